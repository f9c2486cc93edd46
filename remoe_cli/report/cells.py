"""The figures of one arm's traces, as docs/report.md lists them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from remoe_cli.cache import Replay, replay
from remoe_cli.report import metrics
from remoe_cli.routing import RoutingTrace

BOOTSTRAP_SEED = 0
RANKS = (2, 4, 8)


def decode_figures(trace: RoutingTrace, ids_RS: np.ndarray) -> dict[str, Any]:
    """Overlap, usage and repetition of one decode trace. ids_RS: the tokens that were fed."""
    overlap, usage = metrics.overlap(trace), metrics.usage(trace)
    return {
        "requests": trace.n_requests,
        "steps": trace.n_tokens,
        "eor": overlap.eor,
        "eor_95": metrics.bootstrap(overlap.shared, overlap.possible, seed=BOOTSTRAP_SEED),
        "usage": usage._asdict(),
        "distinct_experts_request": metrics.distinct_experts(trace),
        "distinct_experts_64": metrics.distinct_experts(trace, 64),
        "parallel_load": {str(ranks): metrics.parallel_load(trace, ranks) for ranks in RANKS},
        "distinct_4": _mean([metrics.distinct_n(row.tolist(), 4) for row in ids_RS]),
        "repetition": _mean([metrics.repetition_rate(row.tolist()) for row in ids_RS]),
    }


def cache_cells(
    trace: RoutingTrace,
    base: RoutingTrace,
    kind: str,
    capacities: Sequence[int],
    policies: Sequence[str],
    expert_bytes: int,
) -> list[dict[str, Any]]:
    """One cell a capacity, policy and admission. Belady is shown in both admission forms, the others forced.

    base: the base's trace of the same requests, which the gap is measured on.
    """
    cells = []
    for capacity in capacities:
        reference = {
            "lru": replay(base, "lru", capacity).misses,
            "forced": replay(base, "belady", capacity).misses,
            "bypass": replay(base, "belady", capacity, admission="bypass").misses,
        }
        for policy in policies:
            for admission in ("forced", "bypass") if policy == "belady" else ("forced",):
                done = replay(trace, policy, capacity, admission=admission)
                cells.append(_cell(done, kind, policy, admission, capacity, expert_bytes, reference))
    return cells


def _cell(
    done: Replay, kind: str, policy: str, admission: str, capacity: int, expert_bytes: int, reference: dict[str, int]
) -> dict[str, Any]:
    per_request = expert_bytes / 1e6
    return {
        "trace": kind,
        "policy": policy,
        "admission": admission,
        "capacity": capacity,
        "accesses": done.accesses,
        "hits": done.hits,
        "misses": done.misses,
        "evictions": done.evictions,
        "proactive": done.proactive,
        "hit_ratio": done.hit_ratio,
        "hit_ratio_95": metrics.bootstrap(done.request_hits, done.request_accesses, seed=BOOTSTRAP_SEED),
        "mb_a_token": metrics.load_mb(done.misses, done.proactive, expert_bytes, done.tokens),
        "mb_a_token_95": metrics.bootstrap(done.request_misses * per_request, done.request_tokens, seed=BOOTSTRAP_SEED),
        "gap_closed": metrics.gap_closed(done.misses, reference["lru"], reference["bypass"]),
        "gap_closed_forced": metrics.gap_closed(done.misses, reference["lru"], reference["forced"]),
    }


def latency_ms(ttft_s: Sequence[float], itl_s: Sequence[Sequence[float]]) -> dict[str, Any]:
    """ttft_ms, tpot_ms, itl_ms, e2el_ms: mean, p50, p95, p99 of each, None where there is no value."""
    found = metrics.latency(ttft_s, itl_s)
    return {f"{name}_ms": part._asdict() if part else None for name, part in found._asdict().items()}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
