"""The result of `remoe replay` as tables for a person."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from remoe_cli.report.renderers.grid import grid as narrowed
from remoe_cli.report.rows import megabytes, number

WIDTH = 120
Cell = dict[str, Any]
PROSE = 118
RESETS = {"request": "a fresh, cold cache for each request", "never": "one cache for all requests, cold at the first"}
PROMPTS = {
    "prefill": ", prompts go through it first, token by token",
    "batch": ", prompts go through it first, as one step a layer",
}
ORDERS = {"weight": "the heaviest expert touched last", "listed": "touched as listed"}


def replay_table(result: dict[str, Any], width: int = WIDTH) -> str:
    """Hits, loads and gap of every policy and admission, with the rules they were made by; at most `width` columns where
    a single cache size fits."""
    several = all(arm["requests"] > 1 for arm in result["arms"])
    timed = result["estimate"] is not None
    heads = ["hit %", _unit(result), "gap", *(["est. ms"] if timed else [])]

    def show(cell: Cell) -> list[str]:
        hit = number(100 * cell["hit_ratio"], 1) + (_half(cell["hit_ratio_95"]) if several else "")
        return [hit, _moved(cell), _gap(cell), *([number(cell["tpot_ms_estimate"]["mean"], 1)] if timed else [])]

    tables = _by_capacity(result, heads, show, width)
    above, below = map(_arm, result["arms"]), [*_answers(result), *_footnotes(result, several)]
    return "\n".join([*_wrapped(above, width), "", *tables, *_wrapped(below, width), *_missing(result, width)])


def figure_tables(result: dict[str, Any], width: int = WIDTH) -> str:
    """The figures that no policy changes, arm by arm, then the spread of misses over tokens."""
    parts = []
    for arm in result["arms"]:
        parts += [f"{arm['name']}, decode tokens", *_trace_figures(result["figures"][arm["role"]], width)]

    def show(cell: Cell) -> list[str]:
        found = cell["misses_a_token"]
        return [number(found[name], 0) for name in ("p50", "p95", "p99")]

    return "\n".join(
        [*parts, "Misses a token, percentiles", "", *_by_capacity(result, ["p50", "p95", "p99"], show, width)]
    )


def _sessions(result: dict[str, Any]) -> Iterator[str]:
    """How far the places in the turn differ, for the policy that the table begins with."""
    if not result["cells"] or not result["cells"][0]["sessions"]:
        return
    first = result["cells"][0]
    named = [one for one in result["cells"] if all(one[name] == first[name] for name in ("arm", "policy", "admission"))]
    hits = [[100 * found["hit_ratio"] for found in one["sessions"] if found["accesses"]] for one in named]
    shown = "; ".join(f"C = {one['capacity']}: {min(found):.1f} to {max(found):.1f}" for one, found in zip(named, hits))
    yield f"hit % of single sessions in the shared cache, {first['policy']} {first['admission']}: {shown}."


def _by_capacity(
    result: dict[str, Any], heads: Sequence[str], show: Callable[[Cell], list[str]], width: int
) -> Iterator[str]:
    """Grids with a row for every policy, admission and arm, and as many cache sizes side by side as fit."""
    cells = {(one["policy"], one["admission"], one["arm"], one["capacity"]): show(one) for one in result["cells"]}
    arms = {arm["role"]: arm["name"] for arm in result["arms"]}
    known = {policy for policy, *_ in cells}
    rows = [
        (policy, form, role)
        for policy in result["policies"]
        for form in (result["admissions"] if policy in known else ["-"])
        for role in (arms if policy in known else [*arms][:1])
    ]
    labels = [
        [policy, form, *([arms[role] if policy in known else "-"] if len(arms) > 1 else [])]
        for policy, form, role in rows
    ]
    above = ["policy", "admission", *(["trace"] if len(arms) > 1 else [])]
    missing = ["n/a", *[""] * (len(heads) - 1)]

    def grid(capacities: Sequence[int]) -> list[str]:
        titles = _flat([f"C = {capacity}", *[""] * (len(heads) - 1)] for capacity in capacities)
        body = [_flat(cells.get((*row, capacity), missing) for capacity in capacities) for row in rows]
        lines = [[*[""] * len(above), *titles], [*above, *_flat(heads for _ in capacities)]]
        return _grid([*lines, *([*label, *words] for label, words in zip(labels, body))], left=len(above))

    for at_once in range(len(result["capacities"]), 0, -1):
        count = -(-len(result["capacities"]) // at_once)
        groups = [part.tolist() for part in np.array_split(result["capacities"], count)]
        grids = [grid(group) for group in groups]
        if at_once == 1 or max(len(lines[0]) for lines in grids) <= width:
            break
    if max(len(lines[0]) for lines in grids) > width:
        for capacity in result["capacities"]:
            body = [[*label, *cells.get((*row, capacity), missing)] for label, row in zip(labels, rows)]
            yield from [f"C = {capacity}", *narrowed([*above, *heads], body, width, len(above)), ""]
        return
    for lines in grids:
        yield from [*(line.rstrip() for line in lines), ""]


def _answers(result: dict[str, Any]) -> Iterator[str]:
    """The best of what a decoder can run, for each arm, where there is a choice."""
    names = {arm["role"]: arm["name"] for arm in result["arms"]}
    policies = {(cell["policy"], cell["admission"]) for cell in result["cells"]}
    for role in names if len(policies) > 1 else ():
        found = [
            f"C = {one['capacity']}: {one['policy']} {one['admission']}, {_moved(one)}, gap {_gap(one)}"
            for one in result["best"]
            if one["arm"] == role
        ]
        if found:
            of = f" on {names[role]}" if len(names) > 1 else ""
            yield f"Least {_unit(result)} a token{of} by a policy that a decoder can run: {'; '.join(found)}."


def _footnotes(result: dict[str, Any], several: bool) -> Iterator[str]:
    rules, first = result["rules"], result["arms"][0]
    pool = {True: "one pool of C slots a layer", "bytes": "one pool of C experts' bytes a layer"}.get(rules["pool"])
    fitted = rules["fit"] and any(cell["policy"] == "static" for cell in result["cells"])
    yield (
        "; ".join(
            [
                f"Simulated: {RESETS[rules['reset']]}{PROMPTS.get(rules['warm'], '')}",
                f"step {rules['step']}, {ORDERS[rules['touch_order']]}",
                *([pool] if pool else []),
                *([f"{rules['sessions']} sessions take turns"] if rules["sessions"] > 1 else []),
                *([f"slots of each layer fitted on {rules['budgets']}"] if rules["budgets"] else []),
                *([f"parameters tuned on {rules['tune']}"] if rules["tune"] else []),
                *([f"static fitted on {rules['fit']}"] if fitted else []),
            ]
        )
        + "."
    )
    yield from _sessions(result)
    if "bypass" in {cell["admission"] for cell in result["cells"]}:
        staging = f"{first['top_k']} experts of staging"
        yield f"Bypass has {staging} {'taken from its' if rules['equal'] == 'memory' else 'beside its'} slots."
        yield from _cramped(result)
    of = f", both on {first['name']}" if len(result["arms"]) > 1 else ""
    yield (
        f"hit %: of the experts that steps ask for{', ± half of the 95 % interval over requests' if several else ''}. "
        f"{_unit(result)}: loaded a token. gap: share of the way from LRU (0 %) to Belady with bypass (100 %){of}, in loads "
        "a token; below 0 %: more loads than LRU."
    )
    if ahead := dict.fromkeys(cell["policy"] for cell in result["cells"] if cell["proactive"]):
        yield (
            f"What {', '.join(ahead)} loads ahead of need counts in {_unit(result)} and gap, not in hit %: more hits can be "
            "more loads."
        )
    reasons: dict[str, list[str]] = {}
    for one in result["references"]:
        if one["reason"] is not None:
            reasons.setdefault(one["reason"], []).append(str(one["capacity"]))
    for reason, capacities in reasons.items():
        yield f"gap n/a at C = {', '.join(capacities)}: {reason}."
    if result["estimate"] is not None:
        yield (
            f"est. ms: {result['estimate']['label']}: {result['estimate']['compute_ms']:g} ms of compute and all bytes of a "
            f"token over {result['estimate']['link_bytes_a_second'] / 1e9:g} GB/s, one after the other."
        )


def _cramped(result: dict[str, Any]) -> Iterator[str]:
    """On bypass caches that hold less than one token asks for, where a row hits next to nothing for it."""
    first, sizes = result["arms"][0], result["expert_bytes"]
    token = first["top_k"] * first["moe_layers"]
    if result["rules"]["pool"] == "bytes":
        token = first["top_k"] * sum(sizes)
    small = {
        cell["capacity"]: cell["slots"]
        for cell in result["cells"]
        if cell["admission"] == "bypass" and cell["slots"] < token and cell["hit_ratio"] < 0.01
    }
    if small:
        shown = ", ".join(f"C = {capacity}" for capacity in small)
        yield (
            f"At {shown} that leaves less than the experts of one token: a policy that keeps what was touched last, as LRU "
            "does, then loses experts just before they are asked for again, so hits near 0 are no error."
        )


def _missing(result: dict[str, Any], width: int) -> Iterator[str]:
    """What reads n/a and why, each with its command on a line of its own."""
    found: dict[tuple[str, str | None], list[str]] = {}
    for one in result["unavailable"]:
        found.setdefault((one["reason"].rstrip("."), one["try"]), []).append(one["policy"])
    for (reason, command), policies in found.items():
        yield from _wrapped(
            [f"n/a: {', '.join(dict.fromkeys(policies))}: {reason}.{' Try:' if command else ''}"], width
        )
        if command:
            yield f"  {command}"


def _gap(cell: Cell) -> str:
    return "n/a" if cell["gap_closed"] is None else f"{round(100 * cell['gap_closed'])}%"


def _moved(cell: Cell) -> str:
    return megabytes(cell["mb_a_token"]) if cell["mb_a_token"] is not None else number(cell["loads_a_token"], 1)


def _unit(result: dict[str, Any]) -> str:
    return "loads" if result["expert_bytes"] is None else "MB"


def _half(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" ±{50 * (interval[1] - interval[0]):.1f}"


def _arm(arm: dict[str, Any]) -> str:
    made = arm["provenance"]
    model = f" of {made['model']}" if isinstance(made.get("model"), str) else ""
    kind = f", {made['kind']}" if isinstance(made.get("kind"), str) else ""
    prompt = f" after {arm['prefill_tokens']:,} of prompt" if arm["prefill_tokens"] else ", no prompt"
    return (
        f"{arm['name']}{model}{kind}: {arm['moe_layers']} MoE layers, top-{arm['top_k']} of {arm['n_experts']}; "
        f"{arm['requests']:,} request{'' if arm['requests'] == 1 else 's'}, {arm['decode_tokens']:,} decode tokens"
        f"{prompt}."
    )


def _trace_figures(found: dict[str, Any], width: int) -> Iterator[str]:
    lags, sets, usage = found["eor"], found["working_set"], found["usage"]
    within = found["reuse"]["within"]
    yield ""
    yield from _grid(
        [
            ["tokens", *lags],
            ["EOR at that lag", *(number(lags[lag], 3) for lag in lags)],
            ["used again within", *(number(within[lag], 3) for lag in lags)],
        ]
    )
    yield f"First use in its request: {number(found['reuse']['first'], 3)} of the accesses."
    yield ""
    yield from _grid(
        [
            ["window, tokens", *sets],
            *(
                [f"experts a layer, {name}", *(number(one and one[name], places) for one in sets.values())]
                for name, places in (("mean", 1), ("p95", 0), ("most", 0))
            ),
        ]
    )
    yield ""
    ranks = ", ".join(f"{load:.2f} on {ranks}" for ranks, load in found["parallel_load"].items() if load is not None)
    sentence = (
        f"Usage: entropy {number(usage['entropy_layers'], 3)} (pooled {number(usage['entropy_pooled'], 3)}), CV "
        f"{number(usage['cv_layers'], 3)} (pooled {number(usage['cv_pooled'], 3)}), {number(usage['effective_experts'], 1)} "
        f"effective experts; busiest rank over mean: {ranks or 'n/a'}."
    )
    yield from _wrapped([sentence], width)
    yield ""
    yield "LRU hit % with C slots a layer, cold"
    curve = found["lru_hit_ratio"]
    at_once = max(1, (width - 4) // 8)
    for first in range(0, len(curve), at_once):
        part = curve[first : first + at_once]
        numbers = [str(first + place) for place in range(1, len(part) + 1)]
        yield from _grid([["C", *numbers], ["%", *(number(100 * hit, 1) for hit in part)]])
    yield ""


def _wrapped(sentences: Iterable[str], width: int) -> list[str]:
    return [line for sentence in sentences for line in wrap(sentence, min(width, PROSE))]


def _flat(parts: Any) -> list[str]:
    return [word for part in parts for word in part]


def _grid(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Columns of equal width, the first `left` ones flush left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            word.ljust(size) if at < left else word.rjust(size) for at, (word, size) in enumerate(zip(row, widths))
        )
        for row in rows
    ]
