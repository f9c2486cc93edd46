"""When each token was there and what its time went to: perf_counter on a CPU, CUDA events on a GPU (read at the end)."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

PHASES = ("wait", "experts", "attention", "dense", "router", "bookkeeping")
ASIDE = "aside"  # time that counts nowhere: the caller's, who is told of a token


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


class Split(NamedTuple):
    """Where the time went: seconds of the prefill, and of each decode token, by PHASES. wait: for experts that are still on
    their way; experts: the routed ones' arithmetic; attention: the attention modules; router: gate, choice and (on a GPU) its
    way to the host; bookkeeping: cache, counts and starting loads; dense: all else. They add up to the time measured."""

    prefill: dict[str, float]
    tokens: dict[str, tuple[float, ...]]

    def mean(self) -> dict[str, float]:
        """Seconds of a decode token; zeros where there was none."""
        return {name: sum(values) / len(values) if values else 0.0 for name, values in self.tokens.items()}


class Timeline:
    """`start()`, then `to(phase)` wherever the next phase begins, and `token()` once each token is there.

    On a GPU every mark is an event in the compute stream: host time around launches would read next to nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.start()

    def start(self) -> None:
        self._phase = "dense"
        self._marks: list[tuple[str, Any]] = []  # phase that ended, when; "" at the end of a token
        self._begun = self._now()

    def to(self, phase: str) -> None:
        if phase != self._phase:
            self._marks.append((self._phase, self._now()))
            self._phase = phase

    def token(self) -> None:
        now = self._now()
        self._marks.append((self._phase, now))
        self._marks.append(("", now))
        self._phase = "dense"

    def finish(self) -> tuple[Latency, Split]:
        """Waits for the last mark. Needs at least one token."""
        if self._cuda:
            self._marks[-1][1].synchronize()
        tokens: list[dict[str, float]] = []
        sums = dict.fromkeys(PHASES, 0.0)
        before = self._begun
        for phase, at in self._marks:
            if phase:
                if phase != ASIDE:
                    sums[phase] += self._between(before, at)
                before = at
            else:
                tokens.append(sums)
                sums = dict.fromkeys(PHASES, 0.0)
        steps = [sum(token.values()) for token in tokens]
        decode = {name: tuple(token[name] for token in tokens[1:]) for name in PHASES}
        return Latency(steps[0], tuple(steps[1:])), Split(tokens[0], decode)

    def _now(self) -> Any:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) / 1e3 if self._cuda else b - a


def mark_attention(model: nn.Module, to: Callable[[str], None]) -> None:
    """Has every attention module of a model report when it begins and when it is over."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "self_attn":
            module.register_forward_pre_hook(lambda *_: to("attention"))
            module.register_forward_hook(lambda *_: to("dense"))
