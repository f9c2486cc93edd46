"""Where in a row each expert's tensors lie, and which reads bring them there.

Experts of one model differ: by where a page begins inside them, and by whether all their tensors lie side by side. A row is
large enough for each of them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from remoe_cli.families.experts import ExpertLayer, Piece, SCALES
from remoe_cli.families.quantised import dequantised
from remoe_cli.families.stored import TORCH
from remoe_cli.offload.arena import PAGE
from remoe_cli.offload.small import SMALL, Small

_DTYPES = {**TORCH, "I8": torch.int8}
ALIGN = 64  # parts that are copied start on cache lines


class Window(NamedTuple):
    """One read: `nbytes` from `offset` of `file`, to `start` of a row. needed: how many of them hold the expert's data; where
    a file ends sooner than `nbytes`, that is enough."""

    file: Path
    offset: int
    nbytes: int
    needed: int
    start: int


class View(NamedTuple):
    """A tensor in a row, or several pieces of it that lie side by side. part: its name; dim: along which the pieces of one
    part are joined. scales: where those of a quantised piece lie. rows: of a weight in 8 or 4 bits, else 0."""

    part: str
    start: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    scales: "View | None" = None
    rows: int = 0


class Image(NamedTuple):
    """One expert in a row."""

    windows: tuple[Window, ...]
    views: tuple[View, ...]


class Layout:
    """images: [layer][expert], as the files are read; row_bytes: of a row for them.

    direct: windows begin and end on pages, as O_DIRECT wants them, else they are exact. convert: whether the
    compute dtype differs from the stored one, or is of numbers that are stored in fewer bits (or a tensor does not lie on a multiple of
    its element size), so that experts are read into one row and copied to another: `targets`, the same for all experts, in a row of `slot_bytes`.
    Experts in 8 or 4 bits stay so in their slots.
    """

    def __init__(self, layers: Sequence[ExpertLayer], dtype: torch.dtype, *, direct: bool) -> None:
        self.images = [[_image(layer, expert, direct) for expert in range(layer.n_experts)] for layer in layers]
        views = [view for images in self.images for image in images for view in image.views]
        self.row_bytes = max(row_end(image.windows[-1]) for images in self.images for image in images)
        self._dtype = dtype
        small = any(view.rows for view in views)
        self.convert = not small and any(
            view.scales or view.dtype != dtype or view.start % view.dtype.itemsize for view in views
        )
        self.targets, self.slot_bytes = ((), self.row_bytes) if not self.convert else _targets(layers[0], dtype)
        self.max_windows = max(len(image.windows) for images in self.images for image in images)

    def tensors(self, slot: torch.Tensor, layer: int, expert: int) -> dict[str, list[torch.Tensor | Small]]:
        """Part -> its pieces, in order, as views of a slot [slot_bytes] that holds this expert."""
        found: dict[str, list[torch.Tensor | Small]] = {}
        for view in self.targets if self.convert else self.images[layer][expert].views:
            whole = _tensor(slot, view)
            if view.rows and view.scales is not None:
                found.setdefault(view.part, []).append(Small(whole, _tensor(slot, view.scales), view.rows))
            else:  # a bias beside small weights may be stored in another dtype
                found.setdefault(view.part, []).append(whole if whole.dtype == self._dtype else whole.to(self._dtype))
        return found

    def copy(self, row: torch.Tensor, slot: torch.Tensor, layer: int, expert: int) -> None:
        """From a row as it was read to a slot in the compute dtype."""
        parts = {view.part: view for view in self.targets}
        done: dict[str, int] = {}
        for view in self.images[layer][expert].views:
            target = parts[view.part]
            source = _unpacked(row, view)
            whole = _tensor(slot, target)
            if view.scales:
                source = dequantised(source, _unpacked(row, view.scales), whole.dtype)
            start = done.get(view.part, 0)
            whole.narrow(view.dim, start, source.shape[view.dim]).copy_(source)
            done[view.part] = start + source.shape[view.dim]


def _unpacked(row: torch.Tensor, view: View) -> torch.Tensor:
    return unpacked(row, view.start, view.nbytes, view.dtype, view.shape)


def unpacked(row: torch.Tensor, start: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """What lies in a row from `start` on; a copy where that is no multiple of the element size."""
    raw = row[start : start + nbytes]
    return (raw.clone() if start % dtype.itemsize else raw).view(dtype).view(shape)


def _tensor(row: torch.Tensor, view: View) -> torch.Tensor:
    return row[view.start : view.start + view.nbytes].view(view.dtype).view(view.shape)


def _image(layer: ExpertLayer, expert: int, direct: bool) -> Image:
    """Runs of pieces without a gap between them are one window; pieces of one part that follow one another are one view."""
    named = [(part.name, piece) for part in layer.parts for piece in part.pieces[expert]]
    windows: list[Window] = []
    where: dict[int, int] = {}  # place in `named` -> start in the row
    for run in _runs([piece for _, piece in named]):
        first = named[run[0]][1]
        length = sum(named[i][1].nbytes for i in run)
        before = first.offset % PAGE
        start = row_end(windows[-1]) if windows else 0
        place = start + before  # also where reads are exact: products may round by where their operands lie
        if direct:
            whole = round_up(before + length, PAGE)
            windows.append(Window(first.file, first.offset - before, whole, before + length, start))
        else:
            windows.append(Window(first.file, first.offset, length, length, place))
        for i in run:
            where[i] = place
            place += named[i][1].nbytes
    views: list[View] = []
    for i, (part, piece) in enumerate(named):
        dtype = _DTYPES[piece.dtype]
        last = views[-1] if views else None
        if piece.role == SCALES and last is not None:
            views[-1] = last._replace(scales=View(part, where[i], piece.nbytes, piece.shape, dtype, piece.dim))
            continue
        joined = last is not None and last.part == part and last.dim == piece.dim == 0 and last.dtype == dtype
        joined = joined and not piece.role
        if joined and last is not None and last.start + last.nbytes == where[i]:
            shape = (last.shape[0] + piece.shape[0], *piece.shape[1:])
            views[-1] = View(part, last.start, last.nbytes + piece.nbytes, shape, dtype, 0)
        else:
            rows = piece.start if piece.role in SMALL else 0
            views.append(View(part, where[i], piece.nbytes, piece.shape, dtype, piece.dim, rows=rows))
    return Image(tuple(windows), tuple(views))


def _runs(pieces: Sequence[Piece]) -> list[list[int]]:
    """The numbers of pieces, those that lie side by side in one file together."""
    runs: list[list[int]] = []
    end: tuple[Path, int] | None = None
    for i in sorted(range(len(pieces)), key=lambda i: (pieces[i].file, pieces[i].offset)):
        piece = pieces[i]
        if end == (piece.file, piece.offset):
            runs[-1].append(i)
        else:
            runs.append([i])
        end = (piece.file, piece.offset + piece.nbytes)
    return runs


def _targets(layer: ExpertLayer, dtype: torch.dtype) -> tuple[tuple[View, ...], int]:
    views: list[View] = []
    end = 0
    for part in layer.parts:
        nbytes = dtype.itemsize * int(torch.Size(part.shape).numel())
        views.append(View(part.name, end, nbytes, part.shape, dtype, 0))
        end = round_up(end + nbytes, ALIGN)
    return tuple(views), round_up(end, PAGE)


def row_end(window: Window) -> int:
    """The first page of a row after this window."""
    return round_up(window.start + window.nbytes, PAGE)


def round_up(value: int, step: int) -> int:
    """To a multiple of `step`."""
    return -(-value // step) * step
