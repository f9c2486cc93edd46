"""What replay can vary, by hand and against its plain engine: warm-up, pools, sessions, budgets, and the curve."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cache import as_trace, traces

from remoe_cli.cache import ExpertCache, replay
from remoe_cli.cache.budgets import equal_memory, fit_budgets
from remoe_cli.cache.curve import lru_curve
from remoe_cli.errors import CacheError
from remoe_cli.routing import RoutingTrace

A, B, C, D = range(4)
RANDOM = settings(max_examples=60, deadline=None)


def with_prompt(rows, borders, prefill, **fields) -> RoutingTrace:
    return RoutingTrace(np.array(rows), np.array(borders), np.array(prefill, dtype=bool), 4, **fields)


# ---- warm-up, by hand


def test_prefill_warms_the_cache_and_is_not_counted():
    trace = with_prompt([[[A]], [[B]], [[A]], [[C]], [[C]]], [0, 4, 5], [1, 1, 0, 0, 0])
    warm = replay(trace, "lru", 2, warm="prefill")
    assert (warm.tokens, warm.accesses, warm.hits, warm.evictions) == (3, 3, 1, 1)
    assert (warm.request_hits.tolist(), warm.token_misses.tolist()) == ([1, 0], [0, 1, 1])
    assert replay(trace, "lru", 2, warm="cold").hits == 0
    assert replay(trace, "lru", 2, warm="carry").hits == 1  # C lives on into the second request


def test_retention_fills_free_slots_after_the_first_prompt_token():
    """The prompt's first token uses A; of the rest C is likeliest, so that it lies there when it is asked for."""
    scores = np.array([[[0.5, 0.1, 0.3, 0.1]], [[0.1, 0.1, 0.7, 0.1]]], np.float16)
    trace = with_prompt([[[A]], [[C]]], [0, 2], [1, 0], probabilities=scores)
    assert replay(trace, "retention", 2, warm="prefill").hits == 1
    assert replay(trace, "lru", 2, warm="prefill").hits == 0


def test_a_prompt_as_one_batch():
    """Distinct experts once, in the order of their last mention: A, B, A -> B, A; then B leaves for C."""
    trace = with_prompt([[[A]], [[B]], [[A]], [[C]], [[A]], [[B]]], [0, 6], [1, 1, 1, 0, 0, 0])
    got = replay(trace, "lru", 2, warm="batch")
    assert (got.tokens, got.accesses, got.hits, got.misses) == (3, 3, 1, 2)
    assert (got.prefill_accesses, got.prefill_misses) == (2, 2)
    assert got.token_misses.tolist() == [1, 0, 1]


def test_sessions_take_turns():
    trace = as_trace([[[A]], [[A]], [[B]], [[B]], [[C]]], [0, 2, 4, 5], n_experts=4)
    one = replay(trace, "lru", 1, warm="carry")
    two = replay(trace, "lru", 1, warm="carry", sessions=2)  # A B A B C
    assert (one.request_hits.tolist(), two.request_hits.tolist()) == ([1, 1, 0], [0, 0, 0])
    assert replay(trace, "lru", 2, warm="carry", sessions=2).request_hits.tolist() == [1, 1, 0]


# ---- pools and budgets, by hand


def test_a_pool_gives_slots_to_the_layer_that_needs_them():
    rows = [[[A], [A]], [[B], [A]], [[A], [A]], [[B], [A]]]  # layer 0 alternates, layer 1 repeats
    trace = as_trace(rows, [0, 4], n_experts=2)
    assert replay(trace, "lru", 1).hits == 3
    assert replay(trace, "lru", [2, 1]).hits == 5
    pooled = replay(trace, "lru", 2, pool=True)
    assert (pooled.hits, pooled.slots, pooled.request_loads.tolist()) == (5, 4, [[2, 1]])


def test_a_pool_in_bytes_by_hand():
    """Layer 0's experts take 3 bytes, layer 1's 1 byte: of 4 bytes one of each fits."""
    rows = [[[A], [A]], [[A], [B]], [[A], [A]]]
    trace = with_prompt(rows, [0, 3], [0, 0, 0], provenance={"expert_bytes": [3, 1]})
    # A0 A1 | A0 hit, B1 for A1 | A0 hit, A1 for B1
    assert replay(trace, "lru", 4, pool="bytes").request_loads.tolist() == [[1, 3]]
    assert replay(trace, "lru", 5, pool="bytes").request_loads.tolist() == [[1, 2]]


def test_a_batch_may_exceed_a_cache_in_bytes_until_the_next_step():
    cache = ExpertCache(2, n_experts=4, sizes=[1, 1, 1, 1])
    assert cache.step([A, B, C]).evicted == () and cache.resident == {A, B, C}
    assert sorted(cache.step([C]).evicted) == [A]  # then the least recent leave until the contents fit


