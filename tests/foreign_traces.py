"""Published routing traces as their goldens need them, and two views of a trace for tests."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from remoe_cli.routing import RoutingTrace
from remoe_cli.routing.imports import expert_npz

esft = lru_cache(maxsize=2)(expert_npz.read_esft)
cacheable_by_design = lru_cache(maxsize=2)(expert_npz.read_cacheable)


def canonical(trace: RoutingTrace) -> RoutingTrace:
    """As our recorder would have written it: descending weight, ties by descending id, so that the reverse is
    ascending weight, then id."""
    assert trace.weights is not None
    order = np.lexsort((trace.experts, trace.weights), axis=-1)[..., ::-1]
    return RoutingTrace(
        experts=np.take_along_axis(trace.experts, order, axis=-1),
        borders=trace.borders,
        prefill=trace.prefill,
        n_experts=trace.n_experts,
        weights=np.take_along_axis(trace.weights, order, axis=-1),
    )


def first_requests(trace: RoutingTrace, n_requests: int, n_layers: int) -> RoutingTrace:
    """A slice: the first requests in the first layers."""
    stop = trace.borders[n_requests]
    return RoutingTrace(
        experts=trace.experts[:stop, :n_layers],
        borders=trace.borders[: n_requests + 1],
        prefill=trace.prefill[:stop],
        n_experts=trace.n_experts,
        weights=None if trace.weights is None else trace.weights[:stop, :n_layers],
    )
