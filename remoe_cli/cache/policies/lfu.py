"""Least frequently used: the expert touched in the fewest steps leaves, of equals the least recent."""

from __future__ import annotations

from collections.abc import Sequence


class Lfu:
    """Counts since the cache was reset (a request), evicted experts included."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._clock = 0
        self._rank: dict[int, tuple[int, int]] = {}

    def touch(self, touched: Sequence[int], misses: Sequence[int]) -> None:
        rank = self._rank
        for expert in touched:
            self._clock += 1
            rank[expert] = (rank[expert][0] + 1 if expert in rank else 1, self._clock)

    def key(self, expert: int) -> tuple[int, int]:
        return self._rank[expert]
