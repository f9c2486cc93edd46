"""What all forms of an applied delta share: the gates to write, the files beside the weights, and a note of what it is."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from remoe_cli import atomic
from remoe_cli.delta.delta import Delta
from remoe_cli.delta.stored import dtype_named, stored_bytes
from remoe_cli.errors import RunError
from remoe_cli.hub.checkpoint import Checkpoint, INDEX, read_header

if TYPE_CHECKING:
    import torch

APPLIED = "remoe_applied.json"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def gates_to_write(delta: Delta, checkpoint: Checkpoint, cast: bool, keep_f32: bool) -> dict[str, "torch.Tensor"]:
    """On-disk name -> tuned gate in the dtype that the checkpoint stores it in; a delta's float32 is kept with keep_f32.

    cast: rounded to the base's dtype in every case. Raises DeltaError where the checkpoint is not the delta's base.
    """
    delta.is_applied(checkpoint)
    found = {}
    for name, tensor in delta.tensors.items():
        dtype = dtype_named(checkpoint.tensors[name].dtype)
        if cast:
            found[name] = delta.stored(name, dtype)
        elif keep_f32 and tensor.dtype == dtype_named("F32"):
            found[name] = tensor
        else:
            found[name] = delta.tensor(name, dtype)
    return found


def beside_weights(checkpoint: Checkpoint) -> list[Path]:
    """Config, tokenizer and the like: every plain file of the folder but weights, their index and hidden ones."""
    return [
        path
        for path in sorted(checkpoint.folder.iterdir())
        if path.is_file() and path.suffix not in _OTHER_WEIGHTS and path.name != INDEX and not path.name.startswith(".")
    ]


def note_applied(folder: Path, delta: Delta, form: str) -> None:
    """Which delta is in there, for whoever finds the folder."""
    facts = {
        "form": form,
        "base": delta.base,
        "commit": delta.commit,
        "recipe": delta.recipe,
        "gates": len(delta.tensors),
    }
    atomic.write(folder / APPLIED, json.dumps(facts, indent=1) + "\n")


def require_written(file: Path, gates: dict[str, "torch.Tensor"]) -> None:
    """Reads the gates back from the file. Raises RunError where one is not what was to be written."""
    try:
        found = read_header(file)
        with open(file, "rb") as stream:
            for name, tensor in gates.items():
                stream.seek(found[name].offset)
                if stream.read(found[name].nbytes) != stored_bytes(tensor):
                    raise ValueError(f"the gate {name} reads back differently")
    except (KeyError, ValueError) as error:
        raise RunError(
            f"{file.name} was not written as it should be ({error}); nothing was kept.",
            "the same command again, with --out on another disk",
        ) from None
