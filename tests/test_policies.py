"""Every row of the policy registry: compiled = live = slow twin, the textbooks, and the bounds that no policy breaks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from foreign_traces import cacheable_by_design, esft, first_requests
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_traces import as_trace, counts, PROBABILITIES, random_trace
from slow_policies import foreseen, History, slow_cache, textbook_arc, textbook_s3fifo

from remoe_cli.cache import ExpertCache, POLICIES, replay
from remoe_cli.cache.policies import choose
from remoe_cli.cache.policy import SCORES
from remoe_cli.routing import RoutingTrace

# One row a policy: the ways to ask for it that the properties below are tried with.
ROWS = {
    "lru": ["lru"],
    "lfu": ["lfu"],
    "fifo": ["fifo"],
    "lrfu": ["lrfu", "lrfu:0.05", "lrfu:0", "lrfu:1"],
    "lfru": ["lfru"],
    "arc": ["arc"],
    "s3fifo": ["s3fifo"],
    "least_stale": ["least_stale"],
    "random": ["random", "random:7"],
    "static": ["static"],
    "gate": ["gate"],
    "decayed_weight": ["decayed_weight", "decayed_weight:0.5", "decayed_weight:0", "decayed_weight:1"],
    "decayed": ["decayed", "decayed:0.5"],
    "retention": ["retention"],
    "temporal": ["temporal"],
    "temporal_decayed": ["temporal_decayed", "temporal_decayed:0.3:0.5", "temporal_decayed:0", "temporal_decayed:2:1"],
    "gate_ahead": ["gate_ahead", "gate_ahead:2", "gate_ahead:3:0.2", "gate_ahead:0"],
    "spatio_temporal": ["spatio_temporal", "spatio_temporal:1", "spatio_temporal:3:0.25", "spatio_temporal:0"],
    "spatio": ["spatio", "spatio:1", "spatio:4:0.1", "spatio:0"],
    "held": ["held"],
    "hindsight": ["hindsight"],
    "belady": ["belady"],
}
ADMISSIONS = ("forced", "bypass")
CELLS = [
    (policy, admission)
    for policy in ROWS
    for admission in ADMISSIONS
    if POLICIES[policy].admits or admission == "bypass"
]
AHEAD = [policy for policy in ROWS if POLICIES[policy].refines]
READS_SCORES = [policy for policy in ROWS if {*SCORES} & {*POLICIES[policy].needs}]


def test_every_policy_has_a_row():
    assert set(ROWS) == set(POLICIES)


# ---- compiled = live = slow twin

RANDOM = settings(max_examples=20, deadline=None)
BRIEF = settings(max_examples=10, deadline=None)


@st.composite
def histories(draw, most_layers=2) -> History:
    """Uneven steps of 1 to 4 of 5 experts in 1 or 2 layers, as batches make them, with all that a policy may need."""
    layers = draw(st.integers(1, most_layers))
    step = st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True)
    steps = [
        [at % layers * 5 + one for one in own] for at, own in enumerate(draw(st.lists(step, min_size=1, max_size=16)))
    ]
    number = st.sampled_from(PROBABILITIES)
    return History(
        steps=steps,
        layers=layers,
        n_experts=5,
        weights=[draw(st.lists(number, min_size=len(one), max_size=len(one))) for one in steps],
        scores=[draw(st.lists(number, min_size=5, max_size=5)) for _ in steps],
        fit=draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0]), min_size=5 * layers, max_size=5 * layers)),
        heads=[draw(st.lists(number, min_size=5, max_size=5)) for _ in steps],
        ahead=[draw(st.none() | st.lists(number, min_size=5, max_size=5)) for _ in steps],
    )


@pytest.mark.parametrize(("policy", "admission"), CELLS)
@RANDOM
@given(capacity=st.integers(1, 9), data=st.data())
def test_live_steps_equal_the_slow_twin(policy, admission, capacity, data):
    past = data.draw(histories(most_layers=1 if policy in AHEAD else 2))
    asked = data.draw(st.sampled_from(ROWS[policy]))
    past.parameter, past.second = choose(asked)[2:4]
    cache = ExpertCache(
        capacity,
        asked,
        n_experts=5,
        admission=admission,
        n_layers=past.layers,
        future=[one for touched in past.steps for one in touched],
        fit=past.fit,
    )
    slow, preloaded = slow_cache(policy, min(capacity, 5 * past.layers), admission, past)
    assert cache.proactive == preloaded
    for at, (touched, expected) in enumerate(zip(past.steps, slow, strict=True)):
        if policy in AHEAD and past.ahead[at] is not None:
            came = cache.refine(past.ahead[at])
            assert (sorted(came.admitted), sorted(came.evicted)) == (sorted(past.came[at]), sorted(past.went[at]))
        got = cache.step(touched, past.weights[at], past.scores[at], past.heads[at], layer=at % past.layers)
        assert got[:3] == (tuple(expected.hits), tuple(expected.misses), tuple(expected.admitted))
        assert sorted(got.evicted) == sorted(expected.evicted)
    assert cache.proactive == preloaded + sum(map(len, past.came))
    assert cache.evictions == sum(len(one.evicted) for one in slow) + sum(map(len, past.went))


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
def test_queues_of_a_large_cache_with_large_steps(policy, admission):
    """A small queue of 2 beside a main queue of 18, and steps that protect nearly all of either."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        sizes = rng.choice([1, 2, 3, 19], size=80)
        steps = [rng.permutation(24)[: int(size)].tolist() for size in sizes]
        for at in range(2, 80, 3):  # asked for again, so that they move to the main queue
            steps[at] = steps[at - 1]
        slow, _ = slow_cache(policy, 20, admission, History(steps, 1, 24))
        cache = ExpertCache(20, policy, n_experts=24, admission=admission)
        for touched, expected in zip(steps, slow, strict=True):
            assert sorted(cache.step(touched).evicted) == sorted(expected.evicted)


