"""remoe inspect MODEL: its figures equal those of the loaded model and its files, and a Hub model's weights stay on the Hub."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from commands import refused, report_of
from hub_client import Client
from loopback_hub import LoopbackHub
from tiny_models import EXPERTS, LAYERS, TOP_K

from remoe_cli import inspect_model, memory
from remoe_cli.errors import MemoryShortError
from remoe_cli.families import find_gates
from remoe_cli.families.loader import experts_on_disk, load_resident
from remoe_cli.hub.checkpoint import Checkpoint, INDEX
from remoe_cli.offload import budget

FAMILIES = ("deepseek_v2", "mixtral", "qwen2_moe")
INSPECT = "__import__('remoe_cli.inspect_model', fromlist=['x']).inspect"
IS_MODEL = "__import__('remoe_cli.inspect', fromlist=['x']).is_model"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A Hub, a process that asks it, and that one's home."""
    home = tmp_path_factory.mktemp("home")
    with LoopbackHub() as hub:
        client = Client(hub, home)
        yield hub, client, home
        client.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_figures_are_those_of_the_loaded_model(folders, remoe, family, dtype):
    folder = folders(family, dtype)
    found = report_of(remoe("inspect", folder, "--json", "--cache", "3,8"))
    model = load_resident(Checkpoint.open(folder), dtype, "cpu")
    gates = find_gates(model)
    experts = sum(p.nbytes for gate in gates for p in gate.experts.parameters())
    assert found["supported"] and found["reason"] is None and found["absent"] == ""
    assert (found["layers"], found["moe_layers"]) == (LAYERS, len(gates))
    assert (found["experts"], found["top_k"]) == (EXPERTS, TOP_K)
    assert (found["shared_experts"] > 0) == (gates[0].shared is not None)
    assert found["experts_bytes"] == experts and found["expert_bytes"] * EXPERTS * len(gates) == experts
    assert found["delta_bytes"] == len(gates) * EXPERTS * 32 * dtype.itemsize
    assert {tuple(gate["shape"]) for gate in found["gates"].values()} == {(EXPERTS, 32)}
    tensors = Checkpoint.open(folder).tensors
    assert set(found["gates"]) <= set(tensors) and len(found["gates"]) == len(gates)
    assert found["outside_bytes"] + experts == sum(info.nbytes for info in tensors.values())
    assert list(found["memory"]) == ["3", "8"]


