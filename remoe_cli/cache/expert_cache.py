"""ExpertCache: the C slots of one layer. The simulator and the offloaded decoder drive this same object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from remoe_cli.cache.policies import CachePolicy
from remoe_cli.errors import CacheError

ADMISSIONS = ("forced", "bypass")


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


class ExpertCache:
    """At most `capacity` resident experts of one layer, and counts of what was asked of them.

    policy: who leaves; `make_policy(name)` builds one. It belongs to this cache alone.
    admission: "forced": the experts of a step are protected until it is over and stay at least until the next one;
    "bypass": after a step the cache keeps the best of residents and touched alike, so that an expert just used may
    leave at once.
    A step that touches more than `capacity` experts leaves the last `capacity` touched, whatever the policy.

    Counters, in experts, since construction or reset: hits, misses, evictions.
    Source: objectives-and-metrics.md, section 5. Raises CacheError for a capacity below 1 or an unknown admission.
    """

    def __init__(self, capacity: int, policy: CachePolicy, admission: str = "forced") -> None:
        if capacity < 1:
            raise CacheError(f"a cache needs at least 1 slot a layer, not {capacity}", "remoe eval --cache 6")
        if admission not in ADMISSIONS:
            raise CacheError(f"no admission {admission!r}: {' or '.join(ADMISSIONS)}", "remoe eval --cache 6")
        self.capacity = capacity
        self.policy = policy
        self.admission = admission
        self.resident: set[int] = set()
        self.hits = self.misses = self.evictions = 0

    def reset(self) -> None:
        """Empties the cache and the policy's memory, and sets the counters to 0."""
        self.policy.reset()
        self.resident.clear()
        self.hits = self.misses = self.evictions = 0

    def step(self, touched: Sequence[int]) -> Step:
        """Serves one step that asks for the distinct experts `touched`, in touch order (the last is the most recent).

        Hits count against the contents before the step. Raises ValueError where an expert is named twice.
        """
        resident, capacity, policy = self.resident, self.capacity, self.policy
        asked = {*touched}
        if len(asked) != len(touched):
            raise ValueError(f"a step names an expert twice: {list(touched)}")
        if asked <= resident:
            policy.touch(touched, ())
            self.hits += len(touched)
            return Step(tuple(touched), (), (), ())
        hits: tuple[int, ...] = ()
        misses = tuple(touched)
        if not resident.isdisjoint(asked):
            hits = tuple([expert for expert in touched if expert in resident])
            misses = tuple([expert for expert in touched if expert not in resident])
        policy.touch(touched, misses)
        self.hits += len(hits)
        self.misses += len(misses)
        leaving = len(resident) + len(misses) - capacity
        if leaving <= 0:
            resident.update(misses)
            return Step(hits, misses, misses, ())
        if len(asked) > capacity:
            victims = (resident | asked).difference(touched[-capacity:])
        else:
            victims = resident - asked if self.admission == "forced" else resident | asked
            if leaving < len(victims):
                if leaving == 1:
                    victims = {min(victims, key=policy.key)}
                else:
                    victims = set(sorted(victims, key=policy.key)[:leaving])
        evicted = tuple(resident & victims)
        resident |= asked
        resident -= victims
        self.evictions += len(evicted)
        if len(evicted) < len(victims):
            return Step(hits, misses, tuple([expert for expert in misses if expert in resident]), evicted)
        return Step(hits, misses, misses, evicted)
