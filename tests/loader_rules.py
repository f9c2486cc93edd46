"""How runtimes read a checkpoint folder, in a few lines each: which tensor they end up with, under which name.

Each reader gives on-disk name -> stored bytes; what a later file says replaces what an earlier one said.
"""

import json
import re
from pathlib import Path

from remoe_cli.hub.checkpoint import read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def transformers_rules(folder: Path) -> dict[str, bytes]:
    """A file of the single name is all there is; else every file of the index, by name, with all that is in it."""
    if (folder / SINGLE).is_file():
        return _read([folder / SINGLE])
    return _read([folder / name for name in sorted(set(_places(folder).values()))])


def vllm_rules(folder: Path) -> dict[str, bytes]:
    """Every *.safetensors that the index names (all without an index), numbers in names by their value."""
    files = sorted(folder.glob("*.safetensors"), key=lambda file: _natural(file.name))
    if (folder / INDEX).is_file():
        named = set(_places(folder).values())
        assert named <= {file.name for file in files}
        files = [file for file in files if file.name in named]
    return _read(files)


def index_rules(folder: Path) -> dict[str, bytes]:
    """Each tensor from the file that the index names for it, as accelerate's offload does."""
    if not (folder / INDEX).is_file():
        return _read([folder / SINGLE])
    return {name: _read([folder / file])[name] for name, file in _places(folder).items()}


READERS = (transformers_rules, vllm_rules, index_rules)


def _places(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def _natural(name: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _read(files: list[Path]) -> dict[str, bytes]:
    found = {}
    for file in files:
        content = file.read_bytes()
        for name, info in read_header(file).items():
            found[name] = content[info.offset : info.offset + info.nbytes]
    return found
