"""The command line: wrong input gives one line with the next command, and a small run goes all the way."""

import gc
import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_tokenizers
import torch
from commands import make_model, QUICK, refused
from rich.console import Console
from safetensors.torch import load_file, save_file
from test_delta import hashes
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts

from remoe_cli import console, errors, evaluate, finetune, recipe


@pytest.fixture
def a_run(remoe, model, texts):
    ran = remoe("finetune", model, "--data", texts, "--steps", 2, *QUICK)
    assert ran.code == 0, ran.err
    return next(Path("runs").iterdir())


def test_the_whole_way(remoe, model, texts):
    before = hashes(model)
    control = remoe("finetune", model, "--data", texts, "--steps", 3, "--recipe", "ce-only", "--out", "control", *QUICK)
    tuned = remoe("finetune", model, "--data", texts, "--steps", 3, *QUICK)
    assert control.code == 0 and tuned.code == 0, tuned.err
    assert hashes(model) == before, "finetune changed the base"
    run = Path(next(Path("runs").iterdir()))
    assert re.search(r"base +perplexity .*\ntuned +perplexity .*\nNext: remoe eval", tuned.out), tuned.out
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert {"loss", "ce", "trust", "reuse", "smooth", "lag", "window", "eor", "lr", "tokens_per_s"} <= set(steps[0])
    facts = json.loads((run / "delta/remoe.json").read_text())
    gates = load_file(run / "delta/gates.safetensors")
    assert set(gates) == set(facts["gates"]) and facts["changed"] > 0
    assert all(".mlp.gate.weight" in name for name in gates)

    ran = remoe("eval", "--cache", "1,2,4", "--control", "control", "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert report == json.loads((run / "report.json").read_text())
    assert [arm["name"] for arm in report["arms"]] == ["base", "ce-only", "remoe"]
    for arm in report["arms"]:
        below, *measured = arm["measured"]
        assert below["capacity"] == 1 and below["skipped"] == "needs C >= 2"
        for row in measured:
            assert row["counts_match"] is True and row["exact"] is True
            assert (
                row["bytes"]
                == row["misses"] * report["base"]["expert_bytes"]
                == row["reads"] * report["base"]["expert_bytes"]
            )
        cells = {(c["trace"], c["policy"], c["admission"], c["capacity"]): c for c in arm["cache"]}
        forced = [cells["forced", p, "forced", 2]["hits"] for p in ("lru", "lfu", "fifo", "belady")]
        assert len(set(forced)) == 1, "at C = K every policy with forced admission holds the last step's experts"
        assert cells["forced", "belady", "bypass", 2]["hits"] >= forced[0]
    base = report["arms"][0]
    lru = next(c for c in base["cache"] if (c["trace"], c["policy"], c["capacity"]) == ("forced", "lru", 2))
    assert lru["gap_closed"] in (0.0, None) and lru["gap_closed_forced"] is None

    shown = remoe("eval", "--cache", "2", "--no-measure")
    assert "EOR, teacher-forced" in shown.out and "C = 2" in shown.out

    assert remoe("push", "--to", "pushed").code == 0
    assert sorted(p.name for p in Path("pushed").iterdir()) == [
        "README.md",
        "gates.safetensors",
        "headline.png",
        "recipe.yaml",
        "remoe.json",
        "report.json",
    ]
    assert "needs C >= 2" not in Path("pushed/README.md").read_text()
    assert remoe("apply", "pushed", model, "--out", "patched").code == 0
    after = hashes(Path("patched"))
    assert {name for name in before if before[name] != after[name]} == set(gates)
    one = remoe("decode", "patched", "--cache", 2, "--tokens", 5, "--json")
    two = remoe("decode", model, "--delta", "pushed", "--cache", 2, "--tokens", 5, "--json")
    assert one.code == 0 and two.code == 0
    assert json.loads(one.out)["rows"][0]["texts"] == json.loads(two.out)["rows"][0]["texts"]
    assert json.loads(one.out)["rows"][0]["misses"] == json.loads(two.out)["rows"][0]["misses"]


# The twelve wrong inputs, and more of their kind


def test_unknown_family(remoe, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "other_moe", "num_local_experts": 16}))
    refused(remoe("finetune", tmp_path / "model"), "other_moe", "deepseek_v2")


