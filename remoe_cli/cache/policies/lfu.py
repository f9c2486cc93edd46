"""Least frequently used: the expert touched in the fewest steps leaves, of equals the least recent."""

from remoe_cli.cache.policy import Memory, Policy


def touch(m: Memory, expert: int, hit: bool, value: float) -> None:
    m.count[expert] += 1


def key(m: Memory, expert: int) -> float:
    return float(m.count[expert])


POLICY = Policy(
    title="the expert touched least often in this request leaves; counts outlive eviction",
    source="CacheRouter's baseline (arXiv 2609.04895)",
    touch=touch,
    key=key,
)