@st.composite
def traces(draw, least_layers=1, prompts=False) -> RoutingTrace:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    top_k = draw(st.integers(1, 3))
    prompt = [draw(st.integers(0, length if at else length - 1)) if prompts else 0 for at, length in enumerate(lengths)]
    return random_trace(
        rng,
        sum(lengths),
        draw(st.integers(least_layers, 2)),
        top_k,
        draw(st.integers(top_k, 7)),
        np.cumsum([0, *lengths]),
        np.concatenate([np.arange(length) < own for length, own in zip(lengths, prompt)]),
    )


def slow_counts(trace, asked, capacity, admission, step, reset, pool, fit):
    """The same, by the slow twin: a cold cache a layer or one for all, for each request or for the whole trace."""
    name, parameter, second = choose(asked).name, *choose(asked)[2:4]
    n_layers, n_experts = trace.n_layers, trace.n_experts
    n_requests = trace.n_requests
    hits, misses, proactive = [0] * n_requests, [0] * n_requests, [0] * n_requests
    token_misses = [0] * trace.n_tokens
    evictions = 0
    fitted = (trace if name == "hindsight" else fit).decode()
    spans = [(0, trace.n_tokens)] if reset == "never" else list(zip(trace.borders.tolist(), trace.borders.tolist()[1:]))
    for group in [list(range(n_layers))] if pool else [[layer] for layer in range(n_layers)]:
        uses = [float((fitted.experts[:, layer] == one).sum()) for layer in group for one in range(n_experts)]
        for low, high in spans:
            steps, weights, scores, owners, heads, ahead = [], [], [], [], [], []
            for token in [one for one in range(low, high) if not trace.prefill[one]]:
                for place, layer in enumerate(group):
                    ids = [place * n_experts + int(one) for one in trace.experts[token, layer]][::-1]
                    values = [float(one) for one in trace.weights[token, layer]][::-1]
                    for part in (
                        [slice(at, at + 1) for at in range(len(ids))] if step == "sequential" else [slice(None)]
                    ):
                        steps.append(ids[part])
                        weights.append(values[part])
                        scores.append([float(one) for one in trace.probabilities[token, layer]])
                        heads.append(
                            [] if trace.temporal is None else [float(one) for one in trace.temporal[token, layer]]
                        )
                        ahead.append(foreseen(name, trace, token, layer))
                        owners.append(token)
            past = History(
                steps, len(group), n_experts, weights, scores, uses, parameter, second=second, heads=heads, ahead=ahead
            )
            slots = capacity * len(group)
            done, preloaded = slow_cache(name, slots, admission, past)
            if owners:
                proactive[int(np.searchsorted(trace.borders, owners[0], side="right")) - 1] += preloaded
            for token, one, came, went in zip(owners, done, past.came, past.went, strict=True):
                request = int(np.searchsorted(trace.borders, token, side="right")) - 1
                hits[request] += len(one.hits)
                misses[request] += len(one.misses)
                token_misses[token] += len(one.misses)
                evictions += len(one.evicted) + len(went)
                proactive[request] += len(came)
    token_misses = np.array(token_misses)[~trace.prefill].tolist()
    total = sum(misses) + sum(proactive)
    totals = len(token_misses), sum(hits) + sum(misses), sum(hits), sum(misses), evictions, sum(proactive), total
    return totals, hits, misses, proactive, token_misses


