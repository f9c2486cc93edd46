"""Metrics: hand values, and the published arithmetic of objectives-and-metrics.md (6)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remoe_cli.report import metrics

# ---- published arithmetic

REMOE_ACCESSES = 128 * 64 * 26 * 6
QWEN_ACCESSES, QWEN_EXPERT = 384, 9_437_184  # a token; bytes
DEEPSEEK_ACCESSES, DEEPSEEK_EXPERT = 156, 17_301_504


def test_remoe_counts():
    assert REMOE_ACCESSES == 1_277_952
    for hit, misses in ((0.3187, 870_700), (0.3687, 806_800)):
        assert round(metrics.hit_ratio(REMOE_ACCESSES, misses), 4) == hit


@pytest.mark.parametrize(("hit", "load", "published"), [(0.6119, 1406.4, 1406.50), (0.7313, 973.7, 973.86)])
def test_qwen_load(hit, load, published):
    got = metrics.load_mb(QWEN_ACCESSES * (1 - hit), 0, QWEN_EXPERT, tokens=1)
    assert round(got, 1) == load
    assert got == pytest.approx(published, rel=2e-4)  # they rounded the hit ratio


def test_spatio_temporal_load():
    demand, proactive = 35.86, 120.33
    assert round(100 * metrics.hit_ratio(QWEN_ACCESSES, demand), 2) == 90.66
    assert round(100 * metrics.adjusted_hit_ratio(QWEN_ACCESSES, demand, proactive), 2) == 69.03
    assert round(metrics.load_mb(demand, proactive, QWEN_EXPERT, tokens=1), 2) == 1473.99


def test_expert_sizes():
    assert metrics.load_mb(1, 0, DEEPSEEK_EXPERT, 1) == pytest.approx(17.30, abs=5e-3)
    assert metrics.load_mb(DEEPSEEK_ACCESSES * 10, 0, DEEPSEEK_EXPERT, 10) == pytest.approx(156 * 17.301504)


# ---- hits and loads


def test_gap_closed_by_hand():
    assert metrics.gap_closed(load=70, lru_base=100, belady_base=40) == 0.5
    assert metrics.gap_closed(load=100, lru_base=100, belady_base=40) == 0
    assert metrics.gap_closed(load=110, lru_base=100, belady_base=40) == pytest.approx(-1 / 6)
    assert metrics.gap_closed(load=10, lru_base=100, belady_base=40) == 1.5
    assert metrics.gap_closed(load=70, lru_base=100, belady_base=100) is None


def test_ratios_by_hand():
    assert metrics.hit_ratio(accesses=8, demand=2) == 0.75
    assert metrics.adjusted_hit_ratio(accesses=8, demand=2, proactive=4) == 0.5
    assert metrics.load_mb(demand=2, proactive=4, expert_bytes=500_000, tokens=3) == 1.0
    assert metrics.hit_ratio(0, 0) is metrics.adjusted_hit_ratio(0, 0, 0) is metrics.load_mb(0, 0, 1, 0) is None


# ---- repetition


def test_repetition_by_hand():
    ids = [1, 2, 3, 4, 1, 2, 3, 4]
    assert metrics.distinct_n(ids) == 4 / 5  # 1234 comes twice
    assert metrics.distinct_n(ids, 1) == 0.5
    assert metrics.distinct_n([1, 2, 3]) is None
    assert metrics.repetition_rate(ids) == 4 / 7
    assert metrics.repetition_rate(ids, window=3) == 0
    assert metrics.repetition_rate([5] * 10, window=1) == 1
    assert metrics.repetition_rate([5]) is None


# ---- latency


def test_summary_by_hand():
    assert metrics.summary(range(101)) == (50, 50, 95, 99)
    assert metrics.summary([1, 2]) == pytest.approx((1.5, 1.5, 1.95, 1.99))
    assert metrics.summary([]) is None


def test_tpot_leaves_out_the_first_token():
    assert metrics.tpot(ttft=100, e2el=400, n=4) == 100
    assert metrics.tpot(ttft=100, e2el=100, n=1) is None


def test_latency_by_hand():
    got = metrics.latency(ttft_s=[0.5, 0.1], itl_s=[[0.01, 0.03], []])
    assert got.ttft.mean == pytest.approx(300)
    assert got.itl == pytest.approx((20, 20, 29, 29.8))
    assert got.tpot == pytest.approx((20, 20, 20, 20))  # the second request has one token only
    assert got.e2el.mean == pytest.approx((540 + 100) / 2)


def test_latency_of_single_tokens_has_no_tpot():
    got = metrics.latency([0.5], [[]])
    assert (got.tpot, got.itl) == (None, None) and got.ttft == got.e2el == (500, 500, 500, 500)
    with pytest.raises(ValueError, match="1 first tokens, 2 lists"):
        metrics.latency([0.5], [[], []])


# ---- intervals


def test_bootstrap_of_equal_requests_is_a_point():
    assert metrics.bootstrap([2, 4, 6], [4, 8, 12], seed=0) == (0.5, 0.5)


def test_bootstrap_covers_a_known_spread():
    hits = np.random.default_rng(1).binomial(100, 0.3, size=400)
    low, high = metrics.bootstrap(hits, np.full(400, 100), seed=0)
    error = hits.std() / 100 / math.sqrt(400)
    assert (low, high) == pytest.approx((hits.mean() / 100 - 1.96 * error, hits.mean() / 100 + 1.96 * error), abs=4e-4)


def test_bootstrap_is_a_ratio_of_sums():
    """Two requests, 1/1 and 0/3: resamples are 1 (a quarter), 1/4 (a half) or 0 (a quarter); never a mean of ratios."""
    low, high = metrics.bootstrap([1, 0], [1, 3], seed=3, level=0.4)
    assert (low, high) == (0.25, 0.25)
    assert metrics.bootstrap([1, 0], [1, 3], seed=3) == (0, 1)


def test_bootstrap_repeats_with_its_seed():
    hits, accesses = np.arange(20), np.full(20, 40)
    assert metrics.bootstrap(hits, accesses, seed=5) == metrics.bootstrap(hits, accesses, seed=5)
    assert metrics.bootstrap(hits, accesses, seed=5) != metrics.bootstrap(hits, accesses, seed=6)


def test_bootstrap_where_undefined():
    assert metrics.bootstrap([], [], seed=0) is None
    assert metrics.bootstrap([0, 0], [0, 0], seed=0) is None
    assert metrics.bootstrap([0, 1], [0, 2], seed=0) == (0.5, 0.5)  # resamples of the empty request alone are left out
    with pytest.raises(ValueError, match="one length"):
        metrics.bootstrap([1], [1, 2], seed=0)


# ---- paired intervals


def slow_change(before, after, change, seed: int, resamples: int) -> tuple[float, float]:
    """Percentiles 2.5 and 97.5 of the change, resample by resample, request by request."""
    rng, requests, found = np.random.default_rng(seed), len(before[0]), []
    picks = rng.integers(0, requests, size=(resamples, requests))
    for pick in picks:
        tops, bottoms = ([sum(float(one[part][r]) for r in pick) for one in (before, after)] for part in (0, 1))
        if 0 not in bottoms:
            found.append(change(tops[0] / bottoms[0], tops[1] / bottoms[1]))
    found.sort()
    ends = []
    for share in (0.025, 0.975):
        at = share * (len(found) - 1)
        low, part = int(at), at - int(at)
        ends.append(found[low] + part * (found[min(low + 1, len(found) - 1)] - found[low]))
    return ends[0], ends[1]


counts = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=6)


@given(counts, st.integers(0, 3), st.sampled_from([metrics.relative, metrics.difference]))
def test_bootstrap_change_equals_its_slow_twin(rows, seed, change):
    before, after = (
        ([row[0] for row in rows], [row[2] for row in rows]),
        ([row[1] for row in rows], [row[2] for row in rows]),
    )
    got = metrics.bootstrap_change(before, after, change, seed=seed, resamples=50)
    if sum(before[1]) == 0:
        assert got is None
    else:
        assert got == pytest.approx(slow_change(before, after, change, seed, 50))


def test_a_change_alike_in_every_request_is_a_point():
    """Requests differ tenfold, the change does not: only pairing shows it."""
    before, tokens = np.array([10, 40, 100]), [10, 10, 10]
    change = metrics.bootstrap_change((before, tokens), (before * 0.75, tokens), metrics.relative, seed=0)
    assert change == pytest.approx((-0.25, -0.25))
    assert metrics.bootstrap_change(
        (before, tokens), (before + 1, tokens), metrics.difference, seed=0
    ) == pytest.approx((0.1, 0.1))
    low, high = metrics.bootstrap(before, tokens, seed=0)
    assert high - low > 4


def test_bootstrap_change_by_hand():
    """Two requests, misses 2 -> 1 and 4 -> 4: resamples say -1/2 (a quarter), -1/6 (a half), 0 (a quarter)."""
    before, after = ([2, 4], [1, 1]), ([1, 4], [1, 1])
    assert metrics.bootstrap_change(before, after, metrics.relative, seed=0) == (-0.5, 0)
    assert metrics.bootstrap_change(before, after, metrics.relative, seed=0, level=0.4) == pytest.approx(
        (-1 / 6, -1 / 6)
    )


def test_bootstrap_change_where_undefined():
    one, none, broken = ([1.0, 2.0], [1, 1]), ([0, 0], [0, 0]), ([1.0, math.nan], [1, 1])
    assert metrics.bootstrap_change(one, none, metrics.difference, seed=0) is None
    assert (
        metrics.bootstrap_change(([0, 0], [1, 1]), one, metrics.relative, seed=0) is None
    )  # from nothing to something
    assert metrics.bootstrap_change(one, broken, metrics.difference, seed=0) is None
    assert metrics.bootstrap(*broken, seed=0) is None
    with pytest.raises(ValueError, match="do not pair"):
        metrics.bootstrap_change(one, ([1], [1]), metrics.difference, seed=0)


def test_95_percent_intervals_hold_the_truth_about_95_times_in_100():
    """300 experiments of 40 requests: misses a request are Poisson, with a mean of its own that the change multiplies by 0.7."""
    rng, held = np.random.default_rng(7), 0
    tokens = np.full(40, 64)
    for experiment in range(300):
        mean = rng.gamma(20, 5, size=40)
        before, after = rng.poisson(mean), rng.poisson(0.7 * mean)
        interval = metrics.bootstrap_change(
            (before, tokens), (after, tokens), metrics.relative, seed=experiment, resamples=400
        )
        held += interval.low <= -0.3 <= interval.high
    assert 0.90 <= held / 300 <= 0.98


# ---- rows of text


def test_text_rows_by_hand():
    rows = metrics.TextRows(np.array([2.0, 4.0]), np.array([0.5, 1.0]), np.array([1.0, 2.0]))
    assert rows.measures() == (pytest.approx(math.exp(2)), 2, 0.5, 3)
    broken = metrics.TextRows(np.array([3000.0]), np.array([0.5]), np.array([1.0]))
    assert broken.measures().perplexity == math.inf
