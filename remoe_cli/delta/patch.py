"""Putting a delta's gates and heads into a loaded model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from remoe_cli.delta.delta import Delta
from remoe_cli.errors import DeltaError
from remoe_cli.families import Gate, Heads, KINDS

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

    from remoe_cli.families.spread import assign

    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # a selection bias is a buffer
    with torch.no_grad():
        for name, tensor in gates.items():
            assign(parameters[name], tensor)
