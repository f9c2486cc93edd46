"""The traces that `remoe replay` is given: read, fit to be replayed together, and told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from remoe_cli.atomic import free_name
from remoe_cli.cache import choose
from remoe_cli.errors import CacheError, command, TraceError
from remoe_cli.report.replay_options import Asked, recording
from remoe_cli.routing import read, RoutingTrace


def fit_notes(
    asked: Asked, policies: Sequence[str], trace: RoutingTrace, others: dict[str, RoutingTrace | None]
) -> Iterator[str]:
    """On a fit that nothing uses, and on fits that know what is to come."""
    unused = asked.fit is not None and not any(map(_is_fitted, policies))
    if unused:
        yield f"--fit {asked.fit} is not used: of the policies only static is fitted on another trace."
    if asked.tune is not None and not any(map(is_tuned, policies)):
        yield f"--tune {asked.tune} is not used: no policy here has a grid and came without its parameter."
    for option in ("budgets", "tune") if unused else ("fit", "budgets", "tune"):
        other = others[option]
        if other is not None and np.array_equal(other.experts, trace.experts):
            yield f"--{option} {getattr(asked, option)} is the very trace that is replayed, so it is fitted in hindsight."


def read_trace(path: Path, again: Callable[[Path], str]) -> RoutingTrace:
    """The trace of a file that can be mapped. again: the command that names another file in place of this one."""
    spare = free_name(Path("t.trace"))
    if path.is_dir() and (held := sorted(path.glob("*.trace"))):
        raise TraceError(f"{path} is a folder; a trace is a file.", again(held[0]))
    if str(path) == "-" or path.is_fifo():
        raise TraceError(
            f"{path} is no file on disk; a trace is mapped, so it cannot come through a pipe.",
            f"cat > {spare}; {again(spare)}",
        )
    if path.is_char_device():
        raise TraceError(f"{path} is a device; a trace is a file.", f"remoe trace demo -o {spare}")
    trace = read(path)
    if trace.prefill.all():
        out = free_name(path)
        raise CacheError(
            f"{path} holds no decoded token, so there is nothing to count.",
            recording(trace, out) or command("trace", "demo", o=out),
        )
    return trace


def read_fitting(option: str, asked: Asked, path: Path, trace: RoutingTrace) -> RoutingTrace | None:
    """The trace that an option names. Raises TraceError where it is not of a model of the same shape."""
    named = getattr(asked, option)
    if named is None:
        return None
    other = read_trace(named, lambda found: asked.command(path, **{option: found}))
    shapes = [(one.n_layers, one.n_experts, one.top_k) for one in (trace, other)]
    if shapes[0] != shapes[1]:
        words = [f"{layers} layers, top-{top_k} of {experts}" for layers, experts, top_k in shapes]
        change: dict[str, Any] = {option: None}
        if option == "fit":  # without it the policies that are fitted would be refused next
            change["policies"] = [name for name in asked.policies if name == "all" or not _is_fitted(name)] or None
        raise TraceError(
            f"--{option} {named} is of another model: {words[1]}; the trace has {words[0]}.",
            asked.command(path, **change),
        )
    return other


def is_tuned(word: str) -> bool:
    """Whether --tune chooses its parameter: it has a grid, and none was given."""
    return not {":", "+"} & {*word} and bool(choose(word).policy.grid)


def _is_fitted(name: str) -> bool:
    """On another trace, not on the one that is replayed."""
    return {*choose(name).policy.needs} == {"fit"}


def names_of(base: Path, own: Path) -> tuple[str, str]:
    """How tables call two traces: their stems, or as much of the paths as tells them apart."""
    if base.stem != own.stem:
        return base.stem, own.stem
    parts = base.absolute().parts, own.absolute().parts
    for length in range(1, max(map(len, parts)) + 1):
        first, second = ("/".join(part[-length:]) for part in parts)
        if first != second:
            return first, second
    return f"{base.stem} (base)", f"{own.stem} (trace)"


def against_notes(base: RoutingTrace, own: RoutingTrace) -> Iterator[str]:
    """Where the tokens of two traces are not the same, so that gates are not all that differs."""
    made = [base.provenance, own.provenance]
    differ = []
    for name, shown in (
        ("model", "model"), ("kind", "kind"), ("data_sha256", "texts"), ("seed", "seed"), ("prompt_tokens", "prompt tokens"),
        ("new_tokens", "new tokens"),
    ):  # fmt: skip
        values = [one.get(name) for one in made]
        if None not in values and values[0] != values[1]:
            differ.append(shown if name == "data_sha256" else f"{shown} ({values[0]}, {values[1]})")
    if not differ and not np.array_equal(base.borders, own.borders):
        differ.append("lengths of requests")
    if differ:
        yield f"--against: the traces differ in {', '.join(differ)}: other tokens, so the change is not that of the gates alone."
    elif [one.get("kind") for one in made] == ["greedy"] * 2 and made[0].get("delta") != made[1].get("delta"):
        yield "--against: both traces are greedy, so each goes on in its own words: the change is not that of the gates alone."