def test_dense_model(remoe, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "llama"}))
    refused(remoe("finetune", tmp_path / "model"), "dense", "llama")
    refused(remoe("decode", tmp_path / "model", "--cache", 8), "dense")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_experts_per_tok", None, "num_experts_per_tok"), ("num_experts_per_tok", "2", "num_experts_per_tok"),
        ("num_experts_per_tok", 0, "from 1 to its 8 experts"), ("num_experts_per_tok", 9, "from 1 to its 8 experts"),
        ("num_experts_per_tok", True, "num_experts_per_tok"), ("num_experts_per_tok", 1.5, "num_experts_per_tok"),
        ("n_routed_experts", None, "no experts in its config"), ("n_routed_experts", "8", "no experts in its config"),
        ("n_routed_experts", 1, "no experts in its config"), ("n_routed_experts", 7, "/model"), ("model_type", ["x"], "['x']"),
        ("quantization_config", "awq", "quantised"), ("text_config", "none", "cannot be loaded"), ("hidden_act", "x", "cannot be loaded"),
        ("hidden_size", 0, "/model"), ("num_attention_heads", "4", "cannot be loaded"), ("max_position_embeddings", "x", "cannot be loaded"),
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_cannot_be(remoe, model, texts, key, value, words):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: value}))
    refused(remoe("finetune", model, "--data", texts, "--steps", 1, *QUICK), words)
    refused(remoe("decode", model, "--cache", 8), words)
    assert not Path("runs").exists()


def test_a_base_whose_config_was_damaged_later(remoe, a_run, model):
    config = json.loads((model / "config.json").read_text())
    for change in ({"num_experts_per_tok": "2"}, {"hidden_act": "x"}):
        (model / "config.json").write_text(json.dumps({**config, **change}))
        refused(remoe("eval", "--cache", 2))


def test_missing_shard(remoe, model, texts):
    shard = sorted(model.glob("*.safetensors"))[1]
    shard.unlink()
    refused(remoe("finetune", model, "--data", texts), shard.name)


def test_truncated_file(remoe, model, texts):
    shard = sorted(model.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-7])
    refused(remoe("finetune", model, "--data", texts), shard.name, "truncated")


def test_not_a_delta(remoe, model):
    Path("empty").mkdir()
    refused(remoe("apply", "empty", model, "--out", "out"), "not a delta")
    assert not Path("out").exists()


def test_delta_of_another_base(remoe, a_run, tmp_path):
    other = make_model(tmp_path / "other", seed=5)
    refused(remoe("apply", a_run, other, "--out", "out"), "another revision")
    refused(remoe("decode", other, "--cache", 2, "--delta", a_run), "another revision")
    assert not Path("out").exists()


def test_cache_smaller_than_top_k_asked_of_the_decoder(remoe, model):
    refused(remoe("decode", model, "--cache", 1), "2 experts", "--cache 2")


def test_empty_data(remoe, model):
    Path("empty.jsonl").write_text("")
    refused(remoe("finetune", model, "--data", "empty.jsonl"), "empty.jsonl")
    Path("empty.txt").write_text("\n")
    refused(remoe("finetune", model, "--data", "empty.txt"), "empty.txt")
    assert not Path("runs").exists(), "a refused command left a run behind"


def test_bad_recipe_key(remoe, model):
    refused(remoe("finetune", model, "--set", "train.stpes=3"), "did you mean train.steps")
    Path("mine.yaml").write_text("objective: {trsut: 1}\n")
    refused(remoe("finetune", model, "--recipe", "mine.yaml"), "did you mean objective.trust")
    refused(remoe("finetune", model, "--recipe", "remeo"), "did you mean remoe")
    refused(remoe("finetune", model, "--steps", 0), "train.steps is at least 1, not 0")
    refused(remoe("finetune", model, "--set", "train.lr=[1"), "not valid YAML")
    refused(remoe("finetune", model, "--set", "train.steps=.inf"), "whole number")
    refused(remoe("finetune", model, "--set", "name=../../esc"), "recipe key name")
    Path("name with spaces.yaml").write_text("train: {steps: 1}\n")
    refused(remoe("finetune", model, "--recipe", "name with spaces.yaml"), "recipe key name")
    assert not Path("runs").exists(), "a refused command left a run behind"


