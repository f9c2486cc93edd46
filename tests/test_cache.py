"""ExpertCache, policies and replay: hand values, the slow twin, and the invariants of objectives-and-metrics.md (5)."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from foreign_traces import cacheable_by_design, canonical, esft, first_requests
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_reference import slow_replay, slow_steps

from remoe_cli.cache import choose, ExpertCache, replay, Step
from remoe_cli.errors import CacheError
from remoe_cli.report import locality, metrics
from remoe_cli.routing import RoutingTrace

ADMISSIONS = ("forced", "bypass")
CAUSAL = ["lru", "lfu", "fifo"]  # every other one is in test_policies.py
POLICIES = [*CAUSAL, "belady"]
CELLS = [(policy, admission) for policy in POLICIES for admission in ADMISSIONS]


def cache_of(steps, capacity, policy, admission="forced") -> ExpertCache:
    future = [expert for touched in steps for expert in touched]
    return ExpertCache(capacity, policy, n_experts=1 + max(future, default=0), admission=admission, future=future)


def run(steps, capacity, policy, admission="forced") -> list[Step]:
    cache = cache_of(steps, capacity, policy, admission)
    return [cache.step(touched) for touched in steps]


# ---- hand values

A, B, C, D = range(4)


@pytest.mark.parametrize(
    ("policy", "admission", "capacity", "steps", "last"),
    [
        # A is the older touch.
        ("lru", "forced", 2, [[A], [B], [C]], Step((), (C,), (C,), (A,))),
        # A was touched again, so B is older; inside a step the order decides.
        ("lru", "forced", 2, [[A], [B], [A], [C]], Step((), (C,), (C,), (B,))),
        ("lru", "forced", 2, [[B, A], [C]], Step((), (C,), (C,), (B,))),
        # A hit does not help in a queue.
        ("fifo", "forced", 2, [[A], [B], [A], [C]], Step((), (C,), (C,), (A,))),
        # B has two touches, A and C one; A is the less recent.
        ("lfu", "forced", 3, [[B], [A], [B, C], [D]], Step((), (D,), (D,), (A,))),
        # B's first touch counts although it left in between, so that A and B have two each.
        ("lfu", "forced", 2, [[A], [A], [B], [C], [B], [D]], Step((), (D,), (D,), (A,))),
        # B is used sooner than A. Of two that are never used again the higher id leaves.
        ("belady", "forced", 2, [[A], [B], [C], [B]], Step((B,), (), (), ())),
        ("belady", "forced", 2, [[A, B], [C], [B], [A]], Step((), (A,), (A,), (C,))),
        # With bypass D, never used again, is not kept.
        ("belady", "bypass", 1, [[A], [D], [A]], Step((A,), (), (), ())),
        # An expert that was just hit leaves: A has no further use, B and C have.
        ("belady", "bypass", 2, [[A, B], [A, C], [C, B]], Step((C, B), (), (), ())),
        # Counts: A 2, B 1: B only passes through.
        ("lfu", "bypass", 1, [[A], [A], [B]], Step((), (B,), (), ())),
        # With bypass a queue sends away even what it just hit.
        ("fifo", "bypass", 2, [[A], [B], [A, C]], Step((A,), (C,), (C,), (A,))),
        # Three experts, two slots: the last two touched stay. B, resident, is a hit all the same.
        ("lru", "forced", 2, [[A, B], [B, C, D]], Step((B,), (C, D), (C, D), (A, B))),
        ("lfu", "forced", 2, [[A, B], [A], [A, C, D]], Step((A,), (C, D), (C, D), (A, B))),
        # With bypass the policy chooses all the same: C and D were loaded last.
        ("fifo", "bypass", 2, [[A, B], [C, D, B]], Step((B,), (C, D), (C, D), (A, B))),
        ("lru", "bypass", 1, [[A, B]], Step((), (A, B), (B,), ())),
        # With bypass a small cache keeps what the policy thinks best: A and B are used again, C and D are not.
        ("belady", "bypass", 2, [[A, B, C], [A, B, D], [A, B]], Step((A, B), (), (), ())),
        ("lfu", "bypass", 1, [[A], [A, B, C]], Step((A,), (B, C), (), ())),
    ],
)
def test_by_hand(policy, admission, capacity, steps, last):
    got = run(steps, capacity, policy, admission)[-1]
    assert got._replace(evicted=tuple(sorted(got.evicted))) == last


def test_belady_forced_and_bypass_differ_by_hand():
    steps = [[A], [B], [A], [C], [A]]  # with one slot, forced must keep each newcomer
    assert [len(step.hits) for step in run(steps, 1, "belady", "forced")] == [0, 0, 0, 0, 0]
    assert [len(step.hits) for step in run(steps, 1, "belady", "bypass")] == [0, 0, 1, 0, 1]


def test_a_step_protects_its_own_experts_and_a_sequence_does_not():
    trace = as_trace([[[A, B]], [[C, A]]], [0, 2], n_experts=4)
    atomic = replay(trace, "lru", 2, touch_order="listed")
    sequential = replay(trace, "lru", 2, step="sequential", touch_order="listed")
    assert (atomic.hits, sequential.hits) == (1, 0)  # in a sequence C pushes A out before A is asked for


def test_touch_order_by_hand():
    trace = as_trace([[[A, B]], [[C, D]], [[A, C]]], [0, 3], n_experts=4)  # A, C are the heaviest of their steps
    assert replay(trace, "lru", 3).hits == 2  # C, D, and A the last touched before them
    assert replay(trace, "lru", 3, touch_order="listed").hits == 1  # C, D, B


def test_reset_by_hand():
    trace = as_trace([[[A]], [[A]], [[A]], [[B]]], [0, 2, 2, 4], n_experts=2)
    fresh, one = replay(trace, "lru", 2), replay(trace, "lru", 2, reset="never")
    assert (fresh.hits, fresh.request_hits.tolist(), fresh.request_misses.tolist()) == (1, [1, 0, 0], [1, 0, 2])
    assert (one.hits, one.request_hits.tolist(), one.request_misses.tolist()) == (2, [1, 0, 1], [1, 0, 1])
    assert fresh.request_tokens.tolist() == [2, 0, 2] and fresh.request_accesses.tolist() == [2, 0, 2]


def test_replay_counts_decode_tokens_from_a_cold_start():
    trace = RoutingTrace(np.array([[[A]], [[A]], [[A]]]), np.array([0, 3]), np.array([True, True, False]), 2)
    got = replay(trace, "lru", 1)
    assert (got.tokens, got.accesses, got.hits, got.misses, got.evictions, got.proactive) == (1, 1, 0, 1, 0, 0)


def test_reset_forgets_contents_counts_and_policy():
    steps = [[A], [B], [A], [C], [B]]
    for policy, admission in CELLS:
        cache = cache_of(steps, 2, policy, admission)
        first = [cache.step(touched) for touched in steps]
        counters = cache.hits, cache.misses, cache.evictions
        assert counters == tuple(sum(len(step[field]) for step in first) for field in (0, 1, 3))
        cache.reset()
        assert (cache.resident, cache.hits, cache.misses, cache.evictions) == (set(), 0, 0, 0)
        assert [cache.step(touched) for touched in steps] == first


# ---- what is refused


def scored() -> RoutingTrace:
    return RoutingTrace(
        np.zeros((1, 1, 1), int), np.array([0, 1]), np.zeros(1, bool), 1, probabilities=np.ones((1, 1, 1))
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ExpertCache(0, n_experts=2), "at least 1 slot"),
        (lambda: ExpertCache(1, n_experts=2, admission="free"), "forced or bypass"),
        (lambda: ExpertCache(1, "lruu", n_experts=2), r"did you mean lru\?.*there are lru, lfu, fifo"),
        (lambda: ExpertCache(1, "belady", n_experts=2), "only replay knows; a decoder can use lru, lfu, fifo"),
        (lambda: choose("lru:2"), "takes no parameter"),
        (lambda: replay(as_trace([[[A]]], [0, 1], 1), "lru", 1, sessions=2), "2 sessions"),
        (lambda: replay(as_trace([[[A]]], [0, 1], 1), "lru", [1, 1]), "2 budgets for 1 layers"),
        (lambda: replay(as_trace([[[A]]], [0, 1], 1), "lru", 1, pool="bytes"), "the bytes of an expert"),
        (lambda: replay(as_trace([[[A]]], [0, 1], 1), "lru", 1, engine="c"), "compiled or python"),
        (lambda: replay(as_trace([[[A]]], [0, 1], 1), "lru", 1, step="both"), "atomic or sequential"),
        (lambda: replay(as_trace([[[A]]], [0, 1], 1), "lru", 1, step="sequential", warm="batch"), "--step atomic"),
        (lambda: replay(scored(), "decayed", 1, step="sequential"), "neither --step sequential"),
        (lambda: replay(scored(), "retention", 1, warm="batch"), "nor --warm batch"),
        (lambda: replay(as_trace([[[A]]], [0, 1], 1), "decayed", 1), "probabilities"),
        (lambda: replay(as_trace([[[A]]], [0, 1], 1), "static", 1), "--fit"),
        (lambda: replay(as_trace([[[A]]], [0, 1], 1), "lru", 1, reset="layer"), "request or never"),
        (lambda: replay(as_trace([[[A]]], [0, 1], 1), "lru", 1, touch_order="id"), "weight or listed"),
        (lambda: replay(as_trace([[[A]]], [0, 1], 1), "lru", 0), "at least 1 slot"),
        (
            lambda: replay(RoutingTrace(np.zeros((1, 1, 1), int), np.array([0, 1]), np.ones(1, bool), 1), "lru", 1),
            "no dec",
        ),
    ],
)
def test_refuses(call, message):
    with pytest.raises(CacheError, match=message) as caught:
        call()
    assert caught.value.hint.startswith("remoe ")


def test_a_step_names_each_expert_once():
    with pytest.raises(ValueError, match="twice"):
        ExpertCache(2, n_experts=2).step([A, B, A])


def test_belady_refuses_another_future():
    cache = ExpertCache(2, "belady", n_experts=4, future=[A, B, C])
    cache.step([A, B])
    with pytest.raises(ValueError, match="not the future"):
        cache.step([D])


# ---- random traces


def as_trace(rows, borders, n_experts) -> RoutingTrace:
    experts = np.array(rows)
    return RoutingTrace(experts, np.array(borders), np.zeros(len(experts), dtype=bool), n_experts)


@st.composite
def traces(draw, prompts: bool = False) -> RoutingTrace:
    """Up to 4 requests of up to 12 tokens, 1 or 2 layers, top-1 to top-3 of at most 7 experts; at least one token to
    decode."""
    top_k = draw(st.integers(1, 3))
    n_experts = draw(st.integers(top_k, 7))
    n_layers = draw(st.integers(1, 2))
    lengths = [*draw(st.lists(st.integers(0, 12), max_size=3)), draw(st.integers(1, 12))]
    prompt_lengths = [draw(st.integers(0, length if prompts else 0)) for length in lengths[:-1]] + [0]
    token = st.lists(st.integers(0, n_experts - 1), min_size=top_k, max_size=top_k, unique=True)
    size = sum(lengths) * n_layers
    rows = draw(st.lists(token, min_size=size, max_size=size))
    prefill = [at < prompt for length, prompt in zip(lengths, prompt_lengths) for at in range(length)]
    return RoutingTrace(
        experts=np.array(rows).reshape(sum(lengths), n_layers, top_k),
        borders=np.cumsum([0, *lengths]),
        prefill=np.array(prefill, dtype=bool),
        n_experts=n_experts,
    )


@st.composite
def uneven_steps(draw) -> list[list[int]]:
    """Steps of 1 to 5 of 6 experts, as batches make them: often more than the cache holds."""
    step = st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True)
    return draw(st.lists(step, min_size=1, max_size=14))


RANDOM = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize(("policy", "admission"), CELLS)
@RANDOM
@given(steps=uneven_steps(), capacity=st.integers(1, 6))
def test_steps_equal_the_slow_twin(policy, admission, steps, capacity):
    fast, slow = run(steps, capacity, policy, admission), slow_steps(steps, capacity, policy, admission)
    for one, other in zip(fast, slow, strict=True):
        assert one[:3] == (tuple(other.hits), tuple(other.misses), tuple(other.admitted))
        assert sorted(one.evicted) == sorted(other.evicted)


def equals_the_slow_twin(trace, policy, capacity, **options):
    fast, slow = replay(trace, policy, capacity, **options), slow_replay(trace, policy, capacity, **options)
    assert (fast.tokens, fast.accesses, fast.hits) == (slow.tokens, slow.accesses, slow.hits)
    assert (fast.misses, fast.evictions) == (slow.misses, slow.evictions)
    assert fast.request_hits.tolist() == slow.request_hits
    assert fast.request_misses.tolist() == slow.request_misses
    assert fast.request_loads.sum(axis=1).tolist() == slow.request_misses
    assert fast.token_misses.sum() == slow.misses and len(fast.token_misses) == slow.tokens


@pytest.mark.parametrize(("policy", "admission"), CELLS)
@RANDOM
@given(
    trace=traces(prompts=True),
    capacity=st.integers(1, 7),
    step=st.sampled_from(["atomic", "sequential"]),
    reset=st.sampled_from(["request", "never"]),
    touch_order=st.sampled_from(["weight", "listed"]),
)
def test_replay_equals_the_slow_twin(policy, admission, trace, capacity, step, reset, touch_order):
    options = {"step": step, "reset": reset, "touch_order": touch_order}
    equals_the_slow_twin(trace, policy, capacity, admission=admission, **options)


def most_hits(steps: list[list[int]], capacity: int, admission: str) -> int:
    """The most hits any policy could get, by trying every choice."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for touched in steps:
        after: dict[frozenset[int], int] = {}
        for resident, hits in reached.items():
            hits += len(resident & set(touched))
            held = resident | set(touched)
            if len(touched) > capacity and admission == "forced":
                choices = [frozenset(touched[-capacity:])]
            elif admission == "bypass":
                choices = [frozenset(kept) for kept in combinations(held, min(capacity, len(held)))]
            else:
                others = held - set(touched)
                room = min(capacity - len(touched), len(others))
                choices = [frozenset(touched) | set(kept) for kept in combinations(others, room)]
            for choice in choices:
                after[choice] = max(hits, after.get(choice, 0))
        reached = after
    return max(reached.values())


