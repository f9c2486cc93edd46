"""Expert slots: rows of one expert each in the memory that computes, and which of them are free."""

from collections import deque

import torch

from remoe_cli.offload.arena import Arena


class SlotPool:
    """`rows` [n_slots, slot_bytes] uint8, on the compute device. `resize` allocates."""

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self.slot_bytes, self.device = slot_bytes, device
        self._cuda = device.type == "cuda"
        self._used: dict[int, torch.cuda.Event] = {}
        self.rows = self._empty = torch.empty(0, slot_bytes, dtype=torch.uint8)
        self._arena: Arena | None = None
        self._free: deque[int] = deque()

    def resize(self, n_slots: int) -> None:
        """Allocates n_slots, all free, once the old ones are given back."""
        if len(self.rows) != n_slots:
            self._free.clear()
            self.rows, self._arena = self._empty, None  # the old memory goes back before the new is taken
            if self._cuda:
                with torch.inference_mode(False):
                    self.rows = torch.empty(n_slots, self.slot_bytes, dtype=torch.uint8, device=self.device)
            else:
                self._arena = Arena(n_slots, self.slot_bytes)
                self.rows = self._arena.rows
        self.reset()

    def reset(self) -> None:
        """All slots are free. Nothing may be on its way to them."""
        self._used.clear()
        self._free = deque(range(len(self.rows)))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def buffer(self, slot: int) -> memoryview:
        """A slot in host memory, as writable bytes."""
        assert self._arena is not None
        return self._arena.buffer(slot)

    def acquire(self) -> int:
        """A free slot: on a CPU the last one released, whose memory is warm; on a GPU the one released longest ago, so
        that a copy need not wait for the experts that still run."""
        return self._free.popleft() if self._cuda else self._free.pop()

    def release(self, slot: int) -> None:
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
            self._used[slot] = event
        self._free.append(slot)

    def last_use(self, slot: int) -> "torch.cuda.Event | None":
        """On a GPU: the event after which the slot may be overwritten."""
        return self._used.pop(slot, None)
