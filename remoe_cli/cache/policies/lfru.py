"""Frequency over age: the expert with the fewest touches for the steps since its last one leaves."""

from remoe_cli.cache.policy import Memory, Policy


def touch(m: Memory, expert: int, hit: bool, value: float) -> None:
    m.count[expert] += 1
    m.stamp[expert] = m.now[0]


def key(m: Memory, expert: int) -> float:
    return m.count[expert] / (m.now[0] - m.stamp[expert] + 1)


POLICY = Policy(
    title="the expert with the lowest touches / (steps since the last + 1) leaves",
    source="arXiv 2608.07911",
    touch=touch,
    key=key,
)