def test_the_memory_is_what_a_decoder_is_refused_below(folders, monkeypatch):
    folder = folders("mixtral")
    found = inspect_model.inspect(str(folder), [4])
    checkpoint = Checkpoint.open(folder)
    layers = experts_on_disk(checkpoint)

    def require(nbytes: int) -> None:
        monkeypatch.setattr(memory, "available", lambda: memory.Room(nbytes, "the machine"))
        budget.require(
            checkpoint,
            layers,
            torch.float32,
            "cpu",
            4,
            row_bytes=found["expert_bytes"],
            rows=lambda _: 0,
            ram=0,
            top_k=4,
        )

    require(found["memory"]["4"])
    with pytest.raises(MemoryShortError):
        require(found["memory"]["4"] - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_shards_the_config_tells_the_same_sizes(folders, remoe, family, tmp_path):
    folder = folders(family, torch.bfloat16)
    for name in ("config.json", INDEX):
        (tmp_path / "bare").mkdir(exist_ok=True)
        shutil.copy(folder / name, tmp_path / "bare" / name)
    whole, bare = (report_of(remoe("inspect", one, "--json")) for one in (folder, "bare"))
    told = {"model", "gates", "absent"}
    assert {k: v for k, v in bare.items() if k not in told} == {k: v for k, v in whole.items() if k not in told}
    assert bare["absent"] == "no weight file is here" and {gate["dtype"] for gate in bare["gates"].values()} == {None}
    assert all(any(name.endswith(f".{gate}") for name in whole["gates"]) for gate in bare["gates"])
    assert "From config.json alone (no weight file is here)" in remoe("inspect", "bare").out


def test_the_words_for_a_person(folders, remoe):
    ran = remoe("inspect", folders("deepseek_v2"), "--cache", "8")
    for words in (
        "deepseek_v2, supported", "3 layers, 2 of them MoE: 8 experts, 2 a token", "2 gates: 2 of [8, 32] float32; a delta takes 2.05 kB",
        "One expert ", " at 8", "Next: remoe finetune ",
    ):  # fmt: skip
        assert words in ran.out, ran.out


@pytest.mark.parametrize(
    ("name", "moe", "why"),
    [
        ("Qwen3-30B-A3B", 48, None), ("granite-3.1-1b-a400m-instruct", 24, None),
        ("DeepSeek-V3", 58, None), ("gpt-oss-20b", 24, None),
        ("Kimi-K2-Instruct", None, "brings code of its own, which remoe never runs"),
    ],
)  # fmt: skip
def test_real_configs(shared, remoe, name, moe, why):
    found = report_of(remoe("inspect", shared(f"data/configs/{name}"), "--json"))
    assert found["supported"] == (why is None) and found["moe_layers"] == moe
    assert found["reason"] is None if why is None else why in found["reason"]


def test_a_published_size_by_hand(shared):
    found = inspect_model.inspect(str(shared("data/configs/Mixtral-8x7B-v0.1")))
    assert found["expert_bytes"] == 3 * 4096 * 14336 * 2
    assert (found["experts_bytes"] + found["outside_bytes"]) // 2 == 46_702_792_704, "46.7 billion parameters"


def test_published_sizes_of_quantised_experts(shared):
    """One scale of 4 bytes for 128 x 128 fp8 weights; 17 bytes for 32 mxfp4 weights, biases counted alike."""
    found = inspect_model.inspect(str(shared("data/configs/DeepSeek-V3")))
    assert found["expert_bytes"] == 3 * 7168 * 2048 + 3 * 56 * 16 * 4 and found["dtype"] == "bfloat16"
    found = inspect_model.inspect(str(shared("data/configs/gpt-oss-20b")))
    assert found["expert_bytes"] == (3 * 2880 * 2880 + 3 * 2880) * 17 // 32


def test_only_headers_of_a_hub_model_are_read(served, tmp_path):
    hub, client, home = served
    folder = tiny_models.make("mixtral", tmp_path / "m", torch.bfloat16, vocab_size=20_000)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    sha = hub.add("model", "org/moe", files)
    hub.add("model", "org/delta", {"remoe.json": b"{}", "gates.safetensors": b""})
    hub.sent = 0
    found = client(f"{INSPECT}('org/moe', [2, 8])")
    sent = hub.sent
    assert client(f"[{IS_MODEL}('org/moe'), {IS_MODEL}('org/delta')]") == [True, False]
    here = inspect_model.inspect(str(folder), [2, 8])
    assert found.pop("commit") == sha and found.pop("model") == "org/moe"
    assert found == {k: v for k, v in here.items() if k not in ("commit", "model")}
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    small = sum(len(data) for name, data in files.items() if not name.endswith(".safetensors"))
    assert sent <= small + tiny_models.SHARDS * 100_001 < weights / 4
    assert not [*home.rglob("*.safetensors")], "nothing of the weights is in the cache"


def test_a_damaged_header_on_the_hub_is_named(served, folders):
    hub, client, _ = served
    files = {path.name: path.read_bytes() for path in folders("mixtral").iterdir()}
    shard = next(name for name in sorted(files) if name.endswith(".safetensors"))
    hub.add("model", "org/a", files | {shard: files[shard][:8] + b"!" + files[shard][9:]})
    hub.add("model", "org/b", files | {shard: files[shard][:8].replace(b"\0", b"\xff")})
    hub.add("model", "org/c", {"config.json": files["config.json"], "pytorch_model.bin": b"pickle"})
    for repo in ("org/a", "org/b"):
        error = client(f"{INSPECT}('{repo}')")
        assert error["error"] == "CheckpointError" and f"{shard} of {repo}" in error["message"], error
    found = client(f"{INSPECT}('org/c')")
    assert not found["supported"] and "remoe reads safetensors only" in found["reason"] and found["moe_layers"] == 3


def test_bad_input(folders, remoe, tmp_path):
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense/config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 4}))
    found = report_of(remoe("inspect", "dense", "--json"))
    assert not found["supported"] and "dense is a dense model" in found["reason"]
    assert (found["layers"], found["moe_layers"], found["experts"]) == (4, 0, 0)
    assert remoe("inspect", "dense", "--cache", "4").code == 0
    refused(remoe("inspect", "no/such/folder"), "there is no folder no/such/folder")
    folder = folders("mixtral")
    for cache, words in (
        ("1", "2 (those of one token) to 8"),
        ("9", "2 (those of one token) to 8"),
        ("x", "whole numbers"),
    ):
        refused(remoe("inspect", folder, "--cache", cache), words)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:100])
    refused(remoe("inspect", "copy"), "truncated or damaged")
    (copy / "config.json").write_text("{")
    refused(remoe("inspect", "copy"), "config.json is damaged")


def test_a_config_that_the_files_contradict_is_refused(folders, remoe, tmp_path):
    copy = Path(shutil.copytree(folders("mixtral"), tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] * 2}))
    refused(remoe("inspect", "copy"), "does not fit")
