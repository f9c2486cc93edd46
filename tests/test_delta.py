"""Deltas: written under on-disk names, applied exactly, refused on any other base."""

import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from commands import make_model, make_texts, QUICK

import remoe_cli
from remoe_cli.apply import apply, find_delta
from remoe_cli.delta import Delta, gates_for, put
from remoe_cli.errors import DeltaError, RunError, UsageError
from remoe_cli.families.loader import gate_disk_names, load_resident
from remoe_cli.finetune import Asked, finetune
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


def test_gates_of_a_dtype_that_the_base_does_not_explain_are_damaged(tmp_path):
    checkpoint = Checkpoint.open(tiny_models.make("mixtral", tmp_path / "base", torch.bfloat16))
    delta = make_delta(checkpoint)
    delta = replace(delta, tensors={name: tensor.half() for name, tensor in delta.tensors.items()})
    delta.save(tmp_path / "delta")
    with pytest.raises(DeltaError, match=r"is float16 but its base_dtype .* is bfloat16"):
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


def test_a_flipped_byte_is_refused_and_an_older_delta_without_digests_still_loads(mixtral, tmp_path):
    make_delta(mixtral).save(tmp_path / "delta")
    gates, facts = tmp_path / "delta/gates.safetensors", tmp_path / "delta/remoe.json"
    whole = gates.read_bytes()
    gates.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DeltaError, match=r"is not the one that remoe\.json describes"):
        Delta.load(tmp_path / "delta")
    gates.write_bytes(whole)
    older = json.loads(facts.read_text())
    for gate in older["gates"].values():
        del gate["sha256"]
    facts.write_text(json.dumps(older))
    assert set(Delta.load(tmp_path / "delta").tensors) == set(older["gates"])


def test_the_same_delta_gives_the_same_bytes(mixtral, tmp_path):
    make_delta(mixtral).save(tmp_path / "one")
    Delta.load(tmp_path / "one").save(tmp_path / "two")
    for name in ("gates.safetensors", "remoe.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: [],
        lambda facts: {**facts, "gates": []},
        lambda facts: {**facts, "gates": {}},
        lambda facts: {**facts, "gates": dict.fromkeys(facts["gates"], 1)},
        lambda facts: {**facts, "gates": {name: {} for name in facts["gates"]}},
        lambda facts: {**facts, "gates": {"another": next(iter(facts["gates"].values()))}},
        lambda facts: {**facts, "base": 1},
        lambda facts: {**facts, "commit": []},
        lambda facts: {**facts, "changed": 1.5},
        lambda facts: {**facts, "changed": math.nan},
        lambda facts: {**facts, "changed": True},
        lambda facts: {**facts, "report": []},
        lambda facts: {**facts, "report": {"perplexity": {"base": 1}}},
        lambda facts: {**facts, "gates": {name: {**g, "dtype": "float16"} for name, g in facts["gates"].items()}},
        lambda facts: {**facts, "gates": {name: {**g, "shape": [1]} for name, g in facts["gates"].items()}},
        lambda facts: {**facts, "gates": {name: {**g, "base_dtype": "int8"} for name, g in facts["gates"].items()}},
        lambda facts: {**facts, "gates": {name: {**g, "base_dtype": []} for name, g in facts["gates"].items()}},
        lambda facts: {**facts, "gates": {name: {**g, "base_sha256_f16": 1} for name, g in facts["gates"].items()}},
        lambda facts: {**facts, "environment": {"torch": [1]}},
        lambda facts: {**facts, "changed": "much"},
        lambda facts: {**facts, "environment": 3},
        lambda facts: {name: value for name, value in facts.items() if name != "recipe"},
    ],
)
def test_odd_facts_are_a_damaged_delta(mixtral, tmp_path, change):
    make_delta(mixtral).save(tmp_path / "delta")
    path = tmp_path / "delta/remoe.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DeltaError, match=r"damaged delta|remoe\.json is damaged") as raised:
        Delta.load(tmp_path / "delta")
    assert "\n" not in raised.value.message and "Try:" not in raised.value.message


