"""How often LRU hit in traces that were recorded, as a guide to models that were not: known_misses.json, written by
docs/make_known_misses.py."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).with_suffix(".json")
EXACT, FAMILY, ANY = "its family and shape", "its family", "other families"
_DEMO = "demo"  # too small to speak for another model


class Known(NamedTuple):
    """rows: of the file, all of one model unless `of` is ANY; of: what they are traces of. gains: what tuned gates saved, of the
    same family where there is one."""

    rows: list[dict[str, Any]]
    of: str
    gains: list[dict[str, Any]]

    def hits(self, capacity: int, n_experts: int, top_k: int) -> tuple[float, float]:
        """The least and the greatest hit ratio of `capacity` slots a layer, top_k or more."""
        found = [hit for row in self.rows if (hit := _hit(row, capacity, n_experts, top_k)) is not None]
        return min(found), max(found)


def known(family: str, width: int, n_experts: int, n_layers: int) -> Known:
    """What is nearest to a model: traces of itself, else of the model of its family whose hidden state is about as wide, else
    all. n_layers: with a gate."""
    stored = json.loads(PATH.read_text())
    rows, of = _nearest(stored["rows"], family, width)
    shape = (width, n_experts, n_layers)
    if of == FAMILY and all((row["width"], row["experts"], row["layers"]) == shape for row in rows):
        of = EXACT
    return Known(rows, of, _nearest(stored["gains"], family, width)[0])


def _nearest(rows: Sequence[dict[str, Any]], family: str, width: int) -> tuple[list[dict[str, Any]], str]:
    own = [row for row in rows if row["family"] == family]
    if not own:
        return [row for row in rows if row["model"] != _DEMO], ANY
    apart: Callable[[dict[str, Any]], float] = lambda row: abs(math.log(row["width"] / width))  # noqa: E731
    model = min(own, key=apart)["model"]
    return [row for row in own if row["model"] == model], FAMILY


def _hit(row: dict[str, Any], capacity: int, n_experts: int, top_k: int) -> float | None:
    """What the row tells of another number of experts: as far above chance (C / E) as it is as far on the way from K slots to E,
    by how far chance leaves room. None outside of what was measured."""
    own, own_k = row["experts"], row["top_k"]
    way = (capacity - top_k) / (n_experts - top_k) if n_experts > top_k else 1.0
    place = own_k + way * (own - own_k)
    hit = _between(row["hits"], place)
    if hit is None:
        return None
    room = (1 - top_k / n_experts) / (1 - own_k / own)
    return min(1.0, max(0.0, capacity / n_experts + room * (hit - place / own)))


def _between(hits: dict[str, float], place: float) -> float | None:
    points = sorted((int(capacity), hit) for capacity, hit in hits.items())
    for (left, low), (right, high) in zip(points, points[1:]):
        if left <= place <= right:
            return low + (high - low) * (place - left) / (right - left)
    return None
