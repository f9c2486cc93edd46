"""The registry of cache policies. To add one: a file here that ends in `POLICY = Policy(...)`, a line in POLICIES, and a
row in tests/test_policies.py; docs/extending.md walks through one. File name = key = word on the command line."""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple, TYPE_CHECKING

from remoe_cli.cache.policies import (
    arc,
    belady,
    decayed,
    decayed_weight,
    fifo,
    gate,
    gate_ahead,
    held,
    hindsight,
    least_stale,
    lfru,
    lfu,
    lrfu,
    lru,
    random,
    retention,
    s3fifo,
    spatio,
    spatio_temporal,
    static,
    temporal,
    temporal_decayed,
)
from remoe_cli.cache.policy import leave, Policy
from remoe_cli.cache.prefetch import lacks as prefetch_lacks
from remoe_cli.cache.prefetch import Wanted, wanted
from remoe_cli.errors import CacheError

if TYPE_CHECKING:
    from remoe_cli.routing import RoutingTrace

TRY = "remoe replay TRACE --cache 8 --policy"
HINT = f"{TRY} all"
_FOREIGN = ", the tool that this one comes from did not"

POLICIES: dict[str, Policy] = {
    "lru": lru.POLICY,
    "lfu": lfu.POLICY,
    "fifo": fifo.POLICY,
    "lrfu": lrfu.POLICY,
    "lfru": lfru.POLICY,
    "arc": arc.POLICY,
    "s3fifo": s3fifo.POLICY,
    "least_stale": least_stale.POLICY,
    "random": random.POLICY,
    "static": static.POLICY,
    "gate": gate.POLICY,
    "decayed_weight": decayed_weight.POLICY,
    "decayed": decayed.POLICY,
    "retention": retention.POLICY,
    "temporal": temporal.POLICY,
    "temporal_decayed": temporal_decayed.POLICY,
    "gate_ahead": gate_ahead.POLICY,
    "spatio_temporal": spatio_temporal.POLICY,
    "spatio": spatio.POLICY,
    "held": held.POLICY,
    "hindsight": hindsight.POLICY,
    "belady": belady.POLICY,
}


ALONE = [
    name for name, policy in POLICIES.items() if policy.admits or policy.refines
]  # that hold something without a prefetcher


class Chosen(NamedTuple):
    """A policy as it was asked for: NAME, NAME:PARAMETER or NAME:PARAMETER:SECOND, and +PREFETCHER. parameter, second: the given
    ones, else the policy's defaults, else 0."""

    name: str
    policy: Policy
    parameter: float
    second: float = 0.0
    prefetch: Wanted | None = None

    @property
    def constants(self) -> list[float]:
        return self.policy.table(*[self.parameter, self.second][: 1 if self.policy.second is None else 2])

    @property
    def word(self) -> str:
        """With its parameters, as `choose` takes it."""
        asked = [self.policy.parameter, self.policy.second]
        given = [repr(one) for one, has in zip((self.parameter, self.second), asked) if has is not None]
        return ":".join([self.name, *given]) + ("" if self.prefetch is None else f"+{self.prefetch.word}")


def choose(asked: str) -> Chosen:
    """Raises CacheError for an unknown name, a parameter that the policy or prefetcher does not take, or a policy that does not go
    with a prefetcher."""
    own, plus, ahead = asked.partition("+")
    name, *texts = own.split(":")
    if name not in POLICIES:
        near = nearest(name)
        guess = f" (did you mean {near}?)" if near else ""
        raise CacheError(f"no cache policy {name!r}{guess}; there are {', '.join(POLICIES)}.", HINT)
    policy = POLICIES[name]
    ranges = [(*policy.allowed, policy.whole)] * (policy.parameter is not None)
    ranges += [(*policy.second_allowed, False)] * (policy.second is not None)
    if len(texts) > len(ranges):
        takes = ("no parameter", "one parameter", "two parameters")[len(ranges)]
        raise CacheError(f"policy {name} takes {takes}, so {asked!r} means nothing.", f"{TRY} {name}")
    values = [policy.parameter or 0.0, policy.second or 0.0]
    for place, (text, (low, high, whole)) in enumerate(zip(texts, ranges)):
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high or (whole and value != int(value)):
            kind = "whole number" if whole else "number"
            which = " as its second parameter" if place else ""
            raise CacheError(
                f"policy {name} takes a {kind} from {low:g} to {high:g}{which}, not {text!r}.", f"{TRY} {name}"
            )
        values[place] = value
    if plus and not takes_prefetch(policy):
        raise CacheError(
            f"policy {name} takes no prefetcher: it goes with those that rank each expert by itself, such as lru or lfu.",
            f"{TRY} lru+{ahead}",
        )
    return Chosen(name, policy, values[0], values[1], wanted(ahead, own) if plus else None)


def takes_prefetch(policy: Policy) -> bool:
    """Whether who leaves for a prefetched expert is told by the policy's key alone."""
    return policy.key is not None and policy.leave is leave and not policy.refines and "future" not in policy.needs


def nearest(name: str) -> str | None:
    """The policy that may be meant by a name that is none."""
    return next(iter(get_close_matches(name.lower(), POLICIES, 1)), None)


def needs_future(asked: str) -> bool:
    """True for a policy that must know the later steps, and so can't serve a decoder. Raises CacheError if unknown."""
    return "future" in choose(asked).policy.needs


def live_policies() -> list[str]:
    """Those that a running decoder can use: without the future, and without a trace to fit on."""
    return [name for name, policy in POLICIES.items() if not {"future", "fit"} & {*policy.needs}]


def lacks(asked: str, trace: RoutingTrace, fit: RoutingTrace | None = None) -> str | None:
    """What a trace would need to be replayed with this policy and which option gives it; None where nothing is missing."""
    chosen = choose(asked)
    needs = chosen.policy.needs
    foreign = _FOREIGN if trace.provenance.get("kind") == "imported" else ""
    if "weights" in needs and trace.weights is None:
        return f"the trace has no routing weights; remoe trace records them{foreign}"
    for kind in ("temporal", "spatio"):
        if kind in needs and getattr(trace, kind) is None:
            return (
                f"the trace has no scores of a {kind} head; remoe trace records those of a delta that has one{foreign}"
            )
    if "probabilities" in needs and trace.probabilities is None:
        return f"the trace has no router probabilities; remoe trace --probabilities records them{foreign}"
    if "fit" in needs and "future" not in needs and fit is None:
        return "it is fitted on another trace of the same model, which --fit names"
    return None if chosen.prefetch is None else prefetch_lacks(chosen.prefetch, trace, foreign)
