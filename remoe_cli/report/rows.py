"""The before/after table of a report as plain rows: what terminal and card both show."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from remoe_cli.report.steering import steered_lines
from remoe_cli.sizes import show_size


class Row(NamedTuple):
    """label, then one cell an arm; group: rows of one group stand together."""

    group: str
    label: str
    cells: list[str]


_POLICY_TITLES = {"lru": "LRU", "lfu": "LFU", "fifo": "FIFO", "belady": "Belady"}


def table(report: dict[str, Any]) -> tuple[list[str], list[Row]]:
    """(arm names, rows) of the headline figures: quality and overlap, then each cache size, then each domain."""
    arms, capacities = report["arms"], report["conditions"]["capacities"]
    rows = [
        *_text_rows("text", arms),
        Row("text", "  greedy: distinct-4", [number(arm["decode"]["greedy"]["distinct_4"], 3) for arm in arms]),
        Row("text", "  greedy: repetition", [number(arm["decode"]["greedy"]["repetition"], 3) for arm in arms]),
        Row("text", "usage entropy, layer mean", [_usage(arm, "entropy_layers") for arm in arms]),
        Row("text", "usage CV, layer mean", [_usage(arm, "cv_layers") for arm in arms]),
        *_concentration_rows(arms),
        *_spread_rows(report),
    ]
    for capacity in capacities:
        rows += _cache_rows(arms, capacity)
    for domain in report.get("domains", []):
        group = f"{domain['name']} ({'trained on' if domain['trained'] else 'not trained on'})"
        rows += _text_rows(group, domain["arms"])
        for capacity in capacities:
            cells = [cell(arm, capacity) for arm in domain["arms"]]
            rows.append(Row(group, f"C = {capacity}: LRU hit, MB a token", [_hit(one) for one in cells]))
            rows.append(Row(group, f"C = {capacity}: LRU misses, change", _changes(cells, "misses_change")))
    return [arm["name"] for arm in arms], rows


def conditions(report: dict[str, Any]) -> list[str]:
    """How the figures were made, in sentences."""
    c, base = report["conditions"], report["base"]
    name = base["id"] + (f"@{base['commit'][:12]}" if base["commit"] else "")
    draws = f" in {c['draws']} disjoint draws" if c["draws"] > 1 else ""
    measured = (
        f"Measured: {c['measured_requests']} of the requests, {c['device_name']}, {c['dtype']}, {c['threads']} thread(s), "
        f"io {c['io']}{_how_loaded(c.get('offload'))}; torch {c['torch']}, transformers {c['transformers']}."
    )
    return [
        f"{name}: {base['moe_layers']} MoE layers, top-{base['top_k']} of {base['n_experts']}, "
        f"{base['expert_bytes'] / 1e6:.3f} MB an expert.",
        f"Text: {c['text_tokens']:,} held-out tokens of {c['data']}. Traces: {c['requests']} held-out requests of "
        f"{c['prompt_tokens']} + {c['new_tokens']} tokens{draws}, cold cache each, step-atomic; forced unless greedy is named.",
        "In brackets: 95 % bootstrap intervals of the change, paired over requests (perplexity: over rows of text).",
        *(
            steered_lines(report["steering"], report["arms"][-1]["text"]["perplexity_change"])
            if report.get("steering")
            else []
        ),
        *([f"Domains: {'; '.join(map(_domain, report['domains']))}."] if report.get("domains") else []),
        *([measured] if c["measured_requests"] else []),
    ]


def _how_loaded(offload: dict[str, Any] | None) -> str:
    """Of the decoder's settings those that are not as they would be by themselves."""
    if offload is None:
        return ""
    said = {
        "readers {}": offload["readers"] if offload["readers"] != 2 else None,
        "RAM tier {}": offload["ram"] and show_size(offload["ram"]),
        "guess {}": offload["guess"],
        "throttle {}/s": offload["throttle"] and show_size(offload["throttle"]),
        "packed": offload["pack"],
    }
    return "".join(f", {words.format(value)}" for words, value in said.items() if value)


def _domain(domain: dict[str, Any]) -> str:
    base = domain["arms"][0]
    requests, tokens = base["decode"]["forced"]["requests"], base["text"]["tokens"]
    name, source = domain["name"], domain["source"]
    said = source if re.fullmatch(rf"{re.escape(name)}([@.].*)?", source) else f"{name} of {source}"
    return f"{said}, {requests} requests, {tokens:,} tokens of text"


