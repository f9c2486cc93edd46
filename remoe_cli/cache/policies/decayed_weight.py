"""Decayed weight: routing weights add up and fade; the lowest faded sum leaves."""

from __future__ import annotations

from functools import lru_cache
from math import log2

from remoe_cli.cache.policy import Memory, Policy

MOST_AGES = 2**20


def key(m: Memory, expert: int) -> float:
    age = min(m.now[0] - m.stamp[expert], len(m.table) - 1)
    return m.score[expert] * m.table[age]


def touch(m: Memory, expert: int, hit: bool, value: float) -> None:
    age = min(m.now[0] - m.stamp[expert], len(m.table) - 1)
    m.score[expert] = value + m.score[expert] * m.table[age]
    m.stamp[expert] = m.now[0]


@lru_cache(maxsize=8)  # the layers share it; nobody writes to it
def table(decay: float) -> list[float]:
    """decay^age for each age in tokens, until it is 0 (at most MOST_AGES; older uses count as that old)."""
    if decay in (0.0, 1.0):
        return [1.0, decay]
    ages = min(int(-1075 / log2(decay)) + 2, MOST_AGES)
    return [decay**age for age in range(ages)]


POLICY = Policy(
    title="the lowest sum of routing weights leaves, each faded by PARAMETER a token",
    key=key,
    touch=touch,
    table=table,
    needs=("weights",),
    parameter=0.9,
    allowed=(0.0, 1.0),
    grid=(0.5, 0.6, 0.7, 0.8, 0.9, 0.95),
    source="decayed gate weights, a probe of ours, docs/policies.md",
)