@pytest.mark.parametrize(
    ("capacity", "admission", "budgets"),
    [
        (4, "forced", [4, 4, 4]),
        (4, "bypass", [3, 3, 4]),  # 12 slots less a staging buffer of 2
        (1, "bypass", None),  # 3 slots + 1 that forced stages as well, less 2: a layer would have none
    ],
)
def test_equal_memory(capacity, admission, budgets):
    if budgets is None:
        with pytest.raises(CacheError, match="leaves 2 slots for 3 layers"):
            equal_memory(capacity, 3, 2, admission)
    else:
        assert equal_memory(capacity, 3, 2, admission) == budgets


@RANDOM
@given(trace=traces(), spare=st.integers(0, 6))
def test_fitted_budgets_are_the_best_of_all(trace, spare):
    least = min(trace.top_k, 2)
    total = least * trace.n_layers + spare
    budgets = fit_budgets(trace, total, least=least)
    assert sum(budgets) <= total and min(budgets) >= least
    splits = product(range(least, trace.n_experts + 1), repeat=trace.n_layers)
    hits = [replay(trace, "lru", list(split)).hits for split in splits if sum(split) <= total]
    assert replay(trace, "lru", budgets).hits == max(hits)


def test_budgets_below_what_layers_need_are_refused():
    with pytest.raises(CacheError, match="less than the 2 that each needs"):
        fit_budgets(as_trace([[[A, B], [A, B]]], [0, 1], 4), 3, least=2)


# ---- the curve


@RANDOM
@given(
    trace=traces(prompts=True),
    step=st.sampled_from(["atomic", "sequential"]),
    reset=st.sampled_from(["request", "never"]),
    touch_order=st.sampled_from(["weight", "listed"]),
)
def test_the_curve_is_lru_at_every_size(trace, step, reset, touch_order):
    options = {"step": step, "reset": reset, "touch_order": touch_order}
    curve = lru_curve(trace, **options)
    assert curve.shape == (trace.n_layers, trace.n_experts + 1) and not curve[:, 0].any()
    for capacity in range(1, trace.n_experts + 1):
        assert curve[:, capacity].sum() == replay(trace, "lru", capacity, **options).hits


# ---- the compiled engine against the plain one


def same(fast, slow):
    for name, value in vars(slow).items():
        assert np.array_equal(getattr(fast, name), value), name


@st.composite
def options(draw) -> dict:
    """Options that go together."""
    warm = draw(st.sampled_from(["cold", "prefill", "carry", "batch"]))
    reset = draw(st.sampled_from(["request", "never"]))
    step = "atomic" if warm == "batch" else draw(st.sampled_from(["atomic", "sequential"]))
    lives_on = warm == "carry" or (warm == "cold" and reset == "never")
    return {
        "warm": warm,
        "reset": reset,
        "step": step,
        "sessions": draw(st.integers(1, 3)) if lives_on else 1,
        "pool": draw(st.sampled_from([False, True, "bytes"])),
        "touch_order": draw(st.sampled_from(["weight", "listed"])),
        "admission": draw(st.sampled_from(["forced", "bypass"])),
        "threads": draw(st.sampled_from([1, 2])),
    }


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru", "belady", "hindsight", "arc", "gate"])
@settings(max_examples=120, deadline=None)
@given(trace=traces(prompts=True), options=options(), capacity=st.integers(1, 6), seed=st.integers(0, 9))
def test_engines_agree(policy, trace, options, capacity, seed):
    rng = np.random.default_rng(seed)
    trace = RoutingTrace(
        trace.experts,
        trace.borders,
        trace.prefill,
        trace.n_experts,
        weights=rng.random(trace.experts.shape).astype(np.float16),
        provenance={"expert_bytes": rng.integers(1, 4, trace.n_layers).tolist()},
    )
    if options["pool"] == "bytes":
        capacity *= 2 * trace.n_layers
    same(replay(trace, policy, capacity, **options), replay(trace, policy, capacity, engine="python", **options))


def test_budgets_are_each_layers_own():
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((40, 3, 8)), axis=-1)[..., :2]
    trace = RoutingTrace(experts, np.array([0, 15, 40]), np.zeros(40, bool), 8)
    whole = replay(trace, "lfu", [2, 3, 5])
    for layer, slots in enumerate([2, 3, 5]):
        one = RoutingTrace(experts[:, [layer]], trace.borders, trace.prefill, 8)
        assert whole.request_loads[:, layer].tolist() == replay(one, "lfu", slots).request_misses.tolist()
    assert (whole.slots, whole.staging) == (10, 0)
    assert replay(trace, "lfu", 2, admission="bypass").staging == 2
