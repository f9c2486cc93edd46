"""ExpertCache: the slots of one layer, or of a pool. The offloaded decoder drives it; replay's plain engine does too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from remoe_cli.cache.ahead import candidates
from remoe_cli.cache.policies import choose, live_policies
from remoe_cli.cache.policy import leave, memory, Policy
from remoe_cli.errors import CacheError

ADMISSIONS = ("forced", "bypass")
HINT = "remoe eval --cache 6"
NOTHING_PROTECTED = 1 << 62  # above every clock


class Step(NamedTuple):
    """What one step did, as expert ids. hits, misses and admitted are in touch order, evicted in none.

    hits: asked for and resident before the step.
    misses: asked for and not resident: every one must be loaded in this step.
    admitted: the misses that are resident afterwards; the others only pass through a staging buffer.
    evicted: resident before the step and not afterwards (with bypass this may be an expert that was just hit).
    """

    hits: tuple[int, ...]
    misses: tuple[int, ...]
    admitted: tuple[int, ...]
    evicted: tuple[int, ...]


class Refined(NamedTuple):
    """What came in ahead of a step, best first, each a load, and what left for it, as expert ids."""

    admitted: tuple[int, ...]
    evicted: tuple[int, ...]


class ExpertCache:
    """At most `capacity` resident experts, and counts of what was asked of them.

    policy: NAME or NAME:PARAMETER of POLICIES. n_experts: experts a layer; n_layers: above 1 for one pool of several layers,
    whose ids are layer * n_experts + expert.
    admission: "forced": the experts of a step are protected until it is over and stay at least until the next one; a step
    that touches more than fit leaves the last touched, whatever the policy. "bypass": after a step the cache keeps the
    best of residents and touched alike, so that an expert just used may leave at once.
    future: for an oracle, the id of every access to come, ~id where its hit would not count. fit: [n_layers * n_experts]
    uses in the fitted trace, if any.
    sizes: by id; capacity is then in their unit, and forced admission may exceed it by the experts of one step.

    Counters, in experts, since construction or reset: hits, misses, evictions, proactive.
    Rules: docs/replay.md. Raises CacheError for a capacity below 1, an unknown policy or admission, an oracle without a
    future, or a policy that does not go with the admission or with a pool.
    """

    def __init__(
        self,
        capacity: int,
        policy: str = "lru",
        *,
        n_experts: int,
        admission: str = "forced",
        n_layers: int = 1,
        future: Sequence[int] | None = None,
        fit: Sequence[float] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        if capacity < 1:
            raise CacheError(f"a cache needs at least 1 slot a layer, not {capacity}", HINT)
        if admission not in ADMISSIONS:
            raise CacheError(f"no admission {admission!r}: {' or '.join(ADMISSIONS)}", HINT)
        chosen = choose(policy)
        self.policy = chosen.policy
        if ("future" in self.policy.needs and future is None) or ("fit" in self.policy.needs and fit is None):
            raise CacheError(
                f"policy {chosen.name!r} needs {'the future' if 'future' in self.policy.needs else 'a fitted trace'}, which "
                f"only replay knows; a decoder can use {', '.join(live_policies())}",
                HINT,
            )
        if (why := unfit(self.policy, admission, n_layers > 1)) is not None:
            raise CacheError(f"policy {chosen.name}: {why}", f"{HINT} --policy lru")
        self.capacity, self.admission = capacity, admission
        self._n_experts, self._n_layers, self._sizes = n_experts, n_layers, sizes
        self._constants = chosen.constants
        n_ids = n_experts * n_layers
        self._fit = [0.0] * n_ids if fit is None else fit
        self._next_use = _next_use(future, n_ids) if future is not None and "future" in self.policy.needs else None
        self.reset()

    def reset(self) -> None:
        """As new: empty (or preloaded, where the policy is), nothing remembered, counters 0."""
        n_ids = self._n_experts * self._n_layers
        self._memory = memory(n_ids, self._n_layers, self._n_experts, self._constants, self._fit)
        self._clock = self._steps = self._position = 0
        self.hits = self.misses = self.evictions = self.proactive = 0
        self.resident: set[int] = set()
        if self.policy.preload:
            room = self.capacity
            for expert in sorted(range(n_ids), key=lambda expert: (-self._fit[expert], expert)):
                room -= 1 if self._sizes is None else self._sizes[expert]
                if room < 0:
                    break
                self.resident.add(expert)
            self.proactive = len(self.resident)
        largest = 1 if self._sizes is None else max(self._sizes)
        self.policy.start(self._memory, max(1, self.capacity // largest))

    def step(
        self,
        touched: Sequence[int],
        weights: Sequence[float] | None = None,
        probabilities: Sequence[float] | None = None,
        temporal: Sequence[float] | None = None,
        *,
        layer: int = 0,
    ) -> Step:
        """Serves one step that asks for the distinct experts `touched`, in touch order (the last is the most recent).

        weights: routing weights of `touched`; probabilities, temporal: [n_experts] of this step's layer, the router's and
        its temporal head's; each for policies that need it. Hits count against the contents before the step. Raises ValueError where an expert is named twice, or where
        the policy needs what was not given.
        """
        m, policy, resident = self._memory, self.policy, self.resident
        values = self._values(touched, weights)
        m.now[0], m.now[1] = self._steps // self._n_layers, layer
        self._steps += 1
        if "probabilities" in policy.needs:
            if probabilities is None:
                raise ValueError("the policy needs router probabilities, and the step has none")
            policy.observe(m, probabilities, layer * self._n_experts)
        if "temporal" in policy.needs:
            if temporal is None:
                raise ValueError("the policy needs the scores of a temporal head, and the step has none")
            m.head[layer * self._n_experts : (layer + 1) * self._n_experts] = temporal
        first = self._clock
        hits: list[int] = []
        misses: list[int] = []
        for expert, value in zip(touched, values):
            hit = expert in resident
            (hits if hit else misses).append(expert)
            policy.touch(m, expert, hit, value)
            self._clock += 1
            m.last[expert] = self._clock
        self.hits += len(hits)
        self.misses += len(misses)
        if not policy.admits or (not misses and self._sizes is None):  # the contents are as before
            return Step(tuple(hits), tuple(misses), (), ())
        resident.update(misses)
        gone = self._make_room(first if self.admission == "forced" else NOTHING_PROTECTED)
        evicted = tuple(gone.difference(misses))
        self.evictions += len(evicted)
        return Step(tuple(hits), tuple(misses), tuple([one for one in misses if one not in gone]), evicted)

    def refine(self, scores: Sequence[float], layer: int = 0) -> Refined:
        """Ahead of a step, where the policy `refines`: walks the R best of `scores` [n_experts], see `scores_ahead`. One that
        is not resident is loaded into a free slot, or takes the place of the resident of lowest score where its own is higher
        by more than the margin. Raises ValueError for a policy that is not of this kind.
        """
        if not self.policy.refines:
            raise ValueError("the policy loads nothing ahead of a step")
        most, margin = self._constants
        last, resident, base = self._memory.last, self.resident, layer * self._n_experts
        admitted: list[int] = []
        gone: set[int] = set()
        for candidate in candidates(scores, int(most)):
            expert = base + candidate
            if expert in resident:
                continue
            if len(resident) >= self.capacity:
                lowest = min(resident, key=lambda one: (scores[one - base], last[one], one))
                if not scores[candidate] > scores[lowest - base] + margin:
                    break
                self._dismiss(lowest, gone)
            resident.add(expert)
            admitted.append(expert)
        self.proactive += len(admitted)
        self.evictions += len(gone)
        return Refined(tuple(admitted), tuple(gone))

    def bring(self, experts: Sequence[int], layer: int = 0) -> Refined:
        """Ahead of a step: loads those of `experts` (of one layer, best first) that are not resident, each into a free slot or
        in the place of the one that the policy lets go first; none of `experts` leaves for another. Until it is asked for, an
        expert that came in so is one that was never touched, if it never was before.
        """
        m, resident, key, base = self._memory, self.resident, self.policy.key, layer * self._n_experts
        assert key is not None
        m.now[0], m.now[1] = self._steps // self._n_layers, layer
        listed = {base + expert for expert in experts}
        admitted: list[int] = []
        gone: set[int] = set()
        for expert in [base + one for one in experts if base + one not in resident]:
            if len(resident) >= self.capacity:
                others = [(key(m, one), m.last[one], one) for one in resident if one not in listed]
                if not others:
                    break
                self._dismiss(min(others)[2], gone)
            resident.add(expert)
            admitted.append(expert)
        self.proactive += len(admitted)
        self.evictions += len(gone)
        return Refined(tuple(admitted), tuple(gone))

    def fill(self, layer: int = 0) -> None:
        """Fills this layer's share of the free slots with what the policy would keep longest, free of charge."""
        assert self.policy.key is not None
        own = range(layer * self._n_experts, (layer + 1) * self._n_experts)
        free = self.capacity // self._n_layers - sum(expert in self.resident for expert in own)
        best = sorted(own, key=lambda expert: (-self.policy.key(self._memory, expert), expert))  # type: ignore[misc]
        self.resident.update([expert for expert in best if expert not in self.resident][: max(0, free)])

    def _values(self, touched: Sequence[int], weights: Sequence[float] | None) -> Sequence[float]:
        if len({*touched}) != len(touched):
            raise ValueError(f"a step names an expert twice: {list(touched)}")
        if self._next_use is not None:
            values = self._next_use[1][self._position : self._position + len(touched)]
            if self._next_use[0][self._position : self._position + len(touched)] != list(touched):
                raise ValueError(f"touched {list(touched)} is not the future that the policy was built from")
            self._position += len(touched)
            return values
        if "weights" not in self.policy.needs:
            return [0.0] * len(touched)
        if weights is None:
            raise ValueError("the policy needs routing weights, and the step has none")
        return weights

    def _make_room(self, first: int) -> set[int]:
        """Sends experts away until the contents fit; touched after `first` are protected while there are others."""
        resident, sizes = self.resident, self._sizes
        excess = (len(resident) if sizes is None else sum(sizes[expert] for expert in resident)) - self.capacity
        gone: set[int] = set()
        if excess > 0 and sizes is None and self.policy.key is not None and self.policy.leave is leave:
            for expert in self._lowest(first, excess):  # nothing changes their order while they leave
                self._dismiss(expert, gone)
            excess -= len(gone)
        while excess > 0:
            leaving = self._next(first)
            if leaving < 0:
                if sizes is not None:
                    break
                leaving = min(resident, key=lambda expert: self._memory.last[expert])
            self._dismiss(leaving, gone)
            excess -= 1 if sizes is None else sizes[leaving]
        return gone

    def _next(self, first: int) -> int:
        if self.policy.victim is not None:
            return self.policy.victim(self._memory, [*self.resident], len(self.resident), first)
        lowest = self._lowest(first, 1)
        return lowest[0] if lowest else -1

    def _lowest(self, first: int, n: int) -> list[int]:
        m, last, key = self._memory, self._memory.last, self.policy.key
        assert key is not None
        ranked = [(key(m, expert), last[expert], expert) for expert in self.resident if last[expert] <= first]
        ranked.sort()
        return [expert for _, _, expert in ranked[:n]]

    def _dismiss(self, expert: int, gone: set[int]) -> None:
        self.resident.remove(expert)
        gone.add(expert)
        self.policy.leave(self._memory, expert)


def unfit(policy: Policy, admission: str, pool: bool) -> str | None:
    """Why a policy can't be had so; None where it can."""
    if not policy.admits and admission == "forced":
        return "it keeps no expert that was missed, so it goes with admission bypass only"
    if policy.refines and pool:
        return "it loads ahead into the cache of one layer, so there is no pool for it"
    return None


def _next_use(future: Sequence[int], n_ids: int) -> tuple[list[int], list[int]]:
    """The ids to come, and for each the place of its next access; after all places where there is none, or where that does
    not count: then it costs nothing to be loaded there once more."""
    ids = [max(one, ~one) for one in future]
    upcoming: dict[int, int] = {}
    next_use = [0] * len(ids)
    for place in range(len(ids) - 1, -1, -1):
        next_use[place] = upcoming.get(ids[place], len(ids) + ids[place])
        upcoming[ids[place]] = place if future[place] >= 0 else len(ids) + ids[place]
    return ids, next_use