@pytest.mark.parametrize(("policy", "admission"), CELLS)
@RANDOM
@given(
    trace=traces(prompts=True),
    capacity=st.integers(1, 7),
    step=st.sampled_from(["atomic", "sequential"]),
    reset=st.sampled_from(["request", "never"]),
    pool=st.booleans(),
    data=st.data(),
)
def test_compiled_and_plain_replay_equal_the_slow_twin(policy, admission, trace, capacity, step, reset, pool, data):
    asked = data.draw(st.sampled_from(ROWS[policy]))
    pool = pool and policy not in AHEAD
    if pool or policy in READS_SCORES:
        step = "atomic"
    fit = random_trace(np.random.default_rng(trace.n_tokens), 20, trace.n_layers, trace.top_k, trace.n_experts)
    options = {"admission": admission, "step": step, "reset": reset, "pool": pool, "fit": fit}
    slow = slow_counts(trace, asked, capacity, admission, step, reset, pool, fit)
    assert counts(replay(trace, asked, capacity, threads=1, **options)) == slow
    assert counts(replay(trace, asked, capacity, threads=1, engine="python", **options)) == slow


# ---- the papers' own form, one access at a time


@RANDOM
@given(accesses=st.lists(st.integers(0, 11), min_size=1, max_size=120), capacity=st.integers(1, 8))
def test_one_access_at_a_time_is_the_textbook(accesses, capacity):
    trace = as_trace([[[one]] for one in accesses], 12)
    for policy, textbook in (("arc", textbook_arc), ("s3fifo", textbook_s3fifo)):
        hits = textbook(accesses, capacity)
        assert replay(trace, policy, capacity, threads=1).token_misses.tolist() == [int(not hit) for hit in hits]


@pytest.mark.parametrize(("policy", "textbook"), [("arc", textbook_arc), ("s3fifo", textbook_s3fifo)])
def test_a_long_skewed_run_is_the_textbook(policy, textbook):
    """Long enough for every queue to be full and for ghosts to matter; 20 slots, so that the small queue has 2."""
    rng = np.random.default_rng(11)
    drift = np.repeat(rng.integers(0, 30, size=15), 200)
    accesses = ((rng.zipf(1.3, size=3000) % 50 + drift) % 64).tolist()
    trace = as_trace([[[one]] for one in accesses], 64)
    for capacity in (5, 20, 40):
        assert replay(trace, policy, capacity).hits == sum(textbook(accesses, capacity))


# ---- bounds


@pytest.mark.parametrize(("policy", "admission"), CELLS)
@BRIEF
@given(trace=traces(), capacity=st.integers(1, 7), reset=st.sampled_from(["request", "never"]), pool=st.booleans())
def test_nobody_loads_less_than_belady(policy, admission, trace, capacity, reset, pool):
    options = {"admission": admission, "reset": reset, "pool": pool and policy not in AHEAD, "fit": trace, "threads": 1}
    assert replay(trace, policy, capacity, **options).loads >= replay(trace, "belady", capacity, **options).loads


