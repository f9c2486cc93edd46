"""Figures of routing alone: hand values, slow twins, published values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st

from remoe_cli.report import locality
from remoe_cli.routing import RoutingTrace


def trace(rows, borders, n_experts) -> RoutingTrace:
    """rows: [T, L, K]."""
    experts = np.array(rows)
    return RoutingTrace(experts, np.array(borders), np.zeros(len(experts), dtype=bool), n_experts)


# ---- overlap


def test_overlap_by_hand():
    got = locality.overlap(trace([[[0, 1]], [[1, 0]], [[2, 1]], [[2, 1]], [[3, 2]]], [0, 3, 3, 5], 4))
    assert (got.shared.tolist(), got.possible.tolist()) == ([3, 0, 1], [4, 0, 2])
    assert got.eor == 4 / 6  # tokens 2 and 3 are alike, but a border lies between


def test_overlap_means_over_layers():
    assert locality.eor(trace([[[0], [1]], [[0], [2]]], [0, 2], 3)) == 0.5


@pytest.mark.parametrize("borders", [[0, 1, 2], [0, 0, 1, 2, 2]])
def test_overlap_needs_a_pair(borders):
    assert locality.eor(trace([[[0, 1]], [[0, 1]]], borders, 4)) is None


def test_overlap_of_an_empty_trace():
    assert locality.eor(trace(np.zeros((0, 2, 3), dtype=int), [0], 4)) is None


@st.composite
def traces(draw) -> RoutingTrace:
    top_k, n_layers = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    one = st.lists(st.integers(0, 4), min_size=top_k, max_size=top_k, unique=True)
    rows = draw(st.lists(one, min_size=sum(lengths) * n_layers, max_size=sum(lengths) * n_layers))
    return trace(np.array(rows, dtype=int).reshape(-1, n_layers, top_k), np.cumsum([0, *lengths]), 5)


def sets(routing: RoutingTrace) -> list[list[set[int]]]:
    """One list of the tokens' expert sets a (request, layer)."""
    return [
        [{*routing.experts[token, layer].tolist()} for token in range(start, stop)]
        for start, stop in zip(routing.borders, routing.borders[1:])
        for layer in range(routing.n_layers)
    ]


@pytest.fixture(params=[1, 5, 1 << 20], ids=lambda size: f"block {size}")
def block(request, monkeypatch):
    monkeypatch.setattr(locality, "_BLOCK", request.param)


same_for_blocks = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


@same_for_blocks
@given(traces(), st.integers(1, 7))
def test_overlap_equals_its_definition(block, routing, lag):
    ratios = [
        len(now & before) / routing.top_k for tokens in sets(routing) for before, now in zip(tokens, tokens[lag:])
    ]
    got = locality.eor(routing, lag)
    assert got == (pytest.approx(sum(ratios) / len(ratios)) if ratios else None)


def test_overlap_at_a_lag_by_hand():
    routing = trace([[[0, 1]], [[2, 3]], [[1, 0]], [[3, 1]], [[0, 1]]], [0, 4, 5], 4)
    got = locality.overlap(routing, 2)  # tokens 0 and 2 share both, 1 and 3 one; the last request has no such pair
    assert (got.shared.tolist(), got.possible.tolist()) == ([3, 0], [4, 0])
    assert locality.eor(routing, 4) is None
    with pytest.raises(ValueError, match="at least 1"):
        locality.overlap(routing, 0)


# ---- reuse


def test_reuse_by_hand():
    routing = trace([[[0, 1]], [[0, 2]], [[3, 2]], [[1, 0]], [[0, 1]]], [0, 4, 5], 4)
    got = locality.reuse(routing)  # 0 after 1 and 2 tokens, 2 after 1, 1 after 3; the second request starts anew
    assert (got.counts.tolist(), got.first) == ([0, 2, 1, 1], 6)
    assert [got.within(tokens) for tokens in (0, 1, 2, 3, 99)] == [0, 0.2, 0.3, 0.4, 0.4]


def test_reuse_where_undefined():
    got = locality.reuse(trace(np.zeros((0, 1, 1), dtype=int), [0, 0], 4))
    assert (got.counts.tolist(), got.first, got.within(1)) == ([0], 0, None)


@given(traces())
def test_reuse_equals_its_definition(routing):
    distances, first = [], 0
    for tokens in sets(routing):
        for at, now in enumerate(tokens):
            for expert in now:
                earlier = [before for before in range(at) if expert in tokens[before]]
                if earlier:
                    distances.append(at - max(earlier))
                else:
                    first += 1
    got = locality.reuse(routing)
    assert got.first == first
    assert {d: n for d, n in enumerate(got.counts.tolist()) if n} == {d: distances.count(d) for d in {*distances}}
    assert got.counts.sum() + got.first == routing.experts.size
    assert got.counts[1:2].sum() == locality.overlap(routing).shared.sum()  # used one token before