@pytest.mark.parametrize("admission", ADMISSIONS)
@RANDOM
@given(steps=uneven_steps(), capacity=st.integers(1, 4))
def test_belady_is_the_best_of_all_choices(admission, steps, capacity):
    got = sum(len(step.hits) for step in run(steps, capacity, "belady", admission))
    assert got == most_hits(steps, capacity, admission)


# ---- invariants, each on random traces and on slices of real ones


def fetches_at_most_what_changed(trace):
    """N_fetch(t) <= K (1 - IR_t) for C >= K."""
    for policy in POLICIES:
        for capacity in {trace.top_k, min(trace.top_k + 2, trace.n_experts)}:
            for start, stop in zip(trace.borders, trace.borders[1:]):
                for layer in range(trace.n_layers):
                    rows = trace.experts[start:stop, layer].tolist()
                    for now, step in enumerate(run(rows, capacity, policy)[1:], start=1):
                        assert len(step.misses) <= trace.top_k - len({*rows[now]} & {*rows[now - 1]})


def lru_at_top_k_is_eor(trace):
    """At C = K, LRU uHR = sum_i (T_i - 1) EOR_i / sum_i T_i; here each request's hits, as integers."""
    got, overlap = replay(trace, "lru", trace.top_k), locality.overlap(trace)
    assert got.request_hits.tolist() == overlap.shared.tolist()


