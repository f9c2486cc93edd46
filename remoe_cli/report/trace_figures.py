"""The figures of one trace that no policy changes, as docs/replay.md lists them."""

from __future__ import annotations

from typing import Any

import numpy as np

from remoe_cli.report import locality, metrics
from remoe_cli.report.replays import interval
from remoe_cli.routing import RoutingTrace

LAGS = (1, 2, 4, 8, 16, 32, 64)
WINDOWS = (2, 4, 8, 16, 32, 64, 128)
RANKS = (2, 4, 8)


def trace_figures(trace: RoutingTrace, lru_hits: np.ndarray) -> dict[str, Any]:
    """trace: the decode tokens. lru_hits: [E + 1], hits of LRU with C = 0..E slots (`cache.curve.lru_curve`)."""
    overlap, reuse = locality.overlap(trace), locality.reuse(trace)
    windows = {str(window): locality.working_set(trace, window) for window in WINDOWS}
    windows["request"] = locality.working_set(trace)
    return {
        "eor": {str(lag): locality.eor(trace, lag) for lag in LAGS},
        "eor_95": interval(*overlap),
        "reuse": {
            "within": {str(tokens): reuse.within(tokens) for tokens in LAGS},
            "first": metrics.ratio(reuse.first, trace.experts.size),
            "histogram": _doubling(reuse.counts),
        },
        "working_set": {name: found._asdict() if found else None for name, found in windows.items()},
        "usage": locality.usage(trace)._asdict(),
        "parallel_load": {str(ranks): locality.parallel_load(trace, ranks) for ranks in RANKS},
        "lru_hit_ratio": [metrics.ratio(hits, trace.experts.size) for hits in lru_hits[1:].tolist()],
    }


def _doubling(counts: np.ndarray) -> list[dict[str, int]]:
    """Reuse distances in tokens, in ranges that double: 1, 2, 3-4, 5-8, ..."""
    found, low = [], 1
    while low < len(counts):
        high = 1 << (low - 1).bit_length() if low > 1 else 1
        found.append({"from": low, "to": high, "accesses": int(counts[low : high + 1].sum())})
        low = high + 1
    return found
