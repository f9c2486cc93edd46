"""Trackers get what metrics.jsonl gets; one that fails costs a note, never the run. The real ones run where they are installed."""

import json
import sqlite3
import sys
from pathlib import Path

import pytest
from commands import make_model, make_texts, QUICK, refused

from remoe_cli import run as runs
from remoe_cli.errors import RunError
from remoe_cli.recipe import override, Recipe
from remoe_cli.train.asked import Asked, kept_recipe
from remoe_cli.train.trackers import require_tracker, Tracker

# a package that keeps what it is given in a file, prints as trackio does, and fails at step FAIL
STAND_IN = """
import json, os
print("welcome to the stand-in")
class Settings:
    def __init__(self, **given): pass
def _write(what):
    with open(os.environ["STAND_IN_LOG"], "a") as file:
        file.write(json.dumps(what) + "\\n")
def init(project, **given):
    print("a run starts")
    if os.environ.get("STAND_IN_FAIL") == "start":
        raise OSError("no route to host\\nand more")
    _write({"init": project, "name": given["name"], "resume": given["resume"], "lr": given["config"]["train"]["lr"]})
def log(values, step):
    print("a step")
    if str(step) == os.environ.get("STAND_IN_FAIL"):
        raise ConnectionError("the line is down")
    _write({"step": step, **values})
def finish():
    print("the end")
    if os.environ.get("STAND_IN_FAIL") == "end":
        raise ConnectionError("the line is down")
    _write({"finish": True})
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """In the place of trackio; returns a function that reads what it was given."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/trackio.py").write_text(STAND_IN)
    log = tmp_path / "stand-in.jsonl"
    monkeypatch.setenv("STAND_IN_LOG", str(log))
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    yield lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    sys.modules.pop("trackio", None)


def recipe_of(tracker: str) -> Recipe:
    return override(Recipe(), [f"train.tracker={tracker}"])


def made(tmp_path: Path, tracker: str) -> tuple[Recipe, runs.Run]:
    recipe = recipe_of(tracker)
    return recipe, runs.create("demo", recipe, tmp_path / "run")


def rows(first: int, last: int, base: float = 0.0) -> list[dict[str, float]]:
    return [{"step": step, "loss": base + 1 / step, "eor": step / 16} for step in range(first, last + 1)]


def test_none_is_the_default_and_does_nothing(tmp_path):
    assert Recipe().train.tracker == ""
    require_tracker("")
    recipe, run = made(tmp_path, "")
    tracker = Tracker(recipe, run)
    tracker.log({"step": 1, "loss": 2.0})
    tracker.close()
    assert sorted(path.name for path in run.folder.iterdir()) == ["recipe.yaml", "run.json"]


def test_an_unknown_one_is_refused(remoe):
    ran = remoe("finetune", "demo", "--set", "train.tracker=mlflow")
    refused(ran, "train.tracker is empty, or one of tensorboard, wandb, trackio, not 'mlflow'")
    assert ran.code == 2


def test_one_that_is_not_installed_is_refused_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match=r"train\.tracker wandb is not installed") as caught:
        require_tracker("wandb")
    assert caught.value.hint == "pip install wandb"


def test_every_step_reaches_it_and_stdout_stays_clean(tmp_path, stand_in, capsys):
    recipe, run = made(tmp_path, "trackio")
    tracker = Tracker(recipe, run)
    for row in rows(1, 3):
        tracker.log(row)
    tracker.close()
    tracker.close()
    begun, *steps, end = stand_in()
    assert begun["init"] == "remoe" and begun["lr"] == recipe.train.lr and begun["name"].startswith("run-")
    assert steps == rows(1, 3) and end == {"finish": True}
    captured = capsys.readouterr()
    assert not captured.out and "a run starts" in captured.err
    again = Tracker(recipe, run, 3)
    again.close()
    assert stand_in()[-2] == begun, "a run that goes on has the same name"
    other = Tracker(recipe, runs.create("demo", recipe, tmp_path / "other/run"))
    other.close()
    assert stand_in()[-2]["name"] != begun["name"], "another run of that folder name has not"


