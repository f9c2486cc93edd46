"""Least recently used: the expert whose last touch lies longest ago leaves."""

from __future__ import annotations

from collections.abc import Sequence


class Lru:
    """Inside a step the touch order decides, hits and misses alike."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._clock = 0
        self._touched: dict[int, int] = {}

    def touch(self, touched: Sequence[int], misses: Sequence[int]) -> None:
        for expert in touched:
            self._clock += 1
            self._touched[expert] = self._clock

    def key(self, expert: int) -> int:
        return self._touched[expert]
