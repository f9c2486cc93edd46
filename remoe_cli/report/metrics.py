"""Every figure of a report that is computed from counts, routing, token ids or times. numpy only.

A figure that is undefined (a zero denominator, too short an input) is None, so that it becomes null in report.json.
Source, where no other is named: objectives-and-metrics.md, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from remoe_cli.routing import RoutingTrace


class Overlap(NamedTuple):
    """Expert overlap of adjacent tokens. shared, possible: [R] int64, so that any set of requests has
    EOR = shared.sum() / possible.sum(): experts shared with the token before, and K a (pair, layer)."""

    shared: np.ndarray
    possible: np.ndarray

    @property
    def eor(self) -> float | None:
        return ratio(self.shared.sum(), self.possible.sum())


def overlap(trace: RoutingTrace) -> Overlap:
    """EOR of every request of a trace, over all its tokens: pass `trace.decode()` for the decode figure.

    IR_t = |E_t & E_{t-1}| / K; EOR = sum of IR over all (pair, layer) / their number; no pair crosses a border.
    """
    later, earlier = trace.experts[1:], trace.experts[:-1]
    shared = np.zeros(len(later), dtype=np.int64)
    for slot in range(trace.top_k):
        shared += (later == earlier[..., slot, None]).sum(axis=(1, 2))
    shared = np.concatenate([[0], shared]) if trace.n_tokens else np.zeros(0, dtype=np.int64)
    firsts = trace.borders[:-1][np.diff(trace.borders) > 0]
    shared[firsts] = 0
    before = np.concatenate([[0], np.cumsum(shared)])
    pairs = np.maximum(np.diff(trace.borders) - 1, 0)
    return Overlap(np.diff(before[trace.borders]), pairs * trace.n_layers * trace.top_k)


def eor(trace: RoutingTrace) -> float | None:
    """Expert overlap ratio over all requests; None where no request has two tokens. See `overlap`."""
    return overlap(trace).eor


def hit_ratio(accesses: float, demand: float) -> float | None:
    """Hit = 1 - D/A. With unique accounting this is uHR."""
    return ratio(accesses - demand, accesses)


def adjusted_hit_ratio(accesses: float, demand: float, proactive: float) -> float | None:
    """AdjHit = (A - D) / (A + P): proactive loads are paid for."""
    return ratio(accesses - demand, accesses + proactive)


def load_mb(demand: float, proactive: float, expert_bytes: float, tokens: float) -> float | None:
    """Decimal MB moved a token: (D + P) S_exp / T. expert_bytes: stored bytes of one expert."""
    return ratio((demand + proactive) * expert_bytes / 1e6, tokens)


def gap_closed(load: float, lru_base: float, belady_base: float) -> float | None:
    """Share of the way from base + LRU to base + Belady that `load` goes; all three in loads (D + P) or bytes.

    Belady of the same admission form and the same total slots. None where there is no gap (forced, C = K).
    """
    return ratio(lru_base - load, lru_base - belady_base)


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite where no float holds it."""
    with np.errstate(over="ignore"):
        return float(np.exp(loss))


class TextMeasures(NamedTuple):
    """perplexity: exp of the mean loss over `tokens` predicted tokens. eor: mean over adjacent pairs and MoE layers."""

    perplexity: float
    loss: float
    eor: float
    tokens: int


class TextRows(NamedTuple):
    """Teacher-forced sums of each of N rows of text, float64: loss_N in nats and shared_N (overlaps), both over the row's
    pairs_N pairs of neighbours, which are its predicted tokens."""

    loss_N: np.ndarray
    shared_N: np.ndarray
    pairs_N: np.ndarray

    def measures(self) -> TextMeasures:
        pairs = int(self.pairs_N.sum())
        loss = float(self.loss_N.sum()) / pairs
        return TextMeasures(perplexity(loss), loss, float(self.shared_N.sum()) / pairs, pairs)


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


def usage_counts(trace: RoutingTrace) -> np.ndarray:
    """[L, E] int64, how many tokens used each expert."""
    flat = trace.experts + np.arange(trace.n_layers)[:, None] * trace.n_experts
    counts = np.bincount(flat.ravel(), minlength=trace.n_layers * trace.n_experts)
    return counts.reshape(trace.n_layers, trace.n_experts)


def usage(trace: RoutingTrace) -> Usage:
    """Usage figures of all tokens of a trace; None throughout where it has none, entropies None for a single expert."""
    counts = usage_counts(trace)
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


def distinct_experts(trace: RoutingTrace, window: int | None = None) -> float | None:
    """Mean number of distinct experts of a layer in a request, or in non-overlapping windows of `window` tokens.

    Windows start at each request and a remainder is dropped; empty requests do not count. None where nothing is left.
    """
    if window is not None and window < 1:
        raise ValueError(f"window: want at least 1 token, got {window}")
    spans = []
    for start, stop in zip(trace.borders[:-1], trace.borders[1:]):
        size = window or stop - start
        spans += [(first, first + size) for first in range(start, stop - size + 1, size)] if size else []
    if not spans:
        return None
    layers = np.arange(trace.n_layers)[:, None]
    total = 0
    for start, stop in spans:
        seen = np.zeros((trace.n_layers, trace.n_experts), dtype=bool)
        seen[layers, trace.experts[start:stop]] = True
        total += int(seen.sum())
    return total / (len(spans) * trace.n_layers)


