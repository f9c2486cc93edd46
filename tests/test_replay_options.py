"""What replay can vary, by hand and against its plain engine: warm-up, pools, sessions, budgets, and the curve."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cache import as_trace, traces

from remoe_cli.cache import choose, ExpertCache, replay
from remoe_cli.cache.budgets import equal_memory, fit_budgets
from remoe_cli.cache.curve import lru_curve
from remoe_cli.cache.kernel import kernel
from remoe_cli.errors import CacheError
from remoe_cli.report.replays import by_session
from remoe_cli.routing import read, RoutingTrace, write

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


def test_retention_fills_only_where_a_prompt_was():
    """Without one, every expert is paid for; nor does a later request that has none get any for nothing."""
    scores = np.full((3, 1, 8), 0.1, np.float16)
    scores[..., 2:6] = 0.2
    rows, n_experts = [[[0, 1]], [[2, 3]], [[4, 5]]], 8
    trace = RoutingTrace(np.array(rows), np.array([0, 3]), np.zeros(3, bool), n_experts, probabilities=scores)
    for engine in ("compiled", "python"):
        assert replay(trace, "retention", 6, warm="prefill", engine=engine).misses == 6
    prompted = RoutingTrace(trace.experts, np.array([0, 2, 3]), np.array([True, False, False]), 8, probabilities=scores)
    for engine in ("compiled", "python"):
        assert replay(prompted, "retention", 6, warm="prefill", engine=engine).request_misses.tolist() == [0, 2]


def test_a_pool_is_filled_layer_by_layer_with_its_share():
    """Of 4 slots a layer may fill 2: the likeliest that lie not there yet, of equals the lowest id."""
    scores = np.array([[[0.4, 0.2, 0.2, 0.2], [0.1, 0.3, 0.2, 0.4]]] * 3, np.float16)
    rows = [[[A], [D]], [[B], [B]], [[C], [C]]]
    trace = with_prompt(rows, [0, 3], [1, 0, 0], probabilities=scores)
    for engine in ("compiled", "python"):
        got = replay(trace, "retention", 2, pool=True, warm="prefill", engine=engine)
        assert got.token_misses.tolist() == [0, 2]  # A, B and D, B lie there; then C twice


def test_belady_under_prefill_counts_what_is_counted():
    """The prompt's own reuse is free, so that only decoded tokens decide who stays."""
    rows = [[[0, 4, 3]], [[1, 4, 0]], [[1, 0, 3]], [[3, 4, 0]]]
    trace = RoutingTrace(np.array(rows), np.array([0, 4]), np.array([1, 1, 1, 0], bool), 5)
    assert replay(trace, "belady", 3, warm="prefill", admission="bypass").misses == 0
    later = RoutingTrace(np.array([[[A]], [[B]], [[A]], [[B]]]), np.array([0, 4]), np.array([1, 1, 1, 0], bool), 2)
    assert replay(later, "belady", 1, warm="prefill", admission="bypass").misses == 0  # A returns, but uncounted


@pytest.mark.parametrize("admission", ["forced", "bypass"])
@settings(max_examples=150, deadline=None)
@given(trace=traces(prompts=True), capacity=st.integers(1, 6), reset=st.sampled_from(["request", "never"]))
def test_nobody_loads_less_than_belady_after_a_prefill(admission, trace, capacity, reset):
    options = {"admission": admission, "warm": "prefill", "reset": reset}
    least = replay(trace, "belady", capacity, **options).loads
    for policy in ("lru", "lfu", "fifo", "lfru", "arc", "s3fifo", "random:3"):
        assert replay(trace, policy, capacity, **options).loads >= least


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


def test_each_session_and_the_cache_that_they_share():
    trace = as_trace([[[A]], [[A]], [[B]], [[B]], [[C]]], [0, 2, 4, 5], n_experts=4)
    done = replay(trace, "lru", 2, warm="carry", sessions=2)  # A B A B C: the first place has requests 0 and 2
    assert by_session(done, 2) == [
        {
            "requests": 2,
            "tokens": 3,
            "accesses": 3,
            "misses": 2,
            "proactive": 0,
            "hit_ratio": 1 / 3,
            "loads_a_token": 2 / 3,
        },
        {
            "requests": 1,
            "tokens": 2,
            "accesses": 2,
            "misses": 1,
            "proactive": 0,
            "hit_ratio": 0.5,
            "loads_a_token": 0.5,
        },
    ]
    assert by_session(done, 1) is None
    assert sum(one["misses"] for one in by_session(done, 2)) == done.misses


