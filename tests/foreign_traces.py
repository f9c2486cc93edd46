"""Readers of published routing traces; the goldens need them as they were listed."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np

from remoe_cli.routing import RoutingTrace


@lru_cache(maxsize=2)
def esft(path: Path) -> RoutingTrace:
    """DeepSeek-V2-Lite, 64 experts, ids ascending inside a token: replay with touch_order="listed"."""
    file = np.load(path)
    experts = file["experts"].transpose(1, 0, 2)
    return RoutingTrace(
        experts=experts,
        borders=np.concatenate([[0], np.cumsum(file["sample_lengths"])]),
        prefill=np.zeros(len(experts), dtype=bool),
        n_experts=64,
        weights=file["weights"].transpose(1, 0, 2),
    )


@lru_cache(maxsize=2)
def cacheable_by_design(path: Path) -> RoutingTrace:
    """One request over the whole file, as its authors replay it."""
    file = np.load(path)
    experts = file["experts"].transpose(1, 0, 2)
    return RoutingTrace(
        experts=experts,
        borders=np.array([0, len(experts)]),
        prefill=np.zeros(len(experts), dtype=bool),
        n_experts=json.loads(str(file["meta"]))["num_experts"],
    )


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
    )
