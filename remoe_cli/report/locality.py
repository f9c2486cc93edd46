"""Every figure of a report that is computed from routing alone: overlap, reuse, working sets, usage. numpy only.

All tokens of a trace count: pass `trace.decode()` for the decode figure. A figure that is undefined is None. Traces are read
in blocks of tokens, so that a memory-mapped one is never copied whole.
Defined, where no other source is named, in docs/report.md and docs/replay.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from remoe_cli.report.metrics import ratio
from remoe_cli.routing import RoutingTrace

_BLOCK = 1 << 20  # accesses read at once


class Overlap(NamedTuple):
    """Expert overlap of tokens a lag apart. shared, possible: [R] int64, so that any set of requests has
    EOR = shared.sum() / possible.sum(): experts shared with the token before, and K a (pair, layer)."""

    shared: np.ndarray
    possible: np.ndarray

    @property
    def eor(self) -> float | None:
        return ratio(self.shared.sum(), self.possible.sum())


def overlap(trace: RoutingTrace, lag: int = 1) -> Overlap:
    """EOR of every request, between tokens `lag` apart; adjacent ones by default.

    IR_t = |E_t & E_{t-lag}| / K; EOR = sum of IR over all (pair, layer) / their number; no pair crosses a border.
    Raises ValueError for a lag below 1.
    """
    if lag < 1:
        raise ValueError(f"lag: want at least 1 token, got {lag}")
    shared = np.zeros(trace.n_tokens, dtype=np.int64)
    for start, stop in _blocks(trace, lag):
        later, earlier = trace.experts[start:stop], trace.experts[start - lag : stop - lag]
        for slot in range(trace.top_k):
            shared[start:stop] += np.count_nonzero(later == earlier[..., slot, None], axis=(1, 2))
    lengths = np.diff(trace.borders)
    place = np.arange(trace.n_tokens) - np.repeat(trace.borders[:-1], lengths)
    shared[place < lag] = 0
    before = np.concatenate([[0], np.cumsum(shared)])
    pairs = np.maximum(lengths - lag, 0)
    return Overlap(np.diff(before[trace.borders]), pairs * trace.n_layers * trace.top_k)


def eor(trace: RoutingTrace, lag: int = 1) -> float | None:
    """Expert overlap ratio over all requests; None where no request has two tokens `lag` apart. See `overlap`."""
    return overlap(trace, lag).eor


class Reuse(NamedTuple):
    """When experts come back. counts[d]: accesses whose expert the same layer and request used d tokens before and not
    since, d = 1 to the greatest found (counts[0] is 0); first: accesses without an earlier use. All int64, in accesses."""

    counts: np.ndarray
    first: int

    def within(self, tokens: int) -> float | None:
        """The share of accesses whose expert was last used at most so many tokens before."""
        return ratio(self.counts[: tokens + 1].sum(), self.counts.sum() + self.first)


def reuse(trace: RoutingTrace) -> Reuse:
    """The histogram of reuse distances in tokens, over all layers and requests.

    Distances in distinct experts (LRU stack distances) are the steps of `cache.curve.lru_curve`.
    """
    counts = np.zeros(int(np.diff(trace.borders).max(initial=0)) + 1, dtype=np.int64)
    owner = np.repeat(np.arange(trace.n_requests, dtype=np.int32), np.diff(trace.borders))
    for layer in range(trace.n_layers):
        ids = trace.experts[:, layer].ravel()
        order = np.argsort(ids, kind="stable")  # by expert, then in time
        tokens = (order // trace.top_k).astype(np.int32)
        again = (np.diff(ids[order]) == 0) & (np.diff(owner[tokens]) == 0)
        counts += np.bincount(np.diff(tokens)[again], minlength=len(counts))
    return Reuse(np.trim_zeros(counts, "b") if counts.any() else counts[:1], trace.experts.size - int(counts.sum()))


class WorkingSet(NamedTuple):
    """Distinct experts of a layer in a window: mean, 95th percentile and greatest, over windows and layers."""

    mean: float
    p95: float
    most: int


def working_set(trace: RoutingTrace, window: int | None = None) -> WorkingSet | None:
    """Distinct experts of a layer in non-overlapping windows of `window` tokens, or in whole requests.

    Windows start at each request and a remainder is dropped; empty requests do not count. None where nothing is left.
    """
    if window is not None and window < 1:
        raise ValueError(f"window: want at least 1 token, got {window}")
    found = np.zeros(trace.n_experts + 1, dtype=np.int64)  # windows by their number of distinct experts
    for start, stop in zip(trace.borders[:-1], trace.borders[1:]):
        size = window or stop - start
        if size == 0:
            continue
        at_once = max(1, _BLOCK // (size * trace.n_layers * trace.top_k)) * size
        for first in range(start, stop - size + 1, at_once):
            last = min(first + at_once, first + (stop - first) // size * size)
            found += _distinct(trace.experts[first:last], size, trace.n_experts)
    if not found.sum():
        return None
    numbers, up_to = np.arange(len(found)), np.cumsum(found)
    p95 = int(np.searchsorted(up_to, 0.95 * up_to[-1]))
    return WorkingSet(float((numbers * found).sum() / found.sum()), float(p95), int(numbers[found > 0].max()))


def _distinct(experts_TLK: np.ndarray, size: int, n_experts: int) -> np.ndarray:
    """[E + 1], how many (window, layer) hold how many distinct experts; T is a multiple of the window's size."""
    tokens, n_layers, _ = experts_TLK.shape
    seen = np.zeros((tokens // size, n_layers, n_experts), dtype=bool)
    windows = np.arange(tokens)[:, None, None] // size
    seen[windows, np.arange(n_layers)[:, None], experts_TLK] = True
    return np.bincount(np.count_nonzero(seen, axis=2).ravel(), minlength=n_experts + 1)


def distinct_experts(trace: RoutingTrace, window: int | None = None) -> float | None:
    """The mean working set. See `working_set`."""
    found = working_set(trace, window)
    return found.mean if found else None


class Usage(NamedTuple):
    """How evenly experts are used. Entropy is H(q) / ln E, CV is std(q) / mean(q) (population).

    pooled: of the shares summed over layers by expert number (ReMoE's figures); layers: the mean over layers.
    effective_experts: mean over layers of exp(H).
    """

    entropy_pooled: float | None
    entropy_layers: float | None
    cv_pooled: float | None
    cv_layers: float | None
    effective_experts: float | None


def usage(trace: RoutingTrace) -> Usage:
    """Usage figures of all tokens of a trace; None throughout where it has none, entropies None for a single expert."""
    counts = trace.uses()
    if not counts.sum():
        return Usage(None, None, None, None, None)
    pooled = counts.sum(axis=0)
    nats = np.array([_entropy(layer) for layer in counts])
    most = np.log(trace.n_experts)
    return Usage(
        entropy_pooled=ratio(_entropy(pooled), most),
        entropy_layers=ratio(nats.mean(), most),
        cv_pooled=float(pooled.std() / pooled.mean()),
        cv_layers=float((counts.std(axis=1) / counts.mean(axis=1)).mean()),
        effective_experts=float(np.exp(nats).mean()),
    )


def parallel_load(trace: RoutingTrace, ranks: int) -> float | None:
    """Expert parallelism: load of the busiest rank over the mean rank, mean over layers; 1 is perfect balance.

    Experts lie in equal contiguous blocks, one a rank. None where they can't (E not a multiple of `ranks`).
    """
    if ranks < 1:
        raise ValueError(f"ranks: want at least 1, got {ranks}")
    counts = trace.uses()
    if trace.n_experts % ranks or not counts.sum():
        return None
    loads = counts.reshape(trace.n_layers, ranks, -1).sum(axis=2)
    return float((loads.max(axis=1) / loads.mean(axis=1)).mean())


def _blocks(trace: RoutingTrace, start: int = 0) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks of tokens, from token `start` on."""
    size = max(1, _BLOCK // (trace.n_layers * trace.top_k))
    for first in range(start, trace.n_tokens, size):
        yield first, min(first + size, trace.n_tokens)


def _entropy(counts: np.ndarray) -> float:
    """H(q) in nats of the shares q of `counts`."""
    q = counts[counts > 0] / counts.sum()
    return float(-(q * np.log(q)).sum())
