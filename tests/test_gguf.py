"""Deltas in GGUF files: copies, in place and back, split files, and everything that is refused."""

import hashlib
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import demo_gguf
import gguf
import numpy as np
import pytest
import tiny_models
import torch
from conformance.rows import ROWS
from demo_gguf import noisy

from remoe_cli.delta import Delta
from remoe_cli.errors import CheckpointError, DeltaError, RemoeError, RunError
from remoe_cli.gguf import parts, patch_copy, patch_in_place, state, undo
from remoe_cli.gguf.header import read_header
from remoe_cli.gguf.names import ARCHITECTURES, GATE
from remoe_cli.hub.checkpoint import Checkpoint


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stands(file: Path) -> dict[str, torch.Tensor]:
    """The gates of a GGUF by gguf-py's own reader: name -> fp32."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    found = GGUFReader(file).tensors
    return {
        t.name: torch.from_numpy(np.array(dequantize(t.data, t.tensor_type))) for t in found if GATE.fullmatch(t.name)
    }


def differing(one: Path, two: Path) -> set[str]:
    """Tensors whose bytes differ; fails where anything else does."""
    first, second = one.read_bytes(), two.read_bytes()
    assert len(first) == len(second)
    at = np.flatnonzero(np.frombuffer(first, np.uint8) != np.frombuffer(second, np.uint8))
    places = read_header(one).tensors
    names = {n for n, p in places.items() if ((at >= p.offset) & (at < p.offset + p.nbytes)).any()}
    assert (
        sum(int(((at >= places[n].offset) & (at < places[n].offset + places[n].nbytes)).sum()) for n in names)
        == at.size
    )
    return names


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A DeepSeek-V2 kind in bf16, and its delta."""
    checkpoint = Checkpoint.open(tiny_models.make("deepseek_v2", tmp_path_factory.mktemp("base"), torch.bfloat16))
    return checkpoint, noisy(checkpoint)


@pytest.fixture
def file(base, tmp_path):
    return demo_gguf.write_gates(base[0], tmp_path / "model.gguf", further=4096)


@pytest.fixture
def split(tmp_path_factory, tmp_path):
    """(first of 3 parts, delta): every weight of the model."""
    folder = tiny_models.make(
        "deepseek_v2", tmp_path / "base", torch.bfloat16, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    checkpoint = Checkpoint.open(folder)
    return demo_gguf.write(checkpoint, tmp_path / "model.gguf", parts=3), noisy(checkpoint)


def test_every_family_that_gguf_py_knows_has_its_architecture():
    known = {name: getattr(gguf.MODEL_ARCH, row.gguf) for name, row in ROWS.items() if row.gguf}
    assert {name: gguf.MODEL_ARCH_NAMES[number] for name, number in known.items()} == ARCHITECTURES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", tiny_models.MODEL_TYPES)
def test_a_copy_holds_the_tuned_gates_and_differs_nowhere_else(model_type, dtype, folders, tmp_path):
    checkpoint = Checkpoint.open(folders(model_type, dtype))
    delta = noisy(checkpoint)
    file = demo_gguf.write_gates(checkpoint, tmp_path / "model.gguf", further=4096)
    before = sha256(file)
    done = patch_copy(delta, file, tmp_path / "tuned.gguf")
    assert (done.state, done.gates, done.files) == ("patched", len(delta.tensors), [tmp_path / "tuned.gguf"])
    assert sha256(file) == before and state(delta, file) == "base" and state(delta, done.files[0]) == "tuned"
    found = stands(done.files[0])
    assert differing(file, done.files[0]) == set(found) and len(found) == len(delta.tensors)
    for on_disk, tensor in delta.tensors.items():
        layer, kind = on_disk.split(".")[2], on_disk.rpartition(".")[2]
        assert torch.equal(found[f"blk.{layer}.ffn_gate_inp.{kind}"], tensor.float()), on_disk


def test_in_place_and_undo_give_the_bytes_back(base, file):
    delta, before = base[1], file.read_bytes()
    done = patch_in_place(delta, file)
    assert done.state == "patched" and done.gates == len(delta.tensors) == len(stands(file))
    assert state(delta, file) == "tuned" and file.stat().st_size == len(before)
    journal = file.with_name("model.gguf.remoe-undo")
    gates = sum(t.numel() * 4 for t in delta.tensors.values())
    assert done.written_bytes == gates + journal.stat().st_size + 1  # the mark that it is whole
    again = patch_in_place(delta, file)
    assert (again.state, again.gates, again.written_bytes) == ("already tuned", 0, 0)
    back = undo(file)
    assert (back.state, back.gates) == ("undone", len(delta.tensors)) and file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir() if "undo" in p.name] == []
    assert undo(file).state == "nothing to undo" and file.read_bytes() == before
    assert patch_in_place(delta, file).state == "patched"


