"""remoe sweep: its cells against the parts they are made of, what it takes from an earlier call, and the frontier."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import QUICK, refused, report_of
from hypothesis import given
from hypothesis import strategies as st
from training import documents_of, load

from remoe_cli.cache import replay
from remoe_cli.errors import UsageError
from remoe_cli.families import find_gates, Heads
from remoe_cli.measure.rerouted import measure_rerouted
from remoe_cli.measure.swept import hindrance, Place, record_text, replayed, rerouted, Texts
from remoe_cli.measure.text import measure_rows
from remoe_cli.report.frontier import mark
from remoe_cli.report.sweep_options import Asked
from remoe_cli.run import Run

EXPERT = 1000
SCORES = ("probabilities", "temporal", "spatio")


@pytest.fixture(scope="module")
def qwen():
    return load("qwen3_moe").eval()


@pytest.fixture(scope="module")
def texts():
    return Texts(documents_of(50, 33, 20, 41), 24, 5, 2)


@pytest.mark.parametrize("scores", [(), SCORES])
def test_one_pass_gives_text_and_trace(qwen, texts, scores):
    gates = find_gates(qwen)
    heads = Heads.of_gates(gates, ("temporal", "spatio")) if scores else None
    text, trace = record_text(qwen, gates, heads, texts, bool(scores))
    known = measure_rows(qwen, gates, texts.documents, 24, 5, batch=2)
    for part, other in zip(text, known, strict=True):
        np.testing.assert_array_equal(part, other)
    stock = measure_rerouted(qwen, gates, texts.documents, 24, 5, None, capacity=3, policy="decayed", batch=2)
    np.testing.assert_array_equal(trace.experts, stock.trace.experts)
    np.testing.assert_array_equal(trace.weights, stock.trace.weights)
    np.testing.assert_array_equal(trace.borders, stock.trace.borders)
    assert {name for name in SCORES if getattr(trace, name) is not None} == set(scores)
    if scores:
        np.testing.assert_array_equal(trace.probabilities, stock.trace.probabilities)
        np.testing.assert_allclose(trace.temporal, trace.probabilities, atol=2e-3)  # heads start as their gates
        layers = trace.spatio.astype(np.float64)
        assert layers.shape == trace.probabilities.shape
        np.testing.assert_allclose(layers.sum(-1), 1, atol=5e-3)


def test_scores_of_heads_that_are_not_there_are_left_out(qwen, texts):
    gates = find_gates(qwen)
    _, trace = record_text(qwen, gates, Heads.of_gates(gates, ("temporal",)), texts, True)
    assert trace.temporal is not None and trace.spatio is None
    _, trace = record_text(qwen, gates, None, texts, True)
    assert trace.temporal is None and trace.probabilities is not None
    assert "temporal head" in hindrance(Place(4, "temporal", "forced"), trace)


def test_a_cell_is_a_replay_at_equal_memory(qwen, texts):
    gates = find_gates(qwen)
    _, trace = record_text(qwen, gates, None, texts, True)
    layers, top_k = trace.n_layers, trace.top_k
    for policy, admission in itertools.product(("lru", "gate_ahead:4"), ("forced", "bypass")):
        found = replayed(trace, Place(4, policy, admission), EXPERT)
        total = 4 * layers - (top_k if admission == "bypass" else 0)
        slots = np.diff(np.arange(layers + 1) * total // layers).tolist()
        done = replay(trace, policy, slots, admission=admission, engine="python")
        assert (found["misses"], found["proactive"]) == (done.misses, done.proactive)
        assert found["mb_a_token"] == pytest.approx((done.misses + done.proactive) * EXPERT / 1e6 / trace.n_tokens)
        assert found["adjusted_hit_ratio"] == pytest.approx(
            (done.accesses - done.misses) / (done.accesses + done.proactive)
        )


@pytest.mark.parametrize("admission", ["forced", "bypass"])
def test_a_rerouted_cell_counts_what_ran(qwen, texts, admission):
    """Bonus 0 of rerouting is the model as it is; a large one bends the choice to what is resident."""
    gates = find_gates(qwen)
    text, trace = record_text(qwen, gates, None, texts)
    place = Place(3, "lru", admission)
    same, loads = rerouted(qwen, gates, texts, place, EXPERT)
    np.testing.assert_allclose(same.loss_N, text.loss_N)
    assert loads == replayed(trace, place, EXPERT)
    bent, fewer = rerouted(qwen, gates, texts, place._replace(bonus=2.0), EXPERT)
    assert fewer["misses"] < loads["misses"] and not np.array_equal(bent.loss_N, text.loss_N)


def test_what_stands_in_the_way(qwen, texts):
    _, trace = record_text(qwen, find_gates(qwen), None, texts, True)
    assert hindrance(Place(3, "lru", "forced", 0.1), trace) is None
    assert "running model" in hindrance(Place(3, "belady", "forced", 0.1), trace)
    assert "loads ahead" in hindrance(Place(3, "gate_ahead:4", "forced", 0.1), trace)
    assert "staging" in hindrance(Place(1, "lru", "bypass"), trace)


cells = st.lists(
    st.fixed_dictionaries(
        {"capacity": st.sampled_from([8, 12]), "perplexity_change": st.integers(-3, 3), "mb_a_token": st.integers(0, 5)}
    ),
    max_size=12,
)


@given(cells, st.sampled_from([None, 0, 2]))
def test_the_frontier_by_its_definition(found, limit):
    marked = mark(found, limit)
    assert [{key: one[key] for key in ("capacity", "perplexity_change", "mb_a_token")} for one in marked] == found
    for one in marked:
        rivals = [other for other in marked if other["capacity"] == one["capacity"]]
        better = any(
            (other["perplexity_change"] < one["perplexity_change"] and other["mb_a_token"] <= one["mb_a_token"])
            or (other["perplexity_change"] <= one["perplexity_change"] and other["mb_a_token"] < one["mb_a_token"])
            for other in rivals
        )
        assert one["frontier"] is not better
        assert one["within"] == (None if limit is None else one["perplexity_change"] <= limit)
        if one["best"]:
            assert one["within"] is not False
            assert all(other["mb_a_token"] >= one["mb_a_token"] for other in rivals if other["within"] is not False)
    for capacity in {one["capacity"] for one in marked}:
        allowed = [one for one in marked if one["capacity"] == capacity and one["within"] is not False]
        assert sum(one["best"] for one in allowed) == bool(allowed)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    return tmp_path_factory.mktemp("swept")


@pytest.fixture
def asked(model, texts_file, swept):
    return [
        model, "--data", texts_file, "--steps", "3", "--weights", "1,limit", "--max-ppl", "+5%", "--cache", "3,4", "--policy",
        "lru,belady", "--ahead", "0,4", "--bonus", "0,.5", "--out", swept / "out", *QUICK,
    ]  # fmt: skip


@pytest.fixture
def texts_file(tmp_path):
    from commands import make_texts

    return make_texts(tmp_path / "texts.jsonl")


def test_a_sweep_and_what_the_next_takes_from_it(remoe, swept, tmp_path, asked):
    report = report_of(remoe("sweep", *asked, "--json"))
    out = swept / "out"
    assert report == json.loads((out / "sweep.json").read_text()) and (out / "cells.json").is_file()
    assert [arm["name"] for arm in report["arms"]] == ["base", "ce-only", "remoe x1", "remoe +5%"]
    runs = {arm["name"]: Run(Path(arm["run"])) for arm in report["arms"] if arm["run"]}
    assert all(run.status == "finished" for run in runs.values())
    assert runs["ce-only"].recipe.objective.scale == 0 and runs["remoe +5%"].recipe.train.max_ppl == "+5%"
    assert report["arms"][3]["steering"]["ce_only"]["run"] == str(runs["ce-only"].folder)
    found = {(one["arm"], one["capacity"], one["policy"], one["bonus"]): one for one in report["cells"]}
    assert len(found) == len(report["cells"])
    for arm, capacity in itertools.product(["base", *runs], (3, 4)):
        assert {policy for a, c, policy, bonus in found if (a, c, bonus) == (arm, capacity, 0)} == {
            "lru", "belady", "gate_ahead:4",
        }  # fmt: skip
        ahead = found[arm, capacity, "gate_ahead:4", 0]
        assert ahead["proactive"] > 0 and ahead["adjusted_hit_ratio"] <= ahead["hit_ratio"]
        own = next(one for one in report["arms"] if one["name"] == arm)["perplexity_change"]
        assert found[arm, capacity, "lru", 0]["perplexity_change"] == own
    assert found["base", 3, "lru", 0]["load_change"] == 0 and found["base", 3, "belady", 0]["load_change"] <= 0
    assert not any(one["frontier"] or one["best"] for one in report["cells"] if one["policy"] == "belady")
    assert sum(one["best"] for one in report["cells"]) == 2

    made = {path: path.stat().st_mtime_ns for path in out.glob("*/delta/*")}
    shutil.rmtree(runs["remoe x1"].folder)
    again = remoe("sweep", *asked)
    assert again.code == 0, again.err
    assert again.err.count("Taken from") == 2 and "train 3/3" in again.err
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*/delta/*")}
    for path, when in made.items():
        assert (kept[path] == when) is (runs["remoe x1"].folder not in path.parents)
    assert "frontier" in again.out and "ce-only" in again.out and "bonus 0.5" not in again.err
    once_more = json.loads((out / "sweep.json").read_text())
    assert once_more["cells"] == report["cells"]


def test_other_settings_are_other_runs(remoe, swept, asked):
    before = set((swept / "out").glob("*/run.json"))
    more = report_of(remoe("sweep", *asked, "--steps", "2", "--no-control", "--json"))
    assert [arm["name"] for arm in more["arms"]] == ["base", "remoe x1", "remoe +5%"]
    if before:  # the other test may not have run
        assert len(set((swept / "out").glob("*/run.json")) - before) == 2


@pytest.mark.parametrize("weight", ["0", "1", ".5", "2.", "1e-1", "limit"])
def test_weights_that_are_taken(weight):
    Asked(weights=(weight,), max_ppl="+1%").check()


@pytest.mark.parametrize("weight", ["-1", "1e99", "e1", "inf", "nan", "", "0x1"])
def test_weights_that_are_not(weight):
    with pytest.raises(UsageError, match="takes numbers"):
        Asked(weights=(weight,), max_ppl="+1%").check()


def test_what_is_refused(remoe, model):
    refused(remoe("sweep", model, "--weights", "1,much"), "--weights takes numbers", "'much'")
    refused(remoe("sweep", model, "--weights", "limit"), "--max-ppl, which is not given")
    refused(remoe("sweep", model, "--weights", ","), "take at least one")
    refused(remoe("sweep", model, "--cache", "0"), "at least 1 slot")
    refused(remoe("sweep", model, "--cache", "x"), "--cache takes whole numbers")
    refused(remoe("sweep", model, "--bonus", "-1"), "--bonus takes numbers of at least 0")
    refused(remoe("sweep", model, "--bonus", "nan"), "--bonus takes numbers of at least 0, not nan")
    refused(remoe("sweep", model, "--bonus", "inf"), "--bonus takes numbers of at least 0, not inf")
    refused(remoe("sweep", model, "--ahead", "2000000"), "gate_ahead")
    refused(remoe("sweep", model, "--policy", "static"), "fitted on another trace")
    refused(remoe("sweep", model, "--policy", "nothing"), "nothing")
    refused(remoe("sweep", model, "--admission", "some"), "forced, bypass or both")
    refused(remoe("sweep", model, "--recipe", "nothing"), "no recipe 'nothing'")


def test_the_whole_model_is_swept(remoe, model, texts_file, tmp_path):
    whole = [*QUICK, "--set", "train.scope=full", "--set", "train.lr=0.001"]
    asked = ["--data", texts_file, "--steps", "2", "--weights", "limit", "--max-ppl", "+5%", "--cache", "3", *whole]
    report = report_of(remoe("sweep", model, *asked, "--out", tmp_path / "out", "--json"))
    assert [arm["name"] for arm in report["arms"]] == ["base", "ce-only", "remoe +5%"]
    assert report["arms"][1]["perplexity_change"] != 0 and report["arms"][2]["steering"]["ce_only"]["run"]
    assert not report["notes"]


def test_a_recipe_with_a_limit_of_its_own_is_refused(remoe, model, texts_file):
    asked = ["--data", texts_file, "--weights", "1", *QUICK, "--set", "train.max_ppl=+1%"]
    refused(remoe("sweep", model, *asked), "train.max_ppl of its own", "--weights limit --max-ppl +1%")


def test_cross_entropy_alone_is_no_distillation(remoe, model, texts_file, tmp_path):
    asked = ["--data", texts_file, "--steps", "1", "--weights", "1", *QUICK, "--set", "objective.target=base"]
    report = report_of(remoe("sweep", model, *asked, "--cache", "3", "--out", tmp_path / "out", "--json"))
    recipe = Run(Path(report["arms"][1]["run"])).recipe
    assert (recipe.name, recipe.objective.target, recipe.objective.scale) == ("ce-only", "text", 0)


def test_recipes_that_train_alike_share_a_control_and_heads_are_not_steered(remoe, model, texts_file, tmp_path):
    recipes = [
        word
        for name in ("resident-mass", "remoe-plus", "gate-cacherouter", "heads-only")
        for word in ("--recipe", name)
    ]
    same = (
        "schedule=constant",
        "lr_warmup=0.1",
        "weight_decay=0",
        "lr=0.02",
        "sequence=32",
        "micro_batch=2",
        "accumulation=1",
    )
    shared = [word for one in same for word in ("--set", f"train.{one}")] + [
        "--set",
        "data.format=prefix",
        "--set",
        "data.labels=all",
    ]
    asked = [
        *recipes,
        "--data",
        texts_file,
        "--steps",
        "1",
        "--weights",
        "limit",
        "--max-ppl",
        "+5%",
        *QUICK,
        *shared,
        "--set",
        "objective.cache=3",
    ]
    report = report_of(remoe("sweep", model, *asked, "--cache", "3", "--out", tmp_path / "out", "--json"))
    names = [arm["name"] for arm in report["arms"]]
    assert names == ["base", "ce-only", "resident-mass +5%", "remoe-plus +5%", "gate-cacherouter +5%", "heads-only x1"]
    heads = report["arms"][-1]
    assert heads["steering"] is None and heads["perplexity_change"] == 0
    controls = {arm["steering"]["ce_only"]["run"] for arm in report["arms"] if arm["steering"]}
    assert controls == {report["arms"][1]["run"]}


def test_places_hold_the_reference_once():
    asked = Asked(capacities=(4, 2, 4), policies=("decayed:0.8",), ahead=(0, 3), admission="bypass")
    assert asked.places == [
        (2, "lru", "forced"), (4, "lru", "forced"),
        *((c, policy, "bypass") for c in (2, 4) for policy in ("lru", "decayed:0.8", "gate_ahead:3", "spatio_temporal:3")),
    ]  # fmt: skip
