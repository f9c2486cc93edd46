"""The form `overlay`: links to the base's weight files, the tuned gates in one small file, and an index that names both.

Loaders differ in what they believe. transformers, vLLM and others read every file that the index names, in the order of
their names, and the last one wins; accelerate's offload, and remoe's own decoder, look a tensor up in the index. So the gates' file
sorts last *and* is the index's place for them.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from remoe_cli import atomic
from remoe_cli.console import note
from remoe_cli.copies import clone_or_copy, require_room
from remoe_cli.delta.delta import Delta
from remoe_cli.delta.forms import beside_weights, gates_to_write, note_applied, require_written
from remoe_cli.errors import CheckpointError, RunError
from remoe_cli.hub.checkpoint import Checkpoint, INDEX, read_header, read_object

MODEL_GATES = "model-gates.safetensors"


def overlay(delta: Delta, checkpoint: Checkpoint, out: Path, cast: bool = False) -> Path:
    """A folder that loads as the base with the tuned gates, and takes next to no room. The base has to stay where it is.

    Raises DeltaError for the wrong base, RunError when `out` is taken or not writable.
    """
    from safetensors.torch import save

    gates = gates_to_write(delta, checkpoint, cast, keep_f32=True)
    names = link_names([file.name for file in checkpoint.files])
    places = {name: names[info.file.name] for name, info in checkpoint.tensors.items()} | dict.fromkeys(
        gates, MODEL_GATES
    )
    with atomic.new_folder(out) as scratch:
        _link(checkpoint.files, names, scratch, out)
        for path in beside_weights(checkpoint):
            shutil.copyfile(path, scratch / path.name)
        atomic.write(scratch / MODEL_GATES, save(gates, metadata={"format": "pt"}))
        size = sum(info.nbytes for name, info in checkpoint.tensors.items() if name not in gates)
        index = {
            "metadata": {**_metadata(checkpoint), "total_size": size + sum(gate.nbytes for gate in gates.values())},
            "weight_map": dict(sorted(places.items())),
        }
        atomic.write(scratch / INDEX, json.dumps(index, indent=1) + "\n")
        require_written(scratch / MODEL_GATES, gates)
        _require_one_answer(scratch)
        note_applied(scratch, delta, "overlay")
    return out


def link_names(files: list[str]) -> dict[str, str]:
    """The base's weight file -> the name of the link to it: the same, unless the gates' file would not sort after all.

    `model.safetensors` has to have another name in any case: transformers takes it alone, whatever the index says.
    """
    if all(name < MODEL_GATES and natural(name) < natural(MODEL_GATES) for name in files):
        return {name: name for name in files}
    ordered = sorted(files)
    return {name: f"model-{i:05d}-of-{len(files):05d}.safetensors" for i, name in enumerate(ordered, 1)}


def natural(name: str) -> list[int | str]:
    """vLLM's order of files: numbers by their value."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _link(files: list[Path], names: dict[str, str], scratch: Path, out: Path) -> None:
    """Links to where the bytes lie: in a Hub cache that is the blob, not the snapshot's own link to it."""
    made: dict[str, int] = {}
    for file in files:
        how = _linked(file.resolve(), scratch / names[file.name], out)
        made[how] = made.get(how, 0) + 1
    others = ", ".join(f"{count} of {len(files)} as {how}" for how, count in made.items() if how != "links")
    if others:
        note(f"Note: this file system takes no symbolic links: weight files are there {others}")


def _linked(source: Path, target: Path, out: Path) -> str:
    try:
        target.symlink_to(source)
        return "links"
    except (OSError, NotImplementedError):
        pass
    try:
        os.link(source, target)
        return "hard links (the same bytes as the base's: never change them in place)"
    except OSError:
        require_room(source.stat().st_size, out)
        clone_or_copy(source, target)
        return "copies"


def _metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    index = checkpoint.folder / INDEX
    found = read_object(index).get("metadata") if index.is_file() else None
    return found if isinstance(found, dict) else {}


def _require_one_answer(folder: Path) -> None:
    """Raises RunError unless every order in which loaders read gives each tensor from the file that the index names."""
    try:
        places = read_object(folder / INDEX)["weight_map"]
        held = {name: read_header(folder / name) for name in set(places.values())}
        for order in (sorted(held), sorted(held, key=natural)):
            found = {tensor: name for name in order for tensor in held[name]}
            wrong = [tensor for tensor, name in found.items() if places.get(tensor) != name]
            if wrong or found.keys() != places.keys():
                raise ValueError(f"{min(wrong or places.keys() ^ found.keys())} is not found in one place")
    except (CheckpointError, KeyError, ValueError) as error:
        raise RunError(
            f"loaders would not agree on this overlay ({error}); nothing was kept.", "the same command with --as copy"
        ) from None