# ---- working sets


def test_working_set_by_hand():
    routing = trace([[[0, 1]], [[1, 2]], [[2, 3]], [[0, 1]], [[0, 1]]], [0, 3, 3, 5], 4)
    assert locality.working_set(routing) == (3, 4, 4)
    assert locality.working_set(routing, 1) == (2, 2, 2)
    assert locality.working_set(routing, 2) == (2.5, 3, 3)
    assert locality.working_set(routing, 4) is None


@same_for_blocks
@given(traces(), st.one_of(st.none(), st.integers(1, 4)))
def test_working_set_equals_its_definition(block, routing, window):
    sizes = []
    for tokens in sets(routing):
        width = window or max(1, len(tokens))
        for start in range(0, len(tokens) - width + 1, width):
            sizes.append(len(set().union(*tokens[start : start + width])))
    got = locality.working_set(routing, window)
    if not sizes:
        assert got is None
    else:
        p95 = sorted(sizes)[math.ceil(0.95 * len(sizes)) - 1]
        assert got == (pytest.approx(sum(sizes) / len(sizes)), p95, max(sizes))


# ---- usage


def test_usage_by_hand():
    # layer 0: experts 0 and 1 twice each; layer 1: expert 2 four times
    routing = trace([[[0], [2]], [[1], [2]], [[0], [2]], [[1], [2]]], [0, 4], 4)
    assert routing.uses().tolist() == [[2, 2, 0, 0], [0, 0, 4, 0]]
    got = locality.usage(routing)
    assert got.entropy_pooled == pytest.approx(1.5 * math.log(2) / math.log(4))  # shares 1/4, 1/4, 1/2, 0
    assert got.entropy_layers == pytest.approx((0.5 + 0) / 2)
    assert got.cv_pooled == pytest.approx(math.sqrt(2) / 2)  # 2, 2, 4, 0: mean 2, std sqrt 2
    assert got.cv_layers == pytest.approx((1 + math.sqrt(3)) / 2)  # 2, 2, 0, 0: std 1 of mean 1; 0, 0, 4, 0: sqrt 3
    assert got.effective_experts == pytest.approx((2 + 1) / 2)


def test_even_usage():
    got = locality.usage(trace([[[0, 1]], [[2, 3]]], [0, 2], 4))
    assert got == pytest.approx((1, 1, 0, 0, 4))


def test_usage_where_undefined():
    assert locality.usage(trace(np.zeros((0, 1, 1), dtype=int), [0], 4)) == (None,) * 5
    single = locality.usage(trace([[[0]]], [0, 1], 1))
    assert (single.entropy_pooled, single.entropy_layers, single.cv_pooled) == (None, None, 0)


def test_published_entropy_and_cv_fit_each_other():
    """ReMoE's .9998 and .0409 are one distribution: entropy is about 1 - CV^2 / (2 ln E)."""
    q = np.ones(64) + 0.0409 * np.resize([1.0, -1.0], 64)
    got = locality.usage(
        trace(np.repeat(np.arange(64), np.round(q * 10_000).astype(int))[:, None, None], [0, 640_000], 64)
    )
    assert (round(got.entropy_pooled, 4), round(got.cv_pooled, 4)) == (0.9998, 0.0409)


def test_distinct_experts_by_hand():
    routing = trace([[[0, 1]], [[1, 2]], [[2, 3]], [[0, 1]], [[0, 1]]], [0, 3, 3, 5], 4)
    assert locality.distinct_experts(routing) == (4 + 2) / 2
    assert (
        locality.distinct_experts(routing, window=2) == (3 + 2) / 2
    )  # the third token of the first request is left over
    assert locality.distinct_experts(routing, window=3) == 4
    assert locality.distinct_experts(routing, window=4) is None
    assert locality.distinct_experts(trace(np.zeros((0, 1, 1), dtype=int), [0, 0], 4)) is None
    with pytest.raises(ValueError, match="at least 1"):
        locality.distinct_experts(routing, window=0)


def test_distinct_experts_means_over_layers():
    assert locality.distinct_experts(trace([[[0], [0]], [[1], [0]]], [0, 2], 2)) == 1.5


def test_parallel_load_by_hand():
    routing = trace([[[0, 1]], [[0, 1]], [[0, 2]], [[0, 3]]], [0, 4], 4)  # loads 4, 2, 1, 1
    assert locality.parallel_load(routing, 1) == 1
    assert locality.parallel_load(routing, 2) == 6 / 4
    assert locality.parallel_load(routing, 4) == 4 / 2
    assert locality.parallel_load(routing, 8) is None
    with pytest.raises(ValueError, match="at least 1"):
        locality.parallel_load(routing, 0)


def test_parallel_load_does_not_let_layers_cancel():
    assert locality.parallel_load(trace([[[0], [1]]], [0, 1], 2), 2) == 2
