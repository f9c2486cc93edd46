"""The demo's routing with experts of real size: each inner neuron of its experts r times, the way back divided by r.

    python -m decode.widen OUT [--copies 512]        (from benchmarks/)

The function stays the same: r equal neurons add up to r times one, and a division by a power of two is exact in bf16, so all
weights are exact and outputs differ by the rounding of sums alone. r = 512 makes experts of 18.9 MB, 6.2 GB in all. Shared
experts are widened too, since one number in the configuration gives both widths. Tensors pass one by one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from pathlib import Path

import torch

from remoe_cli import demo
from remoe_cli.hub.checkpoint import Checkpoint, INDEX, TensorInfo

SHARD_BYTES = 2 << 30


def widen(source: Checkpoint, out: Path, copies: int) -> Path:
    """Writes a checkpoint with the source's names, in shards of about 2 GB; the index comes last. copies: a power of 2."""
    assert copies & (copies - 1) == 0, "only a power of two divides exactly"
    out.mkdir(parents=True, exist_ok=True)
    for beside in source.folder.iterdir():
        if beside.suffix == ".json" and beside.name not in (INDEX, "config.json"):
            shutil.copyfile(beside, out / beside.name)
    width = source.config["moe_intermediate_size"] * copies
    (out / "config.json").write_text(json.dumps(source.config | {"moe_intermediate_size": width}, indent=2))
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in source.tensors.items():  # in the order of the file: an expert's parts side by side
        size = info.nbytes * (copies if _kind(name) else 1)
        if filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    places = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(source, names, copies, out / file)
        places.update(dict.fromkeys(names, file))
    (out / INDEX).write_text(json.dumps({"metadata": {"widened": copies}, "weight_map": places}))
    return out


def widened(name: str, tensor: torch.Tensor, copies: int) -> torch.Tensor:
    """One tensor: rows of gate and up repeated, columns of down repeated and divided; others as they are."""
    kind = _kind(name)
    if kind is None:
        return tensor
    if kind == "down":
        return (tensor / copies).repeat_interleave(copies, dim=1)
    return tensor.repeat_interleave(copies, dim=0)


def _kind(name: str) -> str | None:
    """gate, up or down of an expert, routed or shared; None for any other tensor."""
    if ".mlp.experts." not in name and ".mlp.shared_experts." not in name:
        return None
    return name.split(".")[-2].removesuffix("_proj")


def _shape(name: str, info: TensorInfo, copies: int) -> list[int]:
    kind, shape = _kind(name), list(info.shape)
    if kind is not None:
        shape[1 if kind == "down" else 0] *= copies
    return shape


def _write(source: Checkpoint, names: list[str], copies: int, path: Path) -> None:
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        info, start = source.tensors[name], end
        end += info.nbytes * (copies if _kind(name) else 1)
        header[name] = {"dtype": info.dtype, "shape": _shape(name, info, copies), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            wide = widened(name, source.read(name), copies).contiguous()
            file.write(wide.view(torch.uint8).numpy().data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--copies", type=int, default=512)
    asked = parser.parse_args()
    widen(Checkpoint.open(demo.PATH, "demo"), asked.out, asked.copies)


if __name__ == "__main__":
    main()
