"""LRU hits at every cache size from one pass over a trace: stack distances (Mattson et al. 1970)."""

from __future__ import annotations

import os

import numpy as np

from remoe_cli.cache.schedule import schedule
from remoe_cli.cache.threads import each
from remoe_cli.routing import RoutingTrace


def lru_curve(
    trace: RoutingTrace,
    *,
    step: str = "atomic",
    reset: str = "request",
    touch_order: str = "weight",
    threads: int | None = None,
) -> np.ndarray:
    """[L, E + 1] int64: each layer's LRU hits with C = 0..E slots, as replay counts them from a cold start.

    The residents of C slots are always the C last touched, so a step's hits are its experts at depth < C of one stack that
    serves all sizes. Options as of replay. Raises CacheError for a trace without a decode token.
    """
    from remoe_cli.cache.kernel import frozen
    from remoe_cli.cache.stack import depths

    plan = schedule(trace, "cold", reset, 1)
    experts, tokens, runs = frozen(np.ascontiguousarray(trace.experts)), frozen(plan.tokens_N), frozen(plan.runs)

    def work(layer: int) -> np.ndarray:
        seen = np.zeros(trace.n_experts + 1, np.int64)
        backwards, sequential = touch_order == "weight", step == "sequential"
        depths(experts, tokens, backwards, sequential, runs, layer, trace.n_experts, seen)
        return np.concatenate([[0], np.cumsum(seen[:-1])])

    return np.stack(each(work, range(trace.n_layers), threads or os.cpu_count() or 1))
