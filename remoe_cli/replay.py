"""remoe replay: what a trace loads from every cache, policy and admission. No torch, no model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remoe_cli import __version__
from remoe_cli.atomic import free_name
from remoe_cli.cache import choose, Replay
from remoe_cli.cache.budgets import equal_memory, fit_budgets
from remoe_cli.cache.curve import lru_curve
from remoe_cli.cache.expert_cache import ADMISSIONS
from remoe_cli.cache.policies import lacks
from remoe_cli.cache.prefetch import unserved
from remoe_cli.cache.prefetch.predictor import Predictor
from remoe_cli.cache.replay import clash, prepare
from remoe_cli.cache.replay import replay as run
from remoe_cli.console import Bar, note, progress
from remoe_cli.errors import CacheError, TraceError, UsageError
from remoe_cli.report.estimate import Estimate, LABEL, parse_bytes, parse_estimate
from remoe_cli.report.replay_inputs import against_notes, fit_notes, is_tuned, names_of, read_fitting, read_trace
from remoe_cli.report.replay_options import admissions_of, Asked, capacities_of, policies_of, recording, rules_of
from remoe_cli.report.replays import best, changes, figures, References, Sizes
from remoe_cli.report.trace_figures import trace_figures
from remoe_cli.routing import RoutingTrace
from remoe_cli.routing.trace import FLOATS
from remoe_cli.sizes import MOST


class Arm(NamedTuple):
    """role: "trace", or "base" for --against. name: how tables call it."""

    role: str
    name: str
    trace: RoutingTrace


class Key(NamedTuple):
    policy: str
    admission: str
    capacity: int


class Hindrance(NamedTuple):
    """Why a cell can't be replayed, and the command that can; None where there is none."""

    reason: str
    mend: str | None


