"""Least-Stale: experts that this token has not used leave first, of them those whose layer comes round last."""

from __future__ import annotations

from remoe_cli.cache.policy import Memory, Policy


def key(m: Memory, expert: int) -> float:
    """(used by this token, nearness of the layer's next turn, place in the queue of loads) as one number below 2^53."""
    layers = m.now[2]
    # The layer that runs now has the longest way to its next turn, the next one the shortest.
    distance = (expert // m.now[3] - m.now[1] - 1) % layers
    rank = layers - 1 - distance
    if m.state[expert] == m.now[0] + 1:
        rank += layers
    return rank * 1099511627776.0 + m.stamp[expert]


def touch(m: Memory, expert: int, hit: bool, value: float) -> None:
    m.state[expert] = m.now[0] + 1
    if not hit:
        m.reg[0] += 1
        m.stamp[expert] = m.reg[0]


POLICY = Policy(
    title="not used by this token first, then the layer whose turn is farthest ahead, then first in, first out",
    key=key,
    touch=touch,
    source="SpecMD, arXiv 2602.03921",
)