def test_a_large_file_of_other_tensors_is_refused_by_its_header(mixtral, tmp_path):
    make_delta(mixtral).save(tmp_path / "delta")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    with open(tmp_path / "delta/gates.safetensors", "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + (1 << 42))  # 4 TiB, sparse: reading it would not end well
    with pytest.raises(DeltaError, match="name different gates"):
        Delta.load(tmp_path / "delta")


def rewritten(checkpoint: Checkpoint, folder: Path, change) -> Checkpoint:
    """A copy in which change(tensors) was applied to each shard's dict in place."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint.folder, folder)
    weight_map = {}
    for shard in checkpoint.files:
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, folder / shard.name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, shard.name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return Checkpoint.open(folder)


def test_smoothed_and_quantised_gates_are_refused_with_the_reason(mixtral, tmp_path):
    delta = make_delta(mixtral)
    gate = next(iter(delta.tensors))

    def smooth(tensors):
        for name in tensors.keys() & delta.tensors.keys():
            tensors[name] = (tensors[name] * 0.75).contiguous()

    def to_int8(tensors):
        if gate in tensors:
            tensors[gate] = tensors[gate].to(torch.int8)

    def pack(tensors):
        if gate in tensors:
            tensors[gate.removesuffix("weight") + "qweight"] = tensors.pop(gate).to(torch.int32)

    for change, words in (
        (smooth, "a quantiser may smooth them"),
        (to_int8, "stored as I8 .*that gate is quantised"),
        (pack, "has no gate .*a quantised one, .*gate.qweight, stands in its place"),
    ):
        with pytest.raises(DeltaError, match=words):
            delta.is_applied(rewritten(mixtral, tmp_path / change.__name__, change))


def test_tied_embeddings_give_a_delta_of_gates_only(tmp_path):
    checkpoint = Checkpoint.open(tiny_models.make("mixtral", tmp_path / "base", tie_word_embeddings=True))
    assert "lm_head.weight" not in checkpoint.tensors
    delta = make_delta(checkpoint)
    delta.save(tmp_path / "delta")
    assert all(name.endswith("block_sparse_moe.gate.weight") for name in delta.tensors)
    out = apply(str(tmp_path / "delta"), str(checkpoint.folder), tmp_path / "out")
    before, after = hashes(checkpoint.folder), hashes(out)
    assert before.keys() == after.keys() and {n for n in before if before[n] != after[n]} == set(delta.tensors)


def test_a_run_is_found_by_its_name_under_runs(mixtral, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_delta(mixtral).save(tmp_path / "runs/my-run/delta")
    assert find_delta("my-run").base == mixtral.id
    (tmp_path / "runs/empty").mkdir()
    with pytest.raises(DeltaError, match="empty is not a delta"):
        find_delta("empty")


def test_a_run_may_keep_what_it_learned_in_float32(tmp_path):
    model, texts = make_model(tmp_path / "model", dtype=torch.bfloat16), make_texts(tmp_path / "texts.jsonl")

    def delta(name: str, *further: str) -> Delta:
        asked = Asked("remoe", str(texts), 2, (*QUICK[1::2], *further))
        finetune(str(model), asked, out=tmp_path / name)
        return Delta.load(tmp_path / name / "delta")

    rounded, kept = delta("rounded"), delta("kept", "train.delta_dtype=float32")
    assert kept.is_float32 and not rounded.is_float32 and kept.base_sha256 == rounded.base_sha256
    for name, tensor in kept.tensors.items():
        assert tensor.dtype == torch.float32 and kept.base_dtype(name) == torch.bfloat16
        assert torch.equal(kept.stored(name), rounded.tensors[name]) and not torch.equal(
            tensor.bfloat16().float(), tensor
        )
    assert apply(str(tmp_path / "kept"), str(model), tmp_path / "out") and hashes(tmp_path / "out") == hashes(
        apply(str(tmp_path / "rounded"), str(model), tmp_path / "again")
    )


def test_a_taken_folder_is_refused_before_the_base_is_looked_for(mixtral, tmp_path):
    make_delta(mixtral).save(tmp_path / "delta")
    with pytest.raises(RunError, match="not an empty folder"):
        apply(str(tmp_path / "delta"), "no/such-base", tmp_path / "delta")


def test_facts_that_are_no_json_are_told_with_one_next_command(mixtral, tmp_path):
    make_delta(mixtral).save(tmp_path / "bad")
    (tmp_path / "bad/remoe.json").write_text("[")
    with pytest.raises(DeltaError, match=r"bad/remoe\.json is damaged: not valid JSON") as raised:
        Delta.load(tmp_path / "bad")
    assert str(raised.value).count("Try: ") == 1


def test_code_of_the_repository_is_never_run(mixtral, tmp_path):
    make_delta(mixtral).save(tmp_path / "delta")
    with pytest.raises(UsageError, match="native classes"):
        remoe_cli.load(str(mixtral.folder), str(tmp_path / "delta"), trust_remote_code=True)
