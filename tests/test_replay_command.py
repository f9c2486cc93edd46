"""`remoe replay`: its cells against the slow twin, its options, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from slow_reference import slow_replay, slow_steps

from remoe_cli.cache import choose, replay
from remoe_cli.cache.budgets import fit_budgets
from remoe_cli.cache.policies import ALONE
from remoe_cli.report import locality, metrics
from remoe_cli.routing import RoutingTrace, write

LAYERS, EXPERTS, TOP_K = 3, 10, 2


def random_trace(seed: int = 0, lengths=(12, 9, 15), prompt: int = 3, layers: int = LAYERS, **fields) -> RoutingTrace:
    """Requests of `prompt` prompt tokens and the rest decoded; some experts are far more used than others."""
    rng = np.random.default_rng(seed)
    chances = rng.dirichlet(np.full(EXPERTS, 0.7), size=layers)
    experts = np.array(
        [
            [rng.choice(EXPERTS, TOP_K, replace=False, p=chances[layer]) for layer in range(layers)]
            for _ in range(sum(lengths))
        ]
    )
    prefill = np.concatenate([np.arange(length) < prompt for length in lengths])
    return RoutingTrace(experts, np.cumsum([0, *lengths]), prefill, EXPERTS, **fields)


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    return random_trace()


@pytest.fixture
def file(trace, tmp_path) -> Path:
    write(trace, tmp_path / "one.trace")
    return tmp_path / "one.trace"


def result(ran) -> dict:
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def cells_of(got: dict, arm: str = "trace") -> dict:
    return {(c["policy"], c["admission"], c["capacity"]): c for c in got["cells"] if c["arm"] == arm}


# ---- cells


def test_cells_equal_the_slow_twin(remoe, trace, file):
    got = result(remoe("replay", file, "--cache", "2,3,5", "--policy", "lru,lfu,belady", "--equal", "slots", "--json"))
    cells = cells_of(got)
    assert len(cells) == len(got["cells"]) == 3 * 2 * 3 and not got["unavailable"]
    for (policy, admission, capacity), cell in cells.items():
        slow = slow_replay(trace, policy, capacity, admission=admission)
        for name in ("tokens", "accesses", "hits", "misses", "evictions"):
            assert cell[name] == getattr(slow, name), (policy, admission, capacity, name)
        assert cell["slots"] == LAYERS * capacity
        assert cell["staging"] == (TOP_K if admission == "bypass" else 0)
        assert cell["hit_ratio"] == slow.hits / slow.accesses
        assert cell["loads_a_token"] == slow.misses / slow.tokens
        lru, best = (slow_replay(trace, name, capacity, admission=form).misses for name, form in REFERENCES)
        assert cell["gap_closed"] == pytest.approx((lru - slow.misses) / (lru - best))
        assert cell["hit_ratio_95"][0] < cell["hit_ratio"] < cell["hit_ratio_95"][1]
    assert {cell["gap_closed_forced"] for key, cell in cells.items() if key[2] == TOP_K} == {None}  # no gap at C = K


REFERENCES = (("lru", "forced"), ("belady", "bypass"))


def test_the_gap_needs_no_reference_among_the_policies(remoe, file):
    both = result(remoe("replay", file, "--cache", "3", "--policy", "lfu,lru,belady", "--json"))
    alone = result(remoe("replay", file, "--cache", "3", "--policy", "lfu", "--admission", "forced", "--json"))
    (cell,) = alone["cells"]
    assert cell == cells_of(both)["lfu", "forced", 3] and cell["gap_closed"] is not None


def test_at_equal_memory_bypass_pays_for_its_staging(remoe, trace, file):
    got = result(remoe("replay", file, "--cache", "4", "--policy", "lfu", "--json"))
    cells = cells_of(got)
    forced, bypass = cells["lfu", "forced", 4], cells["lfu", "bypass", 4]
    assert (forced["slots"], forced["staging"]) == (LAYERS * 4, 0)
    assert (bypass["slots"], bypass["staging"]) == (LAYERS * 4 - TOP_K, TOP_K)
    slots = {one["admission"]: one["layers"] for one in got["slots"]}
    assert slots["forced"] == [4, 4, 4] and sorted(slots["bypass"]) == [3, 3, 4]
    assert bypass["misses"] == replay(trace, "lfu", slots["bypass"], admission="bypass", engine="python").misses


def test_misses_a_token_are_percentiles_over_tokens(remoe, trace, file):
    (cell,) = result(remoe("replay", file, "--cache", "3", "--policy", "lru", "--admission", "forced", "--json"))[
        "cells"
    ]
    misses = []
    for start, stop in zip(trace.borders, trace.borders[1:]):
        tokens = [token for token in range(start, stop) if not trace.prefill[token]]
        layers = [
            slow_steps([trace.experts[token, layer].tolist()[::-1] for token in tokens], 3, "lru")
            for layer in range(LAYERS)
        ]
        misses += [sum(len(steps[at].misses) for steps in layers) for at in range(len(tokens))]
    assert cell["misses_a_token"] == {
        "mean": pytest.approx(np.mean(misses)),
        **{f"p{share}": pytest.approx(np.percentile(misses, share)) for share in (50, 95, 99)},
    }


def test_all_shows_every_policy_or_says_what_it_lacks(remoe, file):
    got = result(remoe("replay", file, "--cache", "4", "--policy", "all", "--json"))
    shown, missing = (
        {cell["policy"] for cell in got["cells"]},
        {one["policy"]: one["reason"] for one in got["unavailable"]},
    )
    assert shown | {*missing} == {*ALONE} and not shown & {*missing}
    for name, reason in missing.items():
        needs = choose(name).policy.needs
        headed = {"temporal", "spatio"} & {*needs}
        option = (
            "of a delta that has"
            if headed
            else "--probabilities"
            if "probabilities" in needs
            else "--fit"
            if "fit" in needs
            else "remoe trace"
        )
        assert not reason.endswith(".")
        assert option in reason
    assert {"decayed", "static", "gate"} <= {*missing} and {"lru", "belady", "hindsight"} <= shown


def test_a_complete_trace_lacks_nothing(remoe, trace, tmp_path):
    rng = np.random.default_rng(1)
    whole = random_trace(
        weights=rng.random((36, LAYERS, TOP_K), dtype=np.float32),
        **{
            name: rng.dirichlet(np.ones(EXPERTS), size=(36, LAYERS)) for name in ("probabilities", "temporal", "spatio")
        },
    )
    write(whole, tmp_path / "whole.trace")
    write(trace, tmp_path / "other.trace")
    got = result(remoe("replay", "whole.trace", "--cache", "4", "--fit", "other.trace", "--json"))
    assert {cell["policy"] for cell in got["cells"]} == {*ALONE}
    assert {(one["policy"], one["admission"]) for one in got["unavailable"]} == {("spatio", "forced")}
    static = cells_of(got)["static", "forced", 4]
    assert static["misses"] == replay(whole, "static", 4, fit=trace, engine="python").misses
    assert static["proactive"] == LAYERS * 4 * 3  # a fresh cache each request
    assert static["loads_a_token"] == (static["misses"] + static["proactive"]) / static["tokens"]
    assert static["loads_a_token_95"][0] <= static["loads_a_token"] <= static["loads_a_token_95"][1]


# ---- options


def test_a_pool_and_fitted_budgets(remoe, trace, file, tmp_path):
    quick = ("replay", file, "--cache", "3", "--policy", "lru", "--admission", "forced", "--json")
    plain, pooled, fitted = (
        result(remoe(*quick, *more))["cells"][0] for more in ((), ("--pool",), ("--budgets", file))
    )
    assert plain["slots"] == pooled["slots"] == fitted["slots"] == LAYERS * 3
    assert pooled["misses"] == replay(trace, "lru", 3, pool=True, engine="python").misses
    assert fitted["hits"] >= plain["hits"]  # fitted on the trace itself
    other = random_trace(seed=9)
    write(other, tmp_path / "other.trace")
    got = result(remoe(*quick, "--budgets", "other.trace"))
    slots = got["slots"][0]["layers"]
    least = min(trace.top_k, 3)
    assert slots == fit_budgets(other, LAYERS * 3, least=least) != fit_budgets(trace, LAYERS * 3, least=least)
    assert min(slots) >= least
    assert sum(slots) == LAYERS * 3 == got["cells"][0]["slots"]
    assert got["cells"][0]["misses"] == replay(trace, "lru", slots, engine="python").misses


def test_policies_that_follow_single_tokens_are_na_where_there_are_none(remoe, tmp_path):
    write(random_trace(probabilities=np.full((36, LAYERS, EXPERTS), 1 / EXPERTS)), tmp_path / "full.trace")
    quick = ("replay", "full.trace", "--cache", "3", "--policy", "lru,decayed", "--admission", "forced", "--json")
    for rule in (("--step", "sequential"), ("--warm", "batch")):
        got = result(remoe(*quick, *rule))
        assert [cell["policy"] for cell in got["cells"]] == ["lru"]
        assert rule[1] in got["unavailable"][0]["reason"]


@pytest.mark.parametrize(
    "options",
    [
        {"step": "sequential"},
        {"reset": "never"},
        {"touch_order": "listed"},
        {"warm": "prefill"},
        {"warm": "batch"},
        {"warm": "carry", "sessions": 2},
    ],
    ids=str,
)
def test_rules_reach_the_simulator(remoe, trace, file, options):
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    got = result(remoe("replay", file, "--cache", "3", "--policy", "lru", "--admission", "forced", *words, "--json"))
    assert got["rules"].items() >= options.items() and got["rules"]["from_trace"] == []
    expected, (cell,) = replay(trace, "lru", 3, engine="python", **options), got["cells"]
    for name in ("hits", "misses", "tokens", "prefill_accesses", "prefill_misses"):
        assert cell[name] == getattr(expected, name)
    assert (cell["prefill_accesses"] > 0) == (options.get("warm") in ("prefill", "batch"))


def test_the_traces_accounting_is_the_default(remoe, tmp_path):
    asks = {"touch_order": "listed", "step": "sequential", "reset": "never"}
    foreign = random_trace(provenance={"accounting": asks, "kind": "imported"})
    write(foreign, tmp_path / "foreign.trace")
    quick = ("replay", "foreign.trace", "--cache", "3", "--policy", "lru", "--admission", "forced", "--json")
    ran = remoe(*quick)
    got = result(ran)
    assert got["rules"]["from_trace"] == ["step", "reset", "touch_order"]
    assert "asks to be replayed with step sequential, reset never, touch_order listed" in ran.err
    assert got["cells"][0]["hits"] == replay(foreign, "lru", 3, engine="python", **asks).hits
    got = result(remoe(*quick, "--step", "atomic", "--reset", "request"))
    assert got["rules"]["from_trace"] == ["touch_order"]
    assert got["cells"][0]["hits"] == replay(foreign, "lru", 3, engine="python", touch_order="listed").hits


def test_a_pool_in_bytes_that_the_trace_asks_for(remoe, tmp_path):
    sizes = [100, 250, 70]
    foreign = random_trace(provenance={"accounting": {"pool": "bytes"}, "expert_bytes": sizes})
    write(foreign, tmp_path / "foreign.trace")
    quick = ("replay", "foreign.trace", "--cache", "3", "--policy", "lru", "--json")
    cells = cells_of(result(remoe(*quick)))
    for form, budget in (("forced", 3 * 420), ("bypass", 3 * 420 - TOP_K * 250)):
        expected = replay(foreign, "lru", budget, pool="bytes", admission=form, engine="python")
        cell = cells["lru", form, 3]
        assert (cell["misses"], cell["slots"]) == (expected.misses, budget)
        assert cell["mb_a_token"] == pytest.approx((expected.request_loads @ sizes).sum() / 1e6 / expected.tokens)
    assert (
        cells_of(result(remoe(*quick, "--no-pool")))["lru", "forced", 3]["misses"] == replay(foreign, "lru", 3).misses
    )


def test_more_slots_than_experts_are_as_many(remoe, file):
    ran = remoe("replay", file, "--cache", "10,12,40", "--policy", "lru", "--json")
    assert result(ran)["capacities"] == [10] and "--cache 12, 40: a layer has 10 experts" in ran.err


def test_a_base_to_compare_with(remoe, trace, file, tmp_path):
    base = random_trace(seed=5, lengths=(20, 8, 11))
    write(base, tmp_path / "base.trace")
    got = result(
        remoe(
            "replay", file, "--cache", "4", "--policy", "lfu", "--against", "base.trace", "--equal", "slots", "--json"
        )
    )
    assert [(arm["role"], arm["name"], arm["requests"]) for arm in got["arms"]] == [
        ("base", "base", 3),
        ("trace", "one", 3),
    ]
    own, before = (slow_replay(one, "lfu", 4) for one in (trace, base))
    lru, best = (slow_replay(base, name, 4, admission=form) for name, form in REFERENCES)
    rate = {
        name: one.misses / one.tokens for name, one in {"own": own, "before": before, "lru": lru, "best": best}.items()
    }
    cell = cells_of(got)["lfu", "forced", 4]
    assert cell["gap_closed"] == pytest.approx((rate["lru"] - rate["own"]) / (rate["lru"] - rate["best"]))
    assert cell["loads_change"] == pytest.approx(rate["own"] / rate["before"] - 1)
    assert cell["loads_change_95"] is None  # requests of other lengths do not pair
    cell = cells_of(got, "base")["lfu", "forced", 4]
    assert cell["gap_closed"] == pytest.approx((rate["lru"] - rate["before"]) / (rate["lru"] - rate["best"]))
    assert cell["loads_change"] is None
    table = remoe("replay", file, "--cache", "4", "--policy", "lfu", "--against", "base.trace").out
    rows = [line.split()[:3] for line in table.splitlines() if line.startswith("lfu ")]
    assert rows == [["lfu", form, name] for form in ("forced", "bypass") for name in ("base", "one")]


def test_the_same_requests_pair(remoe, file):
    got = result(remoe("replay", file, "--cache", "4", "--policy", "lfu", "--against", file, "--json"))
    assert cells_of(got)["lfu", "forced", 4]["loads_change_95"] == [0, 0]


def test_cells_of_the_table_and_the_json_agree(remoe, file):
    quick = ("replay", file, "--cache", "4", "--policy", "lfru", "--admission", "forced")
    (cell,) = result(remoe(*quick, "--json"))["cells"]
    (row,) = [line.split() for line in remoe(*quick).out.splitlines() if line.startswith("lfru")]
    half = 50 * (cell["hit_ratio_95"][1] - cell["hit_ratio_95"][0])
    gap = metrics.ratio(round(100 * cell["gap_closed"]), 1)
    assert row == [
        "lfru",
        "forced",
        f"{100 * cell['hit_ratio']:.1f}",
        f"±{half:.1f}",
        f"{cell['loads_a_token']:.1f}",
        f"{gap:.0f}%",
    ]


# ---- bytes and the estimate


def test_the_estimate_by_hand(remoe, trace, file):
    words = ("--expert-bytes", "2MB", "--estimate", "1GB/s,10ms")
    got = result(remoe("replay", file, "--cache", "3", "--policy", "lru", "--admission", "forced", *words, "--json"))
    slow, (cell,) = slow_replay(trace, "lru", 3), got["cells"]
    assert got["estimate"] == {"label": "estimate, not measured", "link_bytes_a_second": 1e9, "compute_ms": 10}
    assert cell["mb_a_token"] == pytest.approx(2 * slow.misses / slow.tokens)
    assert cell["tpot_ms_estimate"]["mean"] == pytest.approx(10 + 2 * slow.misses / slow.tokens)
    assert cell["tpot_ms_estimate"]["p95"] == pytest.approx(10 + 2 * cell["misses_a_token"]["p95"])
    table = remoe("replay", file, "--cache", "3", "--policy", "lru", *words).out
    assert "estimate, not measured" in table and "est. ms" in table
    assert f"{cell['tpot_ms_estimate']['mean']:.1f}" in table and f"{cell['mb_a_token']:.3f}" in table


def test_layers_of_different_sizes(remoe, trace, tmp_path):
    sized = random_trace(provenance={"expert_bytes": [1_000_000, 3_000_000, 2_000_000]})
    write(sized, tmp_path / "sized.trace")
    got = result(remoe("replay", "sized.trace", "--cache", "3", "--policy", "lru", "--admission", "forced", "--json"))
    layers = [RoutingTrace(sized.experts[:, [layer]], sized.borders, sized.prefill, EXPERTS) for layer in range(LAYERS)]
    moved = [slow_replay(one, "lru", 3).misses * size for one, size in zip(layers, (1, 3, 2))]
    assert got["cells"][0]["mb_a_token"] == pytest.approx(sum(moved) / got["cells"][0]["tokens"])
    assert got["expert_bytes"] == [1e6, 3e6, 2e6]


def test_without_sizes_the_table_counts_loads(remoe, file):
    ran = remoe("replay", file, "--cache", "3", "--policy", "lru")
    assert ran.code == 0 and " loads " in ran.out and " MB " not in ran.out


# ---- figures


def test_figures_are_in_the_json_and_on_request_in_the_text(remoe, trace, file):
    quick = ("replay", file, "--cache", "2,5", "--policy", "lru", "--equal", "slots")
    got = result(remoe(*quick, "--json"))
    found, decoded = got["figures"]["trace"], trace.decode()
    assert found["eor"]["1"] == locality.eor(decoded) and found["eor"]["4"] == locality.eor(decoded, 4)
    assert found["working_set"]["8"]["mean"] == locality.distinct_experts(decoded, 8)
    for capacity in (2, 5):
        assert found["lru_hit_ratio"][capacity - 1] == cells_of(got)["lru", "forced", capacity]["hit_ratio"]
    assert len(found["lru_hit_ratio"]) == EXPERTS
    plain, full = remoe(*quick).out, remoe(*quick, "--figures").out
    assert full.startswith(plain) and "EOR at that lag" not in plain
    for words in ("EOR at that lag", "used again within", "window, tokens", "LRU hit %", "Misses a token", "entropy"):
        assert words in full
    assert f"{found['eor']['1']:.3f}" in full and f"{100 * found['lru_hit_ratio'][4]:.1f}" in full


def test_the_table_is_narrow_and_keeps_every_size(remoe, file):
    ran = remoe("replay", file, "--cache", "2,3,4,5,6,7,8", "--policy", "all", "--figures")
    assert ran.code == 0 and max(map(len, ran.out.splitlines())) <= 120
    ran = remoe("replay", file, "--cache", "2,3,4,5,6,7,8", "--policy", "all")
    titles = [word for line in ran.out.splitlines() if line.startswith("  ") for word in line.split("C = ")[1:]]
    assert [int(word) for word in titles] == [2, 3, 4, 5, 6, 7, 8]
    assert "n/a: decayed, retention, gate_ahead: " in ran.out and "--probabilities" in ran.out


def test_intervals_need_more_than_one_request(remoe, tmp_path):
    write(random_trace(lengths=(20,)), tmp_path / "single.trace")
    ran = remoe("replay", "single.trace", "--cache", "3", "--policy", "lru")
    assert ran.code == 0 and "±" not in ran.out
    (cell,) = result(
        remoe("replay", "single.trace", "--cache", "3", "--policy", "lru", "--admission", "forced", "--json")
    )["cells"]
    assert cell["hit_ratio_95"] is cell["loads_a_token_95"] is None and cell["hit_ratio"] is not None


def test_it_needs_no_torch(file):
    code = (
        "import sys; sys.argv = ['remoe', 'replay', sys.argv[1], '--cache', '3', '--policy', 'lru', '--json']\n"
        "from remoe_cli.__main__ import main\n"
        "try: main()\n"
        "finally: sys.exit(bool({'torch', 'transformers', 'datasets'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cells"]


def test_every_key_of_the_json_is_documented(remoe, file):
    page = (Path(__file__).parent.parent / "docs/replay.md").read_text()
    words = ("--expert-bytes", "2MB", "--estimate", "1GB/s,10ms", "--against", file)
    got = result(remoe("replay", file, "--cache", "2", "--policy", "lru,static", *words, "--json"))
    keys = {*got, *got["arms"][0], *got["estimate"], *got["cells"][0], *got["unavailable"][0], *got["slots"][0]}
    keys |= {*got["references"][0], *got["best"][0]}
    keys |= {*got["figures"]["trace"], *got["figures"]["trace"]["reuse"]}
    missing = {key for key in keys if f"`{key}`" not in page and not key.endswith("_95")}
    assert not missing
