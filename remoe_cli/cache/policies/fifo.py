"""First in, first out: the expert that was loaded longest ago leaves."""

from __future__ import annotations

from collections.abc import Sequence


class Fifo:
    """A hit changes nothing; experts loaded in one step line up in touch order."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._clock = 0
        self._loaded: dict[int, int] = {}

    def touch(self, touched: Sequence[int], misses: Sequence[int]) -> None:
        for expert in misses:
            self._clock += 1
            self._loaded[expert] = self._clock

    def key(self, expert: int) -> int:
        return self._loaded[expert]
