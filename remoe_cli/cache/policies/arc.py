"""ARC: experts seen once and experts seen again share the slots; ghosts of both move the border between them."""

from __future__ import annotations

from collections.abc import Sequence

from remoe_cli.cache.policy import Memory, Policy

# state[expert]: 0 unknown, 1 resident, touched once (T1), 2 resident, touched again (T2), 3 and 4 their ghosts (B1, B2).
# reg[0]: capacity; reg[1] to reg[4]: how many experts have that state; reg[5]: 1 if the last miss was a ghost of T2.
# score[-1]: the target size of T1. link and stamp: next and previous ghost, a ring through [-1], oldest first.


def start(m: Memory, capacity: int) -> None:
    end = len(m.link) - 1
    m.reg[0] = capacity
    m.link[end] = end
    m.stamp[end] = end


def touch(m: Memory, expert: int, hit: bool, value: float) -> None:
    was = m.state[expert]
    if not hit:
        m.reg[5] = 1 if was == 4 else 0
    if was == 3:
        m.score[-1] = min(float(m.reg[0]), m.score[-1] + max(1.0, m.reg[4] / m.reg[3]))
    if was == 4:
        m.score[-1] = max(0.0, m.score[-1] - max(1.0, m.reg[3] / m.reg[4]))
    if was >= 3:
        m.link[m.stamp[expert]] = m.link[expert]
        m.stamp[m.link[expert]] = m.stamp[expert]
    if was > 0:
        m.reg[was] -= 1
    becomes = 1 if was == 0 else 2
    m.state[expert] = becomes
    m.reg[becomes] += 1


def victim(m: Memory, slots: Sequence[int], held: int, first: int) -> int:
    """The least recent of T1 or T2. T1's size is that of before the step: room is made first, then the step moves in."""
    once = 0
    oldest_once = -1
    oldest_again = -1
    for place in range(held):
        expert = slots[place]
        if m.last[expert] > first:
            continue
        if m.state[expert] == 1:
            once += 1
            if oldest_once < 0 or m.last[expert] < m.last[oldest_once]:
                oldest_once = expert
        elif oldest_again < 0 or m.last[expert] < m.last[oldest_again]:
            oldest_again = expert
    too_many = once > m.score[-1] or (m.reg[5] == 1 and once == m.score[-1])
    if oldest_once >= 0 and (too_many or oldest_again < 0):
        return oldest_once
    return oldest_again


def leave(m: Memory, expert: int) -> None:
    """Becomes the newest ghost. Once the step fits: |T1| + |B1| <= capacity, all four <= 2 * capacity."""
    end = len(m.link) - 1
    was = m.state[expert]
    m.reg[was] -= 1
    m.state[expert] = was + 2
    m.reg[was + 2] += 1
    newest = m.stamp[end]
    m.link[newest] = expert
    m.stamp[expert] = newest
    m.link[expert] = end
    m.stamp[end] = expert
    if m.reg[1] + m.reg[2] > m.reg[0]:
        return
    for kind in range(3, 5):
        excess = m.reg[1] + m.reg[3] - m.reg[0]
        if kind == 4:
            excess = m.reg[1] + m.reg[2] + m.reg[3] + m.reg[4] - 2 * m.reg[0]
        ghost = m.link[end]
        while excess > 0 and ghost != end:
            following = m.link[ghost]
            if m.state[ghost] == kind:
                m.link[m.stamp[ghost]] = following
                m.stamp[following] = m.stamp[ghost]
                m.state[ghost] = 0
                m.reg[kind] -= 1
                excess -= 1
            ghost = following


POLICY = Policy(
    title="least recent of those seen once or of those seen again, whichever holds more than its moving share",
    victim=victim,
    touch=touch,
    leave=leave,
    start=start,
    source="Megiddo and Modha 2003, FAST, ARC",
)
