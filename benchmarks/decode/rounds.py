"""Rounds in which all systems take their turn, and what is said of them: medians over rounds of ratios within a round.

A machine that others use too is slow for a while; a ratio within one round sees the same machine on both sides.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

# first decoded tokens, in which caches fill and memory is touched for the first time (slow where a host backs it lazily)
SKIP = 12
Round = dict[str, Any]


def interleave(systems: Mapping[str, Callable[[], Any]], rounds: int, title: str) -> list[Round]:
    """One dict a round, name -> what it gave; the order turns from round to round."""
    names, found = list(systems), []
    for number in range(rounds):
        shift = number % len(names)
        results: Round = {}
        for name in names[shift:] + names[:shift]:
            start = time.monotonic()
            results[name] = systems[name]()
            print(f"{title}: round {number + 1} of {rounds}, {name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        found.append(results)
    return found


def steady(seconds: Sequence[float]) -> list[float]:
    """Those after the warm-up; of few tokens, the second half."""
    return list(seconds[min(SKIP, len(seconds) // 2) :])


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


class Spread(NamedTuple):
    """Median, least and greatest over rounds."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.low)} to {number(self.high)})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))


def ratio(rounds: Sequence[Round], of: Callable[[Round], float], to: Callable[[Round], float]) -> Spread:
    """of / to, in each round."""
    return spread([of(one) / to(one) for one in rounds])


@dataclass(frozen=True)
class Bar:
    """A promise and what was measured. better: "more" or "less"; under which conditions is in `note`."""

    name: str
    found: Spread
    passing: float
    stretch: float | None = None
    better: str = "more"
    unit: str = "x"
    note: str = ""

    @property
    def verdict(self) -> str:
        def reached(bar: float) -> bool:
            return self.found.median >= bar if self.better == "more" else self.found.median <= bar

        if self.stretch is not None and reached(self.stretch):
            return "stretch"
        return "pass" if reached(self.passing) else "MISSED"

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "found": self.found._asdict(), "verdict": self.verdict}


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float]:
    """Slope, intercept and R2 of the straight line through the points, by least squares."""
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    around = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / around
    intercept = mean_y - slope * mean_x
    left = sum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys))
    total = sum((y - mean_y) ** 2 for y in ys)
    return slope, intercept, 1 - left / total if total else 1.0


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
