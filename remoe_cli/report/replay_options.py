"""The options of `remoe replay` as they were given: checked, and as the command line that mends what is wrong with them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from remoe_cli.atomic import free_name
from remoe_cli.cache import choose, POLICIES
from remoe_cli.cache.expert_cache import ADMISSIONS
from remoe_cli.cache.policies import ALONE, nearest
from remoe_cli.cache.replay import OPTIONS
from remoe_cli.errors import CacheError, command, TraceError, UsageError
from remoe_cli.routing import RoutingTrace

_WORDS = {"capacities": "--cache", "policies": "--policy", "as_json": "--json"}


@dataclass(frozen=True)
class Asked:
    """The options as given; None: the trace's own accounting decides, else the first of OPTIONS."""

    capacities: Sequence[int | str]
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
    predictor: Path | None = None
    tune: Path | None = None
    against: Path | None = None
    estimate: str | None = None
    expert_bytes: int | str | None = None
    figures: bool = False
    as_json: bool = False

    def command(self, trace: Path, **changes: Any) -> str:
        """`remoe replay` with these options, some of them changed; None leaves one out."""
        words = ["remoe", "replay", str(trace)]
        for field in fields(self):
            option = _WORDS.get(field.name, f"--{field.name.replace('_', '-')}")
            value = changes.get(field.name, getattr(self, field.name))
            if isinstance(value, list):
                value = tuple(value)
            if value is None or value == field.default:
                continue
            if isinstance(value, bool):
                words.append(option if value else f"--no-{field.name}")
            else:
                words += [option, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
        return shlex.join(words)


def policies_of(asked: Asked, path: Path) -> list[str]:
    """Checked names, `all` spelled out, each once. Raises CacheError for a name or a parameter that is not known."""
    for word in asked.policies:
        try:
            word == "all" or choose(word)
        except CacheError as error:
            mended = dict.fromkeys(filter(None, map(_mended, asked.policies)))
            raise CacheError(error.message, asked.command(path, policies=[*mended] or None)) from None
    return list(dict.fromkeys(name for word in asked.policies for name in (ALONE if word == "all" else [word])))


def _mended(word: str) -> str | None:
    """The word, or the nearest that may be meant; None where there is none."""
    try:
        return word if word == "all" else choose(word) and word
    except CacheError:
        name = word.partition(":")[0]
        return name if name in POLICIES else nearest(name)


def admissions_of(asked: Asked, path: Path) -> list[str]:
    for option, given, allowed in (
        ("admission", asked.admission, (*ADMISSIONS, "both")),
        ("equal", asked.equal, ("memory", "slots")),
    ):
        if given not in allowed:
            raise UsageError(
                f"--{option} is {', '.join(allowed[:-1])} or {allowed[-1]}, not {given!r}.",
                asked.command(path, **{option: None}),
            )
    return [*ADMISSIONS] if asked.admission == "both" else [asked.admission]


def capacities_of(asked: Asked, path: Path) -> list[int]:
    """--cache 6,8,12 as numbers, ascending, each once. Raises UsageError or CacheError."""
    words = [str(one).strip() for one in asked.capacities]
    sizes = [int(word) for word in words if re.fullmatch(r"-?[0-9]{1,99}", word)]
    mended = asked.command(path, capacities=sorted({size for size in sizes if size > 0}) or [8])
    if len(sizes) < len(words):
        raise UsageError(f"--cache takes whole numbers such as 6 or 6,8,12, not {','.join(words)!r}.", mended)
    if min(sizes) < 1:
        raise CacheError(f"a cache needs at least 1 slot a layer, not {min(sizes)}.", mended)
    return sorted({*sizes})


def rules_of(asked: Asked, path: Path, trace: RoutingTrace) -> tuple[dict[str, Any], list[str], list[str]]:
    """Options of replay; which of them the trace decided; notes. Given ones win, then the trace's accounting."""
    accounting = trace.provenance.get("accounting", {})
    if not isinstance(accounting, dict):
        raise TraceError(
            f"the accounting that {path} asks for is no table of options, but {accounting!r}.",
            command("trace", "demo", o=free_name(path)),
        )
    rules: dict[str, Any] = {}
    from_trace = []
    for name, allowed in OPTIONS.items():
        given, own = getattr(asked, name), accounting.get(name)
        rules[name] = allowed[0] if given is None and own is None else own if given is None else given
        if given is None and own is not None and own != allowed[0]:
            from_trace.append(name)
        if rules[name] not in allowed:
            words = " or ".join(_word(one) for one in allowed)
            where = f"--{name.replace('_', '-')}" if given is not None else f"the trace's accounting of {name}"
            mend = {name: None if given is not None else allowed[0]}
            raise UsageError(f"{where} is {words}, not {rules[name]!r}.", asked.command(path, **mend))
    if rules["warm"] == "carry":
        if asked.reset == "request":
            raise UsageError(
                "--warm carry keeps one cache for all requests, --reset request has a fresh one for each.",
                asked.command(path, reset=None, warm="carry"),
            )
        rules["reset"] = "never"
    if asked.budgets is not None and rules["pool"]:
        raise UsageError(
            "--budgets gives every layer its own slots, --pool gives all layers one pool.",
            asked.command(path, pool=None if asked.pool else False),
        )
    sessions, notes = _sessions(asked, path, trace, rules)
    if from_trace:
        shown = ", ".join(f"{name} {_word(rules[name])}" for name in from_trace)
        notes.append(f"The trace asks to be replayed with {shown}; options that are given win.")
    return {**rules, "sessions": sessions}, from_trace, notes


def _sessions(asked: Asked, path: Path, trace: RoutingTrace, rules: dict[str, Any]) -> tuple[int, list[str]]:
    """How many requests take turns: no more than there are."""
    if asked.sessions < 1:
        raise UsageError(f"--sessions is at least 1, not {asked.sessions}.", asked.command(path, sessions=None))
    if asked.sessions == 1:
        return 1, []
    mended = asked.command(path, warm="carry", reset=None)
    if rules["warm"] not in ("cold", "carry"):
        raise UsageError(
            f"--sessions {asked.sessions} leaves prompts out: it goes with --warm carry, not {rules['warm']}.", mended
        )
    if rules["reset"] == "request":
        raise UsageError(
            f"--sessions {asked.sessions}: they take turns in one cache for all requests, so it goes with --warm carry (or "
            "--reset never).",
            mended,
        )
    if asked.sessions <= trace.n_requests:
        return asked.sessions, []
    return trace.n_requests, [
        f"--sessions {asked.sessions}: the trace has {trace.n_requests} requests, so all take turns."
    ]


def _word(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, str(value))


def recording(trace: RoutingTrace, out: Path, *more: str, seed: int | None = None) -> str | None:
    """The command that records such a trace again, with more options or another seed; None where it was not recorded by
    `remoe trace`."""
    made = trace.provenance
    if made.get("kind") not in ("forced", "greedy") or not isinstance(made.get("model"), str):
        return None
    words = ["remoe", "trace", made["model"] + (f"@{made['revision']}" if made.get("revision") else "")]
    if made["model"] != "demo":
        words += ["--prompts", str(made.get("data"))]
    if made.get("delta"):
        words += ["--delta", str(made["delta"])]
    if made["kind"] == "greedy":
        words.append("--greedy")
    words += ["--requests", str(trace.n_requests)]
    for name in ("prompt_tokens", "new_tokens"):
        if made.get(name):
            words += [f"--{name.replace('_', '-')}", str(made[name])]
    seed = made.get("seed", 0) if seed is None else seed
    return shlex.join([*words, *(["--seed", str(seed)] if seed else []), *more, "-o", str(out)])
