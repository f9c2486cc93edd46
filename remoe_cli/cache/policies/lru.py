"""Least recently used: the expert whose last touch lies longest ago leaves."""

from remoe_cli.cache.policy import Memory, Policy


def key(m: Memory, expert: int) -> float:
    return float(m.last[expert])


POLICY = Policy(
    title="the expert touched longest ago leaves",
    source="the default of every offloading system; ReMoE and CacheRouter both measure it",
    key=key,
)
