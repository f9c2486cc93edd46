"""--max-ppl: the control law on plants of many kinds, steered runs, their resume, and which texts see what."""

import json
import math
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import QUICK, refused, report_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from training import documents_of, load, recipe_of

from remoe_cli import recipe as recipes
from remoe_cli import recipe_rules
from remoe_cli.delta import Delta
from remoe_cli.errors import DataError, RecipeError, RunError
from remoe_cli.families import find_gates
from remoe_cli.hub.resolve import resolve
from remoe_cli.measure.domains import held_out
from remoe_cli.measure.steering import (
    _is_control,
    CE_ONLY,
    check_control,
    halves,
    read_path,
    reported,
    Steering,
    unsteered,
)
from remoe_cli.objectives import OBJECTIVES
from remoe_cli.recipe import limit_of
from remoe_cli.report.steering import steered_lines
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


def steered(folder, max_ppl="+1%", state=None, save=None, steps=40, objective=None, scope="gates", lr_decay=0.0):
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
        "scope": scope,
        "lr_decay": lr_decay,
    }
    recipe = recipe_of(objective, **settings)
    recipe = replace(recipe, evaluate=replace(recipe.evaluate, rows=3))
    model = load("mixtral")
    gates = find_gates(model)
    steering = Steering(run, recipe, model, gates, documents_of(60, 40, 30, seed=5))
    start = {"start": state.position} if state else {}
    rows = batches(documents_of(50, 20, 41, 77), 32, 2, repeat=True, **start)
    steering.begin(state.step if state else 0)
    return train(model, gates, rows, recipe, state=state, save=save, steer=steering), steering


HEADS = recipes.Objective(name="coverage-spatio-temporal", coverage=1.0, cache=3)


@pytest.mark.parametrize(
    "asked",
    [{}, {"objective": HEADS, "scope": "gates+heads"}, {"lr_decay": 0.5}],
    ids=["gates", "gates+heads", "falling"],
)
def test_a_resumed_run_is_steered_as_the_whole_one(tmp_path, asked):
    states = {}
    keep = lambda state: states.setdefault(state.step, state)  # noqa: E731
    whole, steering = steered(tmp_path / "whole", save=keep, steps=12, **asked)
    path = (tmp_path / "whole" / "steering.jsonl").read_text()
    assert len({stats.steer for stats in whole.steps}) > 5 and len(path.splitlines()) == 12
    for at in (1, 5, 11):
        folder = tmp_path / str(at)
        folder.mkdir()
        Run(folder).note(model="tiny", **{"steering": Run(tmp_path / "whole").facts["steering"]})
        if (tmp_path / "whole" / "steering").is_dir():
            shutil.copytree(tmp_path / "whole" / "steering", folder / "steering")
        (folder / "steering.jsonl").write_text(path + '{"step": 12, "chan')  # from later steps, and cut off
        rest, again = steered(folder, state=states[at], steps=12, **asked)
        assert [one.steer for one in rest.steps] == [one.steer for one in whole.steps[at:]]
        assert again.points == steering.points
        for name, gate in whole.gates.items():
            assert gate.equal(rest.gates[name])
        for kind in whole.heads.kinds if whole.heads else ():
            for one, other in zip(getattr(whole.heads, kind), getattr(rest.heads, kind), strict=True):
                assert one.equal(other)


