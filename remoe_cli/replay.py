"""remoe replay: what a trace loads from every cache, policy and admission. No torch, no model."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remoe_cli import __version__
from remoe_cli.cache import choose, POLICIES, Replay
from remoe_cli.cache.budgets import equal_memory, fit_budgets
from remoe_cli.cache.curve import lru_curve
from remoe_cli.cache.expert_cache import ADMISSIONS
from remoe_cli.cache.policies import lacks
from remoe_cli.cache.replay import prepare
from remoe_cli.cache.replay import replay as run
from remoe_cli.console import Bar, note, progress
from remoe_cli.errors import CacheError, TraceError, UsageError
from remoe_cli.report.estimate import Estimate, LABEL
from remoe_cli.report.replays import changes, figures, References, Sizes
from remoe_cli.report.trace_figures import trace_figures
from remoe_cli.routing import read, RoutingTrace

HINT = "remoe replay FILE --cache 6,8,12"
ALLOWED: dict[str, tuple[Any, ...]] = {
    "step": ("atomic", "sequential"),
    "reset": ("request", "never"),
    "touch_order": ("weight", "listed"),
    "warm": ("cold", "prefill", "carry", "batch"),
    "pool": (False, True, "bytes"),
}


@dataclass(frozen=True)
class Asked:
    """The options as given; None: the trace's own accounting decides, else the first of ALLOWED."""

    capacities: Sequence[int]
    policies: Sequence[str] = ("all",)
    admission: str = "both"
    equal: str = "memory"
    pool: bool | None = None
    step: str | None = None
    reset: str | None = None
    touch_order: str | None = None
    warm: str | None = None
    sessions: int = 1
    budgets: Path | None = None
    fit: Path | None = None
    against: Path | None = None
    estimate: Estimate | None = None
    expert_bytes: int | None = None


class Arm(NamedTuple):
    """role: "trace", or "base" for --against. name: how tables call it."""

    role: str
    name: str
    trace: RoutingTrace


class Key(NamedTuple):
    policy: str
    admission: str
    capacity: int


def replay(path: Path, asked: Asked, with_figures: bool = True) -> dict[str, Any]:
    """Everything docs/replay.md lists; `figures` is None without them.

    Raises TraceError, CacheError or UsageError before any work is done.
    """
    policies, admissions = chosen_policies(asked.policies), chosen_admissions(asked)
    trace = _read(path)
    others = {name: _fitting(getattr(asked, name), name, trace) for name in ("budgets", "fit", "against")}
    rules, from_trace = _rules(asked, trace)
    if others["budgets"] is not None and rules["pool"]:
        raise UsageError("--budgets gives every layer its own slots, --pool gives all layers one pool.", HINT)
    sizes = Sizes(_layer_bytes(asked, trace), asked.estimate)
    if asked.estimate is not None and sizes.layer_bytes is None:
        raise UsageError(f"--estimate needs the size of an expert, which {path} does not say.", "--expert-bytes 17.3MB")
    capacities, notes = _capacities(asked, trace)
    if from_trace:
        shown = ", ".join(f"{name} {_word(rules[name])}" for name in from_trace)
        notes.append(f"The trace asks to be replayed with {shown}; options that are given win.")
    arms = [Arm("trace", path.stem, trace)]
    if asked.against is not None and others["against"] is not None:
        arms.insert(0, Arm("base", asked.against.stem, others["against"]))
    slots = {
        (form, capacity): _slots(trace, form, capacity, rules, asked.equal, sizes, others["budgets"])
        for form in ADMISSIONS
        for capacity in capacities
    }
    bench = _Bench(rules, slots, others["fit"])
    keys = [Key(*key) for key in _product(policies, admissions, capacities)]
    cells, unavailable = _run(bench, arms, keys, sizes, notes)
    if not any(cell["arm"] == "trace" for cell in cells):
        raise CacheError(f"nothing can be replayed: {unavailable[0]['reason']}", HINT)
    for sentence in dict.fromkeys(notes):
        note(sentence)
    return {
        "format": 1,
        "remoe": __version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "arms": [{"role": arm.role, "name": arm.name, **_facts(arm.trace)} for arm in arms],
        "rules": {
            **rules,
            "equal": asked.equal,
            "from_trace": from_trace,
            "budgets": asked.budgets and str(asked.budgets),
            "fit": asked.fit and str(asked.fit),
        },
        "policies": policies,
        "admissions": admissions,
        "capacities": capacities,
        "slots": [
            {"admission": form, "capacity": capacity, "layers": slots[form, capacity].capacity}
            for form in admissions
            for capacity in capacities
        ],
        "expert_bytes": None if sizes.layer_bytes is None else sizes.layer_bytes.tolist(),
        "estimate": asked.estimate
        and {
            "label": LABEL,
            "link_bytes_a_second": asked.estimate.link,
            "compute_ms": asked.estimate.compute_ms,
        },
        "cells": cells,
        "unavailable": unavailable,
        "figures": {arm.role: _figures(arm.trace, rules) for arm in arms} if with_figures else None,
        "notes": list(dict.fromkeys(notes)),
    }


