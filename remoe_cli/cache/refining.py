"""The walk of Algorithm 2 (CacheRouter, arXiv 2609.04895) over the arrays of the compiled replay; ExpertCache.refine is the same
over a set."""

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