def test_with_a_falling_rate_the_mean_of_the_last_gates_is_measured(tmp_path):
    _, steering = steered(tmp_path, steps=6, lr_decay=0.5)
    assert (tmp_path / "steering").is_dir()
    model = steering._model
    at_end = {name: gate.detach().clone() for gate in steering._gates for name, gate in gate.parameters.items()}
    files = [tmp_path / "steering" / f"{step}.safetensors" for step in (2, 3, 4, 5)]
    parts = [load_file(file) for file in files]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in at_end:
                parameter.copy_(sum(part[name].double() for part in parts) / 4)
    assert steering.points[-1].step == 5 and steering.change() == pytest.approx(steering.points[-1].change, rel=1e-4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in at_end:
                parameter.copy_(at_end[name])
    assert steering.finish(6) != pytest.approx(steering.points[-2].change, rel=1e-4)
    assert not (tmp_path / "steering").exists()


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


WHOLE = ["--steps", "4", *QUICK, "--set", "train.scope=full", "--set", "train.lr=0.001"]


def test_the_whole_model_is_steered_and_evaluated(remoe, model, texts):
    options = ["--data", texts, *WHOLE]
    ran = remoe("finetune", model, "--recipe", "ce-only", "--out", "runs/control", *options)
    assert ran.code == 0 and "tensors changed" in ran.out and "gate elements" not in ran.out
    done = report_of(remoe("finetune", model, "--max-ppl", "+2%", "--out", "runs/steered", "--json", *options))
    ce_only = done["steering"]["ce_only"]
    assert ce_only["run"] == "runs/control"
    report = report_of(remoe("eval", "runs/steered", "--control", "runs/control", "--cache", "3", "--json"))
    changes = {arm["name"]: arm["text"]["perplexity_change"] for arm in report["arms"]}
    assert changes["ce-only"] == pytest.approx(ce_only["reported_change"])
    assert changes["remoe"] == pytest.approx(done["after"]["perplexity"] / done["before"]["perplexity"] - 1)
    other = remoe("eval", "runs/control", "--control", "runs/steered", "--cache", "3")
    refused(other, "steered by half of the texts", "remoe eval runs/steered --control runs/control")
    refused(
        remoe("decode", model, "--cache", "3", "--delta", "runs/control"),
        "remoe apply runs/control",
        "then remoe decode DIR",
    )


def test_heads_alone_leave_the_gates_as_they_are_stored(remoe, model, texts):
    own = ["--set", "train.scope=heads", "--set", "objective.name=coverage-temporal", "--set", "objective.cache=3"]
    ran = remoe(
        "finetune",
        model,
        "--out",
        "runs/h",
        "--data",
        texts,
        "--steps",
        "2",
        *QUICK,
        *own,
        "--set",
        "train.dtype=bfloat16",
    )
    assert ran.code == 0 and "head elements beside the base's gates" in ran.out and "Warning" not in ran.out
    assert Delta.load(run_of("runs/h").delta).changed == 0


def test_an_interrupted_run_says_so():
    (line,) = steered_lines({"limit": 0.01, "texts": 3, "base_loss": 2.0}, 0.02)
    assert "steered to +1.00 %" in line and "interrupted" in line


def test_a_control_that_is_damaged_does_not_cost_the_run(remoe, model, texts):
    options = ["--data", texts, "--steps", "2", *QUICK]
    assert remoe("finetune", model, "--recipe", "ce-only", "--out", "runs/control", *options).code == 0
    Path("runs/control/delta/gates.safetensors").write_bytes(b"")
    ran = remoe("finetune", model, "--max-ppl", "+2%", "--out", "runs/steered", *options)
    assert ran.code == 0 and "runs/control is not measured beside it" in ran.err
    assert run_of("runs/steered").status == "finished" and run_of("runs/steered").facts["after"]


def test_the_note_names_the_command_that_makes_the_control(remoe, model, texts):
    options = ["--data", texts, "--steps", "2", *QUICK, "--set", "objective.cache=3"]
    heads = ["--recipe", "gate-cacherouter", *options, "--set", "data.format=prefix", "--set", "data.labels=all"]
    ran = remoe("finetune", model, *heads, "--max-ppl", "+2%", "--out", "runs/one")
    assert ran.code == 0, ran.err
    advised = re.search(r"remoe (finetune .*) makes one", ran.err)[1]
    assert remoe(*shlex.split(advised), "--out", "runs/control").code == 0
    done = report_of(remoe("finetune", model, *heads, "--max-ppl", "+2%", "--out", "runs/two", "--json"))
    assert done["steering"]["ce_only"]["run"] == "runs/control"


def test_what_is_a_control(tmp_path):
    """Cross entropy alone, with the same training; whether heads are there is no matter."""

    def run(name, overrides):
        recipe = recipes.load("gate-cacherouter", "demo", overrides)
        Run(tmp_path / name).folder.mkdir()
        (tmp_path / name / "recipe.yaml").write_text(recipe.to_yaml())
        (tmp_path / name / "delta").mkdir()
        (tmp_path / name / "delta" / "remoe.json").write_text("{}")
        Run(tmp_path / name).note(model="demo", status="finished", gates_sha256="a")
        return Run(tmp_path / name)

    steered_run = run("steered", ["train.max_ppl=+1%"])
    for name, more, fits in (
        ("own", (), True),
        ("gates", ("train.scope=gates", "objective.name=remoe"), True),
        ("whole", ("train.scope=full",), False),
        ("distilled", ("objective.target=base",), False),
        ("trusting", ("objective.trust=.1",), False),
        ("longer", ("train.steps=3",), False),
    ):
        one = run(name, [*CE_ONLY, *more])
        assert _is_control(one, steered_run) is fits, name
        if name not in ("distilled", "trusting"):
            check_control(one, steered_run)
            continue
        with pytest.raises(RunError, match="more than cross entropy"):
            check_control(one, steered_run)
    one.note(gates_sha256="b")
    with pytest.raises(RunError, match="other gates"):
        check_control(one, steered_run)
    one.note(status="failed")
    with pytest.raises(RunError, match="is failed"):
        check_control(one, steered_run)


@pytest.mark.parametrize("name", recipe_rules.OBJECTIVES)
def test_locality_is_what_the_objective_scales(name):
    """No factor, or any one of them, in the recipe's words and in the objective's."""
    keys = ("reuse", "resident", "misses", "coverage", "smooth", "lag", "window")
    for scale in (0, 1):
        for one in (None, *keys):
            settings = replace(
                recipes.Objective(name=name, scale=scale, trust=1), **{key: float(key == one) for key in keys}
            )
            factors = OBJECTIVES[name].scales(settings, 9, 9)
            assert recipes.Recipe(objective=settings).has_locality is any(
                factor for term, factor in factors.items() if term != "trust"
            )


def test_texts_that_steered_are_left_out_of_traces(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    whole, (_, rest) = texts_of(6), halves(texts_of(6))
    plain, steered_run = Run(tmp_path / "plain"), Run(tmp_path / "runs" / "steered")
    for run in (plain, steered_run):
        run.delta.mkdir(parents=True)
        run.note(model="demo")
    steered_run.note(steering={"limit": 0.01}, heldout_sha256=rest.heldout_sha256)
    for name in (None, str(plain.folder), "me/delta"):
        assert unsteered(whole, name) is whole
    for name in ("steered", "runs/steered", "runs/steered/delta"):
        assert unsteered(whole, name).heldout == rest.heldout
    assert not capsys.readouterr().err
    assert unsteered(texts_of(4), "steered").heldout == texts_of(4).heldout
    assert "steered by held-out texts" in capsys.readouterr().err


def test_what_finetune_refuses(remoe, model, texts):
    options = ["--data", texts, "--steps", "2", *QUICK]
    refused(
        remoe("finetune", model, "--recipe", "ce-only", "--max-ppl", "+1%", *options), "nothing to steer", "--recipe"
    )
    assert remoe("finetune", model, "--out", "runs/plain", *options).code == 0
    named = ["--max-ppl", "+1%", "--ce-only", "runs/plain", "--out", "runs/new"]
    refused(remoe("finetune", model, *named, *options), "more than cross entropy", "objective.scale=0")
    assert not Path("runs/new").exists()
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
