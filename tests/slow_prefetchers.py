"""Slow twins of all prefetchers, from their definitions: every list is read off the whole history each time.

They share no code with remoe_cli. A position of a request is token * layers + layer, prompt included; a list for position p is made
from positions up to p - ahead of its own request, and from all of those before it.
"""

from __future__ import annotations

from collections import Counter
from math import exp, fsum, sqrt
from typing import Any

KEPT = 100


class Past:
    """A trace as requests of positions. asked: positions of decode steps, for which lists are made."""

    def __init__(self, trace: Any) -> None:
        self.layers, self.n_experts, self.top_k = trace.n_layers, trace.n_experts, trace.top_k
        self.requests, self.prompts, self.rows = [], [], []
        for low, high in zip(trace.borders.tolist(), trace.borders.tolist()[1:]):
            rows = [(row, layer) for row in range(low, high) for layer in range(trace.n_layers)]
            self.requests.append([trace.experts[where].tolist() for where in rows])
            self.prompts.append(int(trace.prefill[low:high].sum()) * trace.n_layers)
            self.rows.append(rows)
        self.trace = trace

    def until(self, request: int, position: int) -> list[tuple[int, int]]:
        """(request, position) of all that was seen when `position` of `request` was the last one."""
        earlier = [(r, p) for r in range(request) for p in range(len(self.requests[r]))]
        return earlier + [(request, p) for p in range(position + 1)]

    def at(self, request: int, position: int) -> list[int]:
        return self.requests[request][position]

    def scores(self, kind: str, request: int, position: int) -> list[float]:
        return [float(one) for one in getattr(self.trace, kind)[self.rows[request][position]]]


def top(scores: dict[int, float], most: int) -> list[int]:
    return sorted((e for e in scores if scores[e] > 0), key=lambda e: (-round(scores[e], 9), e))[:most]


def st_moe(past: Past, request: int, position: int, most: float, ahead: float) -> list[int]:
    now, ahead = position - int(ahead), int(ahead)
    if now < 0:
        return []
    along, uses, stayed, passed = Counter(), Counter(), Counter(), Counter()
    for r, p in past.until(request, now):
        if p % past.layers != position % past.layers:
            continue
        if p >= ahead:
            uses.update(past.at(r, p - ahead))
            along.update((source, target) for source in past.at(r, p - ahead) for target in past.at(r, p))
        if p >= past.layers:
            before = past.at(r, p - past.layers)
            passed.update(before)
            stayed.update(set(before) & set(past.at(r, p)))
    sources = past.at(request, now)
    scores = {
        target: fsum(along[source, target] / max(1, uses[source]) for source in sources) / len(sources)
        for target in range(past.n_experts)
    }
    if position >= past.layers:
        for expert in past.at(request, position - past.layers):
            scores[expert] += stayed[expert] / max(1, passed[expert])
    return top(scores, int(most))


def step(past: Past, request: int, position: int, most: float, ahead: float, threshold: float) -> list[int]:
    ranked = st_moe(past, request, position, most, ahead)
    for rank in range(len(ranked)):
        told = right = 0
        for r, p in past.until(request, position - int(ahead)):
            if p % past.layers == position % past.layers and p >= past.prompts[r]:
                list_then = st_moe(past, r, p, most, ahead)
                told += rank < len(list_then)
                right += rank < len(list_then) and list_then[rank] in past.at(r, p)
        if right < threshold * told:
            return ranked[:rank]
    return ranked


def moe_infinity(past: Past, request: int, position: int, most: float, ahead: float) -> list[int]:
    now = position - int(ahead)
    if now < 0:
        return []

    def uses(r: int, end: int) -> list[Counter]:
        found = [Counter() for _ in range(past.layers)]
        for p in range(end + 1):
            found[p % past.layers].update(past.at(r, p))
        return found

    def cosine(a: Counter, b: Counter) -> float:
        sizes = sqrt(sum(v * v for v in a.values())), sqrt(sum(v * v for v in b.values()))
        return sum(a[e] * b[e] for e in a) / (sizes[0] * sizes[1]) if all(sizes) else 0.0

    def nearest(own: list[Counter], kept: list[int]) -> int:
        likeness = [round(fsum(map(cosine, own, full[r])) / past.layers, 9) for r in kept]
        return likeness.index(max(likeness))

    full = [uses(r, len(past.requests[r]) - 1) for r in range(request)]
    kept: list[int] = []
    times: list[int] = []
    for r in range(request):
        if kept:
            times[nearest(full[r], kept)] += 1
        if len(kept) < KEPT:
            kept.append(r)
            times.append(0)
        else:
            place = times.index(min(times))
            kept[place], times[place] = r, 0
    own = uses(request, now)
    layer = position % past.layers
    told = full[kept[nearest(own, kept)]][layer] if kept else own[layer]
    return top({e: float(n) for e, n in told.items()}, int(most))


