"""Temporal: the expert leaves that router and temporal head together find least probable for the next token."""

from __future__ import annotations

from remoe_cli.cache.policies.retention import observe
from remoe_cli.cache.policy import Memory, Policy


def key(m: Memory, expert: int) -> float:
    return m.score[expert] + m.head[expert]


POLICY = Policy(
    title="the lowest sum of router probability and temporal head for this token leaves",
    key=key,
    observe=observe,
    needs=("probabilities", "temporal"),
    fill=True,
    source="CacheRouter, arXiv 2609.04895, Algorithm 1",
)