def replay(path: Path, asked: Asked, with_figures: bool = True) -> dict[str, Any]:
    """Everything docs/replay.md lists; `figures` is None without them.

    Raises TraceError, CacheError or UsageError before any work is done.
    """
    policies, admissions, wanted = policies_of(asked, path), admissions_of(asked, path), capacities_of(asked, path)
    trace = read_trace(path, asked.command)
    estimate, given_bytes = _parsed(asked, path, trace)
    others = {name: read_fitting(name, asked, path, trace) for name in ("budgets", "fit", "tune", "against")}
    rules, from_trace, notes = rules_of(asked, path, trace)
    sizes = Sizes(_layer_bytes(given_bytes, asked, path, trace), estimate)
    if estimate is not None and sizes.layer_bytes is None:
        raise UsageError(
            f"--estimate needs the size of an expert, which {path} does not say: --expert-bytes SIZE does.",
            asked.command(path, expert_bytes="17.3MB"),
        )
    capacities = _cut(wanted, trace, notes)
    notes += fit_notes(asked, policies, trace, others)
    arms = [Arm("trace", path.stem, trace)]
    if asked.against is not None and others["against"] is not None:
        base, own = names_of(asked.against, path)
        arms = [Arm("base", base, others["against"]), Arm("trace", own, trace)]
        notes += against_notes(others["against"], trace)
    slots = {
        (form, capacity): _slots(trace, form, capacity, rules, asked.equal, sizes, others["budgets"])
        for form in ADMISSIONS
        for capacity in capacities
    }
    predictor = None if asked.predictor is None else Predictor.read(asked.predictor)
    bench = _Bench(path, asked, rules, slots, others["fit"], sizes, predictor)
    if others["tune"] is not None:
        policies = _tuned(bench, Arm("tune", "", others["tune"]), policies, admissions, capacities, notes)
    keys = [Key(*key) for key in _product(policies, admissions, capacities)]
    _require_something(bench, arms[-1], keys)
    cells, unavailable, ends = _run(bench, arms, keys, notes)
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
            "predictor": asked.predictor and str(asked.predictor),
            "tune": asked.tune and str(asked.tune),
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
        "estimate": estimate
        and {
            "label": LABEL,
            "link_bytes_a_second": estimate.link,
            "compute_ms": estimate.compute_ms,
        },
        "references": ends,
        "best": best(cells),
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

    path: Path
    asked: Asked
    rules: dict[str, Any]
    slots: dict[tuple[str, int], _Slots]
    fit: RoutingTrace | None
    sizes: Sizes
    predictor: Predictor | None = None

    def hindrance(self, arm: Arm, key: Key) -> Hindrance | None:
        if (missing := lacks(key.policy, arm.trace, self.fit)) is not None:
            return Hindrance(missing, self._with_what_is_missing(arm, key.policy))
        prefetch = choose(key.policy).prefetch
        if prefetch is not None and (why := unserved(prefetch, arm.trace, self.predictor)) is not None:
            return Hindrance(why, self.asked.command(self.path, policies=["lru"], predictor=None))
        rules = self.rules
        if (why := clash(key.policy, rules["step"], rules["warm"])) is not None:
            mend = {"step": "atomic"} if rules["step"] == "sequential" else {"warm": "prefill"}
            return Hindrance(why, self.asked.command(self.path, **mend))
        if (why := clash(key.policy, "atomic", "cold", bool(rules["pool"]), key.admission)) is not None:
            unpooled = {"pool": None if self.asked.pool else False} if rules["pool"] else {}
            return Hindrance(why, self.asked.command(self.path, **unpooled, admission="bypass"))
        reason = self.slots[key.admission, key.capacity].reason
        if reason is None:
            return None
        unsized = self.rules["pool"] == "bytes" and self.sizes.layer_bytes is None
        change = {"expert_bytes": "17.3MB"} if unsized else {"equal": "slots"}
        return Hindrance(reason, self.asked.command(self.path, **change))

    def _with_what_is_missing(self, arm: Arm, policy: str) -> str | None:
        """Records it, then replays."""
        path = self.asked.against if arm.role == "base" and self.asked.against else self.path
        if "fit" in choose(policy).policy.needs:
            out = free_name(path.with_name(f"{path.stem}-fit.trace"))
            first = recording(arm.trace, out, seed=int(arm.trace.provenance.get("seed") or 0) + 1)
            then = self.asked.command(self.path, fit=out)
        elif {"temporal", "spatio"} & {*choose(policy).policy.needs}:
            return None  # a recording of gates that have heads has their scores
        else:
            out = free_name(path.with_name(f"{path.stem}-full.trace"))
            reads = () if (prefetch := choose(policy).prefetch) is None else prefetch.kind.needs
            options = ["--guesses"] * any(one.startswith("guess") for one in reads) + ["--hidden"] * ("hidden" in reads)
            plain = "probabilities" in (*reads, *choose(policy).policy.needs)
            first = recording(arm.trace, out, *(["--probabilities"] * plain), *options)
            then = self.asked.command(self.path, against=out) if arm.role == "base" else self.asked.command(out)
        return first and f"{first} && {then}"

    def replay(self, trace: RoutingTrace, key: Key) -> Replay:
        slots = self.slots[key.admission, key.capacity].capacity
        assert slots is not None
        in_bytes = self.sizes.layer_bytes if self.rules["pool"] == "bytes" else None
        sizes = None if in_bytes is None else in_bytes.astype(np.int64).tolist()
        return run(
            trace, key.policy, slots, admission=key.admission, fit=self.fit, predictor=self.predictor, expert_bytes=sizes,
            **self.rules,
        )  # fmt: skip


