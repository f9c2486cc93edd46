"""S3-FIFO: newcomers wait in a small queue; those used twice there, or remembered as ghosts, move to the main queue."""

from __future__ import annotations

from collections.abc import Sequence

from remoe_cli.cache.policy import Memory, Policy

# Three queues, named by state[expert]: 1 small, 2 main, 3 ghosts; 0 is in none. reg[queue]: its oldest, reg[queue + 3]: its
# newest, stamp and link: who is next older and younger in the same queue; the last place of the arrays stands for nobody.
# count[expert]: hits since it was queued, at most 3. score[expert]: 1 if its last touch was a miss.
# reg[0]: slots of the main queue. count[-1]: residents in the main queue. reg[7]: ghosts.


def start(m: Memory, capacity: int) -> None:
    nobody = len(m.link) - 1
    m.reg[0] = capacity - max(1, capacity // 10)
    for queue in range(1, 4):
        m.reg[queue] = nobody
        m.reg[queue + 3] = nobody


def touch(m: Memory, expert: int, hit: bool, value: float) -> None:
    if hit:
        m.score[expert] = 0.0
        m.count[expert] = min(m.count[expert] + 1, 3)
        return
    nobody = len(m.link) - 1
    queue = 1
    if m.state[expert] == 3:
        queue = 2
        m.count[-1] += 1
        m.reg[7] -= 1
        older = m.stamp[expert]
        younger = m.link[expert]
        if older == nobody:
            m.reg[3] = younger
        else:
            m.link[older] = younger
        if younger == nobody:
            m.reg[6] = older
        else:
            m.stamp[younger] = older
    m.score[expert] = 1.0
    m.count[expert] = 0
    m.state[expert] = queue
    newest = m.reg[queue + 3]
    m.stamp[expert] = newest
    m.link[expert] = nobody
    m.reg[queue + 3] = expert
    if newest == nobody:
        m.reg[queue] = expert
    else:
        m.link[newest] = expert


def victim(m: Memory, slots: Sequence[int], held: int, first: int) -> int:
    """The main queue gives if it held more than its slots before the step, else the small one; who is protected keeps its
    place. Room is made before the step's newcomers move in: whom they find put back lines up ahead of them."""
    nobody = len(m.link) - 1
    border = nobody
    size = m.count[-1]
    newest = m.reg[5]
    while newest != nobody and m.last[newest] > first and m.score[newest] == 1.0:
        border = newest
        size -= 1
        newest = m.stamp[newest]
    for turn in range(3):
        if turn == 0 and size > m.reg[0]:
            continue
        queue = 2 if turn == 1 else 1
        expert = m.reg[queue]
        while expert != nobody and m.last[expert] > first:
            expert = m.link[expert]
        while expert != nobody:
            following = m.link[expert]
            if m.last[expert] <= first:
                if m.count[expert] < 3 - queue:
                    return expert
                # To the end of the main queue: from the small one with no hits, else with one hit less.
                m.count[expert] = 0 if queue == 1 else m.count[expert] - 1
                if queue == 1:
                    m.state[expert] = 2
                    m.count[-1] += 1
                older = m.stamp[expert]
                if older == nobody:
                    m.reg[queue] = following
                else:
                    m.link[older] = following
                if following == nobody:
                    m.reg[queue + 3] = older
                else:
                    m.stamp[following] = older
                newest = m.reg[5] if border == nobody else m.stamp[border]
                m.stamp[expert] = newest
                m.link[expert] = border
                if newest == nobody:
                    m.reg[2] = expert
                else:
                    m.link[newest] = expert
                if border == nobody:
                    m.reg[5] = expert
                else:
                    m.stamp[border] = expert
            expert = following
            if expert == nobody and queue == 2:
                expert = m.reg[2]
    return -1


def leave(m: Memory, expert: int) -> None:
    """From the small queue it becomes the newest ghost, of at most as many as the main queue has slots."""
    nobody = len(m.link) - 1
    queue = m.state[expert]
    older = m.stamp[expert]
    younger = m.link[expert]
    if older == nobody:
        m.reg[queue] = younger
    else:
        m.link[older] = younger
    if younger == nobody:
        m.reg[queue + 3] = older
    else:
        m.stamp[younger] = older
    if queue == 2:
        m.state[expert] = 0
        m.count[-1] -= 1
        return
    m.state[expert] = 3
    m.reg[7] += 1
    newest = m.reg[6]
    m.stamp[expert] = newest
    m.link[expert] = nobody
    m.reg[6] = expert
    if newest == nobody:
        m.reg[3] = expert
    else:
        m.link[newest] = expert
    if m.reg[7] > m.reg[0]:
        oldest = m.reg[3]
        m.reg[7] -= 1
        m.state[oldest] = 0
        m.reg[3] = m.link[oldest]
        if m.reg[3] == nobody:
            m.reg[6] = nobody
        else:
            m.stamp[m.reg[3]] = nobody


POLICY = Policy(
    title="a small queue for newcomers, a main queue for those used again, first in, first out in both",
    victim=victim,
    touch=touch,
    leave=leave,
    start=start,
    source="Yang et al. 2023, SOSP, S3-FIFO",
)
