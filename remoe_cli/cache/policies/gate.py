"""Gate: the expert with the lowest routing weight at its last use leaves."""

from __future__ import annotations

from remoe_cli.cache.policy import Memory, Policy


def key(m: Memory, expert: int) -> float:
    return m.score[expert]


def touch(m: Memory, expert: int, hit: bool, value: float) -> None:
    m.score[expert] = value


POLICY = Policy(
    title="the lowest routing weight at the last use leaves",
    key=key,
    touch=touch,
    needs=("weights",),
    source="gate-score retention, a probe of ours, docs/policies.md",
)