def _tuned(
    bench: _Bench, arm: Arm, policies: Sequence[str], admissions: Sequence[str], capacities: Sequence[int],
    notes: list[str],
) -> list[str]:  # fmt: skip
    """The policies, those that are tuned with the parameter of their grid that loads least on the arm's trace, over all
    admissions and cache sizes together."""
    found = []
    for word in policies:
        keys = [Key(*one) for one in _product([word], admissions, capacities)] if is_tuned(word) else []
        hindrances = [bench.hindrance(arm, key) for key in keys]
        keys = [key for key, why in zip(keys, hindrances) if why is None]
        if not keys:
            if reason := next((why.reason for why in hindrances if why is not None), None):
                notes.append(f"--tune {bench.asked.tune}: {word} keeps its default: {reason}.")
            found.append(word)
            continue
        loads = {}
        with progress(f"Tuning {word}", len(choose(word).policy.grid)) as bar:
            for value in choose(word).policy.grid:
                loads[value] = sum(
                    bench.replay(arm.trace, key._replace(policy=f"{word}:{value:g}")).loads for key in keys
                )
                bar.update(len(loads))
        best = min(loads, key=loads.__getitem__)
        tried = ", ".join(f"{value:g}" for value in loads)
        notes.append(f"--tune {bench.asked.tune}: {word}:{best:g} loads least there, of {tried}.")
        found.append(f"{word}:{best:g}")
    return list(dict.fromkeys(found))


def _require_something(bench: _Bench, arm: Arm, keys: Sequence[Key]) -> None:
    """Raises CacheError where no cell of the trace can be replayed: every reason, and the command of the first."""
    found: dict[Hindrance, list[str]] = {}
    for key in keys:
        why = bench.hindrance(arm, key)
        if why is None:
            return
        found.setdefault(why, []).append(key.policy)
    reasons = "; ".join(f"{', '.join(dict.fromkeys(names))}: {why.reason.rstrip('.')}" for why, names in found.items())
    mends = [why.mend for why in found if why.mend is not None]
    mend = mends[0] if mends else bench.asked.command(bench.path, policies=None, admission=None)
    raise CacheError(f"nothing can be replayed: {reasons}.", mend)


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


def _prepare(policies: Sequence[str], notes: list[str]) -> None:
    """All kernels, before anything is timed. Those that are not on disk are compiled, some seconds each."""
    seconds = []
    with progress("Compiling replay kernels, once", len(policies)) as bar:
        for done, policy in enumerate(policies, 1):
            if spent := prepare(policy):
                seconds.append(spent)
                bar.update(done, policy)
    if seconds:
        notes.append(
            f"Compiled {len(seconds)} replay kernels in {sum(seconds):.1f} s; the next run finds them on disk."
        )


class _Work:
    """Runs replays one by one, with progress."""

    def __init__(self, bench: _Bench, bar: Bar) -> None:
        self._bench, self._bar, self._done = bench, bar, 0

    def __call__(self, arm: Arm, key: Key) -> Replay:
        found = self._bench.replay(arm.trace, key)
        self._done += 1
        self._bar.update(self._done, f"{key.policy}, {key.admission}, C = {key.capacity}")
        return found


