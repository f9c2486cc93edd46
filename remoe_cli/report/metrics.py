"""Every figure of a report that is computed from counts, token ids or times (of routing: locality.py). numpy only.

A figure that is undefined (a zero denominator, too short an input) is None, so that it becomes null in report.json.
Defined, where no other source is named, in docs/report.md and docs/replay.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_BLOCK = 1 << 20  # draws looked at together


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
    """Of latencies in ms, or of counts; percentiles interpolate linearly."""

    mean: float
    p50: float
    p95: float
    p99: float


def summary(values: Sequence[float] | np.ndarray) -> Summary | None:
    """mean, p50, p95, p99; None where there is no value."""
    if len(values) == 0:
        return None
    values = np.asarray(values, dtype=np.float64)
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
    tops, bottoms = np.empty(resamples), np.empty(resamples)
    times = _times(len(over), seed, resamples)
    size = max(1, _BLOCK // max(1, len(over)))
    for start in range(0, resamples, size):
        some = times[start : start + size].astype(np.float64)
        with np.errstate(invalid="ignore"):
            tops[start : start + size], bottoms[start : start + size] = some @ over, some @ under
    return np.divide(tops, bottoms, out=np.full(resamples, np.nan), where=bottoms != 0)


@lru_cache(maxsize=2)
def _times(requests: int, seed: int, resamples: int) -> np.ndarray:
    """[resamples, R], how often each resample draws each request. Shared by all figures of one set of requests."""
    rng = np.random.default_rng(seed)
    picks = (rng.integers(0, max(1, requests), size=requests) for _ in range(resamples))
    return np.stack([np.bincount(pick, minlength=requests).astype(np.uint16) for pick in picks])


def _interval(values: np.ndarray, level: float) -> Interval | None:
    if len(values) == 0 or not np.isfinite(values).all():
        return None
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator / denominator, None where the denominator is 0."""
    return None if denominator == 0 else float(numerator / denominator)