def test_settings_far_beyond_the_texts_are_survived(remoe, model, texts):
    huge = [
        f"objective.lags=[1, {2**53 - 1}]",
        "objective.window_tokens=1e15",
        "data.train_samples=1e15",
        "evaluate.rows=1e15",
    ]
    ran = remoe(
        "finetune", model, "--data", texts, "--steps", 1, *QUICK, *(part for h in huge for part in ("--set", h))
    )
    assert ran.code == 0, ran.err


def test_names_in_square_brackets_are_shown_as_they_are(remoe, texts, tmp_path, monkeypatch):
    model = make_model(tmp_path / "[red]model[/red]")
    ran = remoe("finetune", model, "--data", texts, "--steps", 1, *QUICK)
    assert ran.code == 0 and "Base " in ran.err and "[red]model[/red]" in ran.err
    stream = io.StringIO()
    monkeypatch.setattr(console, "_stderr", Console(file=stream, force_terminal=True, width=200))
    with console.progress("[b]title[/b]", 2) as bar:
        bar.update(1, "[i]detail[/i]")
    assert "[b]title[/b]" in stream.getvalue() and "[i]detail[/i]" in stream.getvalue()


def test_recipes_are_listed_with_what_they_are_for(remoe):
    shown = remoe("recipes").out
    assert all(name in shown for name in ("remoe ", "ce-only", "cross entropy alone", "remoe.yaml", "--set train.lr="))
    found = {row["name"]: row for row in json.loads(remoe("recipes", "demo", "--json").out)}
    assert {"remoe", "demo-strong", *recipe.CONTROLS} <= set(found) and found["remoe"]["file"].endswith(
        "demo/remoe.yaml"
    )
    assert all(row["purpose"] and Path(row["file"]).is_file() for row in found.values())
    listed = remoe("recipes", "demo").out
    assert all(f"\n{name}  " in f"\n{listed}" for name in recipe.shipped("demo")), "a name runs into what it is for"
    refused(remoe("recipes", "NONSENSE"), "NONSENSE", "demo, deepseek_v2, olmoe")
    code = "import sys; from remoe_cli.cli import recipes; recipes('demo'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_no_run_yet(remoe):
    for command in ("eval", "push"):
        refused(remoe(command), "no run", "remoe finetune")
    refused(remoe("eval", "no-such-run"), "no-such-run")


def test_damaged_runs(remoe, a_run):
    whole = (a_run / "run.json").read_text()
    (a_run / "run.json").write_text(whole[:20])
    refused(remoe("eval", "--cache", 2), "damaged")
    (a_run / "run.json").write_text(whole)
    (a_run / "recipe.yaml").rename(a_run / "gone.yaml")
    refused(remoe("eval", "--cache", 2), "recipe.yaml")
    (a_run / "gone.yaml").rename(a_run / "recipe.yaml")
    gates = a_run / "delta/gates.safetensors"
    gates.write_bytes(gates.read_bytes()[:-8])
    refused(remoe("push", "--to", "out"), "damaged")
    assert not Path("out").exists()


def test_a_run_is_evaluated_from_any_folder(remoe, a_run, tmp_path, monkeypatch, texts):
    run = a_run.resolve()
    monkeypatch.chdir("/")
    ran = remoe("eval", run, "--cache", 2, "--no-measure", "--json")
    assert ran.code == 0, ran.err


def test_no_token(remoe, a_run):
    ran = remoe("push", a_run, "me/delta")
    refused(ran, "token", "hf auth login")


def test_unwritable_folder(remoe, model, texts):
    refused(remoe("finetune", model, "--data", texts, "--out", "/proc/remoe", *QUICK), "/proc/remoe")


def test_taken_folder(remoe, a_run, model, texts):
    Path("taken").mkdir()
    Path("taken/mine.txt").write_text("mine")
    refused(remoe("finetune", model, "--data", texts, "--out", "taken"), "not an empty folder")
    refused(remoe("push", "--to", "taken"), "not an empty folder")
    refused(remoe("apply", a_run, model, "--out", "taken"), "not an empty folder")
    assert [path.name for path in Path("taken").iterdir()] == ["mine.txt"]


