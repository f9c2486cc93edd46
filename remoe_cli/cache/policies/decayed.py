"""Decayed: router probabilities of all experts add up and fade, chosen or not; the lowest faded sum leaves."""

from __future__ import annotations

from collections.abc import Sequence

from remoe_cli.cache.policy import Memory, Policy


def key(m: Memory, expert: int) -> float:
    return m.score[expert]


def observe(m: Memory, scores: Sequence[float], start: int) -> None:
    decay = m.table[0]
    for place in range(len(scores)):
        m.score[start + place] = decay * m.score[start + place] + float(scores[place])


def table(decay: float) -> list[float]:
    return [decay]


POLICY = Policy(
    title="the lowest sum of router probabilities leaves, each faded by PARAMETER a token",
    key=key,
    observe=observe,
    table=table,
    needs=("probabilities",),
    parameter=0.8,
    allowed=(0.0, 1.0),
    grid=(0.5, 0.6, 0.7, 0.8, 0.9, 0.95),
    source="a probe of ours, docs/policies.md",
)
