"""The slow twin of rerouting: one token after the other through the stock model, caches and rules read off the definitions.

It shares no code with remoe_cli. Every token is a pass of its own, so what a layer's router sees is exactly what came
before it; nothing is batched, and the cache is the list of what was touched.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class SlowRun(NamedTuple):
    """choices: [token][layer] sets of experts; losses: of each token but the first; weights: as choices, by expert."""

    choices: list[list[set[int]]]
    weights: list[list[dict[int, float]]]
    losses: list[float]
    hits: int
    misses: int


def slow_choice(
    method: str, strength: float, keep: int, logits: list[float], stock: list[int], cached: set[int], seen: list[float]
) -> set[int]:
    """stock: the router's own K, heaviest first. seen: max - min of the logits of this token and those before it."""
    top_k = len(stock)
    if method == "cache-prior":
        bonus = strength * sum(seen) / len(seen)
        raised = [z + (bonus if e in cached or e in stock[:keep] else 0) for e, z in enumerate(logits)]
        ranks = [(raised[e], e in stock, logits[e]) for e in range(len(logits))]  # of equals, what the router chose
        return {*sorted(range(len(logits)), key=lambda e: ranks[e], reverse=True)[:top_k]}
    ranked = sorted(range(len(logits)), key=lambda e: logits[e], reverse=True)
    if method == "max-rank":
        considered = ranked[: int(strength)]
    else:
        total = sum(math.exp(z) for z in logits)
        considered = []
        while sum(math.exp(logits[e]) / total for e in considered) < strength and len(considered) < len(ranked):
            considered.append(ranked[len(considered)])
    chosen = set(stock[:keep])
    for wanted in ([e for e in considered if e in cached], ranked):
        for expert in wanted:
            if len(chosen) < top_k:
                chosen.add(expert)
    return chosen


def slow_reroute(
    model,
    routers: list,
    ids: list[int],
    method: str | None,
    strength: float,
    keep: int,
    capacity: int,
    renormalised: bool,
) -> SlowRun:
    """One request with a cold LRU cache of forced admission in each layer. method: None for the stock model."""
    history: list[list[int]] = [[] for _ in routers]  # of each layer: experts by last touch, the latest last
    seen: list[list[float]] = [[] for _ in routers]
    run = SlowRun([], [], [], 0, 0)
    counts = [0, 0]

    def hook(layer: int):
        def reroute(_module, _inputs, outputs):
            logits_1E, weight_1K, choice_1K = outputs
            logits, weights = logits_1E[0].double().tolist(), weight_1K[0].double().tolist()
            pairs = sorted(zip(weights, choice_1K[0].tolist()), reverse=True)
            stock = [expert for _, expert in pairs]
            cached = set(history[layer][-capacity:])
            seen[layer].append(max(logits) - min(logits))
            chosen = set(stock)
            if method is not None:
                chosen = slow_choice(method, strength, keep, logits, stock, cached, seen[layer])
            powers = {expert: math.exp(logits[expert]) for expert in range(len(logits))}
            share = sum(powers[e] for e in (chosen if renormalised else stock))
            mixed = {expert: sum(weights) * powers[expert] / share for expert in chosen}
            counts[0] += len(chosen & cached)
            counts[1] += len(chosen - cached)
            for expert in sorted(chosen, key=lambda e: mixed[e]):
                if expert in history[layer]:
                    history[layer].remove(expert)
                history[layer].append(expert)
            run.choices[-1].append(chosen)
            run.weights[-1].append(mixed)
            order = sorted(chosen)
            return (
                logits_1E,
                torch.tensor([[mixed[expert] for expert in order]], dtype=weight_1K.dtype),
                torch.tensor([order], dtype=choice_1K.dtype),
            )

        return reroute

    handles = [router.register_forward_hook(hook(layer)) for layer, router in enumerate(routers)]
    try:
        state: dict = {}
        with torch.inference_mode():
            for token, following in zip(ids, [*ids[1:], None]):
                run.choices.append([])
                run.weights.append([])
                out = model(input_ids=torch.tensor([[token]]), use_cache=True, **state)
                name = "cache" if "cache" in out else "past_key_values"
                state = {name: out[name]}
                if following is not None:
                    run.losses.append(-float(out.logits[0, -1].double().log_softmax(-1)[following]))
    finally:
        for handle in handles:
            handle.remove()
    return run._replace(hits=counts[0], misses=counts[1])