def _text_rows(group: str, arms: list[dict]) -> list[Row]:
    texts = [arm["text"] for arm in arms]
    forced, greedy = ([arm["decode"][kind] for arm in arms] for kind in ("forced", "greedy"))
    return [
        Row(group, "perplexity", [number(one["perplexity"], 3) for one in texts]),
        Row(group, "perplexity, change", _changes(texts, "perplexity_change", places=2)),
        Row(group, "EOR, teacher-forced", [number(one["eor"], 3) for one in texts]),
        Row(group, "EOR, forced decode", [number(one["eor"], 3) for one in forced]),
        Row(group, "EOR, forced decode, change", _changes(forced, "eor_change", 1, 3, "")),
        Row(group, "EOR, greedy decode", [number(one["eor"], 3) for one in greedy]),
    ]


def _concentration_rows(arms: list[dict]) -> list[Row]:
    """Nothing for a report of an older version."""
    forced = [arm["decode"]["forced"] for arm in arms]
    if not all("concentration" in one for one in forced):
        return []
    found = [one["concentration"] for one in forced]
    ranks = [one["parallel_load"] for one in forced]
    return [
        Row("text", "effective experts", [number(one["effective_experts"], 1) for one in found]),
        Row("text", "max frequency", [percent(one["max_frequency"]) for one in found]),
        Row("text", "top-8 mass", [percent(one["top_8_mass"]) for one in found]),
        Row(
            "text", "busiest / mean of 2, 4, 8 ranks", [" / ".join(number(n, 2) for n in one.values()) for one in ranks]
        ),
    ]


def _spread_rows(report: dict[str, Any]) -> list[Row]:
    """The standard deviation over the draws, where there are several."""
    arms, capacities, draws = report["arms"], report["conditions"]["capacities"], report["conditions"]["draws"]
    if draws < 2:
        return []
    spreads = [arm["spread"] for arm in arms]
    return [
        Row("text", f"sd of {draws} draws: perplexity", [number(one["perplexity"], 3) for one in spreads]),
        Row("text", "  EOR, forced decode", [number(one["eor_forced"], 3) for one in spreads]),
        *(
            Row("text", f"  LRU hit, C = {capacity}", [number(one["lru_hit_ratio"][at], 3) for one in spreads])
            for at, capacity in enumerate(capacities)
        ),
    ]


def _cache_rows(arms: list[dict], capacity: int) -> list[Row]:
    group, rows = f"C = {capacity}", []
    for policy, admission in _policies(arms):
        title = _POLICY_TITLES.get(policy, policy) + ("" if admission == "forced" else " bypass")
        if policy == "lru":
            cells = [cell(arm, capacity, policy, admission) for arm in arms]
            rows.append(Row(group, f"{title} hit", [number(one["hit_ratio"], 3) for one in cells]))
            rows.append(Row(group, f"{title} misses", [f"{one['misses']:,}" for one in cells]))
            rows.append(Row(group, f"{title} misses, change", _changes(cells, "misses_change")))
            rows.append(Row(group, f"{title} MB a token", [megabytes(one["mb_a_token"]) for one in cells]))
            rows.append(Row(group, f"{title} gap closed", [percent(one["gap_closed"]) for one in cells]))
        else:  # an arm without heads has no cell of a policy that reads them
            found = [_found(arm, ("forced", policy, admission, capacity)) for arm in arms]
            rows.append(Row(group, f"{title}: hit, MB, gap", [_brief(one) if one else "n/a" for one in found]))
    measured = [_measured(arm, capacity) for arm in arms]
    if any(measured) and all(one is None or one["skipped"] for one in measured):
        rows.append(Row(group, "measured", [one["skipped"] if one else "n/a" for one in measured]))
    elif any(measured):
        with_floor = any(one and one.get("floor") for one in measured)
        for label, show in {**_MEASURED, **(_FLOOR if with_floor else {})}.items():
            rows.append(Row(group, label, [_shown(one, show) for one in measured]))
    for policy in dict.fromkeys(
        one.get("policy", "lru") for arm in arms for one in arm["measured"] if not one["skipped"]
    ):
        if policy != "lru":
            label = f"measured {policy}: MB, tpot p50 ms, counts and tokens exact"
            rows.append(Row(group, label, [_shown(_measured(arm, capacity, policy), _headed) for arm in arms]))
    return rows