def option(past: Past, request: int, position: int, most: float, cost: float) -> list[int]:
    held: list[int] = []
    for end in range(position % past.layers, position - past.layers + 1, past.layers):
        worth = dict.fromkeys(range(past.n_experts), 0.0)
        for p in range(position % past.layers, end + 1, past.layers):
            share = dict.fromkeys(past.at(request, p), 1 / past.top_k)
            if past.trace.probabilities is not None:
                share = dict(enumerate(past.scores("probabilities", request, p)))
            for e in worth:
                worth[e] += 0.1 * share.get(e, 0.0) * 0.9 ** ((end - p) // past.layers)
        other = top(worth, int(most))
        fresh = [e for e in other if e not in held]
        gain = fsum(worth[e] for e in other) - fsum(worth[e] for e in held)
        if fresh and round(gain - cost * len(fresh), 9) > 0:
            held = other
    return held


def gate_next(past: Past, request: int, position: int, most: float, kind: str = "guess") -> list[int]:
    if not position % past.layers:
        return []
    return top(dict(enumerate(past.scores(kind, request, position - 1))), int(most))


def gate_next_shared(past: Past, request: int, position: int, most: float) -> list[int]:
    return gate_next(past, request, position, most, "guess_shared")


def finemoe(past: Past, request: int, position: int, most: float, ahead: float) -> list[int]:
    now = position - int(ahead)
    if now < 0:
        return []

    def unit(values: list[float]) -> list[float]:
        length = sqrt(fsum(v * v for v in values))
        return [v / length for v in values] if length else values

    def dot(a: list[float], b: list[float]) -> float:
        return fsum(x * y for x, y in zip(a, b))

    def token(r: int, first: int) -> tuple[list[float], list[list[float]]]:
        maps = [past.scores("probabilities", r, first + layer) for layer in range(past.layers)]
        return unit(past.scores("hidden", r, first)), maps

    stored = [token(r, p - past.layers + 1) for r, p in past.until(request, now) if p % past.layers == past.layers - 1]
    ring = [(number, one) for number, one in enumerate(stored)][-KEPT:]
    ring.sort(key=lambda one: one[0] % KEPT)  # places in the store
    stored = [one for _, one in ring]
    if not stored:
        return []
    own, first = past.scores("hidden", request, now - now % past.layers), now - now % past.layers
    known = now % past.layers + 1
    path = unit([v for layer in range(known) for v in past.scores("probabilities", request, first + layer)])
    alike = [dot(unit(own), meaning) for meaning, _ in stored]
    candidates = sorted(range(len(stored)), key=lambda n: (-round(alike[n], 9), n))[:64]
    total = {n: alike[n] + dot(path, unit([v for row in stored[n][1][:known] for v in row])) for n in candidates}
    nearest = sorted(candidates, key=lambda n: (-round(total[n], 9), candidates.index(n)))[:8]
    weights = [exp(total[n]) for n in nearest]
    weights = [w / fsum(weights) for w in weights]
    mixed = [
        fsum(w * stored[n][1][position % past.layers][e] for w, n in zip(weights, nearest))
        for e in range(past.n_experts)
    ]
    confidence = min(1.0, max(0.0, fsum(w * total[n] for w, n in zip(weights, nearest)) / 2))
    order = sorted(range(past.n_experts), key=lambda e: (-round(mixed[e], 9), e))
    enough = next(
        (n for n in range(1, len(order) + 1) if round(fsum(mixed[e] for e in order[:n]), 9) >= 0.35 - 0.3 * confidence),
        len(order),
    )
    return order[: min(int(most), max(enough, past.top_k))]


def promoe(past: Past, request: int, position: int, most: float, ahead: float) -> list[int]:
    """PREDICTOR: the weights, by name."""
    now = position - int(ahead)
    if now < 0:
        return []
    layer, state = position % past.layers, past.scores("hidden", request, now)
    into, bias, out, last = (PREDICTOR[name][layer].tolist() for name in ("into", "into_bias", "out", "out_bias"))
    inner = [max(0.0, fsum(x * row[w] for x, row in zip(state, into)) + bias[w]) for w in range(len(bias))]
    told = [fsum(x * row[e] for x, row in zip(inner, out)) + last[e] for e in range(len(last))]
    return sorted(range(len(told)), key=lambda e: (-told[e], e))[: int(most)]


PREDICTOR: dict[str, Any] = {}
TWINS = {
    "gate_next": gate_next, "gate_next_shared": gate_next_shared, "promoe": promoe, "finemoe": finemoe, "st_moe": st_moe,
    "step": step, "moe_infinity": moe_infinity, "option": option,
}  # fmt: skip


def slow_lists(name: str, values: tuple[float, ...], trace: Any) -> dict[tuple[int, int], list[int]]:
    """(row, layer) of each decode step -> what is listed before it."""
    past = Past(trace)
    return {
        past.rows[r][p]: TWINS[name](past, r, p, *values)
        for r in range(len(past.requests))
        for p in range(past.prompts[r], len(past.requests[r]))
    }
