"""The slow twin of the simulator: the rules of objectives-and-metrics.md (5) read off the whole history each time.

It shares no code with remoe_cli, and keeps no state between steps but the list of residents and the list of loads.
Every test that counts hits or loads, the decoder's too, compares with this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

NEVER = 10**9


class SlowStep(NamedTuple):
    hits: list[int]
    misses: list[int]
    admitted: list[int]
    evicted: list[int]


@dataclass
class SlowCounts:
    tokens: int = 0
    accesses: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    request_hits: list[int] = field(default_factory=list)
    request_misses: list[int] = field(default_factory=list)


def slow_steps(steps: list[list[int]], capacity: int, policy: str, admission: str = "forced") -> list[SlowStep]:
    """One layer's cache, cold, over steps of distinct experts in touch order."""
    resident: list[int] = []
    loads: list[list[int]] = []
    done = []
    for now, touched in enumerate(steps):
        hits = [expert for expert in touched if expert in resident]
        misses = [expert for expert in touched if expert not in resident]
        loads.append(misses)
        before = list(resident)
        resident = before + misses
        if len(touched) > capacity and admission == "forced":
            resident = touched[len(touched) - capacity :]
        while len(resident) > capacity:
            may_leave = [e for e in resident if admission == "bypass" or e not in touched]
            resident.remove(min(may_leave, key=lambda expert: worth(policy, expert, steps, loads, now)))
        admitted = [expert for expert in misses if expert in resident]
        evicted = [expert for expert in before if expert not in resident]
        done.append(SlowStep(hits, misses, admitted, evicted))
    return done


def worth(policy: str, expert: int, steps: list[list[int]], loads: list[list[int]], now: int) -> Any:
    """How much the policy wants to keep an expert after step `now`; the least leaves."""
    if policy == "lru":
        return last_place(expert, steps[: now + 1])
    if policy == "fifo":
        return last_place(expert, loads)
    if policy == "lfu":
        return sum(expert in step for step in steps[: now + 1]), last_place(expert, steps[: now + 1])
    if policy == "belady":
        for distance, step in enumerate(steps[now + 1 :]):
            if expert in step:
                return -distance, -step.index(expert)
        return -NEVER, -expert
    raise ValueError(policy)


def last_place(expert: int, steps: list[list[int]]) -> tuple[int, int]:
    """(step, place in the step) of the last mention."""
    return max((at, step.index(expert)) for at, step in enumerate(steps) if expert in step)


def slow_replay(
    trace: Any,
    policy: str,
    capacity: int,
    *,
    admission: str = "forced",
    step: str = "atomic",
    reset: str = "request",
    touch_order: str = "weight",
) -> SlowCounts:
    """Counts over the decode tokens of a trace (anything with .experts [T, L, K], .borders [R + 1], .prefill [T])."""
    n_layers = trace.experts.shape[1]
    counts = SlowCounts()
    counts.request_hits = [0] * (len(trace.borders) - 1)
    counts.request_misses = [0] * (len(trace.borders) - 1)
    for layer in range(n_layers):
        steps: list[list[int]] = []
        owners: list[int] = []
        for request in range(len(trace.borders) - 1):
            for token in range(int(trace.borders[request]), int(trace.borders[request + 1])):
                if trace.prefill[token]:
                    continue
                listed = [int(expert) for expert in trace.experts[token, layer]]
                touched = listed if touch_order == "listed" else listed[::-1]
                for part in [[expert] for expert in touched] if step == "sequential" else [touched]:
                    steps.append(part)
                    owners.append(request)
                if layer == 0:
                    counts.tokens += 1
        if reset == "never":
            done = slow_steps(steps, capacity, policy, admission)
        else:
            done = []
            for request in sorted(set(owners)):
                own = [part for part, owner in zip(steps, owners) if owner == request]
                done += slow_steps(own, capacity, policy, admission)
        for owner, one in zip(owners, done):
            counts.request_hits[owner] += len(one.hits)
            counts.request_misses[owner] += len(one.misses)
            counts.evictions += len(one.evicted)
    counts.hits, counts.misses = sum(counts.request_hits), sum(counts.request_misses)
    counts.accesses = counts.hits + counts.misses
    return counts
