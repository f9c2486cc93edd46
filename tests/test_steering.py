"""--max-ppl: the control law on plants of many kinds, steered runs, their resume, and which texts see what."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import QUICK, refused, report_of
from hypothesis import given
from hypothesis import strategies as st
from training import documents_of, load, recipe_of

from remoe_cli import recipe as recipes
from remoe_cli.errors import DataError, RecipeError
from remoe_cli.families import find_gates
from remoe_cli.hub.resolve import resolve
from remoe_cli.measure.domains import held_out
from remoe_cli.measure.steering import halves, read_path, reported, Steering
from remoe_cli.recipe import limit_of
from remoe_cli.run import Run
from remoe_cli.train.data import Documents, load_documents, load_tokenizer
from remoe_cli.train.packing import batches
from remoe_cli.train.steer import interval, next_factor, Point
from remoe_cli.train.trainer import train

STEPS = 300
SCHEDULES = {
    "constant": lambda step: 1.0,
    "falling": lambda step: min(1.0, (STEPS + 1 - step) / (0.6 * STEPS)),
    "cosine": lambda step: 0.5 + 0.5 * math.cos(math.pi * max(0.0, step - 30) / (STEPS - 30)),
}


def ends_at(limit, tax, lag, drift, schedule):
    """Where perplexity ends (change) when gates follow a weight with a lag, and drift with the texts by themselves."""
    points, cost, drifted = [], 0.0, 0.0
    for step in range(STEPS):
        if step % interval(STEPS) == 0:
            change = cost + drifted
            points.append(Point(step, change, next_factor(points, change, limit)))
        rate = SCHEDULES[schedule](step + 1) * min(1.0, (step + 1) / 30)
        weight = points[-1].steer * min(1.0, (step + 1) / 60)
        cost += rate * (tax * weight**1.2 - cost) / lag
        drifted += rate * (drift - drifted) / 120
    return cost + drifted


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lag", [40, 70, 140])
@pytest.mark.parametrize("drift", [-0.03, 0.0])
@pytest.mark.parametrize("tax", [0.01, 0.03, 0.08])
def test_the_law_ends_at_the_limit_on_plants_of_many_kinds(tax, drift, lag, schedule):
    assert abs(ends_at(0.01, tax, lag, drift, schedule) - 0.01) < 0.003


@pytest.mark.parametrize("limit", [0.003, 0.01, 0.03])
def test_the_law_finds_limits_of_any_size(limit):
    assert abs(ends_at(limit, 0.03, 70, -0.018, "constant") - limit) < 0.002


@given(st.lists(st.floats(-0.5, 2), max_size=40), st.floats(-0.4, 1))
def test_the_factor_stays_within_its_bounds_and_moves_the_right_way(changes, limit):
    points = []
    for step, change in enumerate(changes):
        factor = next_factor(points, change, limit)
        assert 0.02 <= factor <= 50 and (points or factor == 1)
        if points and change > limit and change > points[-1].change:
            assert factor <= points[-1].steer
        if points and change < limit and change < points[-1].change:
            assert factor >= points[-1].steer
        points.append(Point(step, change, factor))


def test_percentages():
    assert (
        limit_of("off") is None and limit_of("+1%") == 0.01 and limit_of(".5%") == 0.005 and limit_of("-2.5%") == -0.025
    )
    for wrong in ("1", "one %", "+101%", "-51%", "%", "+-1%", "1 %"):
        with pytest.raises(RecipeError, match="max_ppl is off, or a change"):
            recipes.override(recipes.Recipe(), [f"train.max_ppl={wrong}"])
    with pytest.raises(RecipeError, match="nothing to steer"):
        objective = ["objective.name=coverage-temporal", "train.scope=heads", "train.max_ppl=+1%"]
        recipes.override(recipes.Recipe(), objective)


def texts_of(count):
    return Documents(
        SimpleNamespace(), [[i, i + 1, i + 2] for i in range(count)], "here", domains=["a", "b"] * (count // 2)
    )


def test_every_second_text_steers_and_nothing_else_sees_it():
    steering, rest = halves(texts_of(6))
    assert [ids[0] for ids in steering] == [0, 2, 4] and [ids[0] for ids in rest.heldout] == [1, 3, 5]
    assert rest.domains == ["b", "b", "b"]
    recipe = recipes.Recipe()
    assert reported(texts_of(6), recipe).heldout == texts_of(6).heldout
    steered = replace(recipe, train=replace(recipe.train, max_ppl="+1%"))
    assert reported(texts_of(6), steered).heldout == rest.heldout
    with pytest.raises(DataError, match="two held-out texts"):
        halves(replace(texts_of(2), heldout=[[1, 2]], domains=["a"]))


def steered(folder, max_ppl="+1%", state=None, save=None, steps=40):
    """A run of the trainer alone, and its Steering."""
    folder.mkdir(exist_ok=True)
    run = Run(folder)
    if not (folder / "run.json").is_file():
        run.note(model="tiny")
    settings = {
        "steps": steps,
        "lr": 0.02,
        "micro_batch": 2,
        "accumulation": 1,
        "max_ppl": max_ppl,
        "save_seconds": 0.0,
    }
    recipe = recipe_of(**settings)
    recipe = replace(recipe, evaluate=replace(recipe.evaluate, rows=3))
    model = load("mixtral")
    gates = find_gates(model)
    steering = Steering(run, recipe, model, gates, documents_of(60, 40, 30, seed=5))
    start = {"start": state.position} if state else {}
    rows = batches(documents_of(50, 20, 41, 77), 32, 2, repeat=True, **start)
    steering.begin(state.step if state else 0)
    return train(model, gates, rows, recipe, state=state, save=save, steer=steering), steering


def test_a_resumed_run_is_steered_as_the_whole_one(tmp_path):
    states = {}
    whole, steering = steered(tmp_path / "whole", save=lambda state: states.setdefault(state.step, state), steps=12)
    path = (tmp_path / "whole" / "steering.jsonl").read_text()
    assert len({stats.steer for stats in whole.steps}) > 5 and len(path.splitlines()) == 12
    for at in (1, 5, 11):
        folder = tmp_path / str(at)
        folder.mkdir()
        Run(folder).note(model="tiny", **{"steering": Run(tmp_path / "whole").facts["steering"]})
        (folder / "steering.jsonl").write_text(path + '{"step": 12, "chan')  # from later steps, and cut off
        rest, again = steered(folder, state=states[at], steps=12)
        assert [one.steer for one in rest.steps] == [one.steer for one in whole.steps[at:]]
        assert again.points == steering.points
        for name, gate in whole.gates.items():
            assert gate.equal(rest.gates[name])


def test_the_path_says_what_was_measured(tmp_path):
    _, steering = steered(tmp_path, steps=6)
    end = steering.finish(6)
    points = read_path(tmp_path / "steering.jsonl")
    assert points == steering.points and points[-1] == Point(6, end, None)
    assert points[0] == Point(0, 0.0, 1.0) and [point.step for point in points] == [0, 1, 2, 3, 4, 5, 6]
    assert all(point.change for point in points[1:]) and end == steering.change()
    steering.begin(6)  # a resume after the end does not take the end for a measurement
    assert [point.step for point in steering.points] == [0, 1, 2, 3, 4, 5]


def test_a_tight_limit_is_felt(tmp_path):
    loose, _ = steered(tmp_path / "loose", "+60%")
    tight, _ = steered(tmp_path / "tight", "-30%")
    assert loose.steps[-1].steer > 2 * tight.steps[-1].steer


def run_of(folder):
    return Run(Path(folder))


def test_finetune_with_a_limit(remoe, model, texts):
    options = ["--data", texts, "--steps", "8", *QUICK]
    assert remoe("finetune", model, "--recipe", "ce-only", "--out", "runs/control", *options).code == 0
    ran = remoe("finetune", model, "--max-ppl", "+2%", "--out", "runs/steered", "--json", *options)
    done = report_of(ran)
    found = done["steering"]
    assert found["limit"] == 0.02 and found["ce_only"]["run"] == "runs/control" and found["texts"] == 2
    assert found["change"] == read_path(run_of("runs/steered").steering)[-1].change
    shown = remoe("eval", "runs/steered", "--no-measure", "--cache", "3")
    assert shown.code == 0 and "steered to +2.00 %" in shown.out and "cross entropy alone (runs/control)" in shown.out
    report = json.loads(run_of("runs/steered").report.read_text())
    assert [point["step"] for point in report["steering"]["path"]] == list(range(9))
    after = done["after"]["perplexity"] / done["before"]["perplexity"] - 1
    assert report["arms"][1]["text"]["perplexity_change"] == pytest.approx(after)
    control = json.loads(run_of("runs/control").metrics.read_text().splitlines()[-1])
    assert control["steer"] == 1.0
    kept = remoe("finetune", model, "--max-ppl", "+3%", "--out", "runs/steered", "--resume", *options)
    refused(kept, "finished")


def test_what_finetune_refuses(remoe, model, texts):
    options = ["--data", texts, "--steps", "2", *QUICK]
    refused(remoe("finetune", model, "--max-ppl", "much", *options), "train.max_ppl", "+1%")
    refused(remoe("finetune", model, "--ce-only", "runs/x", *options), "--ce-only goes with --max-ppl")
    refused(remoe("finetune", model, "--max-ppl", "+1%", "--ce-only", "runs/x", *options), "not a run folder")


def test_a_domain_holds_no_steering_text(made):
    """`remoe eval` measures on what did not steer."""
    recipe = Run(made / "run").recipe
    tokenizer = load_tokenizer(resolve(str(made / "model")))
    whole = load_documents(recipe.data, tokenizer, seed=recipe.train.seed)
    steered_recipe = replace(recipe, train=replace(recipe.train, max_ppl="+1%"))
    assert held_out(steered_recipe, tokenizer, 1).documents.heldout == whole.heldout[1::2]
    assert held_out(recipe, tokenizer, 1).documents.heldout == whole.heldout