@pytest.mark.parametrize(
    "policy", [name for name in ROWS if not POLICIES[name].preload and name not in (*AHEAD, "held")]
)
@BRIEF
@given(trace=traces(), reset=st.sampled_from(["request", "never"]))
def test_forced_at_k_slots_is_lru_whatever_the_policy(policy, trace, reset):
    one, lru = (replay(trace, name, trace.top_k, reset=reset, threads=1) for name in (policy, "lru"))
    assert counts(one) == counts(lru)


@pytest.mark.parametrize(("policy", "admission"), [cell for cell in CELLS if cell[0] not in (*AHEAD, "held")])
@BRIEF
@given(trace=traces())
def test_with_room_for_all_only_cold_misses_are_left(policy, admission, trace):
    done = replay(trace, policy, trace.n_experts, admission=admission, fit=trace, threads=1)
    each = [
        sum(len(np.unique(trace.experts[low:high, layer])) for layer in range(trace.n_layers))
        for low, high in zip(trace.borders, trace.borders[1:])
    ]
    if POLICIES[policy].preload:
        assert (done.misses, done.proactive) == (0, trace.n_requests * trace.n_layers * trace.n_experts)
    else:
        assert done.request_misses.tolist() == each and done.evictions == 0


@pytest.mark.parametrize("policy", [name for name in ROWS if name not in READS_SCORES])
def test_bounds_and_twin_on_a_real_trace(policy, shared):
    """DeepSeek-V2-Lite: 10 samples in 6 layers against the bounds, one of them in one layer against the twin."""
    trace = first_requests(esft(shared("data/traces/esft/intent.npz")), 10, 6)
    for admission in ADMISSIONS if POLICIES[policy].admits else ("bypass",):
        for capacity in (4, 6, 9, 16):
            options = {"admission": admission, "fit": trace}
            done, best = (replay(trace, name, capacity, **options) for name in (policy, "belady"))
            assert done.loads >= best.loads
            if capacity == trace.top_k and admission == "forced" and not POLICIES[policy].preload:
                assert counts(done) == counts(replay(trace, "lru", capacity))
        one = first_requests(trace, 1, 1)
        one = as_trace(one.experts, 64, weights=one.weights, probabilities=np.zeros((one.n_tokens, 1, 64), np.float16))
        slow = slow_counts(one, policy, 9, admission, "atomic", "request", False, one)
        assert counts(replay(one, policy, 9, admission=admission, fit=one)) == slow


def test_no_fixed_set_hits_more_than_hindsight():
    trace = random_trace(np.random.default_rng(2), 300)
    best = replay(trace, "hindsight", 3, admission="bypass", reset="never").hits
    top = [np.sort(np.bincount(trace.experts[:, layer].ravel(), minlength=8))[-3:].sum() for layer in range(2)]
    assert best == sum(top)
    other = random_trace(np.random.default_rng(4), 300)
    assert replay(trace, "static", 3, admission="bypass", reset="never", fit=other).hits < best


@pytest.mark.parametrize("run", ["a-main-s1", "b-main-s1"])
def test_hindsight_equals_published_static_hits(run, shared):
    """cacheable-by-design: one expert after the other, one cache over the whole trace; nothing but the fitted set is kept,
    so with bypass. See objectives-and-metrics.md (6)."""
    folder = shared(f"data/traces/cacheable-by-design/{run}")
    published = json.loads((folder / "metrics.json").read_text())["domains"]["code"]["hit"]
    trace = cacheable_by_design(folder / "trace_code.npz")
    mode = {"admission": "bypass", "step": "sequential", "reset": "never", "touch_order": "listed"}
    for fraction, hits in published.items():
        done = replay(trace, "hindsight", int(float(fraction) * 16), **mode)
        assert round(done.hit_ratio, 4) == hits["static"]
        assert done.proactive == 8 * int(float(fraction) * 16)