class _Slots(NamedTuple):
    """What `replay` takes as capacity, or why the memory holds no such cache."""

    capacity: int | list[int] | None
    reason: str | None = None


@dataclass(frozen=True)
class _Bench:
    """What all replays of one call share. slots: by (admission, capacity)."""

    rules: dict[str, Any]
    slots: dict[tuple[str, int], _Slots]
    fit: RoutingTrace | None

    def hindrance(self, trace: RoutingTrace, key: Key) -> str | None:
        """Why a cell can't be replayed."""
        if (missing := lacks(key.policy, trace, self.fit)) is not None:
            return missing
        if "probabilities" in choose(key.policy).policy.needs:
            if self.rules["step"] == "sequential":
                return "it follows whole tokens, and --step sequential has none"
            if self.rules["warm"] == "batch":
                return "it follows single tokens, and --warm batch serves prompts whole"
        return self.slots[key.admission, key.capacity].reason

    def replay(self, trace: RoutingTrace, key: Key) -> Replay:
        slots = self.slots[key.admission, key.capacity].capacity
        assert slots is not None
        return run(trace, key.policy, slots, admission=key.admission, fit=self.fit, **self.rules)


def _slots(
    trace: RoutingTrace, form: str, capacity: int, rules: dict[str, Any], equal: str, sizes: Sizes,
    budgets: RoutingTrace | None,
) -> _Slots:  # fmt: skip
    """The cache of C slots a layer in every layer, less the staging of bypass at equal memory, spread as asked."""
    pays = equal == "memory" and form == "bypass"
    if rules["pool"] == "bytes":
        if sizes.layer_bytes is None:
            return _Slots(None, "a pool in bytes needs the size of an expert: --expert-bytes, or --no-pool")
        staging = trace.top_k * int(sizes.layer_bytes.max()) if pays else 0
        left = capacity * int(sizes.layer_bytes.sum()) - staging
        return _Slots(left) if left > 0 else _Slots(None, f"{staging:,} bytes of staging are more than the pool")
    try:
        each = equal_memory(capacity, trace.n_layers, trace.top_k, form) if pays else [capacity] * trace.n_layers
        if budgets is not None:
            shared = {name: rules[name] for name in ("touch_order", "reset")}
            least = min(trace.top_k, *each)  # below K a layer could not run on a decoder
            each = fit_budgets(budgets, sum(each), least=least, **shared)
    except CacheError as error:
        return _Slots(None, error.message)
    return _Slots([int(slots) for slots in each])


