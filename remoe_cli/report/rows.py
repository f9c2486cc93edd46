"""The before/after table of a report as plain rows: what terminal and card both show."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Row(NamedTuple):
    """label, then one cell an arm; group: rows of one group stand together."""

    group: str
    label: str
    cells: list[str]


POLICY_TITLES = {"lru": "LRU", "lfu": "LFU", "fifo": "FIFO", "belady": "Belady"}


def table(report: dict[str, Any]) -> tuple[list[str], list[Row]]:
    """(arm names, rows) of the headline figures: quality, overlap, then each cache size."""
    arms = report["arms"]
    rows = [
        Row("text", "perplexity", [number(arm["text"]["perplexity"], 3) for arm in arms]),
        Row("text", "perplexity, change", [change(arm, arms[0]) for arm in arms]),
        Row("text", "EOR, teacher-forced", [number(arm["text"]["eor"], 3) for arm in arms]),
        Row("text", "EOR, forced decode", [number(arm["decode"]["forced"]["eor"], 3) for arm in arms]),
        Row("text", "EOR, greedy decode", [number(arm["decode"]["greedy"]["eor"], 3) for arm in arms]),
        Row("text", "  greedy: distinct-4", [number(arm["decode"]["greedy"]["distinct_4"], 3) for arm in arms]),
        Row("text", "  greedy: repetition", [number(arm["decode"]["greedy"]["repetition"], 3) for arm in arms]),
        Row(
            "text",
            "usage entropy, layer mean",
            [number(arm["decode"]["forced"]["usage"]["entropy_layers"], 3) for arm in arms],
        ),
        Row("text", "usage CV, layer mean", [number(arm["decode"]["forced"]["usage"]["cv_layers"], 3) for arm in arms]),
    ]
    for capacity in report["conditions"]["capacities"]:
        rows += _cache_rows(arms, capacity)
    return [arm["name"] for arm in arms], rows


def _cache_rows(arms: list[dict], capacity: int) -> list[Row]:
    group, rows = f"C = {capacity}", []
    for policy, admission in _policies(arms[0]):
        cells = [cell(arm, capacity, policy, admission) for arm in arms]
        title = POLICY_TITLES.get(policy, policy) + ("" if admission == "forced" else " bypass")
        if policy == "lru":
            rows.append(Row(group, f"{title} hit", [number(one["hit_ratio"], 3) for one in cells]))
            rows.append(Row(group, f"{title} misses", [f"{one['misses']:,}" for one in cells]))
            rows.append(Row(group, f"{title} MB a token", [megabytes(one["mb_a_token"]) for one in cells]))
            rows.append(Row(group, f"{title} gap closed", [percent(one["gap_closed"]) for one in cells]))
        else:
            rows.append(Row(group, f"{title}: hit, MB, gap", [_brief(one) for one in cells]))
    measured = [_measured(arm, capacity) for arm in arms]
    if any(measured) and all(one is None or one["skipped"] for one in measured):
        rows.append(Row(group, "measured", [one["skipped"] if one else "n/a" for one in measured]))
    elif any(measured):
        for label, show in _MEASURED.items():
            rows.append(Row(group, label, [_shown(one, show) for one in measured]))
    return rows


def _policies(arm: dict) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["policy"], row["admission"]) for row in arm["cache"] if row["trace"] == "forced"))


def cell(arm: dict, capacity: int, policy: str = "lru", admission: str = "forced") -> dict:
    """The cell of the forced trace. Raises KeyError when the report has none."""
    wanted = ("forced", policy, admission, capacity)
    for row in arm["cache"]:
        if (row["trace"], row["policy"], row["admission"], row["capacity"]) == wanted:
            return row
    raise KeyError(wanted)


def _measured(arm: dict, capacity: int) -> dict | None:
    return next((row for row in arm["measured"] if row["capacity"] == capacity), None)


def _shown(measured: dict | None, show: Callable[[dict], str]) -> str:
    """n/a where nothing was measured, or why it was not."""
    if measured is None:
        return "n/a"
    return measured["skipped"] or show(measured)


def _yes(value: bool | None) -> str:
    return "n/a" if value is None else "yes" if value else "NO"


def _brief(one: dict) -> str:
    return f"{number(one['hit_ratio'], 3)}, {megabytes(one['mb_a_token'])}, {percent(one['gap_closed'])}"


def _p50(name: str) -> Callable[[dict], str]:
    return lambda one: number(one[name]["p50"] if one[name] else None, 2)


def _tail(one: dict) -> str:
    itl = one["itl_ms"]
    return "n/a" if itl is None else f"{itl['p95']:.2f} / {itl['p99']:.2f}"


_MEASURED: dict[str, Callable[[dict], str]] = {
    "measured ttft, p50 ms": _p50("ttft_ms"),
    "measured tpot, p50 ms": _p50("tpot_ms"),
    "measured itl, p95 / p99 ms": _tail,
    "measured MB a token": lambda one: megabytes(one["mb_a_token"]),
    "counts = simulator": lambda one: _yes(one["counts_match"]),
    "exact (= resident)": lambda one: _yes(one["exact"]),
}


def megabytes(value: float | None) -> str:
    return number(value, 3 if value is not None and value < 10 else 1)


def number(value: float | None, places: int) -> str:
    return "n/a" if value is None else f"{value:.{places}f}"


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"


def change(arm: dict, base: dict) -> str:
    if arm is base:
        return ""
    return f"{100 * (arm['text']['perplexity'] / base['text']['perplexity'] - 1):+.2f} %"
