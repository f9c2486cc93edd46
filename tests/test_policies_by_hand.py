"""The policies by hand, what they say of themselves, and the documented example of a new one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from math import inf
from pathlib import Path

import numpy as np
import pytest
from policy_traces import as_trace, counts, random_trace

from remoe_cli.cache import ExpertCache, POLICIES, replay
from remoe_cli.cache.policies import live_policies
from remoe_cli.cache.policy import Policy
from remoe_cli.routing import RoutingTrace, write

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_says_what_it_is(name):
    policy = POLICIES[name]
    assert 10 < len(policy.title) <= 110 and "\n" not in policy.title and policy.source
    if policy.parameter is not None:
        low, high = policy.allowed
        assert -inf < low <= policy.parameter <= high < inf
        assert policy.table(low) and policy.table(high)


def test_every_page_that_is_named_is_one_that_users_have():
    known = {path.name for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))}
    for path in (*(ROOT / "remoe_cli").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"):
        named = set(re.findall(r"[\w-]+\.md\b", path.read_text()))
        assert named <= known, f"{path.relative_to(ROOT)} names {named - known}"


def test_only_the_oracles_and_the_fitted_are_not_live():
    assert set(POLICIES) - set(live_policies()) == {"belady", "hindsight", "static"}


def test_policy_takes_key_or_victim():
    with pytest.raises(ValueError, match="either key or victim"):
        Policy(title="neither", source="")


# ---- hand values

A, B, C, D, E = range(5)


def contents(policy, capacity, steps, admission="forced", weights=None, probabilities=None, **options) -> list[int]:
    """Who is resident after the steps."""
    cache = ExpertCache(capacity, policy, n_experts=5, admission=admission, **options)
    for at, touched in enumerate(steps):
        cache.step(
            touched,
            weights=None if weights is None else weights[at],
            probabilities=None if probabilities is None else probabilities[at],
        )
    return sorted(cache.resident)


@pytest.mark.parametrize(
    ("policy", "capacity", "steps", "kept"),
    [
        # At the last step A has 2^-1.5 + 2^-1 = .85 and B 2^-.5 = .71.
        ("lrfu", 2, [[A], [A], [B], [C]], [A, C]),
        # With rate 1 they have .25 + .125 and .5.
        ("lrfu:1", 2, [[A], [A], [B], [C]], [B, C]),
        # Touched once only, the oldest leaves.
        ("arc", 2, [[A], [B], [C]], [B, C]),
        # A was seen again; the one seen once leaves although it is more recent.
        ("arc", 2, [[A], [A], [B], [C]], [A, C]),
        # B left as one seen once and is asked for as a ghost: now one slot is for those seen once, so A leaves and C may
        # stay.
        ("arc", 2, [[A], [A], [B], [C], [B]], [B, C]),
        # Then A comes back as a ghost of those seen again: no slot is for those seen once, so C leaves.
        ("arc", 2, [[A], [A], [B], [C], [B], [A]], [A, B]),
        # The small queue has one slot: the newcomer before the last one leaves, and A, used twice there, moves on.
        ("s3fifo", 3, [[A], [A], [A], [B], [C], [D], [E]], [A, D, E]),
        # One use more is not enough: A leaves as any newcomer.
        ("s3fifo", 3, [[A], [A], [B], [C], [D]], [B, C, D]),
        # B comes back as a ghost and goes to the main queue, so that C and D leave before it.
        ("s3fifo", 3, [[B], [C], [D], [E], [B], [A], [C]], [A, B, C]),
        # In one layer: of those that this token does not use, the one loaded first.
        ("least_stale", 2, [[A], [B], [A], [C]], [B, C]),
    ],
)
def test_by_hand(policy, capacity, steps, kept):
    assert contents(policy, capacity, steps) == kept


def test_weights_by_hand():
    steps, weights = [[A], [B], [B], [C]], [[0.5], [0.375], [0.25], [0.125]]
    assert contents("gate", 2, steps, weights=weights) == [A, C]  # last used with .5 and .25
    assert contents("gate", 2, steps, "bypass", weights) == [A, B]
    assert contents("decayed_weight:1", 2, steps, weights=weights) == [B, C]  # .5 against .375 + .25
    assert contents("decayed_weight:0.5", 2, steps, weights=weights) == [B, C]  # 1/16 against (.1875 + .25) / 2


def test_probabilities_by_hand():
    steps = [[A], [B], [C]]
    scores = [[0.5, 0.0, 0.25, 0.25, 0], [0, 0.5, 0.5, 0, 0], [0.125, 0.25, 0.625, 0, 0]]
    assert contents("retention", 2, steps, probabilities=scores) == [B, C]
    assert contents("retention", 1, steps, "bypass", [[1.0]] * 3, scores) == [C]
    # A: .5 + .125, B: .5 + .25, C: .25 + .5 + .625
    assert contents("decayed:1", 2, steps, probabilities=scores) == [B, C]
    scores[0][A] = 0.75
    assert contents("decayed:1", 2, steps, probabilities=scores) == [A, C]
    assert contents("decayed:0.5", 2, steps, probabilities=scores) == [B, C]  # .1875 + .125 against .25 + .25
    # Of A and C, C was never used before but has .25 + .5 at the second step: B passes by.
    assert contents("decayed:1", 1, steps, "bypass", probabilities=scores) == [C]


def test_least_stale_in_a_pool_by_hand():
    """Three layers of 2 experts in one pool of 4: ids 0 1 | 2 3 | 4 5."""
    cache = ExpertCache(4, "least_stale", n_experts=2, n_layers=3)
    for layer, touched in enumerate([[0], [2], [4], [1]]):
        cache.step(touched, layer=layer % 3)
    assert cache.resident == {0, 1, 2, 4}
    # Layer 1 needs room. 1 is of this token. Of 0, 2, 4 layer 1's own 2 has the longest way to its next turn.
    assert cache.step([3], layer=1).evicted == (2,)
    # Layer 2: of 0 and 4, not used by this token, its own 4.
    assert cache.step([5], layer=2).evicted == (4,)


def test_static_by_hand():
    fit = [3, 5, 3, 0, 1]
    assert contents("static", 2, [], fit=fit) == [A, B]
    steps = [[D], [C], [E]]
    assert contents("static", 2, steps, "bypass", fit=fit) == [A, B]  # of A and C, equally used, the lower id stays
    assert contents("static", 2, steps, fit=fit) == [B, E]


@pytest.mark.parametrize("engine", ["compiled", "python"])
def test_retention_fills_free_slots_after_the_first_prompt_token(engine):
    """A is the prompt; B is next in its probabilities, so it is there when it is asked for, free of charge."""
    scores = np.array([[[0.5, 0.25, 0.125, 0.125]], [[0.25, 0.5, 0.125, 0.125]]], np.float16)
    trace = RoutingTrace(np.array([[[A]], [[B]]]), np.array([0, 2]), np.array([True, False]), 4, probabilities=scores)
    filled, cold = (replay(trace, "retention", 2, warm=warm, engine=engine) for warm in ("prefill", "cold"))
    assert (filled.hits, filled.misses, filled.proactive) == (1, 0, 0)
    assert (cold.hits, cold.misses) == (0, 1)
    assert replay(trace, "decayed", 2, warm="prefill", engine=engine).hits == 0


@pytest.mark.parametrize(
    "policy", ["lru", "lfu", "fifo", "lrfu", "lfru", "arc", "s3fifo", "least_stale", "random", "static"]
)
def test_counts_of_a_fixed_loop(policy):
    """A, B, C in turn through two slots: no causal policy with forced admission can hit more than every second access."""
    trace = as_trace([[[A]], [[B]], [[C]]] * 40, 3)
    best = replay(trace, "belady", 2).hits
    assert best == 59  # after A, B, C: every second access hits, the last step included
    assert replay(trace, policy, 2, fit=trace).loads >= 120 - best


def test_random_is_even_and_seeded():
    """16 residents, one leaves, 4000 seeds: each as often as the others."""
    left = np.zeros(16)
    for seed in range(4000):
        cache = ExpertCache(16, f"random:{seed}", n_experts=17)
        for expert in range(16):
            cache.step([expert])
        left[cache.step([16]).evicted] += 1
    assert ((left - 250) ** 2 / 250).sum() < 37.7  # chi-square, 15 degrees of freedom, .001
    trace = random_trace(np.random.default_rng(3), n_tokens=200)
    assert replay(trace, "random", 4).hits != replay(trace, "random:1", 4).hits
    assert replay(trace, "random:1", 4).hits == replay(trace, "random:1", 4).hits


def test_rate_0_counts_and_rate_1_is_recency():
    trace = random_trace(np.random.default_rng(5), n_tokens=300)
    for capacity in (3, 5, 7):
        for mode in ({}, {"admission": "bypass"}, {"step": "sequential"}):
            assert counts(replay(trace, "lrfu:0", capacity, **mode)) == counts(replay(trace, "lfu", capacity, **mode))
        alone = {"step": "sequential"}
        assert counts(replay(trace, "lrfu:1", capacity, **alone)) == counts(replay(trace, "lru", capacity, **alone))


def test_the_small_queue_gives_where_the_main_queue_is_protected():
    cache = ExpertCache(30, "s3fifo", n_experts=32)
    hot = list(range(28))
    for touched in ([*hot, 28, 29], hot, hot):
        cache.step(touched)
    assert cache.step([30]).evicted == (28,)  # all of hot move to the main queue, which has 27 slots
    cache.step([29])
    assert cache.step([*hot, 31]).evicted == (
        29,
    )  # hot is asked for; 29 was queued before 30, and one hit is not enough


# ---- the example of docs/extending.md


BY_HAND = """
from policy_traces import as_trace
from remoe_cli.cache import ExpertCache, live_policies, replay

