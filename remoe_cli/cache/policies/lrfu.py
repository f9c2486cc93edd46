"""LRFU: each touch counts 1 and fades; the lowest faded count leaves."""

from __future__ import annotations

from functools import lru_cache

from remoe_cli.cache.policy import Memory, Policy

MOST_AGES = 2**20


def key(m: Memory, expert: int) -> float:
    age = min(m.now[0] - m.stamp[expert], len(m.table) - 1)
    return m.score[expert] * m.table[age]


def touch(m: Memory, expert: int, hit: bool, value: float) -> None:
    age = min(m.now[0] - m.stamp[expert], len(m.table) - 1)
    m.score[expert] = 1.0 + m.score[expert] * m.table[age]
    m.stamp[expert] = m.now[0]


@lru_cache(maxsize=8)  # the layers share it; nobody writes to it
def table(rate: float) -> list[float]:
    """2^(-rate * age) for each age in tokens, until it is 0 (at most MOST_AGES; older touches count as that old)."""
    if rate == 0:
        return [1.0]
    ages = MOST_AGES if rate * MOST_AGES < 1075 else min(int(1075 / rate) + 2, MOST_AGES)
    return [2.0 ** (-rate * age) for age in range(ages)]


POLICY = Policy(
    title="the lowest sum of touches leaves, each faded by 2^(-PARAMETER * age in tokens)",
    key=key,
    touch=touch,
    table=table,
    parameter=0.5,
    allowed=(0.0, 1.0),
    grid=(0.01, 0.05, 0.1, 0.2, 0.5),
    source="Lee et al. 2001, IEEE Trans. Computers 50(12), LRFU; rate .5 as CacheRouter (arXiv 2609.04895)",
)
