"""remoe apply as a user types it: forms, their defaults, and what cannot go together."""

import json
import shlex
import shutil
from pathlib import Path

import demo_gguf
import pytest
import tiny_models
import torch
from commands import make_model, refused
from loader_rules import transformers_rules, vllm_rules
from test_delta import hashes, make_delta

from remoe_cli.delta import Delta
from remoe_cli.delta.stored import stored_bytes
from remoe_cli.errors import UsageError
from remoe_cli.hub.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.make("deepseek_v2", tmp_path_factory.mktemp("model") / "base", torch.bfloat16)


@pytest.fixture(scope="module")
def made(base):
    return make_delta(Checkpoint.open(base))


@pytest.fixture
def delta(made, tmp_path):
    made.save(tmp_path / "delta")
    return "delta"


@pytest.fixture
def gguf(base, tmp_path):
    return demo_gguf.write(Checkpoint.open(base), tmp_path / "base.gguf")


def test_copy_is_the_default_and_the_next_command_runs(remoe, delta, base, made):
    ran = remoe("apply", delta, base, "--out", "my copy")
    assert ran.code == 0 and "Patched checkpoint: my copy" in ran.out and ran.err == ""
    command = ran.out.strip().rpartition("Next: remoe ")[2].partition(", or")[0]
    assert shlex.split(command) == ["decode", "my copy", "--cache", "8"]
    assert remoe("apply", delta, base, "--as", "copy", "--out", "explicit").code == 0
    assert hashes(Path("explicit")) == hashes(Path("my copy"))
    assert {name for name, digest in hashes(base).items() if hashes(Path("explicit"))[name] != digest} == set(
        made.tensors
    )


@pytest.mark.parametrize("form", ["copy", "overlay", "peft"])
def test_each_form_tells_scripts_what_it_wrote(remoe, delta, base, made, form):
    ran = remoe("apply", delta, base, "--as", form, "--out", "out", "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert (told["form"], told["folder"], told["gates"], told["base"]) == (form, "out", len(made.tensors), made.base)


def test_an_overlay_is_what_loaders_and_remoe_itself_read(remoe, delta, base, made):
    assert remoe("apply", delta, base, "--as", "overlay", "--out", "over").code == 0
    for name, gate in made.tensors.items():
        assert transformers_rules(Path("over"))[name] == stored_bytes(gate)
        assert vllm_rules(Path("over"))[name] == Checkpoint.open(Path("over")).raw(name)


def test_remoe_decodes_an_overlay_as_the_copy(remoe, tmp_path):
    base = make_model(tmp_path / "base")
    make_delta(Checkpoint.open(base)).save(tmp_path / "delta")
    said = []
    for form in ("copy", "overlay"):
        assert remoe("apply", "delta", base, "--as", form, "--out", form).code == 0
        ran = remoe("decode", form, "--cache", 4, "--prompt", "the quick", "--tokens", 8, "--json")
        assert ran.code == 0, ran.err
        said.append(json.loads(ran.out))
    assert said[0]["rows"][0]["misses"] == said[1]["rows"][0]["misses"] > 0
    assert said[0]["rows"][0]["texts"] == said[1]["rows"][0]["texts"]


def test_float32_gates_are_said_to_be_cast(remoe, base, tmp_path):
    checkpoint = Checkpoint.open(base)
    gates = {name: gate.float() * 1.001 for name, gate in make_delta(checkpoint).tensors.items()}
    Delta.of(checkpoint, gates, "remoe", {}, dtype=torch.float32).save(tmp_path / "delta")
    words = "float32; they were cast"
    assert words in remoe("apply", "delta", base, "--out", "copy").err
    assert words in remoe("apply", "delta", base, "--as", "overlay", "--cast", "--out", "cast").err
    kept = remoe("apply", "delta", base, "--as", "overlay", "--out", "kept")
    assert kept.code == 0 and words not in kept.err
    assert hashes(Path("copy")) == hashes(Path("cast"))
    assert {Checkpoint.open(Path("kept")).tensors[name].dtype for name in gates} == {"F32"}


def test_a_quantised_base_with_plain_gates_is_said_to_be_one(remoe, delta, base, tmp_path):
    quantised = shutil.copytree(base, tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    for form in ("copy", "overlay", "peft"):
        ran = remoe("apply", delta, quantised, "--as", form, "--out", form)
        assert ran.code == 0 and "stored quantised (fp8), but not its gates" in ran.err, ran.err


def test_a_gguf_to_a_copy_in_place_and_back(remoe, delta, gguf):
    before = gguf.read_bytes()
    ran = remoe("apply", delta, gguf, "--out", "tuned.gguf", "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["form"] == "gguf" and told["state"] == "patched" and told["files"] == ["tuned.gguf"]
    assert gguf.read_bytes() == before
    ran = remoe("apply", delta, gguf, "--as", "gguf", "--in-place")
    assert ran.code == 0 and "patched" in ran.out and "bytes written in" in ran.out
    assert gguf.read_bytes() == (gguf.parent / "tuned.gguf").read_bytes() != before
    assert "already tuned" in remoe("apply", delta, gguf, "--in-place").out
    undone = remoe("apply", "--undo", gguf)
    assert undone.code == 0 and "undone" in undone.out and gguf.read_bytes() == before
    assert "nothing to undo" in remoe("apply", delta, gguf, "--undo").out


WRONG = [
    (["delta"], "needs a DELTA and a BASE"),
    ([], "needs a DELTA and a BASE"),
    (["delta", "demo"], "--as copy needs --out"),
    (["delta", "demo", "--as", "onnx", "--out", "o"], "no form 'onnx'; allowed: copy, overlay, peft, gguf"),
    (["delta", "demo", "--in-place"], "--in-place is for a .gguf file"),
    (["delta", "demo", "--in-place", "--out", "o"], "--in-place is for a .gguf file"),
    (["delta", "demo", "--as", "gguf", "--out", "o"], "--as gguf takes a .gguf file as BASE"),
    (["delta", "base.gguf"], "to a copy (--out NEW.gguf) or --in-place"),
    (["delta", "base.gguf", "--out", "o.gguf", "--in-place"], "to a copy (--out NEW.gguf) or --in-place"),
    (["delta", "base.gguf", "--as", "overlay", "--out", "o"], "only be written --as gguf"),
    (["--undo"], "--undo takes the .gguf file"),
    (["--undo", "delta"], "--undo takes the .gguf file"),
    (["--undo", "base.gguf", "--out", "o"], "--undo takes the .gguf file"),
    (["--undo", "base.gguf", "--in-place"], "--undo takes the .gguf file"),
    (["delta", "base.gguf", "--undo", "--as", "peft"], "--undo takes the .gguf file"),
]


@pytest.mark.parametrize(
    ("arguments", "words"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_go_together_is_wrong_usage(remoe, delta, tmp_path, arguments, words):
    before = sorted(tmp_path.iterdir())
    ran = remoe("apply", *arguments)
    refused(ran, words)
    assert ran.code == UsageError.exit_code and sorted(tmp_path.iterdir()) == before


def test_a_form_that_cannot_be_written_leaves_nothing(remoe, delta, base, tmp_path):
    other = tiny_models.make("mixtral", tmp_path / "other")
    for form in ("copy", "overlay", "peft"):
        refused(remoe("apply", delta, other, "--as", form, "--out", "out"), "belongs to", "mixtral")
        refused(remoe("apply", delta, base, "--as", form, "--out", "delta"), "not an empty folder")
        refused(remoe("apply", delta, base, "--as", form, "--out", "/proc/none/out"), "cannot be written")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["delta", "other"]