A, B, C = range(3)
steps = [A, A, A, B, B, C]

def kept(policy):
    cache = ExpertCache(2, policy, n_experts=5)
    for one in steps:
        cache.step([one])
    return sorted(cache.resident)

assert "capped_lfu" in live_policies()
assert kept("capped_lfu") == [B, C]
assert kept("capped_lfu:3") == kept("lfu") == [A, C]
trace = as_trace([[[one]] for one in [*steps, A, B]], 5)
for engine in ("compiled", "python"):
    # After A, A, A, B, B, C the cap 2 keeps B, C: A misses, takes C's place (one touch), and B hits.
    assert replay(trace, "capped_lfu", 2, engine=engine).token_misses.tolist() == [1, 0, 0, 1, 0, 1, 1, 0]
    assert replay(trace, "capped_lfu:3", 2, engine=engine).token_misses.tolist() == [1, 0, 0, 1, 0, 1, 0, 1]
"""


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the package and the tests with the file and the changes that docs/extending.md describes, and no others."""
    copy = tmp_path_factory.mktemp("extended")
    for folder in ("remoe_cli", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "docs" / "extending.md").read_text()
    (block,) = re.findall(r"<!-- a test runs this block -->\n```python\n(.*?)```", text, re.DOTALL)
    (name,) = re.findall(r"`(remoe_cli/cache/policies/\w+\.py)`:\n\n<!-- a test runs", text)
    (copy / name).write_text(block)
    changes = re.findall(r"```diff\n--- (\S+)\n(.*?)```", text, re.DOTALL)
    assert len(changes) == 4
    for path, change in changes:
        lines = change.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] == " ")
        file = copy / path
        assert file.read_text().count(before) == 1, f"docs/extending.md: {path} has not once\n{before}"
        file.write_text(file.read_text().replace(before, "".join(line[1:] for line in lines)))
    return copy


def in_the_copy(copy: Path, *words: str) -> str:
    """A command's output. The copy's own package is the one that is run."""
    environment = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tests'}"}
    ran = subprocess.run([sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_documented_example_by_hand(extended):
    where = "import remoe_cli; print(remoe_cli.__file__)"
    assert in_the_copy(extended, "-c", where).startswith(str(extended))
    in_the_copy(extended, "-c", BY_HAND)


def test_the_documented_examples_commands_run(extended):
    write(as_trace([[[one]] for one in (A, B, C) * 4], 9), extended / "t.trace")
    text = (ROOT / "docs" / "extending.md").read_text()
    commands = [shlex.split(line) for line in re.findall(r"^    remoe (.*)$", text, re.MULTILINE)]
    assert [command[0] for command in commands] == ["replay", "decode"]
    for command in commands:
        in_the_copy(extended, "-m", "remoe_cli", *command, "--json")


def test_the_documented_examples_row_and_twin_pass(extended):
    chosen = "capped_lfu and slow_twin or every_policy_has_a_row"
    said = in_the_copy(extended, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_policies.py", "-k", chosen)
    assert int(re.search(r"(\d+) passed", said)[1]) >= 3 and "failed" not in said