def parallel_load(trace: RoutingTrace, ranks: int) -> float | None:
    """Expert parallelism: load of the busiest rank over the mean rank, mean over layers; 1 is perfect balance.

    Experts lie in equal contiguous blocks, one a rank. None where they can't (E not a multiple of `ranks`).
    """
    if ranks < 1:
        raise ValueError(f"ranks: want at least 1, got {ranks}")
    counts = usage_counts(trace)
    if trace.n_experts % ranks or not counts.sum():
        return None
    loads = counts.reshape(trace.n_layers, ranks, -1).sum(axis=2)
    return float((loads.max(axis=1) / loads.mean(axis=1)).mean())


def distinct_n(ids: Sequence[int], n: int = 4) -> float | None:
    """Distinct n-grams / n-grams of one text of token ids; None where it is shorter than n."""
    grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
    return ratio(len(set(grams)), len(grams))


def repetition_rate(ids: Sequence[int], window: int = 16) -> float | None:
    """Share of tokens that occur among the `window` tokens before them (rep/l of Welleck et al. 2020, 1908.04319).

    The first token has none before it and does not count; None for fewer than two tokens. A loop shorter than the
    window gives 1.
    """
    repeats = [ids[at] in ids[max(0, at - window) : at] for at in range(1, len(ids))]
    return ratio(sum(repeats), len(repeats))


class Summary(NamedTuple):
    """Of one latency, in ms; percentiles interpolate linearly."""

    mean: float
    p50: float
    p95: float
    p99: float


def summary(values_ms: Sequence[float]) -> Summary | None:
    """mean, p50, p95, p99; None where there is no value."""
    if len(values_ms) == 0:
        return None
    values = np.asarray(values_ms, dtype=np.float64)
    return Summary(float(values.mean()), *(float(at) for at in np.percentile(values, [50, 95, 99])))


def tpot(ttft: float, e2el: float, n: int) -> float | None:
    """Time per output token after the first: (e2el - ttft) / (n - 1) of n output tokens; None where n = 1."""
    return ratio(e2el - ttft, n - 1)


class Latency(NamedTuple):
    """Names as in vLLM's serving benchmark; None where no request has a value."""

    ttft: Summary | None
    tpot: Summary | None
    itl: Summary | None
    e2el: Summary | None


def latency(ttft_s: Sequence[float], itl_s: Sequence[Sequence[float]]) -> Latency:
    """Summaries in ms over requests from seconds: ttft_s[r] to the first token, itl_s[r] the gaps between the next ones.

    ttft, tpot and e2el have one value a request, itl one a gap. A request of one token has no tpot.
    """
    if len(ttft_s) != len(itl_s):
        raise ValueError(f"latency: {len(ttft_s)} first tokens, {len(itl_s)} lists of gaps")
    e2el = [first + sum(gaps) for first, gaps in zip(ttft_s, itl_s)]
    each = [tpot(first, end, len(gaps) + 1) for first, end, gaps in zip(ttft_s, e2el, itl_s)]
    in_seconds = (ttft_s, [one for one in each if one is not None], [gap for gaps in itl_s for gap in gaps], e2el)
    return Latency(*(summary([second * 1e3 for second in seconds]) for seconds in in_seconds))


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


Sums = tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray]


def bootstrap(
    numerators: Sequence[float] | np.ndarray,
    denominators: Sequence[float] | np.ndarray,
    *,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
) -> Interval | None:
    """Percentile bootstrap over requests (or rows of text) of sum(numerators) / sum(denominators). [R] each.

    Resamples without a denominator are left out. None where there is no request, no denominator at all, or a value
    that is not finite.
    """
    ratios = _resampled(numerators, denominators, seed, resamples)
    return _interval(ratios[~np.isnan(ratios)], level) if np.isfinite(numerators).all() else None


def bootstrap_change(
    before: Sums,
    after: Sums,
    change: Callable[[np.ndarray, np.ndarray], np.ndarray],
    *,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
) -> Interval | None:
    """Paired percentile bootstrap of change(ratios before, ratios after), such as `relative`.

    before, after: (numerators [R], denominators [R]) of two systems on the same R requests. Each resample takes the same
    requests for both, so that what makes a request hard for both falls out. Otherwise as `bootstrap`.
    """
    if len(before[0]) != len(after[0]):
        raise ValueError(f"bootstrap_change: {len(before[0])} requests before, {len(after[0])} after: they do not pair")
    first, second = (_resampled(*sums, seed, resamples) for sums in (before, after))
    known = ~np.isnan(first) & ~np.isnan(second)
    finite = np.isfinite(before[0]).all() and np.isfinite(after[0]).all()
    with np.errstate(divide="ignore", invalid="ignore"):
        return _interval(change(first[known], second[known]), level) if finite else None


def relative(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    return after / before - 1


def difference(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    return after - before


def _resampled(numerators, denominators, seed: int, resamples: int) -> np.ndarray:
    """[resamples] ratios, NaN where a resample has no denominator. The same seed and R give the same resamples."""
    over, under = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if over.ndim != 1 or over.shape != under.shape:
        raise ValueError(f"bootstrap: want two lists of one length, got {over.shape} and {under.shape}")
    picks = np.random.default_rng(seed).integers(0, max(1, len(over)), size=(resamples, len(over)))
    tops, bottoms = over[picks].sum(axis=1), under[picks].sum(axis=1)
    return np.divide(tops, bottoms, out=np.full(resamples, np.nan), where=bottoms != 0)


def _interval(values: np.ndarray, level: float) -> Interval | None:
    if len(values) == 0 or not np.isfinite(values).all():
        return None
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator / denominator, None where the denominator is 0."""
    return None if denominator == 0 else float(numerator / denominator)


def _entropy(counts: np.ndarray) -> float:
    """H(q) in nats of the shares q of `counts`."""
    q = counts[counts > 0] / counts.sum()
    return float(-(q * np.log(q)).sum())
