"""Belady's optimum: the expert whose next use lies farthest ahead leaves. No policy of the same admission loads less."""

from remoe_cli.cache.policy import Memory, Policy


def touch(m: Memory, expert: int, hit: bool, value: float) -> None:
    m.link[expert] = int(value)


def key(m: Memory, expert: int) -> float:
    return -float(m.link[expert])


POLICY = Policy(
    title="the expert used again last leaves: the optimum, which knows the future",
    source="Belady 1966 (MIN)",
    touch=touch,
    key=key,
    needs=("future",),
)
