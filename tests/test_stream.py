"""A model whose layers come from files: the same model, each layer read once for each way it is needed, and nothing left behind."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from commands import make_model, make_texts, QUICK, refused
from conformance.test_quantised import quantise_fp8, quantise_mxfp4
from training import documents_of, recipe_of

from remoe_cli import memory
from remoe_cli.errors import CheckpointError, FamilyError
from remoe_cli.families import find_gates
from remoe_cli.families.loader import load_resident
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.measure.text import measure_rows
from remoe_cli.stream.passes import begin, finish, forward, Resident
from remoe_cli.stream.stream import Stream
from remoe_cli.train.packing import batches
from remoe_cli.train.refit import refit
from remoe_cli.train.trainer import Stopped, train

IDS = torch.tensor([[5, 17, 80, 3, 99, 41, 64, 12]])
PLANS = {"fp8": ("deepseek_v3", {"moe_intermediate_size": 160}, quantise_fp8)}
PLANS["mxfp4"] = ("gpt_oss", {"intermediate_size": 64}, quantise_mxfp4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    """Six layers of .66 MB, several shards."""
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 16}
    return Checkpoint.open(tiny_models.make("qwen3_moe", tmp_path_factory.mktemp("model"), torch.bfloat16, **sizes))


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kept", [0, 2, 6])
def test_a_plain_call_gives_the_resident_logits(checkpoint, dtype, kept):
    expected = logits_of(load_resident(checkpoint, dtype, "cpu"))
    sizes = Stream(checkpoint, dtype).layer_bytes
    with Stream(checkpoint, dtype, ram=sum(sizes[:kept])) as stream:
        assert stream.kept == kept
        for _ in range(2):
            torch.testing.assert_close(logits_of(stream.model), expected, rtol=0, atol=1e-5)
        passes = stream.traffic.layers
    assert passes - kept - 2 * (6 - kept) in (0, 1), "those that stay are read once; one is read ahead at the end"


@pytest.mark.parametrize("kind", [*PLANS])
def test_quantised_layers(kind, tmp_path):
    model_type, sizes, quantise = PLANS[kind]
    quantise(tiny_models.make(model_type, tmp_path / "model", **sizes))
    checkpoint = Checkpoint.open(tmp_path / "model")
    with Stream(checkpoint, torch.bfloat16) as stream:
        torch.testing.assert_close(
            logits_of(stream.model), logits_of(load_resident(checkpoint, torch.bfloat16, "cpu")), rtol=0.02, atol=0.02
        )


def test_every_tensor_is_the_checkpoints(checkpoint):
    whole = load_resident(checkpoint, torch.bfloat16, "cpu").state_dict()
    with Stream(checkpoint, torch.bfloat16) as stream:
        seen = set()
        for index in [*range(6), *reversed(range(6)), 3, 0, 3]:
            with stream.layer(index, ahead=range(index + 1, 6)):
                for name, tensor in stream.layers[index].state_dict().items():
                    full = f"model.layers.{index}.{name}"
                    assert torch.equal(tensor, whole[full]), full
                    seen.add(full)
        assert {name for name in whole if ".layers." in name} == seen
        assert not any(
            parameter.requires_grad for layer in stream.layers for parameter in layer.mlp.experts.parameters()
        )


def test_a_step_reads_each_layer_once_each_way(checkpoint):
    with Stream(checkpoint, torch.bfloat16) as stream:
        rows = batches(documents_of(*[32] * 20), 32, 1, repeat=True)
        train(stream.model, stream.gates, rows, recipe_of(steps=3, accumulation=4), layers=stream)
        layers, read = stream.traffic.layers, stream.traffic.read_bytes
    # forward 6; back 6 of which the last two are still there; the next step's first two were read ahead or are there
    assert 6 + 2 * (4 + 4) <= layers <= 3 * 10 + 1
    size = sum(stream.layer_bytes) / 6
    assert read <= layers * (size + 40 * 4096), "pages at the ends of a few reads, no more"


def test_the_layer_that_is_wanted_next_is_read_ahead(checkpoint):
    with Stream(checkpoint, torch.bfloat16) as stream:
        with stream.layer(0, ahead=(1, 2)):
            assert {*stream._here} == {0, 1}
            for job in stream._here[1].jobs:
                job.result(timeout=20)
        with stream.layer(1, ahead=(2, 3)):
            assert {*stream._here} == {1, 2}
        with stream.layer(5, ahead=(5, 4)):
            assert {*stream._here} == {5, 4}
        with stream.layer(4, ahead=(4, 3)):
            assert {*stream._here} == {4, 3}


def test_a_shard_that_breaks_in_mid_run_keeps_the_last_good_gates(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint.folder, tmp_path / "model")
    files = Checkpoint.open(folder).files
    saved = []

    def cut(stats) -> None:
        if stats.step == 2:
            with open(files[-1], "r+b") as file:
                file.truncate(4096)

    with Stream(Checkpoint.open(folder), torch.bfloat16) as stream, pytest.raises(Stopped) as stopped:
        rows = batches(documents_of(*[32] * 20), 32, 1, repeat=True)
        recipe = recipe_of(steps=9, lr=1e-2)
        train(stream.model, stream.gates, rows, recipe, layers=stream, on_step=cut, save=saved.append)
    assert files[-1].name in str(stopped.value) and "inside" in str(stopped.value)
    assert 2 <= stopped.value.trained.step < 9 and saved[-1].step == stopped.value.trained.step
    assert all(tensor.isfinite().all() for tensor in stopped.value.trained.gates.values())


def test_families_that_cannot_be_read_layer_by_layer_say_so(tmp_path):
    tiny_models.make("longcat_flash", tmp_path)
    with pytest.raises(FamilyError, match="not one row for each"):
        Stream(Checkpoint.open(tmp_path), torch.float32)


def test_damage_is_named_before_anything_is_loaded(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint.folder, tmp_path / "model")
    next(folder.glob("*.safetensors")).write_bytes(b"short")
    with pytest.raises(CheckpointError):
        Stream(Checkpoint.open(folder), torch.float32)


MEASURES = """
import json, sys, torch
from pathlib import Path
sys.path[:0] = [{tests!r}]
torch.set_num_threads(1)
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.measure.text import measure_rows
from remoe_cli.stream.passes import begin, finish, forward, Resident
from remoe_cli.stream.stream import Stream
from remoe_cli.train.packing import batches
from remoe_cli.train.trainer import train
from training import documents_of, recipe_of
import transformers.models.qwen3_moe.modeling_qwen3_moe

