"""Retention: the expert that the router finds least probable for this token leaves."""

from __future__ import annotations

from collections.abc import Sequence

from remoe_cli.cache.policy import Memory, Policy


def key(m: Memory, expert: int) -> float:
    return m.score[expert]


def observe(m: Memory, scores: Sequence[float], start: int) -> None:
    for place in range(len(scores)):
        m.score[start + place] = float(scores[place])


POLICY = Policy(
    title="the lowest router probability of this token leaves",
    key=key,
    observe=observe,
    needs=("probabilities",),
    fill=True,
    source="CacheRouter, arXiv 2609.04895, Algorithm 1 with s = the gate's own probabilities",
)
