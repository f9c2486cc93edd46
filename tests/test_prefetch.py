"""Prefetchers in replay: each against its slow twin, none of them sees what is to come, and every load is paid for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import slow_prefetchers
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_traces import as_trace, counts, random_trace
from slow_policies import History, slow_cache
from slow_prefetchers import slow_lists, TWINS

from remoe_cli.cache import choose, ExpertCache, replay
from remoe_cli.cache.policies import lacks
from remoe_cli.cache.prefetch import finemoe, moe_infinity, PREFETCHERS, Shape
from remoe_cli.cache.prefetch.listed import listed
from remoe_cli.cache.prefetch.predictor import Predictor
from remoe_cli.errors import CacheError
from remoe_cli.routing import RoutingTrace

# Ways to ask for each
ROWS = {
    "gate_next": ["gate_next:3"],
    "gate_next_shared": ["gate_next_shared:2"],
    "promoe": ["promoe:3", "promoe:2:2"],
    "finemoe": ["finemoe:4:1", "finemoe:3:2"],
    "moe_infinity": ["moe_infinity:3", "moe_infinity:2:2"],
    "st_moe": ["st_moe:3", "st_moe:4:2", "st_moe:0"],
    "step": ["step:4", "step:3:2:0.7", "step:5:1:0"],
    "option": ["option:3", "option:4:0.1", "option:2:0"],
}
WORDS = [word for words in ROWS.values() for word in words]
BRIEF = settings(max_examples=8, deadline=None)


def test_every_prefetcher_has_a_row_and_a_twin():
    assert set(ROWS) == set(PREFETCHERS) == set(TWINS)


@st.composite
def traces(draw) -> RoutingTrace:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    prompt = [draw(st.integers(0, length if at else length - 1)) for at, length in enumerate(lengths)]
    top_k = draw(st.integers(1, 3))
    return random_trace(
        np.random.default_rng(draw(st.integers(0, 2**32))),
        sum(lengths),
        draw(st.integers(2, 3)),
        top_k,
        draw(st.integers(top_k, 7)),
        np.cumsum([0, *lengths]),
        np.concatenate([np.arange(length) < own for length, own in zip(lengths, prompt)]),
    )


def predictor_of(trace: RoutingTrace, ahead: int) -> Predictor:
    """Drawn, not trained."""
    L, E, H, W = trace.n_layers, trace.n_experts, trace.hidden.shape[-1], 3
    rng = np.random.default_rng(7)
    shapes = {"into": (L, H, W), "into_bias": (L, W), "out": (L, W, E), "out_bias": (L, E)}
    facts = {
        "format": 1,
        "model": None,
        "revision": None,
        "ahead": ahead,
        "n_layers": L,
        "n_experts": E,
        "hidden": H,
        "width": W,
    }
    return Predictor(facts, {name: rng.normal(size=shape) for name, shape in shapes.items()})


def lists_of(trace: RoutingTrace, word: str) -> dict[tuple[int, int], list[int]]:
    wanted = choose(f"lru+{word}").prefetch
    predictor = predictor_of(trace, wanted.value("AHEAD")) if wanted.kind.trained else None
    found, _ = listed(trace, wanted, "cold", "request", 1, predictor)
    rows = np.flatnonzero(~trace.prefill).tolist()
    return {
        (row, layer): [one for one in found[at, layer].tolist() if one >= 0]
        for at, row in enumerate(rows)
        for layer in range(trace.n_layers)
    }


@pytest.mark.parametrize("word", WORDS)
@BRIEF
@given(trace=traces(), kept=st.sampled_from([1, 2, 100]))
def test_lists_are_the_slow_twins(word, trace, kept):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_infinity, "KEPT", kept)
        patch.setattr(finemoe, "KEPT", kept)
        patch.setattr(slow_prefetchers, "KEPT", kept)
        wanted = choose(f"lru+{word}").prefetch
        if wanted.kind.trained:
            patch.setattr(slow_prefetchers, "PREDICTOR", predictor_of(trace, wanted.value("AHEAD"))._weights)
        assert lists_of(trace, word) == slow_lists(wanted.name, wanted.values, trace)


@pytest.mark.parametrize(
    ("policy", "admission"), [("lru", "forced"), ("lfu", "bypass"), ("lfu", "forced"), ("held", "bypass")]
)
@pytest.mark.parametrize("word", ["st_moe:3", "option:3:0.05", "moe_infinity:2:2"])
@BRIEF
@given(trace=traces(), capacity=st.integers(1, 7))
def test_replay_is_the_slow_one_and_pays_for_every_load(policy, admission, word, trace, capacity):
    asked = f"{policy}+{word}"
    fast = replay(trace, asked, capacity, admission=admission, threads=1)
    assert counts(fast) == counts(replay(trace, asked, capacity, admission=admission, threads=1, engine="python"))
    lists, totals = lists_of(trace, word), [0, 0, 0, 0]
    for low, high in zip(trace.borders, trace.borders[1:]):
        rows = [row for row in range(low, high) if not trace.prefill[row]]
        for layer in range(trace.n_layers):
            steps = [trace.experts[row, layer, ::-1].tolist() for row in rows]
            past = History(steps, 1, trace.n_experts, listed=[lists[row, layer] for row in rows])
            for done, came, went in zip(slow_cache(policy, capacity, admission, past)[0], past.came, past.went):
                parts = len(done.hits), len(done.misses), len(done.evicted) + len(went), len(came)
                totals = [total + part for total, part in zip(totals, parts)]
    assert [fast.hits, fast.misses, fast.evictions, fast.proactive] == totals
    assert fast.loads == fast.misses + fast.proactive


def with_another_future(trace: RoutingTrace, row: int, layer: int) -> RoutingTrace:
    """As before up to this layer of this token; all that comes later is drawn anew."""
    other = random_trace(
        np.random.default_rng(99),
        trace.n_tokens,
        trace.n_layers,
        trace.top_k,
        trace.n_experts,
        trace.borders,
        trace.prefill,
    )
    kept = {}
    for name in ("experts", "weights", "probabilities", "guess", "guess_shared", "hidden"):
        own, drawn = getattr(trace, name).copy(), getattr(other, name)
        own[row + 1 :] = drawn[row + 1 :]
        own[row, layer + 1 :] = drawn[row, layer + 1 :]
        kept[name] = own
    return replace(trace, **kept)


@pytest.mark.parametrize("word", WORDS)
def test_none_sees_what_is_to_come(word):
    trace = random_trace(np.random.default_rng(5), 60, 3, 2, 8, np.array([0, 20, 40, 60]), np.arange(60) % 20 < 4)
    wanted = choose(f"lru+{word}").prefetch
    ahead = wanted.make(Shape(3, 8, 2)).ahead
    for row, layer in ((12, 0), (25, 1), (47, 2)):
        other = with_another_future(trace, row, layer)
        lists, changed = lists_of(trace, word), lists_of(other, word)
        known = [place for place in lists if place[0] * 3 + place[1] <= row * 3 + layer + ahead]
        assert [lists[place] for place in known] == [changed[place] for place in known]
        for policy in ("lru", "lfu"):
            one, two = (
                replay(
                    each, f"{policy}+{word}", 3, threads=1,
                    predictor=predictor_of(each, ahead) if wanted.kind.trained else None,
                ).token_misses
                for each in (trace, other)
            )  # fmt: skip
            before = int((~trace.prefill[:row]).sum())
            assert one[:before].tolist() == two[:before].tolist()


def test_by_hand():
    """One layer pair, K = 1: expert 1 of layer 0 goes with 3 of layer 1, then 2 with 4."""
    trace = as_trace([[[1], [3]], [[2], [4]], [[1], [3]], [[2], [4]]], 5)
    lists = lists_of(trace, "st_moe:1")
    assert [lists[row, 1] for row in range(4)] == [[], [], [3], [4]]
    done = replay(trace, "lru+st_moe:1", 1, threads=1)
    assert (done.misses, done.proactive, done.loads) == (6 - 1, 3, 8)


def test_what_came_in_and_was_not_asked_for_leaves_first():
    cache = ExpertCache(3, "lru", n_experts=8)
    cache.step([0, 1])
    assert cache.bring([5, 1]) == ((5,), ())
    assert [{*one} for one in cache.bring([6, 7])] == [{6, 7}, {5, 0}]
    assert [{*one} for one in cache.bring([2, 3, 4, 5])] == [{2, 3, 4}, {6, 7, 1}]
    assert cache.proactive == 6 and cache.evictions == 5 and cache.resident == {2, 3, 4}


def test_sessions_share_what_is_learned_and_one_cache():
    trace = random_trace(np.random.default_rng(1), 60, 2, 2, 8, np.array([0, 20, 40, 60]))
    options = {"warm": "carry", "threads": 1}
    alone, turns = (replay(trace, "lru+st_moe:3", 4, sessions=n, **options) for n in (1, 3))
    assert alone.tokens == turns.tokens and alone.misses != turns.misses
    assert counts(turns) == counts(replay(trace, "lru+st_moe:3", 4, sessions=3, engine="python", **options))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("lru+st_mo", "no prefetcher 'st_mo' (did you mean st_moe?)"),
        ("lru+", "no prefetcher ''"),
        ("lru+st_moe:2.5", "MOST of prefetcher st_moe is a whole number from 0 to 1e+06, not '2.5'"),
        ("lru+st_moe:2:9", "AHEAD of prefetcher st_moe is a whole number from 1 to 3, not '9'"),
        ("lru+option:2:x", "COST of prefetcher option is a number from 0 to 1, not 'x'"),
        ("lru+st_moe:1:1:1", "prefetcher st_moe takes MOST:AHEAD, so 'st_moe:1:1:1' means nothing"),
        ("arc+st_moe", "policy arc takes no prefetcher"),
        ("belady+st_moe", "policy belady takes no prefetcher"),
        ("gate_ahead+st_moe", "policy gate_ahead takes no prefetcher"),
    ],
)
def test_what_is_refused(asked, message):
    with pytest.raises(CacheError) as caught:
        choose(asked)
    assert message in caught.value.message and caught.value.hint.startswith("remoe replay TRACE")


def test_it_takes_a_token_at_a_time_in_one_layer():
    trace = as_trace([[[0], [1]], [[1], [0]]], 2)
    for options in ({"step": "sequential"}, {"warm": "batch"}, {"pool": True}):
        with pytest.raises(CacheError, match="a prefetcher lists experts of one layer"):
            replay(trace, "lru+st_moe", 2, **options)
    with pytest.raises(CacheError, match="looks 3 layers ahead"):
        replay(trace, "lru+st_moe:6:3", 2)
    assert lacks("lru+st_moe", trace) is None