def every_policy_is_lru_at_top_k(trace):
    """Forced admission at C = K leaves no choice, Belady included."""
    hits = {replay(trace, policy, trace.top_k).hits for policy in POLICIES}
    assert len(hits) == 1


def lru_hits_grow_with_the_cache(trace):
    for step in ("atomic", "sequential"):
        hits = [replay(trace, "lru", capacity, step=step).hits for capacity in sizes(trace)]
        assert hits == sorted(hits)


def nothing_beats_belady(trace):
    """No policy loads less than Belady of its own admission form; and bypass has more choices than forced."""
    for step in ("atomic", "sequential"):
        for capacity in sizes(trace):
            least = {}
            for admission in ADMISSIONS:
                options = {"admission": admission, "step": step}
                least[admission] = replay(trace, "belady", capacity, **options).misses
                assert all(replay(trace, policy, capacity, **options).misses >= least[admission] for policy in CAUSAL)
            assert least["bypass"] <= least["forced"]


def full_cache_has_cold_misses_only(trace):
    """C = E misses each expert once a layer and request, so at most E times."""
    distinct = sum(
        len({*trace.experts[start:stop, layer].ravel().tolist()})
        for start, stop in zip(trace.borders, trace.borders[1:])
        for layer in range(trace.n_layers)
    )
    assert distinct <= trace.n_experts * trace.n_layers * trace.n_requests
    for policy, admission in CELLS:
        got = replay(trace, policy, trace.n_experts, admission=admission)
        assert (got.misses, got.evictions) == (distinct, 0)