def _policies(arms: list[dict]) -> list[tuple[str, str]]:
    cells = (row for arm in arms for row in arm["cache"] if row["trace"] == "forced")
    return list(dict.fromkeys((row["policy"], row["admission"]) for row in cells))


def cell(arm: dict, capacity: int, policy: str = "lru", admission: str = "forced") -> dict:
    """The cell of the forced trace. Raises KeyError when the report has none."""
    wanted = ("forced", policy, admission, capacity)
    if (found := _found(arm, wanted)) is None:
        raise KeyError(wanted)
    return found


def _found(arm: dict, wanted: tuple[str, str, str, int]) -> dict | None:
    names = ("trace", "policy", "admission", "capacity")
    return next((row for row in arm["cache"] if tuple(row[name] for name in names) == wanted), None)


def _measured(arm: dict, capacity: int, policy: str = "lru") -> dict | None:
    """A row that was skipped stands for all policies; older versions measured lru and did not say so."""
    rows = (row for row in arm["measured"] if row["capacity"] == capacity)
    return next((row for row in rows if row["skipped"] or row.get("policy", "lru") == policy), None)


def _headed(one: dict) -> str:
    counts, exact = _yes(one["counts_match"]), _yes(one["exact"])
    return f"{megabytes(one['mb_a_token'])}, {_p50('tpot_ms')(one)}, {counts} / {exact}"


def _shown(measured: dict | None, show: Callable[[dict], str]) -> str:
    """n/a where nothing was measured, or why it was not."""
    if measured is None:
        return "n/a"
    return measured["skipped"] or show(measured)


def _yes(value: bool | None) -> str:
    return "n/a" if value is None else "yes" if value else "NO"


def _hit(one: dict) -> str:
    return f"{number(one['hit_ratio'], 3)}, {megabytes(one['mb_a_token'])}"


def _brief(one: dict) -> str:
    return f"{_hit(one)}, {percent(one['gap_closed'])}"


def _usage(arm: dict, key: str) -> str:
    return number(arm["decode"]["forced"]["usage"][key], 3)


def _changes(parts: list[dict], key: str, scale: int = 100, places: int = 1, unit: str = " %") -> list[str]:
    """-27.9 % [-30.1, -25.6], the interval at 95 %; nothing for the base, which comes first."""

    def shown(value: float | None, interval: Sequence[float] | None) -> str:
        ends = f" [{', '.join(f'{scale * end:+.{places}f}' for end in interval)}]" if interval else ""
        return "n/a" if value is None else f"{scale * value:+.{places}f}{unit}{ends}"

    return ["", *(shown(part[key], part[f"{key}_95"]) for part in parts[1:])]


def _p50(name: str) -> Callable[[dict], str]:
    return lambda one: number(one[name]["p50"] if one[name] else None, 2)


def _tail(one: dict) -> str:
    itl = one["itl_ms"]
    return "n/a" if itl is None else f"{itl['p95']:.2f} / {itl['p99']:.2f}"


def _where_time_goes(one: dict) -> str:
    """n/a in reports of older versions, as the others below."""
    split = one.get("split_ms")
    if not split or not (step := sum(split.values())):
        return "n/a"
    parts = (split["wait"], split["experts"], step - split["wait"] - split["experts"])
    return f"{' / '.join(f'{100 * part / step:.0f}' for part in parts)} %"


def _limit(one: dict) -> str:
    return one["limit"]["by"] if one.get("limit") else "n/a"


_MEASURED: dict[str, Callable[[dict], str]] = {
    "measured ttft, p50 ms": _p50("ttft_ms"),
    "measured tpot, p50 ms": _p50("tpot_ms"),
    "measured itl, p95 / p99 ms": _tail,
    "measured MB a token": lambda one: megabytes(one["mb_a_token"]),
    "measured wait / experts / rest": _where_time_goes,
    "measured, limited by": _limit,
    "counts = simulator": lambda one: _yes(one["counts_match"]),
    "exact (= resident)": lambda one: _yes(one["exact"]),
}
_FLOOR: dict[str, Callable[[dict], str]] = {
    "measured, loads alone": lambda one: percent(one["floor"]["share"]) if one.get("floor") else "n/a",
}


def megabytes(value: float | None) -> str:
    return number(value, 3 if value is not None and value < 10 else 1)


def number(value: float | None, places: int) -> str:
    return "n/a" if value is None else f"{value:.{places}f}"


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"
