"""Replays of a trace as cells of figures, as docs/replay.md lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from remoe_cli.cache import choose, live_policies, Replay
from remoe_cli.report import metrics
from remoe_cli.report.cells import BOOTSTRAP_SEED
from remoe_cli.report.estimate import Estimate


class References(NamedTuple):
    """What the gap is measured between, in loads a token of the base at one cache size, all of the same total memory.
    None: that memory holds no such cache."""

    lru: float | None
    belady_forced: float | None
    belady_bypass: float | None

    def no_gap(self, *reasons: str) -> str | None:
        """Why there is no gap between LRU and Belady with bypass; reasons: why a replay of them was not to be had."""
        if self.lru is None or self.belady_bypass is None:
            return reasons[0]
        return "LRU loads no more than Belady with bypass" if self.lru == self.belady_bypass else None


class Sizes(NamedTuple):
    """layer_bytes: [L] stored bytes of one expert of each layer, or None where the trace does not say."""

    layer_bytes: np.ndarray | None
    estimate: Estimate | None = None


def figures(done: Replay, references: References, sizes: Sizes, sessions: int = 1) -> dict[str, Any]:
    """Counts, ratios, loads and the estimate of one replay; intervals are bootstraps over requests. sessions: that took turns."""
    request_loads = done.request_misses + done.request_proactive
    a_token = metrics.summary(done.token_misses)
    return {
        "slots": done.slots,
        "staging": done.staging,
        "tokens": done.tokens,
        "accesses": done.accesses,
        "hits": done.hits,
        "misses": done.misses,
        "evictions": done.evictions,
        "proactive": done.proactive,
        "prefetch_bytes": done.prefetch_bytes,
        "prefill_accesses": done.prefill_accesses,
        "prefill_misses": done.prefill_misses,
        "hit_ratio": done.hit_ratio,
        "hit_ratio_95": interval(done.request_hits, done.request_accesses),
        "adjusted_hit_ratio": metrics.adjusted_hit_ratio(done.accesses, done.misses, done.proactive),
        "loads_a_token": _per_token(done),
        "loads_a_token_95": interval(request_loads, done.request_tokens),
        "misses_a_token": a_token._asdict() if a_token else None,
        **_bytes(done, sizes),
        "sessions": by_session(done, sessions),
        "gap_closed": _gap(done, references.lru, references.belady_bypass),
        "gap_closed_forced": _gap(done, references.lru, references.belady_forced),
    }


def by_session(done: Replay, sessions: int) -> list[dict[str, Any]] | None:
    """What each place in the turn got of the shared cache: place s serves the requests s, s + sessions, ... None for a single one."""
    if sessions == 1:
        return None
    place_R = np.arange(len(done.request_tokens)) % sessions
    sums = {
        "requests": np.ones_like(place_R), "tokens": done.request_tokens, "accesses": done.request_accesses,
        "misses": done.request_misses, "proactive": done.request_proactive,
    }  # fmt: skip
    counts = {name: np.bincount(place_R, of, sessions).astype(int).tolist() for name, of in sums.items()}
    rows = [dict(zip(counts, row, strict=True)) for row in zip(*counts.values(), strict=True)]
    return [
        {
            **row,
            "hit_ratio": metrics.ratio(row["accesses"] - row["misses"], row["accesses"]),
            "loads_a_token": metrics.ratio(row["misses"] + row["proactive"], row["tokens"]),
        }
        for row in rows
    ]


def best(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each arm and capacity the cell that loads least of those whose policy a decoder can run; the first of equals."""
    live = {*live_policies()}
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for cell in cells:
        place = cell["arm"], cell["capacity"]
        if choose(cell["policy"]).name in live and (place not in found or _moved(cell) < _moved(found[place])):
            found[place] = cell
    names = ("arm", "capacity", "policy", "admission", "hit_ratio", "loads_a_token", "mb_a_token", "gap_closed")
    return [{name: found[place][name] for name in names} for place in sorted(found)]


def _moved(cell: dict[str, Any]) -> float:
    return cell["loads_a_token"] if cell["mb_a_token"] is None else cell["mb_a_token"]


def interval(numerators: np.ndarray, denominators: np.ndarray) -> metrics.Interval | None:
    """95 % over requests, of the ratio of sums; None where fewer than two requests have a say."""
    if np.count_nonzero(denominators) < 2:
        return None
    return metrics.bootstrap(numerators, denominators, seed=BOOTSTRAP_SEED)


def changes(base: Replay | None, done: Replay) -> dict[str, Any]:
    """Loads a token against the base's, relatively; null without a base. The interval is paired where both have requests
    of the same lengths, else null."""
    if base is None:
        return {"loads_change": None, "loads_change_95": None}
    before, after = (one.request_misses + one.request_proactive for one in (base, done))
    paired = None
    if np.array_equal(base.request_tokens, done.request_tokens) and np.count_nonzero(done.request_tokens) > 1:
        sums = (before, base.request_tokens), (after, done.request_tokens)
        paired = metrics.bootstrap_change(*sums, metrics.relative, seed=BOOTSTRAP_SEED)
    was, now = _per_token(base), _per_token(done)
    return {"loads_change": metrics.ratio(now - was, was), "loads_change_95": paired}


def _per_token(done: Replay) -> float:
    return done.loads / done.tokens


def _gap(done: Replay, lru: float | None, belady: float | None) -> float | None:
    return None if lru is None or belady is None else metrics.gap_closed(_per_token(done), lru, belady)


def _bytes(done: Replay, sizes: Sizes) -> dict[str, Any]:
    """MB a token and the estimate. Where layers differ in size, a token's time takes the mean size of a load."""
    if sizes.layer_bytes is None:
        return {"mb_a_token": None, "mb_a_token_95": None, "tpot_ms_estimate": None}
    moved = done.request_loads @ sizes.layer_bytes  # [R]
    times = None
    if sizes.estimate is not None:
        mean_bytes = moved.sum() / max(1, done.request_loads.sum())
        proactive = done.proactive / done.tokens
        loads = done.token_misses + proactive
        times = metrics.summary([sizes.estimate.tpot_ms(count * mean_bytes) for count in loads])
    return {
        "mb_a_token": metrics.ratio(moved.sum() / 1e6, done.tokens),
        "mb_a_token_95": interval(moved / 1e6, done.request_tokens),
        "tpot_ms_estimate": times._asdict() if times else None,
    }