class _Work:
    """Runs replays one by one, with progress. seconds: of compiling, by policy, where a kernel was not on disk."""

    def __init__(self, bench: _Bench, bar: Bar) -> None:
        self._bench, self._bar, self._done = bench, bar, 0
        self.seconds: dict[str, float] = {}

    def __call__(self, arm: Arm, key: Key) -> Replay:
        if key.policy not in self.seconds:
            self.seconds[key.policy] = prepare(key.policy) or 0.0
        found = self._bench.replay(arm.trace, key)
        self._done += 1
        self._bar.update(self._done, f"{key.policy}, {key.admission}, C = {key.capacity}")
        return found


def _run(
    bench: _Bench, arms: Sequence[Arm], keys: Sequence[Key], sizes: Sizes, notes: list[str]
) -> list[list[dict[str, Any]]]:
    """The cells, and those that could not be replayed. Replays are dropped as soon as their figures are there."""
    references = {
        capacity: [Key("lru", "forced", capacity), *(Key("belady", form, capacity) for form in ADMISSIONS)]
        for capacity in dict.fromkeys(key.capacity for key in keys)
    }
    wanted = {arm.role: [*keys] for arm in arms}
    wanted[arms[0].role] += [key for every in references.values() for key in every if key not in keys]
    reasons = {(arm.role, key): bench.hindrance(arm.trace, key) for arm in arms for key in wanted[arm.role]}
    cells: list[dict[str, Any]] = []
    unavailable: list[dict[str, Any]] = []
    with progress("Replaying", sum(reason is None for reason in reasons.values())) as bar:
        work = _Work(bench, bar)
        for capacity, every in references.items():
            held = {key: work(arms[0], key) for key in every if reasons[arms[0].role, key] is None}
            ends = References(*(held[key].loads / held[key].tokens if key in held else None for key in every))
            for key in keys:
                before = None
                for arm in arms if key.capacity == capacity else ():
                    named = {"arm": arm.role, **key._asdict()}
                    if (reason := reasons[arm.role, key]) is not None:
                        unavailable.append({**named, "reason": reason})
                        continue
                    done = held[key] if arm is arms[0] and key in held else work(arm, key)
                    cells.append({**named, **figures(done, ends, sizes)})
                    if len(arms) > 1:
                        cells[-1] |= changes(before, done)
                    before = done
    slow = [seconds for seconds in work.seconds.values() if seconds]
    if slow:
        notes.append(f"Compiled {len(slow)} replay kernels in {sum(slow):.1f} s; the next run finds them on disk.")
    order = {key: place for place, key in enumerate(keys)}
    return [sorted(part, key=lambda one: order[_key(one)]) for part in (cells, unavailable)]


def _key(cell: dict[str, Any]) -> Key:
    return Key(*(cell[name] for name in Key._fields))


def _figures(trace: RoutingTrace, rules: dict[str, Any]) -> dict[str, Any]:
    """Of the decode tokens; the LRU curve is that of one cold cache a layer."""
    shared = {name: rules[name] for name in ("step", "reset", "touch_order")}
    return trace_figures(trace.decode(), lru_curve(trace, **shared).sum(axis=0))


def chosen_policies(asked: Sequence[str]) -> list[str]:
    """Checked names, `all` spelled out, each once. Raises CacheError for a name or a parameter that is not known."""
    found = [name for word in asked for name in (POLICIES if word == "all" else [word])]
    for name in found:
        choose(name)
    return list(dict.fromkeys(found))


def chosen_admissions(asked: Asked) -> list[str]:
    for option, given, allowed in (
        ("admission", asked.admission, (*ADMISSIONS, "both")),
        ("equal", asked.equal, ("memory", "slots")),
    ):
        if given not in allowed:
            raise UsageError(f"--{option} is {', '.join(allowed[:-1])} or {allowed[-1]}, not {given!r}.", HINT)
    return [*ADMISSIONS] if asked.admission == "both" else [asked.admission]


