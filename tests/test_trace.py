"""RoutingTrace: what it refuses, decode() and concat()."""

from __future__ import annotations

import numpy as np
import pytest

from remoe_cli.routing import RoutingTrace


def trace(**changes) -> RoutingTrace:
    """Two requests of 3 and 2 tokens, one layer, top-2 of 4; the first has 2 prompt tokens, the second 1."""
    fields = {
        "experts": np.array([[[0, 1]], [[1, 2]], [[2, 3]], [[3, 0]], [[1, 3]]]),
        "borders": np.array([0, 3, 5]),
        "prefill": np.array([True, True, False, True, False]),
        "n_experts": 4,
        "weights": np.array([[[0.9, 0.1]], [[0.8, 0.2]], [[0.7, 0.3]], [[0.6, 0.4]], [[0.5, 0.5]]]),
    }
    return RoutingTrace(**{**fields, **changes})


def test_shapes_and_types():
    one = trace()
    assert (one.n_tokens, one.n_layers, one.top_k, one.n_requests) == (5, 1, 2, 2)
    assert (one.experts.dtype, one.borders.dtype, one.weights.dtype) == (np.int16, np.int64, np.float16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": np.zeros((5, 2), dtype=int)}, r"experts: want \[T, L, K\] integers"),
        ({"experts": np.zeros((5, 1, 2))}, "experts: want .* got float64"),
        ({"experts": np.full((5, 1, 2), [0, 4])}, "experts: want ids 0 to 3, got 0 to 4"),
        ({"experts": np.full((5, 1, 2), [-1, 0])}, "experts: want ids 0 to 3, got -1 to 0"),
        ({"experts": np.full((5, 1, 2), [2, 2])}, "experts: token 0 names an expert twice in layer 0"),
        ({"n_experts": 1}, "n_experts: want top_k 2"),
        ({"n_experts": 40_000}, "n_experts: want top_k 2 to 32767"),
        ({"borders": np.array([0, 3, 6])}, "borders: want rising positions from 0 to 5"),
        ({"borders": np.array([1, 5])}, "borders"),
        ({"borders": np.array([0, 4, 3, 5])}, "borders"),
        ({"borders": np.array([0.0, 5.0])}, "borders"),
        ({"prefill": np.zeros(4, dtype=bool)}, r"prefill: want \[5\] bool"),
        ({"prefill": np.zeros(5, dtype=int)}, r"prefill: want \[5\] bool, got int"),
        ({"prefill": np.array([False, True, False, True, False])}, "a prompt token follows a decoded token"),
        ({"weights": np.zeros((5, 1, 3))}, "weights: want floats"),
        ({"weights": np.zeros((5, 1, 2), dtype=int)}, "weights: want floats"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        trace(**changes)


def test_decode_drops_the_prompt_and_keeps_the_requests():
    got = trace().decode()
    assert got.experts.tolist() == [[[2, 3]], [[1, 3]]]
    assert got.borders.tolist() == [0, 1, 2]
    assert not got.prefill.any()
    assert got.weights is not None and got.weights[:, 0, 0].tolist() == [np.float16(0.7), 0.5]


def test_decode_keeps_a_request_that_was_all_prompt():
    got = trace(prefill=np.array([True, True, True, True, False])).decode()
    assert got.borders.tolist() == [0, 0, 1]


def test_concat_moves_the_borders():
    got = RoutingTrace.concat([trace(), trace()])
    assert got.borders.tolist() == [0, 3, 5, 8, 10]
    assert np.array_equal(got.experts[5:], trace().experts)
    assert np.array_equal(got.prefill[:5], trace().prefill) and np.array_equal(got.prefill[5:], trace().prefill)
    assert got.weights is not None and got.weights.shape == (10, 1, 2)


def test_concat_keeps_provenance_where_it_agrees():
    base, tuned = trace(provenance={"model": "base"}), trace(provenance={"model": "tuned"})
    assert RoutingTrace.concat([base, base]).provenance == {"model": "base"}
    assert RoutingTrace.concat([base, tuned]).provenance == {"parts": [{"model": "base"}, {"model": "tuned"}]}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([], "no trace"),
        ([trace(), trace(n_experts=5)], "differ"),
        ([trace(), trace(weights=None)], "some have none"),
    ],
)
def test_concat_refuses(others, message):
    with pytest.raises(ValueError, match=message):
        RoutingTrace.concat(others)
