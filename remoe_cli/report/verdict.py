"""A report in one sentence: what the tuned gates save at the smallest cache, at what price, and whether it shows in time."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from remoe_cli.report.rows import cell

_SAME = 0.05  # times that differ by less, or not the same way in every request, are not told apart


def verdict(report: Mapping[str, Any]) -> str:
    """Of the last arm against the first; a change whose 95 % interval holds 0 is none."""
    base, tuned = report["arms"][0], report["arms"][-1]
    capacities, top_k = report["conditions"]["capacities"], report["base"]["top_k"]
    capacity = min([one for one in capacities if one >= top_k] or capacities)  # a decoder needs K
    found = cell(tuned, capacity)
    where = f"With {capacity} of {report['base']['n_experts']} experts a layer in memory (LRU)"
    return f"{where}, {tuned['name']} {_loads(found)} {_price(tuned['text'])}{_time(base, tuned, capacity)}."


def _loads(found: Mapping[str, Any]) -> str:
    change, interval = found["misses_change"], found["misses_change_95"]
    if change is None:
        return "loads what it loads"
    ends = sorted(100 * abs(end) for end in interval) if interval else None
    if interval and interval[0] <= 0 <= interval[1]:
        return f"loads as many experts as the base, within the error ({100 * change:+.1f} %, 95 %: {100 * interval[0]:+.1f} to {100 * interval[1]:+.1f})"
    how = "fewer" if change < 0 else "more"
    shown = f" (95 %: {ends[0]:.1f} to {ends[1]:.1f})" if ends else ""
    return f"loads {abs(100 * change):.1f} % {how} experts than the base{shown}"


def _price(text: Mapping[str, Any]) -> str:
    change, interval = text["perplexity_change"], text["perplexity_change_95"]
    if change is None:
        return "at an unknown perplexity"
    if interval and interval[0] <= 0 <= interval[1]:
        return "at the same perplexity, within the error"
    return f"at {100 * change:+.1f} % perplexity"


def _time(base: Mapping[str, Any], tuned: Mapping[str, Any], capacity: int) -> str:
    before, after = (_measured(arm, capacity) for arm in (base, tuned))
    if before is None or after is None:
        return ""
    was, now = before["tpot_ms"]["p50"], after["tpot_ms"]["p50"]
    ratios = [a / b for a, b in zip(after.get("requests_ms", []), before.get("requests_ms", [])) if a and b]
    if ratios and abs(median(ratios) - 1) >= _SAME and (max(ratios) < 1 or min(ratios) > 1):
        return f"; a token takes {now:.3g} ms instead of {was:.3g}"
    limit = (before.get("limit") or {}).get("by")
    why = ": computing is the limit here, not loading" if limit == "compute" else ""
    return f"; the time of a token is not clearly another ({now:.3g} ms, base {was:.3g}){why}"


def _measured(arm: Mapping[str, Any], capacity: int) -> Mapping[str, Any] | None:
    rows = (one for one in arm["measured"] if one["capacity"] == capacity and one.get("policy", "lru") == "lru")
    return next((one for one in rows if not one["skipped"] and one["tpot_ms"]), None)
