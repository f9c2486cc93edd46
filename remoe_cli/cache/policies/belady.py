"""Belady's optimum: the expert whose next use lies farthest ahead leaves. No policy of the same admission hits more."""

from __future__ import annotations

from collections.abc import Sequence


class Belady:
    """Built from the future of its own layer and request.

    future: `touched` of every step to come. Inside a step the touch order breaks ties, so that keys differ; experts
    used in one step are all equal to the count of hits.
    """

    needs_future = True

    def __init__(self, future: Sequence[Sequence[int]]) -> None:
        self._future = tuple([expert for touched in future for expert in touched])
        end = len(self._future)
        self._next_use = [0] * end
        upcoming: dict[int, int] = {}
        for position in range(end - 1, -1, -1):
            expert = self._future[position]
            self._next_use[position] = upcoming.get(expert, end + expert)
            upcoming[expert] = position
        self.reset()

    def reset(self) -> None:
        self._position = 0
        self._ahead: dict[int, int] = {}

    def touch(self, touched: Sequence[int], misses: Sequence[int]) -> None:
        start, stop = self._position, self._position + len(touched)
        if self._future[start:stop] != tuple(touched):
            raise ValueError(f"belady: touched {list(touched)} is not the future it was built from")
        self._ahead.update(zip(touched, self._next_use[start:stop]))
        self._position = stop

    def key(self, expert: int) -> int:
        return -self._ahead[expert]
