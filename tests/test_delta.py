"""Deltas: written under on-disk names, applied exactly, refused on any other base."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch

import remoe_cli
from remoe_cli.apply import apply
from remoe_cli.delta import Delta, gates_for, put
from remoe_cli.errors import DeltaError, RunError
from remoe_cli.families.loader import gate_disk_names, load_resident
from remoe_cli.hub.checkpoint import Checkpoint

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def make_delta(checkpoint: Checkpoint, size: float = 0.5) -> Delta:
    """Gates moved by noise."""
    model = load_resident(checkpoint, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(1)
    gates = {}
    for disk in gate_disk_names(model, checkpoint).values():
        base = checkpoint.read(disk).float()
        gates[disk] = base + size * torch.randn(base.shape, generator=generator)
    return Delta.of(checkpoint, gates, "remoe", {"remoe": "test"})


@pytest.fixture(params=[(m, d) for m in tiny_models.MODEL_TYPES for d in (torch.float32, torch.bfloat16)], ids=str)
def checkpoint(request, tmp_path):
    model_type, dtype = request.param
    return Checkpoint.open(tiny_models.make(model_type, tmp_path / "base", dtype))


def hashes(folder: Path) -> dict[str, str]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.sha256(name) for name in checkpoint.tensors}


def test_round_trip_and_patched_checkpoint(checkpoint, tmp_path):
    delta = make_delta(checkpoint)
    delta.save(tmp_path / "delta")
    again = Delta.load(tmp_path / "delta")
    assert set(again.tensors) == set(delta.tensors) and again.base_sha256 == delta.base_sha256
    before = hashes(checkpoint.folder)
    out = apply(str(tmp_path / "delta"), str(checkpoint.folder), tmp_path / "patched")
    after = hashes(out)
    assert hashes(checkpoint.folder) == before, "the base itself was touched"
    changed = {name for name in before if before[name] != after[name]}
    assert changed == set(delta.tensors)
    for name, tensor in delta.tensors.items():
        assert torch.equal(Checkpoint.open(out).read(name), tensor)
    sizes = {p.name: p.stat().st_size for p in checkpoint.folder.iterdir()}
    assert {p.name: p.stat().st_size for p in out.iterdir() if p.name != "remoe_applied.json"} == sizes


def test_python_load_equals_patched_checkpoint(checkpoint, tmp_path):
    delta = make_delta(checkpoint)
    delta.save(tmp_path / "delta")
    out = apply(str(tmp_path / "delta"), str(checkpoint.folder), tmp_path / "patched")
    base = load_resident(checkpoint, torch.float32, "cpu")
    patched = load_resident(Checkpoint.open(out), torch.float32, "cpu")
    loaded = remoe_cli.load(str(checkpoint.folder), str(tmp_path / "delta"), dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, patched(IDS).logits)
        assert not torch.allclose(loaded(IDS).logits, base(IDS).logits)
    put(base, gates_for(gate_disk_names(base, checkpoint), delta))
    with torch.no_grad():
        assert torch.equal(base(IDS).logits, patched(IDS).logits)


def test_applied_twice_is_a_no_op(checkpoint, tmp_path):
    delta = make_delta(checkpoint)
    delta.save(tmp_path / "delta")
    once = apply(str(tmp_path / "delta"), str(checkpoint.folder), tmp_path / "once")
    twice = apply(str(tmp_path / "delta"), str(once), tmp_path / "twice")
    assert hashes(once) == hashes(twice)


@pytest.fixture
def mixtral(tmp_path):
    return Checkpoint.open(tiny_models.make("mixtral", tmp_path / "base"))


def test_applied_twice_when_one_gate_did_not_change(mixtral, tmp_path):
    delta = make_delta(mixtral)
    still = next(iter(delta.tensors))
    delta = replace(delta, tensors={**delta.tensors, still: mixtral.read(still)})
    delta.save(tmp_path / "delta")
    once = apply(str(tmp_path / "delta"), str(mixtral.folder), tmp_path / "once")
    assert delta.is_applied(Checkpoint.open(once)) and not delta.is_applied(mixtral)
    assert hashes(apply(str(tmp_path / "delta"), str(once), tmp_path / "twice")) == hashes(once)


@pytest.mark.parametrize("other", [torch.float32, torch.float16], ids=str)
def test_gates_of_another_dtype_than_the_base_are_refused(tmp_path, other):
    checkpoint = Checkpoint.open(tiny_models.make("mixtral", tmp_path / "base", torch.bfloat16))
    delta = make_delta(checkpoint)
    delta = replace(delta, tensors={name: tensor.to(other) for name, tensor in delta.tensors.items()})
    delta.save(tmp_path / "delta")
    with pytest.raises(DeltaError, match="stored as BF16"):
        apply(str(tmp_path / "delta"), str(checkpoint.folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_bases_are_refused_with_the_reason(mixtral, tmp_path):
    delta = make_delta(mixtral)
    other_family = Checkpoint.open(tiny_models.make("qwen3_moe", tmp_path / "other"))
    with pytest.raises(DeltaError, match="qwen3_moe"):
        delta.is_applied(other_family)
    other_weights = Checkpoint.open(tiny_models.make("mixtral", tmp_path / "weights", seed=7))
    with pytest.raises(DeltaError, match="another revision"):
        delta.is_applied(other_weights)
    other_dtype = Checkpoint.open(tiny_models.make("mixtral", tmp_path / "dtype", torch.bfloat16))
    with pytest.raises(DeltaError, match="dtype"):
        delta.is_applied(other_dtype)
    more_experts = Checkpoint.open(tiny_models.make("mixtral", tmp_path / "experts", num_local_experts=16))
    with pytest.raises(DeltaError, match=r"\[16, 32\]"):
        delta.is_applied(more_experts)
    fewer_layers = Checkpoint.open(tiny_models.make("mixtral", tmp_path / "layers", num_hidden_layers=2))
    with pytest.raises(DeltaError, match="has no gate"):
        delta.is_applied(fewer_layers)


def test_one_changed_gate_is_refused(mixtral, tmp_path):
    delta = make_delta(mixtral)
    name = next(iter(delta.tensors))
    info = mixtral.tensors[name]
    with open(info.file, "r+b") as stream:
        stream.seek(info.offset)
        stream.write(b"\x01\x02\x03\x04")
    with pytest.raises(DeltaError, match=name):
        delta.is_applied(Checkpoint.open(mixtral.folder))


def test_half_patched_checkpoint_is_refused(mixtral):
    delta = make_delta(mixtral)
    half = replace(delta, tensors=dict(list(delta.tensors.items())[:1]))
    name = next(iter(half.tensors))
    info = mixtral.tensors[name]
    with open(info.file, "r+b") as stream:
        stream.seek(info.offset)
        stream.write(half.tensors[name].view(torch.uint8).numpy().tobytes())
    with pytest.raises(DeltaError, match="mix"):
        delta.is_applied(Checkpoint.open(mixtral.folder))


def test_not_a_delta_and_damaged_deltas(mixtral, tmp_path):
    with pytest.raises(DeltaError, match="not a delta"):
        Delta.load(tmp_path)
    make_delta(mixtral).save(tmp_path / "delta")
    gates = tmp_path / "delta/gates.safetensors"
    whole = gates.read_bytes()
    gates.write_bytes(whole[:-100])
    with pytest.raises(DeltaError, match="damaged"):
        Delta.load(tmp_path / "delta")
    gates.write_bytes(whole)
    facts = json.loads((tmp_path / "delta/remoe.json").read_text())
    facts["format"] = 99
    (tmp_path / "delta/remoe.json").write_text(json.dumps(facts))
    with pytest.raises(DeltaError, match="format 99"):
        Delta.load(tmp_path / "delta")


def test_facts_say_what_changed(mixtral):
    delta = make_delta(mixtral)
    name = next(iter(delta.tensors))
    assert delta.base_sha256[name] == hashlib.sha256(mixtral.raw(name)).hexdigest()
    assert delta.changed > 0.99
    same = Delta.of(mixtral, {n: mixtral.read(n) for n in delta.tensors}, "remoe", {})
    assert same.changed == 0


def test_changes_below_the_stored_precision_are_counted_as_none(tmp_path):
    checkpoint = Checkpoint.open(tiny_models.make("qwen3_moe", tmp_path / "base", torch.bfloat16))
    name = "model.layers.0.mlp.gate.weight"
    base = checkpoint.read(name).float()
    assert Delta.of(checkpoint, {name: base * (1 + 1e-4)}, "remoe", {}).changed < 0.1
    assert Delta.of(checkpoint, {name: base * 1.1}, "remoe", {}).changed > 0.9


def test_a_taken_output_folder_is_left_alone(mixtral, tmp_path):
    make_delta(mixtral).save(tmp_path / "delta")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="not an empty folder"):
        apply(str(tmp_path / "delta"), str(mixtral.folder), out)
    assert [p.name for p in out.iterdir()] == ["mine.txt"]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".out")], "a scratch folder was left behind"
