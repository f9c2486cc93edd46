"""Slow twins of all cache policies, from their definitions: ranks are read off the whole history each time, queues are lists.

They share no code with remoe_cli. Ids in a pool are layer * n_experts + expert; step i is of layer i % layers and of token
i // layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slow_reference import NEVER, SlowStep


@dataclass
class History:
    """All that a cache has seen, up to and with step `now`; `steps` reaches into the future, for oracles."""

    steps: list[list[int]]
    layers: int
    n_experts: int
    weights: list[list[float]] | None = None  # one an access
    scores: list[list[float]] | None = None  # [n_experts] one a step
    fit: list[float] | None = None  # one an id
    parameter: float = 0.0
    now: int = 0
    loads: list[list[int]] = field(default_factory=list)
    second: float = 0.0
    heads: list[list[float]] | None = None  # as scores, of the temporal head
    ahead: list[list[float] | None] | None = None  # what each step is foreseen by, where anything is
    listed: list[list[int]] | None = None  # what a prefetcher lists before each step
    came: list[list[int]] = field(default_factory=list)  # by step, what refinement brought in
    went: list[list[int]] = field(default_factory=list)

    def token(self, step: int) -> int:
        return step // self.layers

    def mentions(self, expert: int) -> list[int]:
        """The steps up to now that asked for it."""
        return [at for at in range(self.now + 1) if expert in self.steps[at]]

    def last_place(self, expert: int) -> tuple[int, int]:
        """(step, place in the step) of the last mention."""
        mentions = self.mentions(expert)
        return (mentions[-1], self.steps[mentions[-1]].index(expert)) if mentions else (-1, -1)

    def last_load(self, expert: int) -> tuple[int, int]:
        return max((at, one.index(expert)) for at, one in enumerate(self.loads) if expert in one)

    def weight(self, step: int, expert: int) -> float:
        assert self.weights is not None
        return self.weights[step][self.steps[step].index(expert)]

    def own_scores(self, expert: int, of: str = "scores") -> list[float]:
        """Its probability in each step of its layer so far; or what the head gave it."""
        layer, place = divmod(expert, self.n_experts)
        return [getattr(self, of)[at][place] for at in range(self.now + 1) if at % self.layers == layer]

    def faded(self, expert: int, gains: list[float], fade: Any) -> float:
        """What the mentions gained; the sum so far fades by fade(age in tokens) until the next one, and until now."""
        total, before = 0.0, 0
        for step, gain in zip(self.mentions(expert), gains, strict=True):
            total = gain + total * fade(self.token(step) - before)
            before = self.token(step)
        return total * fade(self.token(self.now) - before)


def worth(policy: str, expert: int, past: History) -> Any:
    """How much the policy wants to keep an expert now; the least leaves."""
    mentions, rate = past.mentions(expert), past.parameter
    if policy in ("lru", "held"):
        return past.last_place(expert)
    if policy == "fifo":
        return past.last_load(expert)
    if policy == "lfu":
        return len(mentions)
    if policy == "lfru":
        return len(mentions) / (past.token(past.now) - past.token(mentions[-1]) + 1)
    if policy == "lrfu":
        return past.faded(expert, [1.0] * len(mentions), lambda age: 2.0 ** (-rate * age))
    if policy == "gate":
        return past.weight(mentions[-1], expert)
    if policy == "decayed_weight":
        return past.faded(expert, [past.weight(step, expert) for step in mentions], lambda age: rate**age)
    if policy in ("retention", "gate_ahead"):
        return past.own_scores(expert)[-1] if past.own_scores(expert) else 0.0
    if policy in ("temporal", "spatio_temporal"):
        return sum((past.own_scores(expert) or [0.0])[-1:] + (past.own_scores(expert, "heads") or [0.0])[-1:])
    if policy in ("decayed", "temporal_decayed"):
        total = 0.0
        for score in past.own_scores(expert):
            total = (rate if policy == "decayed" else past.second) * total + score
        head = past.own_scores(expert, "heads")[-1:] if policy == "temporal_decayed" else []
        return total + rate * sum(head)
    if policy in ("static", "hindsight"):
        assert past.fit is not None
        return past.fit[expert], -expert
    if policy == "least_stale":
        used_now = past.token(mentions[-1]) == past.token(past.now)
        running, own = past.now % past.layers, expert // past.n_experts
        steps_ahead = next(ahead for ahead in range(1, past.layers + 1) if (running + ahead) % past.layers == own)
        return used_now, -steps_ahead, past.last_load(expert)
    if policy == "random":
        prime, drawn = 2**31 - 1, int(rate)
        for part in (past.token(past.now), expert):
            drawn = (pow(drawn + part + 1, 5, prime) + 48271) % prime
        return drawn
    if policy == "belady":
        for distance, step in enumerate(past.steps[past.now + 1 :]):
            if expert in step:
                return -distance, -step.index(expert)
        return -NEVER, -expert
    raise ValueError(policy)


class Ranked:
    """Any policy that ranks by worth; of equals the one touched longest ago leaves, then the lowest id."""

    def __init__(self, policy: str, past: History) -> None:
        self.policy, self.past = policy, past

    def touch(self, expert: int, hit: bool) -> None:
        pass

    def victim(self, may_leave: list[int], arrived: list[int]) -> int:
        return min(may_leave, key=lambda one: (worth(self.policy, one, self.past), self.past.last_place(one), one))

    def gone(self, expert: int) -> None:
        pass

    def step_over(self) -> None:
        pass


class Arc:
    """ARC (Megiddo and Modha 2003): lists, oldest first. Room is made for a whole step before its experts move in."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.target, self.from_b2 = capacity, 0.0, False
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def touch(self, expert: int, hit: bool) -> None:
        if not hit:
            self.from_b2 = expert in self.b2
        if expert in self.b1:
            self.target = min(self.capacity, self.target + max(1, len(self.b2) / len(self.b1)))
        if expert in self.b2:
            self.target = max(0, self.target - max(1, len(self.b1) / len(self.b2)))
        known = [queue for queue in (self.t1, self.t2, self.b1, self.b2) if expert in queue]
        for queue in known:
            queue.remove(expert)
        (self.t2 if known else self.t1).append(expert)

    def victim(self, may_leave: list[int], arrived: list[int]) -> int:
        once = [one for one in self.t1 if one in may_leave]
        again = [one for one in self.t2 if one in may_leave]
        if once and (len(once) > self.target or (self.from_b2 and len(once) == self.target) or not again):
            return once[0]
        return again[0]

    def gone(self, expert: int) -> None:
        queue, ghosts = (self.t1, self.b1) if expert in self.t1 else (self.t2, self.b2)
        queue.remove(expert)
        ghosts.append(expert)

    def step_over(self) -> None:
        while len(self.t1) + len(self.b1) > self.capacity and self.b1:
            self.b1.pop(0)
        while len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) > 2 * self.capacity and self.b2:
            self.b2.pop(0)


