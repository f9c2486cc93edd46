"""remoe plan: its table is the arithmetic of needs at measured rates, from headers alone; it refuses what cannot be."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from commands import refused, report_of
from hub_client import Client
from loopback_hub import LoopbackHub

from remoe_cli import memory, plan
from remoe_cli.errors import RunError
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.hub.download import RemoteFile
from remoe_cli.recipe import override, Recipe
from remoe_cli.train import needs, rates
from remoe_cli.train.rates import Rates
from remoe_cli.train.shape import shape_of

SMALL = ("train.sequence=64", "train.micro_batch=2", "train.accumulation=3")
SETS = [word for one in SMALL for word in ("--set", one)]
PLAN = "__import__('remoe_cli.plan', fromlist=['x']).plan"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(rates, "SECONDS", 0.02)
    monkeypatch.setattr(rates, "_STAND_IN", 2 * rates._READ)
    monkeypatch.setattr(rates, "_COPY", 1 << 20)


@pytest.fixture
def known(monkeypatch):
    """Rates of a machine that reads 1 MB/s, copies 2 MB/s and computes 1 GFLOP/s, with 16 GB of memory."""
    monkeypatch.setattr(plan, "_measure", lambda *_: Rates(1e6, "direct", 2e6, 1e9))
    monkeypatch.setattr(memory, "available", lambda: memory.Room(16 * 10**9, "the machine"))


def modes_of(found: dict) -> dict[str, dict]:
    return {mode["mode"]: mode for mode in found["modes"]}


def test_the_table_is_what_needs_counts(folders, remoe, known):
    folder = folders("deepseek_v2", torch.bfloat16)
    found = report_of(remoe("plan", folder, "--json", "--steps", "7", *SETS))
    shape = shape_of(Checkpoint.open(folder), torch.bfloat16)
    recipe = override(Recipe(), [*SMALL, "train.steps=7"])
    whole, passing = needs.resident(shape, recipe), needs.streamed(shape, recipe, 10**9)
    assert (found["tokens_a_step"], found["steps"], found["chosen"], found["refusal"]) == (384, 7, "resident", None)
    modes = modes_of(found)
    assert modes["resident"]["device"] == whole.pool and modes["resident"]["fits"]
    assert modes["resident"]["seconds_a_step"] == {"arithmetic": whole.flops / 1e9}
    assert modes["resident"]["hours"] == pytest.approx(7 * whole.flops / 1e9 / 3600)
    assert modes["streamed"]["device"] == passing.pool and modes["streamed"]["read_a_step"] == 0, "all of it stays"
    assert modes["streamed"]["host"] is None and found["host_free"] is None
    assert modes["sharded"]["devices"] == 2
    assert found["next"] == f"remoe finetune {folder} --steps 7 " + " ".join(f"--set {one}" for one in SMALL)


def test_a_device_that_is_not_here(folders, remoe, known):
    folder = folders("deepseek_v2", torch.float32)
    shape = shape_of(Checkpoint.open(folder), torch.bfloat16, "cuda")
    recipe = override(Recipe(), SMALL)
    bare = needs.streamed(shape, recipe)
    sizes = ("--device-memory", f"{bare.device}B", "--ram", f"{bare.host}B")
    found = report_of(remoe("plan", folder, "--json", *SETS, *sizes))
    assert found["dtype"] == "bfloat16", "as training picks it on a GPU"
    assert (found["device_free"], found["host_free"], found["chosen"]) == (bare.device, bare.host, "streamed")
    modes = modes_of(found)
    assert modes["streamed"]["fits"] and not modes["resident"]["fits"]
    assert (modes["streamed"]["device"], modes["streamed"]["host"]) == (bare.device, bare.host)
    assert modes["streamed"]["seconds_a_step"] == {
        "arithmetic": bare.flops / 1e9, "disk": bare.read / 1e6, "copies": bare.copied / 2e6
    }  # fmt: skip
    assert modes["streamed"]["hours"] == pytest.approx(2000 * max(bare.read / 1e6, bare.copied / 2e6) / 3600)
    assert modes["sharded"]["devices"] == 64 or modes["sharded"]["fits"]
    assert " --stream on" in found["next"]
    assert modes_of(report_of(remoe("plan", folder, "--json", "--devices", "3")))["sharded"]["devices"] == 3


def test_what_fits_nowhere_is_refused_with_what_would(folders, remoe, known):
    folder = folders("deepseek_v2")
    shape = shape_of(Checkpoint.open(folder), torch.float32)
    enough = f"{needs.streamed(shape, override(Recipe(), ['train.sequence=512'])).pool}B"
    ran = remoe("plan", folder, "--ram", enough)
    assert ran.code == 1 and "resident" in ran.out and "Next:" not in ran.out
    error = ran.err.splitlines()[-1]
    assert error.startswith(f"error: {folder} streamed layer by layer needs ") and " are free. Try: " in error
    assert error.endswith("the same command with --set train.sequence=512")
    assert remoe("plan", folder, "--ram", enough, "--set", "train.sequence=512").code == 0
    ran = remoe("plan", folder, "--ram", "10MB", "--json")
    assert ran.code == 1 and json.loads(ran.out)["refusal"]["message"].endswith(
        "rows of 128 tokens one by one, needs 383 MB."
    )
    assert modes_of(json.loads(ran.out))["streamed"]["with"] is None


def test_changes_with_which_a_mode_fits(folders, remoe, known):
    folder = folders("mixtral")
    shape = shape_of(Checkpoint.open(folder), torch.float32)
    least = needs.resident(shape, override(Recipe(), [*SMALL, "train.micro_batch=1", "train.accumulation=6"])).pool
    ran = remoe("plan", folder, "--json", *SETS, "--ram", f"{least}B")
    assert modes_of(json.loads(ran.out))["resident"]["with"] == ["train.micro_batch=1", "train.accumulation=6"]


def test_scopes_that_train_the_layers_stay_resident(folders, remoe, known):
    folder = folders("mixtral")
    ran = remoe("plan", folder, "--set", "train.scope=full")
    assert ran.code == 0 and "streamed: train.scope full trains the layers" in ran.out
    ran = remoe("plan", folder, "--set", "train.scope=full", "--ram", "10MB")
    assert ran.code == 1 and "gates, heads and gates+heads can be streamed or sharded" in ran.err


def test_the_words_for_a_person(folders, remoe):
    ran = remoe("plan", folders("mixtral"), *SETS)
    assert ran.code == 0, ran.err
    for words in (
        "in float32, 3 layers of up to", "768 gate parameters", "2,000 steps of 384 tokens, rows of 64, 2 at a time",
        "resident: weights ", "Measured here: disk ", "GFLOP/s in the experts' products", "Assumed: ", "times are the least", "Next: remoe finetune ",
    ):  # fmt: skip
        assert words in ran.out, ran.out
    assert "Measuring this machine" in ran.err


def test_only_headers_of_a_hub_model_are_read(tmp_path):
    folder = tiny_models.make("mixtral", tmp_path / "m", torch.bfloat16, vocab_size=20_000)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    home = tmp_path / "home"
    with LoopbackHub() as hub:
        sha = hub.add("model", "org/moe", {path.name: path.read_bytes() for path in folder.iterdir()})
        client = Client(hub, home)
        rates_of = "__import__('remoe_cli.train.rates', fromlist=['x'])"
        client(f"setattr({rates_of}, 'SECONDS', 0.02) or setattr({rates_of}, '_STAND_IN', 2 << 25)")
        hub.sent = 0
        found = client(f"{PLAN}('org/moe')")
        sent = hub.sent
        client.close()
    here = plan.plan(str(folder))
    same = ("weights", "stored", "layers", "gate_parameters", "dtype", "tokens_a_step")
    assert {key: found[key] for key in same} == {key: here[key] for key in same} and found["commit"] == sha
    assert found["disk"]["needed"] == weights and here["disk"]["needed"] == 0
    assert sent < weights / 4
    assert not [*home.rglob("*.safetensors"), *home.rglob(".remoe-probe-*")]


def test_a_disk_without_room_is_refused(tmp_path, monkeypatch, folders):
    found = plan.fetch_config(str(folders("mixtral")))
    absent = {"model.safetensors": RemoteFile(10**9, None, None)}
    monkeypatch.setattr(plan, "weight_files_here", lambda *_: ([], absent))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**9 - 1))
    done = plan.plan(found.id)
    assert "needs 1 GB more on the disk of" in done["refusal"]["message"] and done["chosen"] is None


def test_bad_input(folders, remoe, tmp_path):
    folder = folders("mixtral")
    for options, words in (
        (("--for", "serve"), "--for is finetune or decode, not 'serve'"),
        (("--device-memory", "8 apples"), "--device-memory takes a size such as 8GB"),
        (("--ram", "-1"), "--ram takes a size"),
        (("--recipe", "nope"), "no recipe 'nope'"),
    ):
        ran = remoe("plan", folder, *options)
        refused(ran, words)
        assert ran.code == 2
    assert remoe("plan", folder, "--devices", "1").code == 2
    refused(remoe("plan", "no/such/folder"), "there is no folder no/such/folder")
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense/config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 4}))
    refused(remoe("plan", "dense"), "is a dense model")


@pytest.fixture
def clock(monkeypatch):
    """Each look at it is a second later."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(rates, "perf_counter", lambda: next(seconds))


def test_rates_are_work_over_time(clock, monkeypatch):
    monkeypatch.setattr(rates, "_COPY", 64)
    assert rates.copy_rate("cpu", 2.0) == 64 * 1 / 3, "one copy between the first look and the third"
    found = rates.flop_rate(2, 3, 5, 7, torch.float32, "cpu", 2.0)
    assert found == pytest.approx(7 * (2 * 5 * 2 * 3 + 2 * 5 * 3 * 2) / 3)


def test_the_disk_is_read_where_the_model_lies(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3 * rates._READ))
    rate, io = rates.disk_rate(tmp_path / "unused", [file], 0.02)
    assert rate > 1e6 and io in ("direct", "buffered") and not (tmp_path / "unused").exists()
    small = tmp_path / "small.safetensors"
    small.write_bytes(bytes(10))
    rate, _ = rates.disk_rate(tmp_path / "cache", [small], 0.02)
    assert rate > 1e6 and not [*(tmp_path / "cache").iterdir()], "what stood in for it is gone"
    with pytest.raises(RunError, match="cannot be measured"):
        rates.disk_rate(Path(small), [], 0.02)
