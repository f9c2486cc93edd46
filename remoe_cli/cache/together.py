"""Requests that are decoded together: a step of a layer asks for the distinct experts of all their tokens.

Shape letters: N tokens, K experts a token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from remoe_cli.cache.expert_cache import ExpertCache
from remoe_cli.errors import CacheError
from remoe_cli.routing import RoutingTrace


class Together(NamedTuple):
    """Distinct experts that the steps asked for, summed over layers and groups of requests."""

    accesses: int
    hits: int
    misses: int
    evictions: int


def touch_order(experts_NK: np.ndarray, weights_NK: np.ndarray) -> dict[int, float]:
    """One step's distinct experts and the weights of their last mention, in the order of that mention: token by token, each
    token's heaviest last. experts_NK, weights_NK: as traces record them, the heaviest first."""
    last: dict[int, float] = {}
    for experts, weights in zip(experts_NK[:, ::-1].tolist(), weights_NK[:, ::-1].tolist()):
        for expert, weight in zip(experts, weights):
            last.pop(expert, None)
            last[expert] = weight
    return last


def replay_together(
    trace: RoutingTrace, batch: int, policy: str, capacity: int, *, admission: str = "forced"
) -> Together:
    """The decode steps of `batch` requests at a time (the last group may be smaller), a cold cache a group and layer.

    Raises CacheError where requests of one group differ in length, and as ExpertCache does.
    """
    total = Together(0, 0, 0, 0)
    weights = np.zeros(trace.experts.shape, np.float16) if trace.weights is None else trace.weights
    rows_R = [np.flatnonzero(~trace.prefill[a:b]) + a for a, b in zip(trace.borders, trace.borders[1:], strict=False)]
    for first in range(0, len(rows_R), batch):
        group = rows_R[first : first + batch]
        if len({len(rows) for rows in group}) != 1:
            raise CacheError("requests that are decoded together have as many tokens each", "remoe decode --help")
        for layer in range(trace.n_layers):
            cache = ExpertCache(capacity, policy, n_experts=trace.n_experts, admission=admission)
            for rows in np.stack(group, 1):
                touched = touch_order(trace.experts[rows, layer], weights[rows, layer])
                cache.step(list(touched), list(touched.values()))
            found = (cache.hits + cache.misses, cache.hits, cache.misses, cache.evictions)
            total = Together(*(a + b for a, b in zip(total, found)))
    return total