def test_one_that_fails_on_the_way_costs_one_note(tmp_path, stand_in, monkeypatch, capsys):
    monkeypatch.setenv("STAND_IN_FAIL", "2")
    tracker = Tracker(*made(tmp_path, "trackio"))
    for row in rows(1, 5):
        tracker.log(row)
    tracker.close()
    assert stand_in()[1:] == rows(1, 1)
    err = capsys.readouterr().err
    assert err.count("Note: trackio has stopped (the line is down); training goes on") == 1


def test_one_that_fails_at_the_end_costs_one_note(tmp_path, stand_in, monkeypatch, capsys):
    monkeypatch.setenv("STAND_IN_FAIL", "end")
    Tracker(*made(tmp_path, "trackio")).close()
    assert capsys.readouterr().err.count("Note: trackio has stopped") == 1


def test_one_that_does_not_start_is_an_error(tmp_path, stand_in, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAIL", "start")
    with pytest.raises(RunError, match=r"train.tracker trackio does not start \(no route to host\)"):
        Tracker(*made(tmp_path, "trackio"))


def test_a_run_tells_it_what_metrics_jsonl_keeps(tmp_path, stand_in, remoe, monkeypatch):
    model, texts = make_model(tmp_path / "model"), make_texts(tmp_path / "texts.jsonl")
    words = ("--data", texts, "--set", "train.tracker=trackio", *QUICK)
    monkeypatch.setenv("STAND_IN_FAIL", "start")
    ran = remoe("finetune", model, "--steps", "2", "--out", "run", *words)
    refused(ran, "train.tracker trackio does not start")
    assert not (tmp_path / "run").exists(), "nothing was trained, so nothing is left"
    monkeypatch.setenv("STAND_IN_FAIL", "")
    assert remoe("finetune", model, "--steps", "2", "--out", "run", "--json", *words).code == 0
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    _, *steps, end = stand_in()
    assert steps == metrics and len(metrics) == 2 and end == {"finish": True}
    refused(remoe("finetune", "--resume", "--out", "run", "--set", "train.tracker="), "is finished")
    monkeypatch.setitem(sys.modules, "wandb", None)
    ran = remoe("finetune", model, "--out", "other", "--set", "train.tracker=wandb")
    refused(ran, "train.tracker wandb is not installed")
    assert not (tmp_path / "other").exists()


def test_tensorboard_for_real(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe, run = made(tmp_path, "tensorboard")
    for step, begin, end, base in ((0, 1, 5, 0.0), (3, 4, 6, 8.0)):  # the second goes on after step 3
        tracker = Tracker(recipe, run, step)
        for row in rows(begin, end, base):
            tracker.log(row)
        tracker.close()
    read = EventAccumulator(str(run.folder / "tensorboard"))
    read.Reload()
    told = [(event.step, event.value) for event in read.Scalars("loss")]
    wanted = [(row["step"], row["loss"]) for row in (*rows(1, 3), *rows(4, 6, 8.0))]
    assert [step for step, _ in told] == [step for step, _ in wanted]
    assert [value for _, value in told] == pytest.approx([value for _, value in wanted], rel=1e-6)


def test_trackio_for_real(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    tracker = Tracker(*made(tmp_path, "trackio"))
    for row in rows(1, 3):
        tracker.log(row)
    tracker.close()
    with sqlite3.connect(tmp_path / "trackio/remoe.db") as base:
        told = [
            {"step": step, **json.loads(values)} for step, values in base.execute("SELECT step, metrics FROM metrics")
        ]
    assert told == rows(1, 3)


def test_wandb_for_real(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    recipe, run = made(tmp_path, "wandb")
    tracker = Tracker(recipe, run)
    for row in rows(1, 3):
        tracker.log(row)
    tracker.close()
    kept = [*run.folder.glob("wandb/offline-run-*/*.wandb")]
    assert len(kept) == 1 and b"eor" in kept[0].read_bytes()
    assert not capfd.readouterr().out


def test_a_run_may_go_on_with_another_one(tmp_path):
    _, run = made(tmp_path, "tensorboard")
    assert kept_recipe(run, "demo", Asked(overrides=("train.tracker=",))).train.tracker == ""
    with pytest.raises(RunError, match=r"was started with train\.seed 0, not 1"):
        kept_recipe(run, "demo", Asked(overrides=("train.tracker=", "train.seed=1")))
