"""Cache-aware rerouting: hand values and properties of the rules, and the walk of one layer over one request."""

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_rerouting import slow_choice

from remoe_cli.cache import ExpertCache
from remoe_cli.cache.reroute import (
    cache_prior,
    default_keep,
    default_strengths,
    max_rank,
    METHODS,
    prefix,
    rank,
    Rule,
    walk,
)
from remoe_cli.errors import UsageError

LOGITS = [3.0, 1.0, 2.0, 0.0, -1.0]  # ranks: 0, 2, 1, 3, 4
ORDER = [0, 2, 1, 3, 4]


# hand values


def test_cache_prior_by_hand():
    # the mean range is 4, so strength .25 is a bonus of 1: expert 3 reaches 1, which is not above expert 2's 2
    assert cache_prior(ORDER, LOGITS, {3}, 2, 1, 1.0) == [0, 2]
    assert cache_prior(ORDER, LOGITS, {3}, 2, 1, 2.0) == [0, 2]  # equal: the better rank stays
    assert cache_prior(ORDER, LOGITS, {3}, 2, 1, 2.5) == [0, 3]
    # what is kept gets the bonus too, so no resident passes it
    assert set(cache_prior(ORDER, LOGITS, {3, 4}, 2, 1, 99.0)) == {0, 3}
    assert set(cache_prior(ORDER, LOGITS, {3, 4}, 2, 0, 99.0)) == {3, 4}
    assert set(cache_prior(ORDER, LOGITS, {3, 4}, 2, 2, 99.0)) == {0, 2}


def test_max_rank_by_hand():
    assert max_rank(ORDER, {3}, 2, 1, 3) == [0, 2]  # expert 3 is of rank 4
    assert max_rank(ORDER, {3}, 2, 1, 4) == [0, 3]
    assert max_rank(ORDER, {3, 4}, 3, 1, 5) == [0, 3, 4]
    assert max_rank(ORDER, {3, 4}, 3, 2, 5) == [0, 2, 3]
    assert max_rank(ORDER, {1, 4}, 2, 0, 5) == [1, 4]
    assert max_rank(ORDER, set(), 2, 0, 5) == [0, 2]


def test_prefix_by_hand():
    shares = [0.5, 0.25, 0.125, 0.125]
    assert [prefix(shares, at) for at in (0, 0.5, 0.51, 0.75, 0.8, 1)] == [1, 1, 2, 2, 3, 4]
    assert prefix([0.5, 0.499], 1.0) == 2  # rounding never asks for more than there are


def test_the_running_mean_of_ranges_is_the_unit_of_the_bonus():
    # ranges 2 and 6, means 2 and 4. The second token's own are 0 and 1; expert 2 is cached and 3 below expert 1
    logits = np.array([[0.0, -2.0, 0.0], [6.0, 3.0, 0.0]], dtype=np.float32)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    stock = np.array([[0, 2], [0, 1]])
    weights = np.take_along_axis(chances, stock, -1)

    def second(strength: float) -> list[int]:
        cache = ExpertCache(2, n_experts=3)
        done = walk(Rule("cache-prior", strength, 1), cache, logits, chances, stock, weights, renormalised=False)
        return done.experts[1].tolist()

    assert second(0.74) == [0, 1] and second(0.76) == [0, 2]  # 3 / 4; with the token's own range it would be 3 / 6


def test_weights_are_the_routers_own_for_what_was_chosen():
    logits = np.array([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]], dtype=np.float32)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    stock = np.array([[3, 2], [0, 1]])
    own = np.take_along_axis(chances, stock, -1)
    rule = Rule("max-rank", 4, 1)
    plain = walk(rule, ExpertCache(2, n_experts=4), logits, chances, stock, 2.5 * own, renormalised=False)
    assert plain.experts.tolist() == [[3, 2], [0, 2]] and plain.changed.tolist() == [False, True]
    np.testing.assert_allclose(plain.weights[1], 2.5 * chances[1, [0, 2]], rtol=1e-6)
    shares = 1.5 * own / own.sum(-1, keepdims=True)
    scaled = walk(rule, ExpertCache(2, n_experts=4), logits, chances, stock, shares, renormalised=True)
    np.testing.assert_allclose(scaled.weights[1], 1.5 * chances[1, [0, 2]] / chances[1, [0, 2]].sum(), rtol=1e-6)
    assert (plain.weights[0] == (2.5 * own[0]).astype(np.float32)).all()


