"""What comes in ahead of a step, over the arrays of the compiled replay; ExpertCache.refine and .bring are the same over a set.
The walk of `bring_in` is Algorithm 2 of CacheRouter (arXiv 2609.04895)."""

from __future__ import annotations

import numpy as np


def bring_in(
    last: np.ndarray,
    scores: np.ndarray,
    best_first: np.ndarray,
    most: int,
    margin: float,
    base: int,
    slot: np.ndarray,
    slots: np.ndarray,
    held: int,
    capacity: int,
) -> tuple[int, int, int]:
    """Walks the `most` best of scores [E] of one layer, whose ids begin at base, and changes slot and slots as the kernel keeps
    them. best_first: [E], scratch. Returns how many are held now, came in and left."""
    listed = 0
    for expert in range(len(scores) if most > 0 else 0):
        at = listed
        if listed == most:
            if scores[expert] <= scores[best_first[most - 1]]:
                continue
            at -= 1
        else:
            listed += 1
        while at > 0 and scores[best_first[at - 1]] < scores[expert]:
            best_first[at] = best_first[at - 1]
            at -= 1
        best_first[at] = expert
    came = 0
    gone = 0
    for rank in range(listed):
        coming = best_first[rank]
        if slot[base + coming] >= 0:
            continue
        if held >= capacity:
            leaving = np.int64(slots[0])
            for place in range(1, held):
                other = np.int64(slots[place])
                ahead = scores[other - base] - scores[leaving - base]
                older = last[other] < last[leaving] or (last[other] == last[leaving] and other < leaving)
                if ahead < 0.0 or (ahead == 0.0 and older):
                    leaving = other
            if not scores[coming] > scores[leaving - base] + margin:
                break
            place = slot[leaving]
            held -= 1
            slots[place] = slots[held]
            slot[slots[held]] = place
            slot[leaving] = -1
            gone += 1
        slot[base + coming] = held
        slots[held] = base + coming
        held += 1
        came += 1
    return held, came, gone


def bring_listed(
    last: np.ndarray,
    ranks: np.ndarray,
    listed: np.ndarray,
    wanted: np.ndarray,
    step: int,
    base: int,
    slot: np.ndarray,
    slots: np.ndarray,
    held: int,
    capacity: int,
) -> tuple[int, int, int]:
    """ExpertCache.bring over arrays. ranks: [ids], the policy's keys of those that are held. listed: experts, best first, up to the first
    -1. wanted: [ids], scratch, below `step` everywhere. Returns how many are held now, came in and left."""
    came = 0
    gone = 0
    for at in range(len(listed)):
        if listed[at] < 0:
            break
        wanted[base + listed[at]] = step
    for at in range(len(listed)):
        if listed[at] < 0:
            break
        coming = base + listed[at]
        if slot[coming] >= 0:
            continue
        if held >= capacity:
            leaving = np.int64(-1)
            for place in range(held):
                other = np.int64(slots[place])
                if wanted[other] == step:
                    continue
                older = leaving >= 0 and (
                    last[other] < last[leaving] or (last[other] == last[leaving] and other < leaving)
                )
                if leaving < 0 or ranks[other] < ranks[leaving] or (ranks[other] == ranks[leaving] and older):
                    leaving = other
            if leaving < 0:
                break
            place = slot[leaving]
            held -= 1
            slots[place] = slots[held]
            slot[slots[held]] = place
            slot[leaving] = -1
            gone += 1
        slot[coming] = held
        slots[held] = coming
        held += 1
        came += 1
    return held, came, gone
