"""remoe pack: every expert's bytes arrive, one read brings each, and a store of anything else is refused."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import tiny_models
import torch
from commands import make_model, refused
from test_delta import make_delta
from tiny_models import EXPERTS, MODEL_TYPES

from remoe_cli.delta import patched_copy
from remoe_cli.errors import CheckpointError, RunError
from remoe_cli.families.loader import experts_on_disk
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import pack as store
from remoe_cli.offload.pack import packed, reads_an_expert, write

PAGE = 4096


def content(layers, layer: int, expert: int) -> bytes:
    found = b""
    for piece in layers[layer].pieces(expert):
        with open(piece.file, "rb") as stream:
            stream.seek(piece.offset)
            found += stream.read(piece.nbytes)
    return found


def opened(folder: Path, commit: str | None = None):
    checkpoint = Checkpoint.open(folder, commit=commit)
    return checkpoint, experts_on_disk(checkpoint)


@pytest.fixture(params=MODEL_TYPES)
def family(request):
    return request.param


@pytest.fixture
def gpt_oss(folders):
    return opened(folders("gpt_oss", torch.bfloat16))


def test_every_byte_arrives_and_one_read_brings_an_expert(folders, tmp_path, family):
    checkpoint, layers = opened(folders(family, torch.bfloat16))
    seen: list[int] = []
    write(layers, checkpoint, tmp_path / "store", on_bytes=seen.append)
    moved = packed(layers, checkpoint, tmp_path / "store")
    assert reads_an_expert(moved) == 1.0 <= reads_an_expert(layers)
    for number, layer in enumerate(moved):
        for expert in range(EXPERTS):
            assert content(moved, number, expert) == content(layers, number, expert)
            assert layer.pieces(expert)[0].offset % PAGE == 0
            assert [piece[2:] for piece in layer.pieces(expert)] == [p[2:] for p in layers[number].pieces(expert)]
    written = sum(path.stat().st_size for path in (tmp_path / "store").glob("*.bin"))
    assert written == store.packed_bytes(layers) == seen[-1] and seen == sorted(seen)
    assert written % PAGE == 0


def test_a_gpt_oss_expert_takes_four_reads_unpacked(gpt_oss):
    assert reads_an_expert(gpt_oss[1]) == 4  # two weights and two biases, each in a tensor of all experts


# refusals of a store


@pytest.fixture
def whole(gpt_oss, tmp_path):
    write(gpt_oss[1], gpt_oss[0], tmp_path / "store")
    return tmp_path / "store"


def rejected(folder: Path, store_folder: Path, *words: str, commit: str | None = None) -> None:
    checkpoint, layers = opened(folder, commit)
    with pytest.raises(CheckpointError) as caught:
        packed(layers, checkpoint, store_folder)
    for word in words:
        assert word in caught.value.message, caught.value.message
    assert caught.value.hint.startswith(("remoe pack ", "cat "))


def test_a_store_of_another_model_is_refused(whole, folders, tmp_path):
    rejected(folders("mixtral", torch.bfloat16), whole, "was packed from")
    rejected(folders("gpt_oss", torch.float32), whole, "was packed from", "dtypes")
    rejected(
        tiny_models.make("gpt_oss", tmp_path / "more", torch.bfloat16, num_local_experts=16),
        whole,
        "numbers of experts",
    )
    rejected(tiny_models.make("gpt_oss", tmp_path / "wide", torch.bfloat16, intermediate_size=32), whole, "sizes")
    rejected(
        tiny_models.make("gpt_oss", tmp_path / "other", torch.bfloat16, seed=1),
        whole,
        "expert 0 of layer 0",
        "another model",
    )


def test_a_model_in_which_one_expert_differs_is_refused(whole, folders, tmp_path):
    folder = Path(shutil.copytree(folders("gpt_oss", torch.bfloat16), tmp_path / "tuned"))
    checkpoint, layers = opened(folder)
    packed(layers, checkpoint, whole)  # a copy is the same model
    largest = max(layers[1].pieces(5), key=lambda piece: piece.nbytes)
    with open(largest.file, "r+b") as stream:
        stream.seek(largest.offset)
        stream.write(bytes(largest.nbytes))
    rejected(folder, whole, "expert 5 of layer 1")


def test_a_patched_checkpoint_can_use_the_store_of_its_base(whole, gpt_oss, tmp_path):
    patched = patched_copy(make_delta(gpt_oss[0]), gpt_oss[0], tmp_path / "patched")
    checkpoint, layers = opened(patched)
    assert content(packed(layers, checkpoint, whole), 1, 5) == content(layers, 1, 5)


def test_a_store_of_another_revision_is_refused(folders, tmp_path):
    folder = folders("gpt_oss", torch.bfloat16)
    checkpoint, layers = opened(folder, "a" * 40)
    write(layers, checkpoint, tmp_path / "store")
    packed(layers, checkpoint, tmp_path / "store")
    rejected(folder, tmp_path / "store", "a" * 40, "b" * 40, commit="b" * 40)


def test_a_damaged_store_is_refused(whole, folders):
    folder, file, facts = folders("gpt_oss", torch.bfloat16), whole / "layer-00001.bin", whole / "pack.json"
    bytes_of_layer, text = file.read_bytes(), facts.read_text()
    os.truncate(file, len(bytes_of_layer) - 1)
    rejected(folder, whole, str(file), f"{len(bytes_of_layer) - 1:,} bytes, not")
    file.unlink()
    rejected(folder, whole, str(file), "is missing")
    file.write_bytes(bytes(len(bytes_of_layer)))
    rejected(folder, whole, "expert 0 of layer 1", "damaged")
    file.write_bytes(bytes_of_layer)
    facts.write_text(json.dumps({**json.loads(text), "format": 2}))
    rejected(folder, whole, "format 2")
    facts.write_text(text[:20])
    rejected(folder, whole, str(facts))
    facts.unlink()
    rejected(folder, whole, "holds no packed experts")
    rejected(folder, whole / "nowhere", "holds no packed experts")


# what ends a pack early


def nothing_but(folder: Path, *names: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_a_full_disk_leaves_nothing(gpt_oss, tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        write(gpt_oss[1], gpt_oss[0], tmp_path / "store")
    nothing_but(tmp_path)


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 160 KiB, less than the layers of a tiny model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full(gpt_oss, small_disk):
    assert store.packed_bytes(gpt_oss[1]) > 160 << 10
    with pytest.raises(RunError, match="No space left"):
        write(gpt_oss[1], gpt_oss[0], small_disk / "store")
    nothing_but(small_disk)


def test_a_source_that_ends_early_leaves_nothing(folders, tmp_path):
    folder = Path(shutil.copytree(folders("gpt_oss", torch.bfloat16), tmp_path / "model"))
    checkpoint, layers = opened(folder)
    last = max(layers[2].pieces(EXPERTS - 1), key=lambda piece: piece.nbytes)
    os.truncate(last.file, last.offset + 1)
    with pytest.raises(CheckpointError, match=str(last.file)):
        write(layers, checkpoint, tmp_path / "store")
    nothing_but(tmp_path, "model")


@pytest.fixture
def under_way(gpt_oss, tmp_path):
    """A process that is in the middle of packing into tmp_path/store."""
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()

    def pack() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def dawdle(_done: int) -> None:
            begun.set()
            time.sleep(30)

        write(gpt_oss[1], gpt_oss[0], tmp_path / "store", on_bytes=dawdle)

    process = fork.Process(target=pack, daemon=True)
    process.start()
    assert begun.wait(20)
    yield process
    process.kill()
    process.join()


def test_two_processes_do_not_pack_into_one_folder_and_a_killed_one_is_cleared_away(under_way, gpt_oss, tmp_path):
    with pytest.raises(RunError, match=f"another process is packing into {tmp_path / 'store'}"):
        write(gpt_oss[1], gpt_oss[0], tmp_path / "store")
    nothing_but(tmp_path, ".store.packing")
    under_way.kill()
    under_way.join()
    nothing_but(tmp_path, ".store.packing")
    write(gpt_oss[1], gpt_oss[0], tmp_path / "store")
    packed(gpt_oss[1], gpt_oss[0], tmp_path / "store")
    nothing_but(tmp_path, "store")


def test_ctrl_c_leaves_nothing(under_way, tmp_path):
    os.kill(under_way.pid, signal.SIGINT)
    under_way.join(20)
    assert under_way.exitcode == 1
    nothing_but(tmp_path)


# the command


def test_the_command_packs_and_says_what_it_gained(remoe, tmp_path):
    model = make_model(tmp_path / "model", "gpt_oss", num_hidden_layers=2)
    ran = remoe("pack", model, "--out", "store")
    assert ran.code == 0, ran.err
    assert "an expert takes 1 read, 4 before" in ran.out and f"remoe decode {model} --cache 2 --pack store" in ran.out
    checkpoint, layers = opened(model)
    packed(layers, checkpoint, tmp_path / "store")
    done = json.loads(remoe("pack", model, "--out", "again", "--json").out)
    assert done["reads_an_expert"] == {"before": 4.0, "after": 1.0} and done["bytes"] == store.packed_bytes(layers)


def test_decoding_from_a_store_says_the_same_in_fewer_reads(remoe, tmp_path):
    model = make_model(tmp_path / "model", "gpt_oss")
    other = make_model(tmp_path / "other", "gpt_oss", seed=1)
    assert remoe("pack", model, "--out", "store").code == 0
    command = ("decode", model, "--cache", 3, "--tokens", 8, "--json")
    plain, from_store = (json.loads(remoe(*command, *more).out)["rows"][0] for more in ((), ("--pack", "store")))
    assert from_store["texts"] == plain["texts"] and from_store["misses"] == plain["misses"] > 0
    assert 4 * from_store["read_calls"] == plain["read_calls"]
    refused(
        remoe("decode", other, "--cache", 3, "--pack", "store"), "another model", f"remoe pack {other} --out store-2"
    )


def test_the_command_refuses_what_it_cannot_or_need_not_do(remoe, tmp_path):
    model = make_model(tmp_path / "model")
    large = make_model(tmp_path / "large", n_routed_experts=64)
    assert 1 < reads_an_expert(opened(large)[1]) < 1.05, "some of its experts lie in two shards"
    refused(
        remoe("pack", large, "--out", "store"),
        "need no packing",
        "each takes 1.0",
        " reads on average as it lies; --force",
    )
    refused(remoe("pack", "demo", "--out", "store"), "need no packing", "one read", "remoe decode demo --cache 6")
    assert remoe("pack", "demo", "--out", "store", "--force").code == 0
    refused(remoe("pack", "demo", "--out", "store", "--force"), "exists", "another folder")
    refused(remoe("pack", "demo", "--out", ".", "--force"), "exists")
    refused(remoe("decode", "demo", "--cache", 8, "--pack", "."), "holds no packed experts", "remoe pack demo --out ")
    refused(remoe("pack", tmp_path / "nowhere", "--out", "x"))
    (tmp_path / "file").touch()
    refused(remoe("pack", model, "--out", "file/store", "--force"), "file is a file")
    assert not (tmp_path / "x").exists()


def test_the_command_looks_for_room_first(remoe, small_disk, tmp_path):
    model = make_model(tmp_path / "model", "gpt_oss")
    refused(remoe("pack", model, "--out", small_disk / "store"), "needs", "164 kB free", "another disk")
    nothing_but(small_disk)
