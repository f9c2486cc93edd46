"""A run that was stopped and goes on ends with the same gates, bit for bit; the run list tells how each run ended."""

import errno
import json
import os

import pytest
import tiny_models
import torch
from commands import QUICK, refused
from training import assert_same, documents_of, load, recipe_of

from remoe_cli import finetune
from remoe_cli import run as runs
from remoe_cli.errors import RunError
from remoe_cli.families import find_gates
from remoe_cli.train import state as states
from remoe_cli.train.packing import batches
from remoe_cli.train.trainer import Diverged, Stopped, train

LENGTHS = (3, 50, 20, 41, 1, 77)


def trained(model_type="mixtral", dtype=torch.float32, state=None, save=None, on_step=None, **settings):
    recipe = recipe_of(**{"steps": 7, "lr_warmup": 0.5, "save_seconds": 0, "micro_batch": 2, **settings})
    model = load(model_type, dtype)
    start = {"start": state.position} if state else {}
    rows = batches(documents_of(*LENGTHS), 32, recipe.train.micro_batch, repeat=True, **start)
    return train(model, find_gates(model), rows, recipe, state=state, save=save, on_step=on_step)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": torch.bfloat16},
        {"checkpointing": True},
        {"micro_batch": 1, "accumulation": 3},
        {"weight_decay": 0.1},
    ],
    ids=str,
)
def test_from_every_saved_step_the_gates_end_bitwise_equal(tmp_path, settings):
    whole = trained(save=lambda state: state.save(tmp_path / str(state.step)), **settings)
    for step in range(1, 8):
        state, threads = states.newest(tmp_path / str(step))
        assert state.step == step and threads == torch.get_num_threads()
        rest = trained(state=state, **settings)
        assert rest.step == 7 and [one.step for one in rest.steps] == list(range(step + 1, 8))
        assert_same(rest.gates, whole.gates, rtol=0, atol=0)
        for one, other in zip(rest.steps, whole.steps[step:], strict=True):
            assert one._replace(elapsed=0, tokens_per_s=0) == other._replace(elapsed=0, tokens_per_s=0)
        assert step == 7 or rest.steps[0].elapsed > state.elapsed


def test_the_two_newest_states_stay_and_a_damaged_one_is_passed_over(tmp_path):
    trained(save=lambda state: state.save(tmp_path))
    assert [path.name for path in states.saved(tmp_path)] == ["step-00000007.safetensors", "step-00000006.safetensors"]
    gates = sum(p.numel() for gate in find_gates(load("mixtral")) for p in gate.parameters.values())
    size = states.saved(tmp_path)[0].stat().st_size
    assert size < 4 * 4 * gates + 10_000  # master, proven and two moments in fp32, and the generator
    whole = states.saved(tmp_path)[0].read_bytes()
    for cut in (0, 4, 100, len(whole) - 1):
        states.saved(tmp_path)[0].write_bytes(whole[:cut])
        assert states.newest(tmp_path)[0].step == 6
    for path in states.saved(tmp_path):
        path.write_bytes(b"{}")
    with pytest.raises(RunError, match="can be read"):
        states.newest(tmp_path)
    assert states.newest(tmp_path / "nothing") is None


