"""RoutingTrace: what it refuses, decode() and concat()."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        ({"probabilities": np.zeros((5, 1, 2))}, r"probabilities: want floats \[5, 1, 4\]"),
        ({"temporal": np.zeros((5, 1, 4), dtype=int)}, "temporal: want floats"),
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


def test_decode_and_concat_carry_the_scores_of_all_experts():
    every = np.arange(20, dtype=np.float16).reshape(5, 1, 4)
    one = trace(probabilities=every, temporal=every + 1)
    assert one.decode().probabilities.tolist() == [[[8, 9, 10, 11]], [[16, 17, 18, 19]]]
    assert one.decode().temporal.tolist() == [[[9, 10, 11, 12]], [[17, 18, 19, 20]]]
    both = RoutingTrace.concat([one, one])
    assert np.array_equal(both.probabilities, np.concatenate([every, every]))
    assert np.array_equal(both.temporal, np.concatenate([every, every]) + 1)


def test_decode_of_a_trace_without_prompts_is_the_trace():
    one = trace(prefill=np.zeros(5, dtype=bool))
    assert one.decode() is one


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 9000), layers=st.integers(1, 3), top_k=st.integers(2, 6))
def test_an_expert_named_twice_is_found_wherever_it_is(seed, tokens, layers, top_k):
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 50, (tokens, layers, 1))
    experts = (start + np.arange(top_k)).astype(rng.choice(["uint8", "int16", "int64"]))
    rest = {"borders": np.array([0, tokens]), "prefill": np.zeros(tokens, dtype=bool), "n_experts": 60}
    RoutingTrace(experts, **rest)
    token, layer = rng.integers(tokens), rng.integers(layers)
    first, second = rng.choice(top_k, 2, replace=False)
    experts[token, layer, first] = experts[token, layer, second]
    with pytest.raises(ValueError, match=f"token {token} names an expert twice in layer {layer}$"):
        RoutingTrace(experts, **rest)
    turned = np.ascontiguousarray(experts.transpose(1, 0, 2)).transpose(1, 0, 2)  # as foreign files lie in memory
    with pytest.raises(ValueError, match=f"token {token} names an expert twice in layer {layer}$"):
        RoutingTrace(turned, **rest)


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
        ([trace(), trace(weights=None)], "some traces have weights and some have none"),
        ([trace(), trace(probabilities=np.zeros((5, 1, 4)))], "some traces have probabilities and some have none"),
    ],
)
def test_concat_refuses(others, message):
    with pytest.raises(ValueError, match=message):
        RoutingTrace.concat(others)
