"""Small traces that carry all a policy may need, and the counts of a replay as plain integers."""

from __future__ import annotations

import numpy as np

from remoe_cli.routing import RoutingTrace

PROBABILITIES = (0.0, 0.125, 0.25, 0.3330078125, 0.0001)


def as_trace(rows, n_experts, borders=None, weights=None, probabilities=None, prefill=None, **heads) -> RoutingTrace:
    experts = np.array(rows)
    borders = np.array([0, len(experts)] if borders is None else borders)
    prefill = np.zeros(len(experts), bool) if prefill is None else np.asarray(prefill)
    return RoutingTrace(experts, borders, prefill, n_experts, weights=weights, probabilities=probabilities, **heads)


def random_trace(rng, n_tokens=40, n_layers=2, top_k=2, n_experts=8, borders=None, prefill=None) -> RoutingTrace:
    """Uneven probabilities, drifting, so that policies differ; weights and scores in few values, so that ties occur. The heads
    see what is to come, dimly."""
    drift = np.cumsum(rng.normal(size=(n_tokens, n_layers, n_experts)) * 0.7, axis=0)
    noisy = drift + rng.gumbel(size=drift.shape)
    rows = np.argsort(-noisy, axis=-1)[..., :top_k]

    def probabilities(logits):
        found = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.round(found / found.sum(-1, keepdims=True), 1).astype(np.float16)

    following = np.roll(noisy, -1, axis=0) + rng.gumbel(size=drift.shape)
    beside = np.concatenate([noisy[:, 1:], np.roll(noisy[:, :1], -1, axis=0)], axis=1) + rng.gumbel(size=drift.shape)
    return as_trace(
        rows,
        n_experts,
        borders,
        weights=rng.choice(PROBABILITIES, size=rows.shape).astype(np.float16),
        probabilities=probabilities(drift),
        prefill=prefill,
        temporal=probabilities(following),
        spatio=probabilities(beside),
        guess=probabilities(beside),
        guess_shared=probabilities(beside + 0.3 * noisy),
        hidden=np.round(drift[..., : n_experts // 2 + 1], 1).astype(np.float16),
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
