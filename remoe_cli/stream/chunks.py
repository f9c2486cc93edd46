"""Which reads bring a layer's tensors, and where each piece goes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from remoe_cli.families.experts import Piece
from remoe_cli.families.held import Held, Unit
from remoe_cli.families.quantised import dequantised
from remoe_cli.families.stored import TORCH
from remoe_cli.offload.arena import PAGE
from remoe_cli.offload.layout import ALIGN, Image, round_up, row_end, unpacked, Window

CHUNK = 32 << 20  # bytes of a read, more only where one tensor is larger
_GAP = 64 << 10  # bytes between two tensors that are read along


class _Target(NamedTuple):
    """A unit of a chunk: which tensor it belongs to, and where its pieces begin in the row."""

    tensor: int
    unit: Unit
    starts: tuple[int, ...]


class Chunk(NamedTuple):
    image: Image
    targets: tuple[_Target, ...]


class LayerPlan:
    """tensors: those of one layer; starts: of each in a buffer of `nbytes`; row_bytes: of the largest chunk as it is read."""

    def __init__(self, tensors: Sequence[Held], *, direct: bool) -> None:
        self.tensors = list(tensors)
        self.starts: list[int] = []
        end = 0
        for tensor in tensors:
            self.starts.append(end)
            end = round_up(end + tensor.nbytes, ALIGN)
        self.nbytes = round_up(end, PAGE)
        self.chunks = [_chunk(units, direct) for units in _grouped(tensors)]
        self.row_bytes = max((row_end(chunk.image.windows[-1]) for chunk in self.chunks), default=0)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a buffer [at least nbytes] uint8."""
        return [
            buffer[start : start + held.nbytes].view(held.dtype).view(held.shape)
            for start, held in zip(self.starts, self.tensors, strict=True)
        ]

    def place(self, chunk: Chunk, row: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        """From a row as it was read into the tensors."""
        for target in chunk.targets:
            whole = views[target.tensor]
            first = target.unit.pieces[0]
            if target.unit.expert is not None:
                whole = whole[target.unit.expert]
            source = _read(row, target.starts[0], first)
            if len(target.unit.pieces) > 1:
                scales = _read(row, target.starts[1], target.unit.pieces[1])
                source = dequantised(source.to(whole.device), scales.to(whole.device), whole.dtype)
            if whole.dim():
                whole = whole.narrow(first.dim, first.start, source.shape[first.dim])
            same = source.dtype == whole.dtype and whole.device.type == "cpu" and whole.is_contiguous()
            if same and source.is_contiguous():  # a plain copy, which takes no other thread away from what computes
                whole.view(-1).view(torch.uint8).numpy()[:] = source.reshape(-1).view(torch.uint8).numpy()
            else:
                whole.copy_(source, non_blocking=True)


def _read(row: torch.Tensor, start: int, piece: Piece) -> torch.Tensor:
    return unpacked(row, start, piece.nbytes, TORCH[piece.dtype], piece.shape)


def _grouped(tensors: Sequence[Held]) -> list[list[tuple[int, Unit]]]:
    """Units in the order of the files, so many together as make a chunk."""
    units = [(number, unit) for number, tensor in enumerate(tensors) for unit in tensor.units]
    units.sort(key=lambda one: one[1].pieces[0][:2])
    groups: list[list[tuple[int, Unit]]] = []
    size = CHUNK
    for number, unit in units:
        nbytes = sum(piece.nbytes for piece in unit.pieces)
        if size + nbytes > CHUNK:
            groups.append([])
            size = 0
        groups[-1].append((number, unit))
        size += nbytes
    return groups


def _chunk(units: Sequence[tuple[int, Unit]], direct: bool) -> Chunk:
    pieces = sorted({piece for _, unit in units for piece in unit.pieces}, key=lambda piece: piece[:2])
    windows: list[Window] = []
    starts: dict[Piece, int] = {}
    run: list[Piece] = []
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        run.append(piece)
        end = piece.offset + piece.nbytes
        if following is not None and following.file == piece.file and following.offset - end <= _GAP:
            continue
        first = run[0]
        before = first.offset % PAGE
        start = row_end(windows[-1]) if windows else 0
        length = end - first.offset
        whole = round_up(before + length, PAGE) if direct else before + length
        windows.append(Window(first.file, first.offset - before, whole, before + length, start))
        starts |= {one: start + before + one.offset - first.offset for one in run}
        run = []
    targets = tuple(_Target(number, unit, tuple(starts[piece] for piece in unit.pieces)) for number, unit in units)
    return Chunk(Image(tuple(windows), ()), targets)
