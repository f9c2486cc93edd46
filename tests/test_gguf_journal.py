"""The journal of an in-place patch: when it is written, what it costs, and what it refuses to undo."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import demo_gguf
import pytest
import torch
from demo_gguf import noisy

from remoe_cli.errors import CheckpointError, DeltaError, RunError
from remoe_cli.gguf import patch_in_place, undo
from remoe_cli.gguf.header import read_header
from remoe_cli.gguf.names import GATE
from remoe_cli.hub.checkpoint import Checkpoint


@pytest.fixture
def base(folders):
    checkpoint = Checkpoint.open(folders("deepseek_v2", torch.bfloat16))
    return checkpoint, noisy(checkpoint)


@pytest.fixture
def file(base, tmp_path):
    return demo_gguf.write_gates(base[0], tmp_path / "model.gguf", further=4096)


def test_a_second_delta_needs_an_undo_first(base, file):
    checkpoint, delta = base
    before = file.read_bytes()
    patch_in_place(delta, file)
    other = noisy(checkpoint, seed=5)
    with pytest.raises(DeltaError, match="is not the one this delta was made from") as raised:
        patch_in_place(other, file)
    assert raised.value.hint == f"remoe apply {file} --undo"
    chained = replace(
        delta,
        base_sha256={n: hashlib.sha256(t.view(torch.uint8).numpy()).hexdigest() for n, t in delta.tensors.items()},
        tensors=other.tensors,
    )
    with pytest.raises(DeltaError, match="holds the gates of another delta already"):
        patch_in_place(chained, file)
    undo(file)
    assert file.read_bytes() == before and patch_in_place(other, file).state == "patched"


def test_a_journal_of_another_file_or_a_damaged_one_changes_nothing(base, file):
    _, delta = base
    base_bytes = file.read_bytes()
    patch_in_place(delta, file)
    tuned, journal = file.read_bytes(), file.with_name("model.gguf.remoe-undo")
    whole = journal.read_bytes()
    for cut in (
        b"",
        whole[:-1],
        whole[:30],
        b"x" + whole[1:],
        whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:],
        whole + b"x",
    ):
        journal.write_bytes(cut)
        with pytest.raises(RunError, match="is damaged"):
            undo(file)
        assert file.read_bytes() == tuned
    journal.write_bytes(whole)
    place = next(place for name, place in read_header(file).tensors.items() if GATE.fullmatch(name))
    edited = tuned[: place.offset] + b"abcd" + tuned[place.offset + 4 :]
    for other in (tuned + b"more", tuned[:40] + bytes([tuned[40] ^ 1]) + tuned[41:], edited):
        file.write_bytes(other)
        with pytest.raises((RunError, CheckpointError)):
            undo(file)
        assert file.read_bytes() == other and journal.read_bytes() == whole
    file.write_bytes(base_bytes)  # downloaded again
    assert (undo(file).gates, file.read_bytes() == base_bytes, journal.exists()) == (0, True, False)


def test_a_large_file_costs_the_gates_and_the_journal(base, tmp_path):
    """5 GB, sparse: what is written by every call of write is counted by the system."""
    counted = Path("/proc/self/io")
    if not counted.exists():
        pytest.skip("this system counts no writes")
    checkpoint, delta = base
    file = demo_gguf.write_gates(checkpoint, tmp_path / "model.gguf", further=4096)
    os.truncate(file, 5_000_000_000)
    gates = sum(tensor.numel() * 4 for tensor in delta.tensors.values())

    def written() -> int:
        return int(next(line for line in counted.read_text().splitlines() if line.startswith("wchar:")).split()[1])

    before = written()
    done = patch_in_place(delta, file)
    assert written() - before == done.written_bytes < gates + 4096 + 1 and done.seconds < 30
    assert done.written_bytes == gates + (tmp_path / "model.gguf.remoe-undo").stat().st_size + 1
    before = written()
    back = undo(file)
    assert written() - before == back.written_bytes == gates + 1
    assert file.stat().st_size == 5_000_000_000 and file.stat().st_blocks * 512 < 100_000


def test_the_journal_is_on_the_disk_before_the_first_gate_changes(base, file, monkeypatch):
    """By the order of the real calls: what is synced and what is written, by file."""
    calls = []

    def recorded(name):
        real = getattr(os, name)

        def call(handle, *arguments):
            calls.append((name, Path(os.readlink(f"/proc/self/fd/{handle}")).name.partition(".tmp")[0]))
            return real(handle, *arguments)

        monkeypatch.setattr(os, name, call)

    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not name open files")
    recorded("fsync")
    recorded("pwrite")
    journal, folder, gates = "model.gguf.remoe-undo", file.parent.name, len(base[1].tensors)
    written = [("pwrite", "model.gguf")] * gates + [("fsync", "model.gguf")]
    patch_in_place(base[1], file)
    assert calls == [("fsync", f".{journal}"), ("fsync", folder), *written, ("fsync", journal)]
    calls.clear()
    undo(file)
    assert calls == [("fsync", journal), *written, ("fsync", folder)]


def test_a_journal_of_an_earlier_download_is_not_written_over(base, file):
    patch_in_place(base[1], file)
    file.unlink()
    demo_gguf.write_gates(base[0], file)  # the same name, another size
    before = file.read_bytes()
    with pytest.raises(RunError, match=r"is another file since; nothing was changed") as raised:
        patch_in_place(base[1], file)
    assert raised.value.hint == f"rm {file}.remoe-undo" and file.read_bytes() == before


def test_a_part_alone_that_is_not_split_has_a_journal_of_its_own_name(base, tmp_path):
    file = demo_gguf.write_gates(base[0], tmp_path / "model-00002-of-00003.gguf")
    before = file.read_bytes()
    patch_in_place(base[1], file)
    assert (tmp_path / "model-00002-of-00003.gguf.remoe-undo").exists()
    undo(file)
    assert file.read_bytes() == before
