"""Expert slots: one arena of equal rows in fast memory, and how an expert gets from its file into a row."""

import math
from collections import deque
from typing import NamedTuple

import torch

from remoe_cli.families.experts import ExpertLayer
from remoe_cli.families.loader import DTYPES
from remoe_cli.offload.store import ExpertStore, IoCount

ALIGN = 64  # bytes; rows and parts start on cache lines, so that kernels take one path whatever the slot
_PINNED_ROWS = 2  # one is filled from the file while the other is copied to the GPU


class _Target(NamedTuple):
    """Where a piece goes: `rows` of part `part` along dimension `dim`."""

    part: str
    dim: int
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SlotPool:
    """Rows of one expert each, in the compute dtype on the compute device; an expert's parts are views of its row.

    On a CPU, files are read straight into the row where dtype and layout agree, else into a staging row and converted.
    On a GPU, files are read into pinned memory and copied in a stream of their own: the compute stream waits for the
    slot it needs, a copy for the last use of the slot it overwrites, the host for a pinned row to be free again only.
    """

    def __init__(self, store: ExpertStore, layer: ExpertLayer, dtype: torch.dtype, device: torch.device) -> None:
        self._store = store
        self._dtype, self._device = dtype, device
        self.arena = torch.empty(0)
        self._cuda = device.type == "cuda"
        self._views: dict[str, list[torch.Tensor]] = {}  # part -> slot -> view
        self._buffers: dict[int, list[memoryview]] = {}  # slot -> its pieces, filled as slots are first used
        self._ready: dict[int, torch.cuda.Event] = {}  # slot -> its copy, until the compute stream waits for it
        self._released: dict[int, torch.cuda.Event] = {}  # slot -> its last use
        self._shapes = {part.name: part.shape for part in layer.parts}
        self._starts, self.slot_bytes = _offsets([math.prod(part.shape) * dtype.itemsize for part in layer.parts])
        self._targets = [
            _Target(part.name, piece.dim, piece.start, piece.shape, DTYPES[piece.dtype])
            for part in layer.parts
            for piece in part.pieces[0]
        ]
        self.resize(1)
        self._same_layout = all(
            target.dtype == dtype and self._destination(target, 0).is_contiguous() for target in self._targets
        )
        self._direct = self._same_layout and not self._cuda
        if not self._direct:
            self._allocate_staging()
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._next_row = 0
            self._copied: list[torch.cuda.Event | None] = [None] * _PINNED_ROWS

    def resize(self, n_slots: int) -> None:
        """Allocates n_slots, all free, once the old ones are given back."""
        if self._views and len(self.arena) == n_slots:
            self.reset()
            return
        self._views.clear()
        self._buffers.clear()
        self.arena = torch.empty(0)  # gives the old memory back before the new is taken
        self.arena = torch.empty(n_slots, self.slot_bytes, dtype=torch.uint8, device=self._device)
        for start, (name, shape) in zip(self._starts, self._shapes.items(), strict=True):
            flat = self.arena[:, start : start + math.prod(shape) * self._dtype.itemsize]
            self._views[name] = [row.view(self._dtype).view(shape) for row in flat]
        self.reset()

    def reset(self) -> None:
        """All slots are free, and nothing is on its way to them."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
            self._ready.clear()
            self._released.clear()
        self._free = deque(range(len(self.arena)))

    def acquire(self) -> int:
        """A free slot: on a CPU the last one released, whose memory is warm; on a GPU the one released longest ago, so
        that a copy need not wait for the experts that still run."""
        return self._free.popleft() if self._cuda else self._free.pop()

    def release(self, slot: int) -> None:
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
            self._released[slot] = event
        self._free.append(slot)

    def part(self, name: str, slot: int) -> torch.Tensor:
        """One part of the expert in `slot`, in the shape of the stock parameter's row."""
        if self._cuda:
            ready = self._ready.pop(slot, None)
            if ready is not None:
                torch.cuda.current_stream().wait_event(ready)
        return self._views[name][slot]

    def load(self, layer: int, expert: int, slot: int, count: IoCount) -> None:
        """Puts one expert into a slot that was acquired."""
        if self._direct:
            self._store.read(layer, expert, self._row(slot), count)
        elif self._cuda:
            self._load_cuda(layer, expert, slot, count)
        else:
            self._store.read(layer, expert, self._staging_rows[0], count)
            for target, source in zip(self._targets, self._sources[0], strict=True):
                self._destination(target, slot).copy_(source)

    def _load_cuda(self, layer: int, expert: int, slot: int, count: IoCount) -> None:
        row = self._next_row
        self._next_row = (row + 1) % _PINNED_ROWS
        copied = self._copied[row]
        if copied is not None:
            copied.synchronize()  # the row's last copy must be over before the file overwrites it
        self._store.read(layer, expert, self._staging_rows[row], count)
        with torch.cuda.stream(self._stream):
            released = self._released.pop(slot, None)
            if released is not None:
                self._stream.wait_event(released)
            if self._same_layout:
                self.arena[slot].copy_(self._staging[row], non_blocking=True)
            else:
                for target, source in zip(self._targets, self._sources[row], strict=True):
                    self._destination(target, slot).copy_(source.to(self.arena.device, non_blocking=True))
            event = torch.cuda.Event()
            event.record(self._stream)
        self._ready[slot] = self._copied[row] = event

    def _allocate_staging(self) -> None:
        if self._same_layout:
            offsets, size = [self._offset(target) for target in self._targets], self.slot_bytes
        else:
            offsets, size = _offsets([math.prod(target.shape) * target.dtype.itemsize for target in self._targets])
        rows = _PINNED_ROWS if self._cuda else 1
        self._staging = torch.empty(rows, size, dtype=torch.uint8, pin_memory=self._cuda)
        self._staging_rows: list[list[memoryview]] = []
        self._sources: list[list[torch.Tensor]] = []
        for row in range(rows):
            flat = [
                self._staging[row, offset : offset + math.prod(target.shape) * target.dtype.itemsize]
                for target, offset in zip(self._targets, offsets, strict=True)
            ]
            self._staging_rows.append([piece.numpy().data for piece in flat])
            self._sources.append([p.view(t.dtype).view(t.shape) for p, t in zip(flat, self._targets, strict=True)])

    def _destination(self, target: _Target, slot: int) -> torch.Tensor:
        return self._views[target.part][slot].narrow(target.dim, target.start, target.shape[target.dim])

    def _offset(self, target: _Target) -> int:
        """Bytes from the start of the row; the target is contiguous."""
        view = self._destination(target, 0)
        return int(view.storage_offset()) * view.element_size()

    def _row(self, slot: int) -> list[memoryview]:
        """The slot's own memory, piece by piece."""
        if slot not in self._buffers:
            row = self.arena[slot].numpy().data
            self._buffers[slot] = [
                row[offset : offset + math.prod(target.shape) * target.dtype.itemsize]
                for target, offset in zip(self._targets, map(self._offset, self._targets), strict=True)
            ]
        return self._buffers[slot]


def _offsets(sizes: list[int]) -> tuple[list[int], int]:
    """Aligned starts of things of these sizes, in bytes, and where they end."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGN) * ALIGN
    return starts, end