def peak():
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM")) * 1024

checkpoint = Checkpoint.open(Path({folder!r}))
before = peak()
stream = Stream(checkpoint, torch.bfloat16)
rows = batches(documents_of(*[32] * 20), 32, 1, repeat=True)
train(stream.model, stream.gates, rows, recipe_of(steps=2), layers=stream)
print(json.dumps(dict(more=peak() - before, layer=max(stream.layer_bytes), layers=sum(stream.layer_bytes))))
"""


def test_memory_is_that_of_a_few_layers(tmp_path):
    sizes = {"num_hidden_layers": 12, "hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 64}
    folder = tiny_models.make("qwen3_moe", tmp_path / "large", torch.bfloat16, **sizes)
    code = MEASURES.format(tests=str(Path(__file__).parent), folder=str(folder))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["layers"] > 590e6 and found["more"] < 2 * found["layer"] + 2 * 34e6 + 120e6


@pytest.fixture
def here(remoe, tmp_path):
    make_model(tmp_path / "model")
    make_texts(tmp_path / "texts.jsonl", rows=120)
    return remoe


COMMAND = ("finetune", "model", "--data", "texts.jsonl", "--steps", "2", *QUICK)


def test_the_command_streams_to_the_same_bytes(here, tmp_path):
    for way in ("on", "off"):
        ran = here(*COMMAND, "--out", way, "--stream", way, "--ram", "1")
        assert ran.code == 0, ran.err
        assert ("Streamed: 3 layers" in ran.err) == (way == "on")
    first, second = (json.loads((tmp_path / way / "run.json").read_text()) for way in ("on", "off"))
    assert (first["streamed_layers"], second["streamed_layers"]) == (3, 0)
    gates = [(tmp_path / way / "delta" / "gates.safetensors").read_bytes() for way in ("on", "off")]
    assert gates[0] == gates[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--stream", "maybe"), "--stream maybe: it is auto, on or off"),
        (("--ram", "much"), "--ram much is no size such as 8GB"),
        (("--stream", "on", "--set", "train.scope=full"), "train.scope full"),
    ],
)
def test_wrong_options_are_one_line(here, options, words):
    refused(here(*COMMAND, "--out", "run", *options), words)


def test_too_little_memory_says_the_least_that_works(here, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: memory.Room(1_000_000, "this test"))
    refused(here(*COMMAND, "--out", "run"), "streamed layer by layer needs", "are free")


def test_gates_are_found_without_the_layers(checkpoint):
    with Stream(checkpoint, torch.bfloat16) as stream:
        assert [gate.layer for gate in find_gates(stream.model)] == [*range(6)]


def test_measuring_pays_for_each_layer_once(checkpoint):
    resident = load_resident(checkpoint, torch.bfloat16, "cpu")
    documents = documents_of(70, 33, 64, 5, 90, 41)
    expected = measure_rows(resident, find_gates(resident), documents, 32, 6, batch=2)
    with Stream(checkpoint, torch.bfloat16) as stream:
        found = measure_rows(stream.model, stream.gates, documents, 32, 6, batch=2, layers=stream)
        assert stream.traffic.layers == 6, "three batches in one wave"
    for one, other in zip(found, expected, strict=True):
        assert (one == other).all()


def test_biases_are_refitted_alike(tmp_path):
    checkpoint = Checkpoint.open(tiny_models.make("deepseek_v3", tmp_path))
    resident = load_resident(checkpoint, torch.float32, "cpu")
    found = []
    for layers in (None, Stream(checkpoint, torch.float32)):
        model = layers.model if layers else resident
        gates = find_gates(model)
        base = {name: p.detach().clone() for gate in gates for name, p in gate.parameters.items()}
        generator = torch.Generator().manual_seed(3)
        tuned = {name: p + 0.3 * torch.randn(p.shape, generator=generator) for name, p in base.items()}
        rows = batches(documents_of(*[32] * 8), 32, 2)
        found.append(refit(model, gates, base, tuned, rows, layers))
    assert found[0].after == found[1].after < found[0].before
    for name, bias in found[0].biases.items():
        torch.testing.assert_close(found[1].biases[name], bias, rtol=0, atol=1e-6)


def test_a_model_that_computes_between_its_layers_is_refused(checkpoint):
    model = load_resident(checkpoint, torch.float32, "cpu")
    layers = Resident(model, find_gates(model))
    begun = begin(layers, {"input_ids": IDS, "use_cache": False}, "cpu")
    assert len(begun.calls) == 6 and begun.start.shape == (1, 8, 64)
    handle = layers.layers[2].register_forward_hook(lambda _layer, _inputs, out: out * 2)
    with pytest.raises(FamilyError, match="computes between its layers"):
        begin(layers, {"input_ids": IDS, "use_cache": False}, "cpu")
    handle.remove()


def test_the_head_sees_what_the_last_layer_would_have_put_out(checkpoint):
    model = load_resident(checkpoint, torch.float32, "cpu")
    layers = Resident(model, find_gates(model))
    inputs = {"input_ids": IDS, "use_cache": False}
    ((logits, kept),) = forward(layers, find_gates(model), [inputs], lambda routed: routed.choice_NK.shape)
    assert torch.equal(logits, logits_of(model)) and kept == [torch.Size((8, 2))] * 6
    hidden = torch.zeros(1, 8, 64, requires_grad=True)
    finish(layers, begin(layers, inputs, "cpu"), hidden).sum().backward()
    assert hidden.grad is not None and "forward" not in vars(layers.layers[0])
