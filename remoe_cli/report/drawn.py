"""What a report's pictures show of a routing trace, small enough for report.json. numpy only; keys as in docs/report.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from remoe_cli.cache import replay
from remoe_cli.cache.curve import lru_curve
from remoe_cli.report import locality
from remoe_cli.report.metrics import ratio
from remoe_cli.routing import RoutingTrace

RIBBON_TOKENS = 200
_SIZES = 24  # cache sizes of a curve, at most
_POINTS = 200  # steps of a loss curve, at most
_TOKENS = 100  # timed tokens of a cell, at most
_NEVER = ("step", "lr", "grad_norm", "tokens", "tokens_per_s", "elapsed", "steer", "perplexity")


def drawn(trace: RoutingTrace) -> dict[str, Any]:
    """Uses, hit-rate curves, the ribbon of the middle layer and reuse distances of one decode trace."""
    return {
        "uses": trace.uses().tolist(),
        "curve": curve(trace),
        "ribbon": ribbon(trace, trace.n_layers // 2),
        "reuse": reuse(trace),
    }


def curve(trace: RoutingTrace) -> dict[str, Any]:
    """Hit ratios of LRU and Belady (both forced) by slots a layer, from K to E; a cold cache each request."""
    most = trace.n_experts
    sizes = np.unique(np.linspace(trace.top_k, most, min(_SIZES, most - trace.top_k + 1)).round().astype(int))
    accesses = trace.experts.size
    return {
        "capacity": sizes.tolist(),
        "lru": [ratio(hits, accesses) for hits in lru_curve(trace)[:, sizes].sum(axis=0).tolist()],
        "belady": [replay(trace, "belady", int(size)).hit_ratio for size in sizes],
    }


def ribbon(trace: RoutingTrace, layer: int) -> dict[str, Any]:
    """Which experts one layer uses, token by token. starts: tokens at which a request begins."""
    tokens = min(trace.n_tokens, RIBBON_TOKENS)
    starts = [int(start) for start in trace.borders[:-1] if start < tokens]
    return {"layer": layer, "starts": starts, "experts": np.sort(trace.experts[:tokens, layer], axis=1).tolist()}


def reuse(trace: RoutingTrace) -> dict[str, Any]:
    """Shares of the accesses by the tokens since their expert's last use in the layer and request: 1, 2, up to 4, 8, ...;
    first: accesses without an earlier use."""
    found = locality.reuse(trace)
    total = int(found.counts.sum()) + found.first
    bounds, below = [1], 1
    while bounds[-1] < len(found.counts) - 1:
        bounds.append(2 * bounds[-1])
    shares = []
    for bound in bounds:
        shares.append(ratio(int(found.counts[below : bound + 1].sum()), total))
        below = bound + 1
    return {"up_to": bounds, "share": shares, "first": ratio(found.first, total)}


def training(metrics: Path) -> dict[str, list[float]] | None:
    """The loss and its terms by step, from metrics.jsonl, thinned evenly. None where there is no such file or step."""
    try:
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        rows = [row for row in rows if isinstance(row, dict) and "step" in row]
    except (OSError, ValueError):
        return None
    if not rows:
        return None
    kept = [rows[at] for at in _evenly(len(rows), _POINTS)]
    names = [name for name in kept[0] if name not in _NEVER and isinstance(kept[0][name], (int, float))]
    return {name: [row.get(name) for row in kept] for name in ("step", *names)}


def token_times(wait: list[float], experts: list[float], whole: list[float]) -> dict[str, list[float]]:
    """Milliseconds of decode tokens, in the order of the whole, thinned evenly to at most 100: waited for experts, the
    experts' arithmetic, all."""
    order = np.argsort(whole, kind="stable")
    kept = order[_evenly(len(order), _TOKENS)]
    return {
        name: [round(1e3 * part[at], 3) for at in kept]
        for name, part in (("wait", wait), ("experts", experts), ("whole", whole))
    }


def _evenly(count: int, most: int) -> np.ndarray:
    """Places of at most so many of `count`, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int))