def test_wrong_options(remoe, a_run, model):
    refused(remoe("eval", "--cache", "six"), "--cache")
    refused(remoe("eval", "--cache", "0"), "at least 1")
    refused(remoe("eval", "--cache", "99"), "8 experts")
    refused(remoe("eval", "--cache", "2", "--policy", "lur"), "lru")
    refused(remoe("eval", "--cache", "2", "--control", a_run), "the run itself")
    refused(remoe("eval", "--cache", "2", "--device", "tpu"), "--device")
    refused(remoe("push", "nonsense"), "nonsense")
    refused(remoe("finetune", model, "--data", ""), "no source of texts", "--data demo")
    for command in (["finetune"], ["eval"], ["push"], ["decode", "--cache", "8"]):
        refused(remoe(*command, "x" * 300), "File name too long")


def test_out_of_memory_before_the_first_step(remoe, model, texts, monkeypatch):
    def too_large(*_args, **_settings):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: 10 TB")

    monkeypatch.setattr(finetune, "measure_heldout", too_large)
    refused(remoe("finetune", model, "--data", texts, *QUICK, "--out", "huge"), "out of memory", "micro_batch")
    assert not Path("huge").exists()


def test_a_loss_that_is_not_finite_keeps_the_last_good_gates(remoe, model, texts):
    rows = texts.read_text().splitlines()
    rows[10] = json.dumps({"text": "~ " * 60})  # a token whose embedding is not a number; row 10 is not held out
    texts.write_text("\n".join(rows) + "\n")
    token = tiny_tokenizers.wrapped()("~", add_special_tokens=False).input_ids[0]
    shard = next(path for path in model.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(path))
    tensors = load_file(shard)
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    ran = remoe("finetune", model, "--data", texts, "--steps", 40, *QUICK)
    assert ran.code == 1 and "not finite" in ran.err.splitlines()[-1] and "Traceback" not in ran.err
    run = next(Path("runs").iterdir())
    assert json.loads((run / "run.json").read_text())["status"] == "diverged"
    assert all(torch.isfinite(gate).all() for gate in load_file(run / "delta/gates.safetensors").values())
    assert remoe("apply", run, model, "--out", "patched").code == 0


def test_no_expert_is_resident_while_the_offloaded_decoder_is_measured(remoe, a_run, monkeypatch):
    alive = []

    class Spy(evaluate.OffloadedDecoder):
        def __init__(self, *arguments, **options):
            gc.collect()
            alive.append(sum(type(thing) is DeepseekV2Experts for thing in gc.get_objects()))
            super().__init__(*arguments, **options)

    gc.collect()
    before = sum(type(thing) is DeepseekV2Experts for thing in gc.get_objects())
    monkeypatch.setattr(evaluate, "OffloadedDecoder", Spy)
    assert remoe("eval", "--cache", "2").code == 0
    assert alive == [before]


def test_latest_run_is_the_one_made_last(remoe, a_run, model, texts):
    remoe("finetune", model, "--data", texts, "--steps", 1, "--recipe", "ce-only", *QUICK)
    ran = remoe("eval", "--cache", "2", "--no-measure", "--json")
    assert json.loads(ran.out)["recipe"] == "ce-only"


def test_help_version_and_module():
    for arguments, words in ((["--help"], "finetune"), (["--version"], "remoe 0."), (["eval", "--help"], "--cache")):
        ran = subprocess.run([sys.executable, "-m", "remoe_cli", *arguments], capture_output=True, text=True)
        assert ran.returncode == 0 and words in ran.stdout


def test_every_command_is_documented():
    docs = Path(__file__).parent.parent / "docs"
    pages = runpy.run_path(str(docs / "make_commands.py"))["pages"]()
    there = {path.relative_to(docs).as_posix() for path in (docs / "commands").iterdir()}
    assert there == set(pages) - {"commands.md"}, "python docs/make_commands.py writes them anew"
    for name, page in pages.items():
        assert (docs / name).read_text() == page, f"{name}: python docs/make_commands.py writes it anew"
    assert "## remoe runs rm" in pages["commands/runs.md"] and "commands/pull.md" in pages["commands.md"]


def test_every_kind_of_error_is_documented():
    table = (Path(__file__).parent.parent / "docs/errors.md").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RemoeError)]
    for kind in kinds:
        row = rf"\| {kind.__name__} \| {kind.exit_code} \|"
        assert kind is errors.RemoeError or re.search(row, table), f"docs/errors.md lacks {kind.__name__}"
    assert len(kinds) > 9
