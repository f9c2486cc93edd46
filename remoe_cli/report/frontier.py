"""Which cells of a sweep are worth having: no other costs less perplexity and loads less from as large a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def mark(cells: Sequence[Mapping[str, Any]], limit: float | None) -> list[dict[str, Any]]:
    """The cells with three keys more. within: `perplexity_change` is at most the limit (null without one); frontier: no
    other cell of its capacity is at least as good in perplexity and MB a token, and better in one; best: loads least of
    those of its capacity within the limit (without one: of all), the first of equals.
    """
    found = [dict(cell) for cell in cells]
    for cell in found:
        cell["within"] = None if limit is None else cell["perplexity_change"] <= limit
        cell["frontier"] = not any(_beats(other, cell) for other in cells if other["capacity"] == cell["capacity"])
        cell["best"] = False
    for capacity in dict.fromkeys(cell["capacity"] for cell in found):
        allowed = [cell for cell in found if cell["capacity"] == capacity and cell["within"] is not False]
        if allowed:
            min(allowed, key=lambda cell: cell["mb_a_token"])["best"] = True
    return found


def _beats(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    pairs = [(one[key], other[key]) for key in ("perplexity_change", "mb_a_token")]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
