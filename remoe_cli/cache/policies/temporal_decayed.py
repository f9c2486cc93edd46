"""Temporal, decayed: router probabilities add up and fade, and the temporal head has a say of PARAMETER."""

from __future__ import annotations

from collections.abc import Sequence

from remoe_cli.cache.policy import Memory, Policy


def key(m: Memory, expert: int) -> float:
    return m.score[expert] + m.table[0] * m.head[expert]


def observe(m: Memory, scores: Sequence[float], start: int) -> None:
    decay = m.table[1]
    for place in range(len(scores)):
        m.score[start + place] = decay * m.score[start + place] + float(scores[place])


POLICY = Policy(
    title="the lowest sum of PARAMETER x temporal head and router probabilities, each faded by the second a token, leaves",
    key=key,
    observe=observe,
    needs=("probabilities", "temporal"),
    parameter=1.0,
    allowed=(0.0, 1000.0),
    grid=(0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
    second=0.8,
    second_allowed=(0.0, 1.0),
    source="decayed and CacheRouter's temporal head (arXiv 2609.04895) together, docs/policies.md",
)