def test_a_copy_of_a_tuned_file_is_that_file(base, file, tmp_path):
    patch_in_place(base[1], file)
    done = patch_copy(base[1], file, tmp_path / "again.gguf")
    assert done.state == "already tuned" and done.files[0].read_bytes() == file.read_bytes()


def test_split_files_are_patched_together(split, tmp_path):
    first, delta = split
    files = parts(first)
    assert [p.name for p in files] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    before = [p.read_bytes() for p in files]
    done = patch_copy(delta, files[1], tmp_path / "out")
    assert done.files == [tmp_path / "out" / p.name for p in files] and state(delta, done.files[2]) == "tuned"
    holding = [bool(differing(old, new)) for old, new in zip(files, done.files)]
    assert holding == [any(GATE.fullmatch(n) for n in read_header(p).tensors) for p in files] and sum(holding) >= 2
    patch_in_place(delta, files[2])
    assert [p.read_bytes() for p in files] == [p.read_bytes() for p in done.files]
    assert [p.name for p in tmp_path.glob("*.remoe-undo")] == ["model-00001-of-00003.gguf.remoe-undo"]
    undo(files[1])
    assert [p.read_bytes() for p in files] == before


def test_split_files_with_a_missing_or_foreign_part_are_refused(split, tmp_path):
    first, delta = split
    with pytest.raises(RunError, match="3 parts, so --out must be a folder"):
        patch_copy(delta, first, tmp_path / "out.gguf")
    second, third = parts(first)[1:]
    whole = third.read_bytes()
    third.unlink()
    before = sha256(first)
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.gguf is not there"):
        patch_in_place(delta, first)
    third.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match="does not say that it is part 3 of 3"):
        patch_in_place(delta, first)
    third.write_bytes(whole)
    renamed = first.rename(tmp_path / "first.gguf")
    with pytest.raises(CheckpointError, match=r"must end in -NNNNN-of-00003\.gguf"):
        patch_in_place(delta, renamed)
    assert sha256(renamed) == before


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_gates_in_half_precision_are_known_and_written(base, tmp_path, kind):
    checkpoint, delta = base
    file = demo_gguf.write_gates(checkpoint, tmp_path / "model.gguf", demo_gguf.gguf.GGMLQuantizationType[kind])
    before = sha256(file)
    patch_in_place(delta, file)
    dtype = torch.float16 if kind == "F16" else torch.bfloat16
    found = stands(file)
    for on_disk, tensor in delta.tensors.items():
        name = f"blk.{on_disk.split('.')[2]}.ffn_gate_inp.weight"
        assert torch.equal(found[name], tensor.to(dtype).float())
    undo(file)
    assert sha256(file) == before


def test_float32_deltas_are_kept_or_cast(base, file, tmp_path):
    delta = noisy(base[0], torch.float32)
    assert delta.is_float32
    kept = patch_copy(delta, file, tmp_path / "kept.gguf").files[0]
    cast = patch_copy(delta, file, tmp_path / "cast.gguf", cast=True).files[0]
    for on_disk, tensor in delta.tensors.items():
        name = f"blk.{on_disk.split('.')[2]}.ffn_gate_inp.weight"
        assert torch.equal(stands(kept)[name], tensor)
        assert torch.equal(stands(cast)[name], tensor.bfloat16().float()) and not torch.equal(
            stands(cast)[name], tensor
        )
    assert state(delta, kept) == state(delta, cast) == "tuned"


def test_a_gate_that_training_left_alone_is_not_written(base, file):
    checkpoint, delta = base
    still = min(delta.tensors)
    delta = replace(delta, tensors={**delta.tensors, still: checkpoint.read(still)})
    done = patch_in_place(delta, file)
    assert done.gates == len(delta.tensors) - 1 and patch_in_place(delta, file).state == "already tuned"
    nothing = replace(delta, tensors={name: checkpoint.read(name) for name in delta.tensors})
    undo(file)
    assert patch_in_place(nothing, file).written_bytes == 0 and not list(file.parent.glob("*.remoe-undo"))


def refused(delta: Delta, file: Path, words: str, error: type[RemoeError] = DeltaError) -> None:
    """In place and as a copy, with nothing changed and nothing left behind."""
    before, names = sha256(file), sorted(p.name for p in file.parent.iterdir())
    for ask in (lambda: patch_in_place(delta, file), lambda: patch_copy(delta, file, file.with_name("out.gguf"))):
        with pytest.raises(error, match=words) as raised:
            ask()
        assert "\n" not in raised.value.message and raised.value.hint
    assert sha256(file) == before and sorted(p.name for p in file.parent.iterdir()) == names