def load_is_one_minus_hit(trace):
    """Load = (1 - Hit) K L S_exp where P = 0."""
    got = replay(trace, "lru", trace.top_k)
    load = metrics.load_mb(got.misses, got.proactive, 17.3e6, got.tokens)
    assert load == pytest.approx((1 - got.hit_ratio) * trace.top_k * trace.n_layers * 17.3)


def counts_add_up(trace):
    for policy, admission in CELLS:
        for capacity in sizes(trace):
            got = replay(trace, policy, capacity, admission=admission)
            assert got.accesses == got.tokens * trace.n_layers * trace.top_k == got.hits + got.misses
            assert (got.request_hits.sum(), got.request_misses.sum()) == (got.hits, got.misses)
            assert got.evictions <= got.misses


def sizes(trace) -> list[int]:
    """Cache sizes worth a look: below, at and above K, up to E."""
    wanted = {1, trace.top_k, trace.top_k + 1, 2 * trace.top_k, trace.n_experts}
    return sorted(size for size in wanted if size <= trace.n_experts)


INVARIANTS = [
    fetches_at_most_what_changed,
    lru_at_top_k_is_eor,
    every_policy_is_lru_at_top_k,
    lru_hits_grow_with_the_cache,
    nothing_beats_belady,
    full_cache_has_cold_misses_only,
    load_is_one_minus_hit,
    counts_add_up,
]


@pytest.mark.parametrize("holds", INVARIANTS)
@RANDOM
@given(trace=traces())
def test_invariant(holds, trace):
    holds(trace)


@pytest.fixture(scope="module")
def real_slices(shared) -> list[RoutingTrace]:
    deepseek = first_requests(canonical(esft(shared("data/traces/esft/intent.npz"))), n_requests=4, n_layers=2)
    sticky = cacheable_by_design(shared("data/traces/cacheable-by-design/b-main-s1/trace_code.npz"))
    return [deepseek, as_trace(sticky.experts[:300, :2], [0, 100, 300], sticky.n_experts)]


@pytest.mark.parametrize("holds", INVARIANTS)
def test_invariant_on_real_traces(real_slices, holds):
    for trace in real_slices:
        holds(trace)


@pytest.mark.parametrize(("policy", "admission"), CELLS)
def test_real_traces_equal_the_slow_twin(real_slices, policy, admission):
    for trace in real_slices:
        for capacity in (trace.top_k - 1, trace.top_k, trace.top_k + 2):
            equals_the_slow_twin(trace, policy, capacity, admission=admission)
