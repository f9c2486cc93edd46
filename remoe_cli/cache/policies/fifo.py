"""First in, first out: the expert that was loaded longest ago leaves."""

from remoe_cli.cache.policy import Memory, Policy


def touch(m: Memory, expert: int, hit: bool, value: float) -> None:
    m.reg[0] += 1
    m.stamp[expert] = m.stamp[expert] if hit else m.reg[0]


def key(m: Memory, expert: int) -> float:
    return float(m.stamp[expert])


POLICY = Policy(
    title="the expert loaded longest ago leaves; a hit changes nothing",
    source="textbook",
    touch=touch,
    key=key,
)
