"""When each token was there: perf_counter on a CPU, CUDA events on a GPU (read after one sync at the end)."""

from time import perf_counter
from typing import Any, NamedTuple

import torch


class Latency(NamedTuple):
    """Seconds. ttft: prompt in to first token out; itl: from each token to the next; names as in vLLM's benchmark."""

    ttft_s: float
    itl_s: tuple[float, ...]

    @property
    def e2el_s(self) -> float:
        return self.ttft_s + sum(self.itl_s)

    @property
    def tpot_s(self) -> float | None:
        """(e2el - ttft) / (n - 1): the first token left out; None for a single token."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else None


class Clock:
    """`mark()` at the start and after each token, then `latency()`.

    On a GPU a mark is an event in the compute stream: host time around launches would read next to nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(perf_counter())

    def latency(self) -> Latency:
        """Waits for the last mark. Needs at least two marks."""
        if self._cuda:
            self._marks[-1].synchronize()
            steps = [a.elapsed_time(b) / 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        else:
            steps = [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return Latency(steps[0], tuple(steps[1:]))