def test_wrong_files_are_refused_with_the_reason(base, tmp_path, folders):
    checkpoint, delta = base
    write = demo_gguf.write_gates
    other = Checkpoint.open(folders("mixtral", torch.bfloat16))
    refused(delta, write(other, tmp_path / "mixtral.gguf"), "GGUF of the architecture llama")
    weights = Checkpoint.open(tiny_models.make("deepseek_v2", tmp_path / "weights", torch.bfloat16, seed=7))
    refused(delta, write(weights, tmp_path / "weights.gguf"), "another revision")
    experts = Checkpoint.open(tiny_models.make("deepseek_v2", tmp_path / "x", torch.bfloat16, n_routed_experts=16))
    refused(delta, write(experts, tmp_path / "experts.gguf"), r"is \[16, 32\] in")
    deeper = Checkpoint.open(tiny_models.make("deepseek_v2", tmp_path / "y", torch.bfloat16, num_hidden_layers=4))
    refused(delta, write(deeper, tmp_path / "deeper.gguf"), "1 gates that this delta .* does not know.*of 4 blocks")
    shorter = Checkpoint.open(tiny_models.make("deepseek_v2", tmp_path / "z", torch.bfloat16, num_hidden_layers=2))
    refused(delta, write(shorter, tmp_path / "shorter.gguf"), "has no gate .*past its last block.* 2 blocks")
    refused(delta, write(checkpoint, tmp_path / "few.gguf", blocks=2), "past its last block")
    refused(delta, write(checkpoint, tmp_path / "q8.gguf", demo_gguf.Q8_0), "stored as Q8_0 .*that gate is quantised")
    refused(delta, write(checkpoint, tmp_path / "many.gguf", blocks=1 << 30), "block_count", CheckpointError)
    lacking = replace(delta, tensors=dict(list(delta.tensors.items())[:1]))
    refused(lacking, write(checkpoint, tmp_path / "more.gguf"), "does not know")


def test_a_smoothed_gate_and_a_half_patched_file_are_refused(base, file):
    _, delta = base
    place = max(read_header(file).tensors.items(), key=lambda item: GATE.fullmatch(item[0]) is not None)[1]
    whole = bytearray(file.read_bytes())
    gate = np.frombuffer(whole, np.float32, place.nbytes // 4, place.offset) * np.float32(0.75)
    file.write_bytes(whole[: place.offset] + gate.tobytes() + whole[place.offset + place.nbytes :])
    refused(delta, file, "a quantiser may smooth them")
    file.write_bytes(whole)
    patch_in_place(delta, file)
    tuned = file.read_bytes()
    undo(file)
    file.write_bytes(
        whole[: place.offset] + tuned[place.offset : place.offset + place.nbytes] + whole[place.offset + place.nbytes :]
    )
    refused(delta, file, "a mix of base gates and tuned gates")


def test_deltas_of_more_than_gates_and_of_unknown_families_are_refused(base, file):
    checkpoint, delta = base
    name = "model.layers.1.self_attn.o_proj.weight"
    more = Delta.of(checkpoint, {**delta.tensors, name: checkpoint.read(name)}, "remoe", {})
    refused(more, file, f"more than gates, such as {name}")
    refused(replace(delta, model_type="zaya"), file, "no GGUF of zaya models, only of afmoe, dbrx")


def test_gguf_py_is_asked_for_in_one_line(base, file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(base[1], file, "gguf-py, which is not installed", RunError)


def test_what_is_not_changed_in_place(base, file, tmp_path):
    _, delta = base
    before = sha256(file)

    def in_place(path: Path, words: str) -> None:
        for ask in (lambda: patch_in_place(delta, path), lambda: undo(path)):
            with pytest.raises(RunError, match=words) as raised:
                ask()
            assert f"remoe apply DELTA {path}" in raised.value.hint and ".gguf" in raised.value.hint
        assert sha256(path) == before and not list(path.parent.glob("*.remoe-undo"))

    link = tmp_path / "snapshot" / "model.gguf"
    link.parent.mkdir()
    link.symlink_to(file)
    in_place(link, "link to another file")
    for name in ("sha256-" + 64 * "a", 64 * "b", 40 * "c"):
        blob = tmp_path / "blobs" / name
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(file.read_bytes())
        in_place(blob, "lies in a cache")
    assert patch_copy(delta, link, tmp_path / "out.gguf").state == "patched"
    os.link(file, tmp_path / "second.gguf")
    in_place(file, r"2 names \(hard links\)")
    (tmp_path / "second.gguf").unlink()
    file.chmod(0o444)
    in_place(file, "read-only")
    file.chmod(stat.S_IRUSR | stat.S_IWUSR)
    assert patch_in_place(delta, file).state == "patched"


def test_a_taken_place_is_left_alone(base, file, tmp_path):
    out = tmp_path / "out.gguf"
    out.write_text("mine")
    with pytest.raises(RunError, match="exists"):
        patch_copy(base[1], file, out)
    assert out.read_text() == "mine"
    with pytest.raises(RunError, match="exists"):
        patch_copy(base[1], file, file.parent)
    (tmp_path / "folder").mkdir()
    assert patch_copy(base[1], file, tmp_path / "folder").files == [tmp_path / "folder/model.gguf"]
