"""Policies that read the heads, and loads ahead of a step: by hand, first tokens, and what R may and may not change."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_traces import as_trace, counts, random_trace

from remoe_cli.cache import ExpertCache, POLICIES, replay, scores_ahead
from remoe_cli.cache.ahead import rows_before
from remoe_cli.errors import CacheError
from remoe_cli.routing import write

A, B, C, D, E = range(5)
BRIEF = settings(max_examples=10, deadline=None)


def rows(*values: float) -> np.ndarray:
    return np.array(values, np.float16)


@st.composite
def traces(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(2, 12), min_size=1, max_size=3))
    prefill = np.concatenate([np.arange(one) < draw(st.integers(0, one - 1)) for one in lengths])
    return random_trace(rng, sum(lengths), 3, 2, 7, np.cumsum([0, *lengths]), prefill)


# ---- by hand


def test_temporal_keeps_the_best_sum_of_router_and_head():
    """Three slots hold A, B, C, and D is missed: the sums are .5, .4, .45 outside the step, so B leaves. By the router alone
    (retention) it would be C."""
    cache = ExpertCache(3, "temporal", n_experts=5)
    cache.step([A, B, C], None, [0.2] * 5, [0.2] * 5)
    done = cache.step([D], None, [0.3, 0.2, 0.1, 0.4, 0], [0.2, 0.2, 0.35, 0, 0.25])
    assert (done.misses, done.evicted, cache.proactive) == ((D,), (B,), 0)


def test_temporal_decayed_weighs_the_head():
    """After two tokens A has .8 * .5 + .1 = .5, B .8 * .1 + .3 = .38, and the head of the second gives B .2: it stays where
    that counts in full, and leaves where it does not count."""
    for word, left in (("temporal_decayed:1", A), ("temporal_decayed:0", B), ("temporal_decayed:0:0", A)):
        cache = ExpertCache(2, word, n_experts=5)
        cache.step([A, B], None, [0.5, 0.1, 0, 0, 0], [0.9, 0, 0, 0, 0])
        assert cache.step([C], None, [0.1, 0.3, 0.6, 0, 0], [0, 0.2, 0, 0, 0]).evicted == (left,)


@pytest.mark.parametrize(
    ("word", "came", "left"),
    [
        ("spatio_temporal:1", (), ()),  # A is the best and there already
        ("spatio_temporal:2", (E,), (C,)),  # E of .7 takes the place of C, whose .1 is the lowest
        ("spatio_temporal:3", (E, D), (C, B)),  # D of .3 that of B of .2; E, which just came, is not the lowest
        ("spatio_temporal:5", (E, D), (C, B)),  # B of .2 would need a resident of less
        ("spatio_temporal:5:0.1", (E,), (C,)),  # D is better than B by .1, which is not more than .1
        ("spatio_temporal:0", (), ()),
    ],
)
def test_refinement_walks_the_best_and_replaces_only_what_is_worse(word, came, left):
    cache = ExpertCache(3, word, n_experts=5)
    cache.step([A, B, C], None, [0.2] * 5, [0.2] * 5)
    scores = [0.75, 0.25, 0.125, 0.375 if word != "spatio_temporal:5:0.1" else 0.25 + 0.1, 0.7]
    done = cache.refine(scores)
    assert (done.admitted, sorted(done.evicted)) == (came, sorted(left))
    assert (cache.proactive, cache.evictions) == (len(came), len(left))
    assert cache.resident == {A, B, C} - {*left} | {*came}


def test_refinement_fills_free_slots_and_of_equals_takes_the_lower_id():
    cache = ExpertCache(3, "gate_ahead:3", n_experts=5)
    assert cache.refine([0.1, 0.3, 0.3, 0.3, 0.3]).admitted == (B, C, D)
    assert cache.refine([0, 0.3, 0.3, 0.3, 0.3]).admitted == ()  # E is no better than any of them
    assert cache.refine([0, 0, 0, 0, 0.3]) == ((E,), (B,))  # all as low, none was touched: the lowest id leaves


def test_what_is_missed_never_stays_with_spatio():
    cache = ExpertCache(2, "spatio:2", n_experts=5, admission="bypass")
    cache.refine([0.5, 0.4, 0, 0, 0])
    done = cache.step([A, C])
    assert done == ((A,), (C,), (), ()) and cache.resident == {A, B}


# ---- which scores foresee a step


def test_the_scores_of_a_step_are_those_of_its_predecessors():
    """One request of a prompt token and two decode tokens in 2 layers, another without a prompt. Each score says where it is."""
    at = np.array([[[4 * (2 * token + layer) + one for one in range(4)] for layer in range(2)] for token in range(5)])
    trace = as_trace(
        np.zeros((5, 2, 1), int), 4, [0, 3, 5], probabilities=at.astype(np.float16), prefill=np.arange(5) == 0,
        temporal=(at + 100).astype(np.float16), spatio=(at + 200).astype(np.float16),
    )  # fmt: skip
    policy = POLICIES["spatio_temporal"]

    def first_score(token, layer, first, kind=policy):
        found = scores_ahead(kind, *rows_before(trace, token, layer, first))
        return found and found[0]

    assert first_score(1, 0, 0) == 0 + 100 + 204  # the prompt token's, and its last layer's
    assert first_score(1, 1, 0) == 4 + 104 + 208  # in layer 1: the first layer of this token
    assert first_score(2, 0, 0) == 8 + 108 + 212
    assert first_score(3, 0, 3) is None  # nothing came before it in its request
    assert first_score(3, 1, 3) == 224  # its own first layer
    assert first_score(4, 0, 3) == 24 + 124 + 228
    assert first_score(3, 1, 3, POLICIES["gate_ahead"]) is None and first_score(4, 1, 3, POLICIES["gate_ahead"]) == 28
    assert first_score(4, 0, 3, POLICIES["spatio"]) == 228
    assert scores_ahead(policy, rows(0.5, 0.25), None, rows(0.25, 0)) == [0.75, 0.25]


def test_the_sum_of_halves_is_exact():
    tiny = np.float16(6e-8)
    found = scores_ahead(POLICIES["spatio_temporal"], rows(1), np.array([tiny]), np.array([tiny]))
    assert found == [1 + 2 * float(tiny)] and found[0] > 1


# ---- what R may and may not change


@pytest.mark.parametrize("policy", ["temporal", "temporal_decayed"])
@BRIEF
@given(trace=traces(), capacity=st.integers(2, 6), admission=st.sampled_from(["forced", "bypass"]))
def test_retention_loads_nothing_ahead(policy, trace, capacity, admission):
    done = replay(trace, policy, capacity, admission=admission, threads=1)
    assert done.proactive == 0 and not done.request_proactive.any()


@pytest.mark.parametrize(
    ("policy", "without"), [("spatio_temporal", "temporal"), ("gate_ahead", "retention"), ("spatio", "")]
)
@BRIEF
@given(trace=traces(), capacity=st.integers(2, 6), warm=st.sampled_from(["cold", "prefill", "carry"]))
def test_r_changes_loads_and_nothing_that_is_asked_for(policy, without, trace, capacity, warm):
    """R = 0 loads nothing ahead, which is Algorithm 1 alone; whatever R, steps ask for the same experts, each a hit or a miss."""
    options = {"admission": "bypass", "warm": warm, "threads": 1}
    done = [replay(trace, f"{policy}:{reach}", capacity, **options) for reach in range(8)]
    assert done[0].proactive == 0
    if without:
        assert counts(done[0]) == counts(replay(trace, without, capacity, **options))
    else:
        assert done[0].hits == 0  # nothing ever comes in
    for one in done:
        assert one.request_accesses.tolist() == done[0].request_accesses.tolist()
        assert one.hits + one.misses == one.accesses == one.tokens * 3 * 2
        assert one.request_loads.sum() == one.loads == one.misses + one.proactive
        assert one.prefill_accesses == done[0].prefill_accesses


@pytest.mark.parametrize(
    "policy", ["temporal", "temporal_decayed:0.5", "gate_ahead:2", "spatio_temporal:3", "spatio:3:0.1"]
)
@BRIEF
@given(
    trace=traces(),
    budgets=st.lists(st.integers(1, 7), min_size=3, max_size=3),
    how=st.sampled_from([("prefill", 1), ("carry", 1), ("carry", 2)]),
)
def test_compiled_equals_plain_with_prompts_turns_and_budgets(policy, trace, budgets, how):
    options = {"warm": how[0], "sessions": how[1], "admission": "bypass", "threads": 1}
    found = [replay(trace, policy, budgets, engine=engine, **options) for engine in ("compiled", "python")]
    assert counts(found[0]) == counts(found[1])
    assert found[0].request_loads.tolist() == found[1].request_loads.tolist()
    assert (found[0].prefill_misses, found[0].token_misses.tolist()) == (
        found[1].prefill_misses,
        found[1].token_misses.tolist(),
    )


def test_many_r_in_one_call_equal_separate_calls(remoe, tmp_path):
    rng = np.random.default_rng(5)
    write(random_trace(rng, 60, 3, 2, 9, [0, 30, 60], np.arange(60) % 30 < 4), tmp_path / "t.trace")
    words = [f"{policy}:{reach}" for policy in ("spatio_temporal", "gate_ahead", "spatio") for reach in (0, 1, 3, 9)]

    def cells(names):
        ran = remoe("replay", "t.trace", "--cache", "3,5", "--policy", ",".join(names), "--json")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)["cells"]

    together = cells(words)
    assert {cell["policy"] for cell in together} == {*words}
    assert together == [cell for word in words for cell in cells([word])]
    assert len({cell["proactive"] for cell in together}) > 6


def test_a_parameter_is_tuned_on_another_trace(remoe, tmp_path):
    rng = np.random.default_rng(6)
    traces = [random_trace(rng, 80, 2, 2, 9, [0, 40, 80]) for _ in range(2)]
    for name, trace in zip(("one", "other"), traces, strict=True):
        write(trace, tmp_path / f"{name}.trace")
    asked = ("replay", "one.trace", "--cache", "3,5", "--equal", "slots", "--json")
    ran = remoe(*asked, "--policy", "lru,temporal_decayed,lrfu:0.3", "--tune", "other.trace")
    assert ran.code == 0, ran.err
    grid = POLICIES["temporal_decayed"].grid
    loads = {
        value: sum(
            replay(traces[1], f"temporal_decayed:{value}", size, admission=form, engine="python").loads
            for size in (3, 5)
            for form in ("forced", "bypass")
        )
        for value in grid
    }
    best = min(loads, key=loads.__getitem__)
    assert len({*loads.values()}) > 1
    got = json.loads(ran.out)
    assert (
        got["policies"] == ["lru", f"temporal_decayed:{best:g}", "lrfu:0.3"] and got["rules"]["tune"] == "other.trace"
    )
    assert f"temporal_decayed:{best:g} loads least there, of 0, 0.25, 0.5, 1, 2, 4, 8, 16" in ran.err
    alone = remoe(*asked, "--policy", f"lru,temporal_decayed:{best:g},lrfu:0.3")
    assert json.loads(alone.out)["cells"] == got["cells"]
    ran = remoe(*asked, "--policy", "lru,temporal", "--tune", "one.trace")
    assert "--tune one.trace is not used" in ran.err and "tuned on" not in ran.err
    object.__setattr__(traces[1], "temporal", None)
    write(traces[1], tmp_path / "headless.trace")
    ran = remoe(*asked, "--policy", "temporal_decayed,lrfu", "--tune", "headless.trace")
    assert "temporal_decayed keeps its default: the trace has no scores of a temporal head" in ran.err
    assert json.loads(ran.out)["policies"][1].startswith("lrfu:")


# ---- refused


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("spatio_temporal", {"pool": True}, "there is no pool for it"),
        ("gate_ahead", {"pool": True}, "there is no pool for it"),
        ("temporal", {"step": "sequential"}, "neither --step sequential nor --warm batch"),
        ("spatio", {"step": "sequential", "admission": "bypass"}, "neither --step sequential nor --warm batch"),
        ("spatio_temporal", {"warm": "batch"}, "neither --step sequential nor --warm batch"),
        ("spatio", {}, "admission bypass only"),
        ("spatio_temporal:1.5", {}, "a whole number from 0 to"),
        ("spatio_temporal:4:-1", {}, "from 0 to 10 as its second parameter, not '-1'"),
        ("temporal:1", {}, "takes no parameter"),
        ("decayed:1:2", {}, "takes one parameter"),
        ("temporal_decayed:1:.5:3", {}, "takes two parameters"),
        ("temporal_decayed:1:x", {}, "second parameter, not 'x'"),
    ],
)
@pytest.mark.parametrize("engine", ["python", "compiled"])
def test_what_makes_no_sense_is_refused(policy, options, words, engine):
    trace = random_trace(np.random.default_rng(0), 10)
    with pytest.raises(CacheError) as stopped:
        replay(trace, policy, 3, engine=engine, **options)
    assert words in stopped.value.message and "\n" not in stopped.value.message and stopped.value.hint


@pytest.mark.parametrize(
    ("policy", "lacking"), [("temporal", "temporal"), ("spatio_temporal", "spatio"), ("spatio", "spatio")]
)
def test_a_trace_without_heads_is_refused(policy, lacking):
    trace = random_trace(np.random.default_rng(0), 10)
    object.__setattr__(trace, lacking, None)
    with pytest.raises(CacheError, match=f"no scores of a {lacking} head"):
        replay(trace, policy, 3, admission="bypass")


def test_a_live_cache_says_what_a_step_lacks():
    with pytest.raises(ValueError, match="scores of a temporal head"):
        ExpertCache(3, "temporal", n_experts=5).step([A], None, [0.2] * 5)
    with pytest.raises(ValueError, match="nothing ahead"):
        ExpertCache(3, "lru", n_experts=5).refine([0.2] * 5)
    with pytest.raises(CacheError, match="no pool"):
        ExpertCache(3, "gate_ahead", n_experts=5, n_layers=2)
