"""The registry of prefetchers. To add one: a file here that ends in `KIND = Kind(...)`, a line in PREFETCHERS, a twin in
tests/slow_prefetchers.py. File name = key = word after the + of a policy."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from remoe_cli.cache.prefetch import finemoe, gate_next, gate_next_shared, moe_infinity, option, promoe, st_moe, step
from remoe_cli.cache.prefetch.base import Kind, Prefetcher, SEEN, Seen, Shape, Wanted, Watch
from remoe_cli.errors import CacheError

if TYPE_CHECKING:
    from remoe_cli.cache.prefetch.predictor import Predictor
    from remoe_cli.routing import RoutingTrace

PREFETCHERS: dict[str, Kind] = {
    "gate_next": gate_next.KIND,
    "gate_next_shared": gate_next_shared.KIND,
    "moe_infinity": moe_infinity.KIND,
    "promoe": promoe.KIND,
    "finemoe": finemoe.KIND,
    "st_moe": st_moe.KIND,
    "step": step.KIND,
    "option": option.KIND,
}
TRY = "remoe replay TRACE --cache 8 --policy"

__all__ = [
    "PREFETCHERS",
    "SEEN",
    "Kind",
    "Prefetcher",
    "Seen",
    "Shape",
    "Wanted",
    "Watch",
    "lacks",
    "unserved",
    "wanted",
]


def wanted(asked: str, policy: str) -> Wanted:
    """NAME, NAME:FIRST or with more parameters, as it stands after POLICY+. Raises CacheError for an unknown name or a
    parameter that it does not take."""
    name, *texts = asked.split(":")
    if name not in PREFETCHERS:
        near = next(iter(get_close_matches(name.lower(), PREFETCHERS, 1)), None)
        guess = f" (did you mean {near}?)" if near else ""
        raise CacheError(
            f"no prefetcher {name!r}{guess}; there are {', '.join(PREFETCHERS)}.", f"{TRY} {policy}+{near or 'st_moe'}"
        )
    kind = PREFETCHERS[name]
    if len(texts) > len(kind.parameters):
        takes = ":".join(one.name for one in kind.parameters)
        raise CacheError(f"prefetcher {name} takes {takes}, so {asked!r} means nothing.", f"{TRY} {policy}+{name}")
    values = [one.default for one in kind.parameters]
    for place, (text, one) in enumerate(zip(texts, kind.parameters)):
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not one.low <= value <= one.high or (one.whole and value != int(value)):
            what = "whole number" if one.whole else "number"
            raise CacheError(
                f"{one.name} of prefetcher {name} is a {what} from {one.low:g} to {one.high:g}, not {text!r}.",
                f"{TRY} {policy}+{name}",
            )
        values[place] = value
    return Wanted(name, kind, tuple(values))


_RECORDED = {
    "probabilities": ("router probabilities", "--probabilities"),
    "guess": ("guesses of the next layer's gate", "--guesses"),
    "guess_shared": ("guesses of the next layer's gate with the shared experts' output", "--guesses"),
    "hidden": ("hidden states", "--hidden"),
}


def lacks(asked: Wanted, trace: RoutingTrace, foreign: str = "") -> str | None:
    """What a trace would need for this prefetcher, and which option records it; None where nothing is missing."""
    for name in asked.kind.needs:
        if getattr(trace, name) is None:
            what, option = _RECORDED[name]
            return f"the trace has no {what}; remoe trace {option} records them{foreign}"
    if (ahead := asked.value("AHEAD")) > trace.n_layers:
        return f"{asked.name} looks {ahead} layers ahead, and the trace has {trace.n_layers}"
    return None


def unserved(asked: Wanted, trace: RoutingTrace, predictor: Predictor | None) -> str | None:
    """Why the predictor at hand can't serve this trace; None where it can, or none is needed."""
    if not asked.kind.trained:
        return None
    if predictor is None:
        return (
            f"{asked.name} needs a trained predictor: remoe predictor train makes one of a trace, --predictor names it"
        )
    about, hidden = trace.provenance, 0 if trace.hidden is None else trace.hidden.shape[-1]
    shape = trace.n_layers, trace.n_experts, hidden
    return predictor.misfit(asked.value("AHEAD"), *shape, about.get("model"), about.get("revision"))