def test_states_are_saved_no_more_often_than_asked():
    saved = []
    trained(save=saved.append, save_seconds=3600)
    assert [state.step for state in saved] == [7]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (MemoryError(), "out of memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (RuntimeError("something\nlong"), "RuntimeError: something;"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_ends_training_the_gates_of_the_last_whole_step_are_kept(error, words):
    kept = {}

    def stop(stats):
        if stats.step == 5:
            raise error

    whole = trained(steps=7, save=lambda state: kept.update({state.step: state.part("master")}))
    with pytest.raises(Stopped, match="step 5") as stopped:
        trained(on_step=stop, save=(late := []).append, save_seconds=3600)
    assert [state.step for state in late] == [4]
    assert words in stopped.value.message and "step 4 are kept" in stopped.value.message
    assert stopped.value.trained.step == 4
    assert_same(stopped.value.trained.gates, kept[4], rtol=0, atol=0)
    assert whole.step == 7


def test_divergence_right_after_a_resume_keeps_the_proven_gates(tmp_path):
    trained(save=lambda state: state.save(tmp_path / str(state.step)))
    state, _ = states.newest(tmp_path / "4")
    model, recipe = load("mixtral"), recipe_of(steps=7)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(Diverged, match="step 5") as stopped:
        train(model, find_gates(model), batches(documents_of(9), 32, 1, repeat=True), recipe, state=state)
    before, _ = states.newest(tmp_path / "3")
    assert_same(stopped.value.trained.gates, before.part("master"), rtol=0, atol=0)
    assert stopped.value.trained.step == 3


# The command


@pytest.fixture
def killed(remoe, model, texts, monkeypatch):
    """run folder of a run of 8 steps that was stopped hard after its fifth, as kill -9 leaves it."""

    class Killed(BaseException):
        pass

    real, asked = finetune.train, [model, "--data", texts, "--steps", 8, "--set", "train.save_seconds=0", *QUICK]

    def train_until_killed(*args, on_step, **options):
        def step(stats):
            on_step(stats)
            if stats.step == 6:
                raise Killed

        return real(*args, on_step=step, **options)

    monkeypatch.setattr(finetune, "train", train_until_killed)
    with pytest.raises(Killed):
        remoe("finetune", *asked)
    monkeypatch.setattr(finetune, "train", real)
    (run,) = runs.ROOT.iterdir()
    return run, asked


def gates_of(run):
    return (run / "delta/gates.safetensors").read_bytes()


def test_resume_goes_on_where_the_last_state_was_saved(remoe, killed, tmp_path):
    run, asked = killed
    assert runs.Run(run).status == "stopped"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 6
    ran = remoe("finetune", "--resume")
    assert ran.code == 0, ran.err
    assert "Going on after step 5" in ran.err and "8 steps" in ran.out
    assert list(runs.ROOT.iterdir()) == [run]
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == list(range(1, 9))
    assert runs.Run(run).status == "finished" and not (run / "state").exists()
    assert remoe("finetune", *asked, "--out", "whole").code == 0
    assert gates_of(tmp_path / "whole") == gates_of(run)


def test_resume_with_the_same_options_goes_on_and_with_others_is_refused(remoe, killed):
    run, asked = killed
    refused(remoe("finetune", *asked, "--steps", 9, "--resume"), "train.steps 8, not 9", "--resume")
    refused(remoe("finetune", *asked, "--recipe", "ce-only", "--resume"), "ce-only")
    refused(remoe("finetune", "--resume", "--data", "demo"), "data.source", "not 'demo'")
    refused(remoe("finetune", "demo", "--resume", "--out", run), "not of demo", "--out")
    assert runs.Run(run).status == "stopped"
    ran = remoe("finetune", *asked, "--resume")
    assert ran.code == 0 and "Going on after step 5" in ran.err


def test_without_an_unfinished_run_resume_starts_one(remoe, model, texts):
    refused(remoe("finetune", "--resume"), "no unfinished run", "remoe finetune MODEL")
    refused(remoe("finetune"), "needs a MODEL")
    ran = remoe("finetune", model, "--data", texts, "--steps", 1, *QUICK, "--resume", "--out", "here")
    assert ran.code == 0 and "Going on" not in ran.err
    refused(remoe("finetune", "--resume", "--out", "here"), "finished", "remoe eval")


@pytest.mark.parametrize("row", [0, 39], ids=["trained on", "held out"])
def test_changed_texts_are_not_gone_on_with(remoe, killed, texts, row):
    rows = texts.read_text().splitlines()
    rows[row] = rows[row].replace("lazy", "busy")
    texts.write_text("\n".join(rows) + "\n")
    refused(remoe("finetune", "--resume"), "have changed", "without --resume")


def test_a_changed_base_is_not_gone_on_with(remoe, killed, model):
    tiny_models.make("deepseek_v2", model, seed=1, vocab_size=400)
    refused(remoe("finetune", "--resume"), "gates of", "have changed")


def test_a_run_that_ends_during_its_last_measurement_measures_once_more(remoe, model, texts, monkeypatch, tmp_path):
    asked = ["finetune", model, "--data", texts, "--steps", 3, *QUICK]
    real = finetune.measure_heldout

    def until_tuned(title, *args, **settings):
        if "tuned" in title:
            raise RunError("the last measurement", "again")
        return real(title, *args, **settings)

    monkeypatch.setattr(finetune, "measure_heldout", until_tuned)
    refused(remoe(*asked), "the last measurement")
    (run,) = runs.every()
    assert run.status == "stopped" and run.has_delta
    gates = gates_of(run.folder)
    monkeypatch.setattr(finetune, "measure_heldout", real)
    ran = remoe(*asked, "--resume")
    assert ran.code == 0 and "Going on after step 3" in ran.err, ran.err
    assert [one.status for one in runs.every()] == ["finished"] and run.facts["after"]
    assert gates_of(run.folder) == gates and len(run.metrics.read_text().splitlines()) == 3


def test_a_run_that_another_process_finished_meanwhile_is_left_alone(remoe, killed, monkeypatch):
    run, real = runs.Run(killed[0]), runs.unfinished

    def slowly(*args):
        found = real(*args)
        found.note(status="finished")  # what the other process did before this one took the lock
        return found

    monkeypatch.setattr(runs, "unfinished", slowly)
    before = run.metrics.read_text()
    refused(remoe("finetune", "--resume"), "is finished")
    assert run.metrics.read_text() == before


def test_a_report_of_former_gates_is_laid_aside(remoe, killed):
    run = runs.Run(killed[0])
    run.report.write_text("{}")
    run.note(steps=5)
    assert remoe("finetune", "--resume").code == 0
    assert not run.report.exists() and (run.folder / "report-step-5.json").read_text() == "{}"


def test_a_run_that_runs_is_left_alone(remoe, killed):
    run = runs.Run(killed[0])
    with run.locked():
        assert run.status == "running"
        refused(remoe("finetune", "--resume"), "no unfinished run")
        refused(remoe("runs", "rm", run.folder, "--yes"), "is running")
        with pytest.raises(RunError, match="running already"), run.locked():
            pass
    assert run.status == "stopped"


def test_a_full_disk_ends_training_with_the_gates_kept_and_resume_ends_it(remoe, model, texts, monkeypatch, tmp_path):
    asked = [model, "--data", texts, "--steps", 6, "--set", "train.save_seconds=0", *QUICK]
    real = states.State.save

    def full(self, folder):
        if self.step == 4:
            raise RunError(f"the folder {folder} cannot be written (No space left on device).", "free some space")
        real(self, folder)

    monkeypatch.setattr(states.State, "save", full)
    refused(remoe("finetune", *asked, "--out", "full"), "No space left", "step 4 are kept")
    assert runs.Run(tmp_path / "full").status == "failed" and (tmp_path / "full/delta/remoe.json").is_file()
    monkeypatch.setattr(states.State, "save", real)
    ran = remoe("finetune", "--resume", "--out", "full")
    assert ran.code == 0 and "Going on after step 3" in ran.err
    assert remoe("finetune", *asked, "--out", "whole").code == 0
    assert gates_of(tmp_path / "whole") == gates_of(tmp_path / "full")


# remoe runs


def test_runs_are_listed_and_removed(remoe, killed, model, texts):
    assert remoe("finetune", model, "--data", texts, "--steps", 1, *QUICK).code == 0
    listed = remoe("runs")
    assert listed.code == 0
    head, first, second = listed.out.splitlines()
    assert head.split() == ["RUN", "STATUS", "STEPS", "PERPLEXITY", "EVAL", "SIZE"]
    assert "stopped" in first and "finished" in second and " -> " in second
    rows = json.loads(remoe("runs", "--json").out)
    assert [row["status"] for row in rows] == ["stopped", "finished"] and rows[1]["steps"] == 1
    (runs.ROOT / "broken").mkdir()
    (runs.ROOT / "broken/recipe.yaml").touch()
    (runs.ROOT / "broken/run.json").write_text("[]")
    assert len(remoe("runs").out.splitlines()) == 3  # a damaged run hides no other
    assert remoe("push", "--to", "pushed").code == 0
    refused(remoe("runs", "rm", "nothing", "--yes"), "nothing is not a run folder")
    ran = remoe("runs", "rm", rows[0]["run"], "broken", "--yes")
    assert ran.code == 0 and ran.out.count("Removed") == 2
    assert [run.folder for run in runs.every()] == [runs.Path(rows[1]["run"])]
    assert not (runs.ROOT / "broken").exists()


def test_removal_is_asked_for(remoe, killed, monkeypatch):
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    assert remoe("runs", "rm", killed[0]).code != 0
    assert killed[0].is_dir()


def test_a_users_own_empty_folder_stays_when_the_run_ends_before_training(remoe, model, texts, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()

    def fails(*_args, **_options):
        raise RunError("no", "yes")

    monkeypatch.setattr(finetune, "measure_heldout", fails)
    refused(remoe("finetune", model, "--data", texts, *QUICK, "--out", "mine"), "no")
    assert list((tmp_path / "mine").iterdir()) == []
    refused(remoe("finetune", model, "--data", texts, *QUICK, "--out", "other"), "no")
    assert not (tmp_path / "other").exists()


def test_names_become_folders_safely(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from remoe_cli.recipe import Recipe

    for name in ("../../esc", "", "a b\nc", "x" * 500, "[red]"):
        run = runs.create("org/../na me@rev", Recipe(name=name))
        assert run.folder.parent == runs.ROOT and run.folder.resolve().parent == tmp_path / "runs"
