"""Small traces that carry all a policy may need, and the counts of a replay as plain integers."""

from __future__ import annotations

import numpy as np

from remoe_cli.routing import RoutingTrace

PROBABILITIES = (0.0, 0.125, 0.25, 0.3330078125, 0.0001)


def as_trace(rows, n_experts, borders=None, weights=None, probabilities=None) -> RoutingTrace:
    experts = np.array(rows)
    borders = np.array([0, len(experts)] if borders is None else borders)
    return RoutingTrace(
        experts, borders, np.zeros(len(experts), bool), n_experts, weights=weights, probabilities=probabilities
    )


def random_trace(rng, n_tokens=40, n_layers=2, top_k=2, n_experts=8, borders=None) -> RoutingTrace:
    """Uneven probabilities, drifting, so that policies differ; weights and probabilities in few values, so that ties occur."""
    drift = np.cumsum(rng.normal(size=(n_tokens, n_layers, n_experts)) * 0.7, axis=0)
    noisy = drift + rng.gumbel(size=drift.shape)
    rows = np.argsort(-noisy, axis=-1)[..., :top_k]
    probabilities = np.exp(drift - drift.max(axis=-1, keepdims=True))
    return as_trace(
        rows,
        n_experts,
        borders,
        weights=rng.choice(PROBABILITIES, size=rows.shape).astype(np.float16),
        probabilities=np.round(probabilities / probabilities.sum(-1, keepdims=True), 1).astype(np.float16),
    )


def counts(done):
    """All integers of a replay."""
    return (
        (done.tokens, done.accesses, done.hits, done.misses, done.evictions, done.proactive, done.loads),
        done.request_hits.tolist(),
        done.request_misses.tolist(),
        done.request_proactive.tolist(),
        done.token_misses.tolist(),
    )