def _run(
    bench: _Bench, arms: Sequence[Arm], keys: Sequence[Key], notes: list[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """The cells, those that could not be replayed, and the ends of the gap for each capacity. Replays are dropped as soon as
    their figures are there."""
    references = {
        capacity: [Key("lru", "forced", capacity), *(Key("belady", form, capacity) for form in ADMISSIONS)]
        for capacity in dict.fromkeys(key.capacity for key in keys)
    }
    wanted = {arm.role: [*keys] for arm in arms}
    wanted[arms[0].role] += [key for every in references.values() for key in every if key not in keys]
    hindrances = {(arm.role, key): bench.hindrance(arm, key) for arm in arms for key in wanted[arm.role]}
    _prepare(list(dict.fromkeys(key.policy for (_, key), why in hindrances.items() if why is None)), notes)
    cells: list[dict[str, Any]] = []
    unavailable: list[dict[str, Any]] = []
    gaps: list[dict[str, Any]] = []
    with progress("Replaying", sum(why is None for why in hindrances.values())) as bar:
        work = _Work(bench, bar)
        for capacity, every in references.items():
            held = {key: work(arms[0], key) for key in every if hindrances[arms[0].role, key] is None}
            ends = References(*(held[key].loads / held[key].tokens if key in held else None for key in every))
            why_not = [why.reason for key in every if (why := hindrances[arms[0].role, key]) is not None]
            gaps.append({"capacity": capacity, **ends._asdict(), "reason": ends.no_gap(*why_not)})
            for key in keys:
                before = None
                for arm in arms if key.capacity == capacity else ():
                    named = {"arm": arm.role, **key._asdict()}
                    if (why := hindrances[arm.role, key]) is not None:
                        unavailable.append({**named, "reason": why.reason, "try": why.mend})
                        continue
                    done = held[key] if arm is arms[0] and key in held else work(arm, key)
                    cells.append({**named, **figures(done, ends, bench.sizes, bench.rules["sessions"])})
                    if len(arms) > 1:
                        cells[-1] |= changes(before, done)
                    before = done
    order = {key: place for place, key in enumerate(keys)}
    cells.sort(key=lambda one: order[_key(one)])
    unavailable.sort(key=lambda one: order[_key(one)])
    return cells, unavailable, gaps


def _key(cell: dict[str, Any]) -> Key:
    return Key(*(cell[name] for name in Key._fields))


def _figures(trace: RoutingTrace, rules: dict[str, Any]) -> dict[str, Any]:
    """Of the decode tokens; the LRU curve is that of one cold cache a layer."""
    shared = {name: rules[name] for name in ("step", "reset", "touch_order")}
    return trace_figures(trace.decode(), lru_curve(trace, **shared).sum(axis=0))


def _parsed(asked: Asked, path: Path, trace: RoutingTrace) -> tuple[Estimate | None, int | None]:
    """--estimate and --expert-bytes as numbers. Raises UsageError."""
    estimate = given = None
    if asked.expert_bytes is not None:
        given = parse_bytes(str(asked.expert_bytes), asked.command(path, expert_bytes=None))
    if asked.estimate is not None:
        sized = given is not None or trace.provenance.get("expert_bytes") is not None
        more = {} if sized else {"expert_bytes": "17.3MB"}
        estimate = parse_estimate(asked.estimate, asked.command(path, estimate=None, **more))
    return estimate, given


def _cut(capacities: list[int], trace: RoutingTrace, notes: list[str]) -> list[int]:
    """At most the experts there are; a note on what was cut."""
    over = [str(capacity) for capacity in capacities if capacity > trace.n_experts]
    if over:
        most = f"a layer has {trace.n_experts} experts, so that is {trace.n_experts} slots"
        notes.append(f"--cache {', '.join(over)}: {most}.")
    return sorted({min(capacity, trace.n_experts) for capacity in capacities})


def _layer_bytes(given: int | None, asked: Asked, path: Path, trace: RoutingTrace) -> np.ndarray | None:
    found = trace.provenance.get("expert_bytes") if given is None else given
    if found is None:
        return None
    every = found if isinstance(found, list) else [found] * trace.n_layers
    whole = all(isinstance(one, int) and not isinstance(one, bool) and 1 <= one <= MOST for one in every)
    if len(every) != trace.n_layers or not whole:
        raise TraceError(
            f"the trace's expert_bytes is neither a whole number of at least 1 nor one for each of {trace.n_layers} layers.",
            asked.command(path, expert_bytes="17.3MB"),
        )
    return np.array(every, np.int64)


def _facts(trace: RoutingTrace) -> dict[str, Any]:
    return {
        "requests": trace.n_requests,
        "prefill_tokens": int(trace.prefill.sum()),
        "decode_tokens": int((~trace.prefill).sum()),
        "moe_layers": trace.n_layers,
        "n_experts": trace.n_experts,
        "top_k": trace.top_k,
        "has": [name for name in FLOATS if getattr(trace, name) is not None],
        "provenance": trace.provenance,
    }


def _product(policies: Sequence[str], admissions: Sequence[str], capacities: Sequence[int]) -> list[tuple]:
    return [(policy, form, capacity) for policy in policies for form in admissions for capacity in capacities]