def test_no_probability_is_too_small_to_be_shared_out():
    logits = np.array([[200.0, 199.0, 0.0, -1.0], [0.0, -1.0, 200.0, 199.0]], dtype=np.float32)
    chances = np.exp(logits - 200) / np.exp(logits - 200).sum(-1, keepdims=True)
    stock = np.array([[0, 1], [2, 3]])
    weights = np.take_along_axis(chances, stock, -1)
    done = walk(Rule("max-rank", 4, 0), ExpertCache(2, n_experts=4), logits, chances, stock, weights, renormalised=True)
    assert done.experts[1].tolist() == [0, 1]
    np.testing.assert_allclose(done.weights[1], [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], rtol=1e-5)


# properties


@st.composite
def tokens(draw):
    """Logits [T, E] without ties, and how many experts a token uses."""
    n_experts, length = draw(st.integers(3, 9)), draw(st.integers(1, 12))
    rows = [draw(st.permutations(range(n_experts))) for _ in range(length)]
    steps = np.array(draw(st.lists(st.integers(1, 9), min_size=n_experts, max_size=n_experts)))
    logits = np.cumsum(steps)[np.array(rows)].astype(np.float32) / 4
    return logits, draw(st.integers(1, n_experts - 1))


def routed(logits: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    chances = powers / powers.sum(-1, keepdims=True)
    stock = np.argsort(-logits, axis=-1)[:, :top_k]
    return chances, stock, np.take_along_axis(chances, stock, -1)


@given(tokens(), st.sampled_from(sorted(METHODS)), st.data())
@settings(deadline=None, max_examples=150)
def test_walk_equals_the_definitions(given_tokens, method, data):
    logits, top_k = given_tokens
    keep, capacity = data.draw(st.integers(0, top_k)), data.draw(st.integers(1, logits.shape[1]))
    strength = {
        "cache-prior": data.draw(st.sampled_from([0.0, 0.1, 0.4, 1.0])),
        "max-rank": data.draw(st.integers(0, logits.shape[1])),
        "threshold": data.draw(st.sampled_from([0.0, 0.3, 0.6, 0.95])),
    }[method]
    chances, stock, weights = routed(logits, top_k)
    cache = ExpertCache(capacity, n_experts=logits.shape[1])
    done = walk(Rule(method, strength, keep), cache, logits, chances, stock, weights, renormalised=False)
    history: list[int] = []
    hits = 0
    for token, row in enumerate(logits.tolist()):
        cached = {*history[-capacity:]}
        seen = [max(one) - min(one) for one in logits[: token + 1].tolist()]
        chosen = slow_choice(method, strength, keep, row, stock[token].tolist(), cached, seen)
        assert {*done.experts[token].tolist()} == chosen, token
        assert done.changed[token] == (chosen != {*stock[token].tolist()})
        assert chosen <= cached | {*stock[token].tolist()}, "what is not resident comes only by the router's own choice"
        assert chosen >= {*stock[token, :keep].tolist()}
        hits += len(chosen & cached)
        touched = sorted(chosen, key=lambda expert: row[expert])
        history = [expert for expert in history if expert not in chosen] + touched
    assert (cache.hits, cache.misses) == (hits, logits.shape[0] * top_k - hits)


@given(tokens(), st.integers(0, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_off_is_the_stock_choice_exactly(given_tokens, keep, capacity):
    logits, top_k = given_tokens
    chances, stock, weights = routed(logits, top_k)
    for rule in (None, Rule("cache-prior", 0, keep), Rule("max-rank", top_k, keep), Rule("threshold", 0, keep)):
        cache = ExpertCache(capacity, n_experts=logits.shape[1])
        done = walk(rule, cache, logits, chances, stock, weights, renormalised=True)
        assert (done.experts == stock).all() and (done.weights == weights).all() and not done.changed.any()


@given(tokens(), st.data())
@settings(deadline=None, max_examples=60)
def test_a_larger_strength_never_chooses_fewer_residents_of_the_same_cache(given_tokens, data):
    logits, top_k = given_tokens
    chances, stock, _ = routed(logits, top_k)
    resident = data.draw(st.sets(st.integers(0, logits.shape[1] - 1)))
    keep = data.draw(st.integers(0, top_k))
    order = rank(logits, stock)[0].tolist()
    for method, strengths in (
        ("cache-prior", (0, 0.2, 0.5, 2)),
        ("max-rank", (1, 3, 5, 9)),
        ("threshold", (0, 0.5, 0.9, 1)),
    ):
        chosen = [
            Rule(method, one, keep).choose(order, logits[0].tolist(), chances[0].tolist(), resident, top_k, 3.0)
            for one in strengths
        ]
        assert all(len({*one}) == top_k for one in chosen)
        held = [len(resident & {*one}) for one in chosen]
        assert held == sorted(held), (method, held)


def test_equal_logits_leave_the_routers_own_choice():
    logits, stock = np.zeros((3, 6), dtype=np.float32), np.array([[5, 1], [4, 0], [5, 1]])
    chances = np.full((3, 6), 1 / 6, dtype=np.float32)
    assert rank(logits, stock)[1].tolist() == [4, 0, 1, 2, 3, 5]
    for rule in (Rule("cache-prior", 0, 0), Rule("max-rank", 2, 0), Rule("threshold", 0.3, 0)):
        done = walk(rule, ExpertCache(2, n_experts=6), logits, chances, stock, np.full((3, 2), 0.5), renormalised=True)
        assert done.experts.tolist() == stock.tolist()


@pytest.mark.parametrize("policy", ["gate", "decayed", "decayed_weight:0.5"])
def test_policies_that_need_more_get_what_the_trace_holds(policy):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, 8)).astype(np.float32)
    chances, stock, weights = routed(logits, 2)
    done = walk(
        Rule("cache-prior", 0.3, 1), cache := ExpertCache(3, policy, n_experts=8), logits, chances, stock, weights,
        renormalised=False,
    )  # fmt: skip
    again = ExpertCache(3, policy, n_experts=8)
    for experts, weight, chance in zip(done.experts, done.weights.astype(np.float16), chances.astype(np.float16)):
        again.step(experts[::-1].tolist(), weight[::-1].tolist(), chance.tolist())
    assert done.changed.any() and (again.hits, again.evictions) == (cache.hits, cache.evictions)


# refusals and defaults


@pytest.mark.parametrize(
    ("method", "strength", "words"),
    [
        ("prior", 0.1, "cache-prior, max-rank, threshold"),
        ("cache-prior", -0.1, "at least 0"),
        ("cache-prior", float("inf"), "at least 0"),
        ("cache-prior", float("nan"), "at least 0"),
        ("threshold", 1.5, "0 to 1"),
        ("max-rank", 2.5, "whole number"),
    ],
)
def test_strengths_out_of_range(method, strength, words):
    with pytest.raises(UsageError, match=words):
        Rule(method, strength, 1)


def test_defaults():
    assert [default_keep(top_k) for top_k in (1, 2, 4, 6, 8)] == [0, 1, 2, 2, 2]
    assert default_strengths("max-rank", 6, 64) == [9, 12, 24] and default_strengths("max-rank", 1, 64) == [2, 2, 4]
    assert default_strengths("max-rank", 6, 16) == [9, 12, 16]
    for method in METHODS:
        for one in default_strengths(method, 4, 5):
            Rule(method, one, 1).check(4, 5)


@pytest.mark.parametrize(("ranks", "good"), [(3, False), (4, True), (8, True), (9, False)])
def test_ranks_are_from_a_tokens_experts_to_all(ranks, good):
    with nullcontext() if good else pytest.raises(UsageError, match=r"4 \(the experts a token\) to 8"):
        Rule("max-rank", ranks, 1).check(4, 8)
    Rule("cache-prior", ranks, 1).check(4, 8)
