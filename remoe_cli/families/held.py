"""The frozen tensors of decoder layers that stay in their files, and where each of them lies."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TYPE_CHECKING

from remoe_cli.families.base import decoder_layers, Gate, stack_of
from remoe_cli.families.experts import ExpertLayer, Piece, QUANTISED, SCALES
from remoe_cli.families.quantised import shape_of
from remoe_cli.hub.checkpoint import TensorInfo

if TYPE_CHECKING:
    import torch
    from torch import nn


class Unit(NamedTuple):
    """What is read together: a piece, and the scales of a quantised one. expert: which one's, None of a tensor that is not theirs."""

    expert: int | None
    pieces: tuple[Piece, ...]


class Held(NamedTuple):
    """A tensor of a decoder layer. name: inside the layer; shape, dtype: in memory; buffer: whether it is one."""

    name: str
    shape: tuple[int, ...]
    dtype: "torch.dtype"
    buffer: bool
    units: tuple[Unit, ...]

    @property
    def nbytes(self) -> int:
        """In memory."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


def held_tensors(
    model: "nn.Module",
    gates: Sequence[Gate],
    experts: Sequence[ExpertLayer],
    plain: Mapping[str, TensorInfo],
    dtypes: Mapping[str, "torch.dtype"],
) -> list[list[Held]]:
    """A decoder layer: its tensors that need not be in memory. Gates and their biases train or are read by name, modules that
    compute buffers of their own need their weights for it, and what the loader makes of several tensors only it can make: those stay.

    model: on the meta device; plain: in-memory name -> place, of what is stored as it is in memory; dtypes: in-memory name -> dtype.
    """
    stack = stack_of(gates)
    stay = {name for gate in gates for name in (*gate.names, gate.bias)}
    parts = {f"{_name_of(model, layer.module)}.{part.name}": part for layer in experts for part in layer.parts}
    found = []
    for index, layer in enumerate(decoder_layers(model, gates)):
        held = []
        for name, tensor, buffer in _tensors(layer):
            memory = f"{stack}.{index}.{name}"
            if memory in stay:
                continue
            if memory in parts:
                units = tuple(_units(parts[memory].pieces))
            elif memory in plain and shape_of(plain[memory]) == tuple(tensor.shape):
                units = (Unit(None, _pieces(plain[memory])),)
            else:
                continue
            held.append(Held(name, tuple(tensor.shape), dtypes.get(memory, tensor.dtype), buffer, units))
        found.append(held)
    return found


def _tensors(layer: "nn.Module") -> Iterator[tuple[str, "torch.Tensor", bool]]:
    """Name, tensor, whether it is a buffer: of every module that has no computed buffer."""
    for path, module in layer.named_modules():
        if module._non_persistent_buffers_set:
            continue
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            yield prefix + name, parameter, False
        for name, buffer in module.named_buffers(recurse=False):
            yield prefix + name, buffer, True


def _units(pieces: Sequence[tuple[Piece, ...]]) -> Iterator[Unit]:
    for expert, of_expert in enumerate(pieces):
        for i, piece in enumerate(of_expert):
            if piece.role != SCALES:
                yield Unit(expert, of_expert[i : i + 2] if piece.role == QUANTISED else (piece,))


def _pieces(info: TensorInfo) -> tuple[Piece, ...]:
    def whole(one: TensorInfo, role: str) -> Piece:
        return Piece(one.file, one.offset, one.nbytes, one.dtype, one.shape, 0, 0, role)

    return (whole(info, ""),) if info.scales is None else (whole(info, QUANTISED), whole(info.scales, SCALES))


def _name_of(model: "nn.Module", module: "nn.Module") -> str:
    return next(name for name, one in model.named_modules() if one is module)