def capacities_of(text: str) -> list[int]:
    """--cache 6,8,12 as numbers, ascending, each once. Raises UsageError or CacheError."""
    if not re.fullmatch(r"\s*-?\d+\s*(,\s*-?\d+\s*)*", text):
        raise UsageError(f"--cache takes whole numbers such as 6 or 6,8,12, not {text!r}.", HINT)
    found = sorted({int(part) for part in text.split(",")})
    if found[0] < 1:
        raise CacheError(f"a cache needs at least 1 slot a layer, not {found[0]}.", HINT)
    return found


def _rules(asked: Asked, trace: RoutingTrace) -> tuple[dict[str, Any], list[str]]:
    """Options of replay, and which of them the trace decided: given ones win, then the trace's accounting."""
    accounting = trace.provenance.get("accounting", {})
    rules, from_trace = {}, []
    for name, allowed in ALLOWED.items():
        given, own = getattr(asked, name), accounting.get(name)
        rules[name] = allowed[0] if given is None and own is None else own if given is None else given
        if given is None and own is not None and own != allowed[0]:
            from_trace.append(name)
        if rules[name] not in allowed:
            words = " or ".join(_word(one) for one in allowed)
            where = f"--{name.replace('_', '-')}" if given is not None else f"the trace's accounting of {name}"
            raise UsageError(f"{where} is {words}, not {rules[name]!r}.", HINT)
    if asked.sessions < 1:
        raise UsageError(f"--sessions is at least 1, not {asked.sessions}.", HINT)
    return {**rules, "sessions": asked.sessions}, from_trace


def _word(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, str(value))


def _capacities(asked: Asked, trace: RoutingTrace) -> tuple[list[int], list[str]]:
    """At most the experts there are, and notes on what was cut."""
    cut = sorted({min(capacity, trace.n_experts) for capacity in asked.capacities})
    over = [str(capacity) for capacity in asked.capacities if capacity > trace.n_experts]
    notes = [f"--cache {', '.join(over)}: a layer has {trace.n_experts} experts, so that is {trace.n_experts} slots."]
    return cut, notes if over else []


def _layer_bytes(asked: Asked, trace: RoutingTrace) -> np.ndarray | None:
    found = asked.expert_bytes or trace.provenance.get("expert_bytes")
    if found is None:
        return None
    try:
        return np.broadcast_to(np.asarray(found, dtype=np.float64), trace.n_layers)
    except (TypeError, ValueError):
        raise TraceError(
            f"the trace's expert_bytes is neither a number nor one for each of {trace.n_layers} layers.",
            "the same command with --expert-bytes 17.3MB",
        ) from None


def _read(path: Path) -> RoutingTrace:
    trace = read(path)
    if trace.prefill.all():
        raise CacheError(
            f"{path} holds no decoded token, so there is nothing to count.", "remoe trace MODEL -o t.trace"
        )
    return trace


def _fitting(path: Path | None, option: str, trace: RoutingTrace) -> RoutingTrace | None:
    """The trace at `path`. Raises TraceError where it is not of a model of the same shape."""
    if path is None:
        return None
    other = _read(path)
    shapes = [(one.n_layers, one.n_experts, one.top_k) for one in (trace, other)]
    if shapes[0] != shapes[1]:
        words = [f"{layers} layers, top-{top_k} of {experts}" for layers, experts, top_k in shapes]
        raise TraceError(f"--{option} {path} is of another model: {words[1]}; the trace has {words[0]}.", HINT)
    return other


def _facts(trace: RoutingTrace) -> dict[str, Any]:
    return {
        "requests": trace.n_requests,
        "prefill_tokens": int(trace.prefill.sum()),
        "decode_tokens": int((~trace.prefill).sum()),
        "moe_layers": trace.n_layers,
        "n_experts": trace.n_experts,
        "top_k": trace.top_k,
        "has": [name for name in ("weights", "probabilities", "head_scores") if getattr(trace, name) is not None],
        "provenance": trace.provenance,
    }


def _product(policies: Sequence[str], admissions: Sequence[str], capacities: Sequence[int]) -> list[tuple]:
    return [(policy, form, capacity) for policy in policies for form in admissions for capacity in capacities]
