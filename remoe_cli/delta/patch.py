"""Putting a delta's gates into a loaded model, or into a copy of the checkpoint on disk."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from remoe_cli import atomic
from remoe_cli.delta.delta import Delta, stored_bytes
from remoe_cli.errors import DeltaError, RunError
from remoe_cli.families import Gate, Heads, KINDS
from remoe_cli.hub.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch
    from torch import nn


def gates_for(disk_names: dict[str, str], delta: Delta) -> dict[str, "torch.Tensor"]:
    """In-memory parameter name -> tuned tensor, from the map in-memory -> on-disk of the loaded base.

    Raises DeltaError where the delta changes a tensor that is not in the map.
    """
    further = set(delta.tensors) - set(disk_names.values())
    if further:
        raise DeltaError(
            f"this delta changes more than can be changed here, such as {min(further)}.",
            f"remoe apply DELTA {delta.base} --out DIR, then the same command with DIR in the base's place",
        )
    return {memory: delta.tensors[disk] for memory, disk in disk_names.items() if disk in delta.tensors}


def heads_for(delta: Delta, disk_names: dict[str, str], gates: Sequence[Gate]) -> Heads | None:
    """The delta's heads by layer, on the CPU; None when it has none. disk_names: in-memory gate parameter -> on-disk name.

    Raises DeltaError where a layer has no head and others have, or a head has not its gate's shape.
    """
    found = {}
    for kind in KINDS:
        names = _head_names(kind, disk_names, gates)
        if not any(name in delta.heads for name in names):
            continue
        for name, gate in zip(names, gates, strict=True):
            shape = gate.parameters[gate.names[0]].shape
            if name not in delta.heads or delta.heads[name].shape != shape:
                raise DeltaError(
                    f"this delta has no head {name} of {list(shape)}.", "remoe finetune MODEL, or another delta"
                )
        found[kind] = [delta.heads[name] for name in names]
    return Heads(**found) if found else None


def heads_on_disk(heads: Heads | None, disk_names: dict[str, str], gates: Sequence[Gate]) -> dict[str, "torch.Tensor"]:
    """The inverse of `heads_for`: on-disk name -> head."""
    kinds = heads.kinds if heads else ()
    names = {kind: _head_names(kind, disk_names, gates) for kind in kinds}
    return {name: head for kind in kinds for name, head in zip(names[kind], getattr(heads, kind), strict=True)}


def _head_names(kind: str, disk_names: dict[str, str], gates: Sequence[Gate]) -> list[str]:
    return [f"{disk_names[gate.names[0]].rpartition('.')[0]}.{kind}" for gate in gates]


def put(model: "nn.Module", gates: dict[str, "torch.Tensor"]) -> None:
    """Copies gates (in-memory name -> tensor) into the model, cast to its dtype and device; nothing else is touched."""
    import torch

    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # a selection bias is a buffer
    with torch.no_grad():
        for name, tensor in gates.items():
            parameters[name].copy_(tensor)


def patched_copy(delta: Delta, checkpoint: Checkpoint, out: Path) -> Path:
    """A full copy of the checkpoint in which only the gates' bytes differ: safe for every loader.

    Raises DeltaError for the wrong base, RunError when `out` is taken, not writable or the disk too small.
    """
    already = delta.is_applied(checkpoint)
    names = [path for path in checkpoint.folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    stray = {path.name for path in names if path.suffix == ".safetensors"} - {path.name for path in checkpoint.files}
    names = [path for path in names if path.name not in stray and path.suffix not in (".bin", ".pt", ".gguf")]
    atomic.make_folder(out.parent)
    needed, free = sum(path.stat().st_size for path in names), shutil.disk_usage(out.parent).free
    if needed > free:
        raise RunError(
            f"{out} needs {needed / 1e9:.1f} GB and {out.parent} has {free / 1e9:.1f} GB free.",
            "the same command with --out on another disk",
        )
    with atomic.new_folder(out) as scratch:
        for path in names:
            shutil.copyfile(path, scratch / path.name)
        if not already:
            for name, tensor in delta.tensors.items():
                info = checkpoint.tensors[name]
                with open(scratch / info.file.name, "r+b") as stream:
                    stream.seek(info.offset)
                    stream.write(stored_bytes(tensor))
                    stream.flush()
                    os.fsync(stream.fileno())
        facts = {"base": delta.base, "commit": delta.commit, "recipe": delta.recipe, "gates": len(delta.tensors)}
        atomic.write(scratch / "remoe_applied.json", json.dumps(facts, indent=1) + "\n")
    return out