def test_a_batch_touches_with_the_weight_of_the_last_mention():
    """A's weight falls from .9 to .1 within the prompt, so that the gate's last score lets it go for B's .5."""
    weights = np.array([0.9, 0.5, 0.1, 0.2], np.float16)[:, None, None]
    trace = with_prompt([[[A]], [[B]], [[A]], [[C]]], [0, 4], [1, 1, 1, 0], weights=weights)
    cache = {}
    for engine in ("compiled", "python"):
        longer = RoutingTrace(
            np.concatenate([trace.experts, [[[B]]]]), np.array([0, 5]), np.array([1, 1, 1, 0, 0], bool), 4,
            weights=np.concatenate([weights, [[[0.5]]]]),
        )  # fmt: skip
        cache[engine] = replay(longer, "gate", 2, warm="batch", engine=engine).token_misses.tolist()
    assert cache == {"compiled": [1, 0], "python": [1, 0]}  # B is still there


def test_token_misses_stand_in_the_traces_order_whatever_the_turns():
    trace = as_trace([[[A]], [[A]], [[B]], [[C]]], [0, 2, 4], n_experts=4)
    got = replay(trace, "lru", 3, warm="carry", sessions=2)  # served: A B A C
    assert got.token_misses.tolist() == [1, 0, 1, 1]
    ordered = as_trace([[[A]], [[B]], [[A]], [[C]]], [0, 1, 3, 4], n_experts=4)
    # with 2 at a time: A of the first, B of the second, A of the second; then C: one slot never hits
    assert replay(ordered, "lru", 1, warm="carry", sessions=2).request_hits.tolist() == [0, 0, 0]
    swapped = as_trace([[[A]], [[B]], [[B]], [[A]]], [0, 2, 4], n_experts=4)
    # turns: A (first), B (second), B (first), A (second): the first of a turn is the earlier request
    assert replay(swapped, "lru", 1, warm="carry", sessions=2).request_hits.tolist() == [1, 0]


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


def test_the_size_of_an_expert_may_be_given_in_place_of_the_traces():
    rows = [[[A], [A]], [[A], [B]], [[A], [A]]]
    trace = with_prompt(rows, [0, 3], [0, 0, 0], provenance={"expert_bytes": 100})
    given = replay(trace, "lru", 4, pool="bytes", expert_bytes=[3, 1])
    assert given.request_loads.tolist() == [[1, 3]]
    assert replay(trace, "lru", 8, pool="bytes", expert_bytes=2).misses == 3
    for wrong in (0, [1, 2, 3], 1.5):
        with pytest.raises(CacheError, match="whole number"):
            replay(trace, "lru", 4, pool="bytes", expert_bytes=wrong)


def test_preloads_are_charged_to_the_layer_they_are_of():
    """Hindsight takes the 3 most used of all: two of layer 1, one of layer 0; and again for the second request."""
    rows = [[[A], [A]], [[A], [A]], [[A], [B]], [[A], [B]]]
    trace = with_prompt(rows, [0, 2, 4], [0, 0, 0, 0], provenance={"expert_bytes": 1})
    for engine in ("compiled", "python"):
        got = replay(trace, "hindsight", 3, pool="bytes", admission="bypass", engine=engine)
        assert (got.misses, got.proactive, got.request_loads.tolist()) == (0, 6, [[1, 2], [1, 2]])


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
    assert replay(trace, "lfu", [1, 3, 3]).staging == 1  # what a layer of one slot can't hold of a step


def test_mapped_and_own_arrays_share_one_kernel(tmp_path):
    """What is read from a file is read-only; a second type would be compiled for again, and not be told of."""
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((30, 2, 8)), axis=-1)[..., :2]
    prefill = np.tile(np.arange(15) < 4, 2)
    own = RoutingTrace(experts, np.array([0, 15, 30]), prefill, 8, weights=rng.random(experts.shape).astype(np.float16))
    write(own, tmp_path / "t.trace")
    mapped = read(tmp_path / "t.trace")
    for policy in ("gate", "belady"):
        for warm in ("cold", "prefill", "batch", "carry"):
            same(replay(mapped, policy, 3, warm=warm), replay(own, policy, 3, warm=warm))
        assert len(kernel(choose(policy).policy).signatures) == 1
