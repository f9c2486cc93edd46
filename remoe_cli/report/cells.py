"""Cache cells: what one arm's traces load from each simulated cache, as docs/report.md lists them."""

from collections.abc import Mapping, Sequence
from typing import Any

from remoe_cli.cache import choose, Replay, replay
from remoe_cli.cache.budgets import equal_memory
from remoe_cli.cache.policies import lacks
from remoe_cli.errors import CacheError
from remoe_cli.report import metrics
from remoe_cli.routing import RoutingTrace

BOOTSTRAP_SEED = 0
REFERENCES = ("lru", "belady")  # what the gap is measured between

Key = tuple[str, int, str, str]  # trace kind, capacity, policy, admission


def replays(
    traces: Mapping[str, RoutingTrace], capacities: Sequence[int], policies: Sequence[str]
) -> dict[Key, Replay]:
    """traces: by kind. Belady in both admission forms, the others forced where they can be, at the same memory: slots and
    staging. Without policies that read what a trace lacks, as heads that this arm has not."""
    return {
        (kind, capacity, policy, admission): replay(
            trace, policy, _slots(trace, capacity, admission), admission=admission
        )
        for kind, trace in traces.items()
        for capacity in capacities
        for policy in policies
        if lacks(policy, trace) is None
        for admission in _admissions(policy)
    }


def _admissions(policy: str) -> tuple[str, ...]:
    if policy == "belady":
        return "forced", "bypass"
    return ("forced",) if choose(policy).policy.admits else ("bypass",)


def _slots(trace: RoutingTrace, capacity: int, admission: str) -> list[int]:
    try:
        return equal_memory(capacity, trace.n_layers, trace.top_k, admission)
    except CacheError:  # the staging buffer leaves less than a slot for each layer
        return [1] * trace.n_layers


def cache_cells(
    done: Mapping[Key, Replay],
    base: Mapping[Key, Replay],
    policies: Sequence[str],
    expert_bytes: int,
) -> list[dict[str, Any]]:
    """One cell a trace kind, capacity, policy and admission. base: the base arm's replays of the same requests, REFERENCES
    among them; the same object as `done` for the base arm itself, which has no change."""
    return [_cell(key, done[key], base, expert_bytes, done is base) for key in done if key[2] in policies]


def _cell(key: Key, done: Replay, base: Mapping[Key, Replay], expert_bytes: int, is_base: bool) -> dict[str, Any]:
    kind, capacity, policy, admission = key
    lru = base[kind, capacity, "lru", "forced"].loads
    belady = {form: base[kind, capacity, "belady", form].loads for form in ("forced", "bypass")}
    request_loads = done.request_misses + done.request_proactive
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
        **_misses_change(base.get(key), None if is_base else done),
        "hit_ratio": done.hit_ratio,
        "hit_ratio_95": metrics.bootstrap(done.request_hits, done.request_accesses, seed=BOOTSTRAP_SEED),
        "adjusted_hit_ratio": metrics.adjusted_hit_ratio(done.accesses, done.misses, done.proactive),
        "mb_a_token": metrics.load_mb(done.misses, done.proactive, expert_bytes, done.tokens),
        "mb_a_token_95": metrics.bootstrap(
            request_loads * (expert_bytes / 1e6), done.request_tokens, seed=BOOTSTRAP_SEED
        ),
        "gap_closed": metrics.gap_closed(done.loads, lru, belady["bypass"]),
        "gap_closed_forced": metrics.gap_closed(done.loads, lru, belady["forced"]),
    }


def _misses_change(base: Replay | None, tuned: Replay | None) -> dict[str, Any]:
    if base is None or tuned is None:
        return {"misses_change": None, "misses_change_95": None}
    before, after = ((one.request_misses, one.request_tokens) for one in (base, tuned))
    return {
        "misses_change": metrics.ratio(tuned.misses - base.misses, base.misses),
        "misses_change_95": metrics.bootstrap_change(before, after, metrics.relative, seed=BOOTSTRAP_SEED),
    }


def latency_ms(ttft_s: Sequence[float], itl_s: Sequence[Sequence[float]]) -> dict[str, Any]:
    """ttft_ms, tpot_ms, itl_ms, e2el_ms: mean, p50, p95, p99 of each, None where there is no value."""
    found = metrics.latency(ttft_s, itl_s)
    return {f"{name}_ms": part._asdict() if part else None for name, part in found._asdict().items()}