class S3Fifo:
    """S3-FIFO (Yang et al. 2023): lists, oldest first. Room is made for a whole step before its experts move in."""

    def __init__(self, capacity: int) -> None:
        self.main_size = capacity - max(1, capacity // 10)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.used: dict[int, int] = {}

    def touch(self, expert: int, hit: bool) -> None:
        if hit:
            self.used[expert] = min(3, self.used[expert] + 1)
            return
        (self.main if expert in self.ghosts else self.small).append(expert)
        self.ghosts = [one for one in self.ghosts if one != expert]
        self.used[expert] = 0

    def victim(self, may_leave: list[int], arrived: list[int]) -> int:
        may = {*may_leave}
        coming = [one for one in self.main if one in arrived and one not in may]  # last in the queue
        before = len(self.main) - len(coming)
        if not may & {*self.main} or (may & {*self.small} and before <= self.main_size):
            for expert in [one for one in self.small if one in may]:
                if self.used[expert] < 2:
                    return expert
                self.small.remove(expert)
                self.main.insert(len(self.main) - len(coming), expert)
                self.used[expert] = 0
        while True:
            expert = next(one for one in self.main if one in may)
            if self.used[expert] == 0:
                return expert
            self.used[expert] -= 1
            self.main.remove(expert)
            self.main.insert(len(self.main) - len(coming), expert)

    def gone(self, expert: int) -> None:
        if expert in self.main:
            self.main.remove(expert)
        else:
            self.small.remove(expert)
            self.ghosts = [*self.ghosts, expert][-self.main_size :] if self.main_size else []

    def step_over(self) -> None:
        pass


# Which probabilities foresee a step: the router's (R) and the temporal head's (T) of the token before in the same layer, and
# the spatio head's (S) of the layer before.
SUMS = {"gate_ahead": "R", "spatio_temporal": "RTS", "spatio": "S"}


def foreseen(policy: str, trace: Any, token: int, layer: int) -> list[float] | None:
    """The sum, or None where none of its parts exists."""
    first = max(int(one) for one in trace.borders if one <= token)
    rows = []
    for kind in SUMS.get(policy, ""):
        if kind == "S":
            where = (token, layer - 1) if layer else (token - 1, trace.experts.shape[1] - 1)
        else:
            where = (token - 1, layer)
        if where[0] >= first:
            array = {"R": trace.probabilities, "T": trace.temporal, "S": trace.spatio}[kind]
            rows.append([float(one) for one in array[where]])
    return [sum(parts) for parts in zip(*rows)] if rows else None


def refine(
    scores: list[float], reach: int, margin: float, capacity: int, resident: list[int], past: History
) -> list[int]:
    """Algorithm 2 of CacheRouter: who is resident after it."""
    now = list(resident)
    for one in sorted(range(len(scores)), key=lambda one: (-scores[one], one))[:reach]:
        if one in now:
            continue
        if len(now) < capacity:
            now.append(one)
            continue
        worst = min(now, key=lambda one: (scores[one], past.last_place(one), one))
        if scores[one] > scores[worst] + margin:
            now = [one if other == worst else other for other in now]
    return now


def bring(policy: str, listed: list[int], capacity: int, resident: list[int], past: History) -> list[int]:
    """Who is resident once what a prefetcher lists has come in."""
    now = list(resident)
    for one in [one for one in listed if one not in resident]:
        others = [other for other in now if other not in listed]
        if len(now) >= capacity and not others:
            break
        if len(now) >= capacity:
            now.remove(min(others, key=lambda other: (worth(policy, other, past), past.last_place(other), other)))
        now.append(one)
    return now


def slow_cache(policy: str, capacity: int, admission: str, past: History) -> tuple[list[SlowStep], int]:
    """What each step of `past.steps` did to one cold cache, and how many experts were loaded before the start."""
    keeper: Any = {"arc": Arc, "s3fifo": S3Fifo}.get(policy, lambda _: Ranked(policy, past))(capacity)
    resident: list[int] = []
    if policy in ("static", "hindsight"):
        assert past.fit is not None
        resident = sorted(range(len(past.fit)), key=lambda one: (past.fit[one], -one))[-capacity:]
    preloaded = len(resident)
    done = []
    for now, touched in enumerate(past.steps):
        past.came.append([])
        past.went.append([])
        if policy in SUMS and past.ahead is not None and (scores := past.ahead[now]) is not None:
            past.now = now - 1
            then = refine(scores, int(past.parameter), past.second, capacity, resident, past)
            past.came[-1] = [one for one in then if one not in resident]
            past.went[-1] = [one for one in resident if one not in then]
            resident = then
        if past.listed is not None:
            past.now = now - 1
            then = bring(policy, past.listed[now], capacity, resident, past)
            past.came[-1] = [one for one in then if one not in resident]
            past.went[-1] = [one for one in resident if one not in then]
            resident = then
        past.now = now
        hits = [one for one in touched if one in resident]
        misses = [one for one in touched if one not in resident]
        past.loads.append(misses)
        for one in touched:
            keeper.touch(one, one in hits)
        before = list(resident)
        if policy in ("spatio", "held"):  # nothing that was missed stays
            done.append(SlowStep(hits, misses, [], []))
            continue
        resident = before + misses
        while len(resident) > capacity:
            may_leave = [one for one in resident if admission == "bypass" or one not in touched]
            # Where the step alone is too large, its last touched stay.
            leaver = keeper.victim(may_leave, misses) if may_leave else next(one for one in touched if one in resident)
            resident.remove(leaver)
            keeper.gone(leaver)
        keeper.step_over()
        admitted = [one for one in misses if one in resident]
        done.append(SlowStep(hits, misses, admitted, [one for one in before if one not in resident]))
    return done, preloaded


# ---- the two queue policies as their papers have them: one access at a time


def textbook_arc(accesses: list[int], capacity: int) -> list[bool]:
    """Hits of ARC(c), figure 4 of the paper. Lists, oldest first."""
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    target, hits = 0.0, []

    def replace(in_b2: bool) -> None:
        if t1 and ((in_b2 and len(t1) == target) or len(t1) > target or not t2):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for page in accesses:
        hits.append(page in t1 or page in t2)
        if page in t1 or page in t2:
            (t1 if page in t1 else t2).remove(page)
            t2.append(page)
        elif page in b1:
            target = min(capacity, target + max(1, len(b2) / len(b1)))
            replace(False)
            b1.remove(page)
            t2.append(page)
        elif page in b2:
            target = max(0, target - max(1, len(b1) / len(b2)))
            replace(True)
            b2.remove(page)
            t2.append(page)
        else:
            if len(t1) + len(b1) == capacity:
                if len(t1) < capacity:
                    b1.pop(0)
                    replace(False)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= capacity:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                    b2.pop(0)
                replace(False)
            t1.append(page)
    return hits


def textbook_s3fifo(accesses: list[int], capacity: int) -> list[bool]:
    """Hits of S3-FIFO, algorithm 1 of the paper; ghosts are looked up before room is made, as in the authors' code."""
    small_size = max(1, capacity // 10)
    small: list[int] = []
    main: list[int] = []
    ghosts: list[int] = []
    used: dict[int, int] = {}
    hits = []

    def evict_main() -> None:
        while True:
            page = main.pop(0)
            if used[page] == 0:
                return
            used[page] -= 1
            main.append(page)

    def evict_small() -> bool:
        while small:
            page = small.pop(0)
            if used[page] > 1:
                used[page] = 0
                main.append(page)
            else:
                ghosts.append(page)
                del ghosts[: max(0, len(ghosts) - (capacity - small_size))]
                return True
        return False

    for page in accesses:
        hits.append(page in small or page in main)
        if hits[-1]:
            used[page] = min(used[page] + 1, 3)
            continue
        remembered = page in ghosts
        if remembered:
            ghosts.remove(page)
        full, too_many = len(small) + len(main) == capacity, len(main) > capacity - small_size
        if full and (too_many or not evict_small()):
            evict_main()
        (main if remembered else small).append(page)
        used[page] = 0
    return hits
