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
    hindsight,
    least_stale,
    lfru,
    lfu,
    lrfu,
    lru,
    random,
    retention,
    s3fifo,
    static,
)
from remoe_cli.cache.policy import Policy
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
    "hindsight": hindsight.POLICY,
    "belady": belady.POLICY,
}


class Chosen(NamedTuple):
    """A policy as it was asked for: NAME or NAME:PARAMETER. parameter: the given one, else the policy's default, else 0."""

    name: str
    policy: Policy
    parameter: float

    @property
    def constants(self) -> list[float]:
        return self.policy.table(self.parameter)


def choose(asked: str) -> Chosen:
    """Raises CacheError for an unknown name or a parameter that the policy does not take."""
    name, colon, text = asked.partition(":")
    if name not in POLICIES:
        near = nearest(name)
        guess = f" (did you mean {near}?)" if near else ""
        raise CacheError(f"no cache policy {name!r}{guess}; there are {', '.join(POLICIES)}.", HINT)
    policy = POLICIES[name]
    if not colon:
        return Chosen(name, policy, policy.parameter or 0.0)
    if policy.parameter is None:
        raise CacheError(f"policy {name} takes no parameter, so {asked!r} means nothing.", f"{TRY} {name}")
    low, high = policy.allowed
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high or (policy.whole and value != int(value)):
        kind = "whole number" if policy.whole else "number"
        raise CacheError(f"policy {name} takes a {kind} from {low:g} to {high:g}, not {text!r}.", f"{TRY} {name}")
    return Chosen(name, policy, value)


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
    needs = choose(asked).policy.needs
    foreign = _FOREIGN if trace.provenance.get("kind") == "imported" else ""
    if "weights" in needs and trace.weights is None:
        return f"the trace has no routing weights; remoe trace records them{foreign}"
    if "probabilities" in needs and trace.probabilities is None:
        return f"the trace has no router probabilities; remoe trace --probabilities records them{foreign}"
    if "fit" in needs and "future" not in needs and fit is None:
        return "it is fitted on another trace of the same model, which --fit names"
    return None
