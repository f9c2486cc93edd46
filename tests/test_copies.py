"""Copies of large files: shared blocks where the file system has them, else every byte, and never half a copy."""

import errno
import fcntl
import os
import shutil
import subprocess

import pytest
import tiny_models
from test_delta import make_delta

from remoe_cli import copies
from remoe_cli.copies import clone, clone_or_copy, copy_files
from remoe_cli.delta import patched_copy
from remoe_cli.errors import RunError
from remoe_cli.hub.checkpoint import Checkpoint


@pytest.fixture
def shares_blocks(tmp_path):
    """A folder on btrfs."""
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("no mkfs.btrfs")
    with open(image, "wb") as stream:
        stream.truncate(120 << 20)
    made = subprocess.run(["mkfs.btrfs", "-q", "-f", image], capture_output=True)
    if made.returncode or subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(os.urandom(300_001))
    return path


def test_every_byte_where_blocks_cannot_be_shared(source, tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "_BLOCK", 1 << 17)

    def cannot(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(fcntl, "ioctl", cannot)
    told: list[int] = []
    assert not clone_or_copy(source, tmp_path / "target", told.append)
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
    assert told == [1 << 17, 1 << 17, 300_001 - (1 << 18)]
    assert not clone(source, tmp_path / "none") and not (tmp_path / "none").exists()


def test_a_real_error_is_not_taken_for_a_file_system_without_sharing(source, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "ioctl", broken)
    with pytest.raises(OSError, match="broken"):
        clone_or_copy(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_shared_blocks_take_no_room_and_part_when_one_is_written(shares_blocks):
    source, target = shares_blocks / "source", shares_blocks / "target"
    source.write_bytes(content := os.urandom(8 << 20))
    os.sync()
    before = shutil.disk_usage(shares_blocks).free
    assert clone_or_copy(source, target, lambda _: pytest.fail("bytes were copied"))
    os.sync()
    assert before - shutil.disk_usage(shares_blocks).free < 1 << 20
    with open(target, "r+b") as stream:
        stream.seek(1000)
        stream.write(b"changed")
    assert source.read_bytes() == content and target.read_bytes() == content[:1000] + b"changed" + content[1007:]


def test_a_patched_copy_shares_all_but_the_gates(shares_blocks, tmp_path):
    wide = {"moe_intermediate_size": 800, "vocab_size": 4000}
    base = Checkpoint.open(
        shutil.copytree(tiny_models.make("qwen3_moe", tmp_path / "m", **wide), shares_blocks / "base")
    )
    delta, size = make_delta(base), sum(file.stat().st_size for file in base.files)
    os.sync()
    before = shutil.disk_usage(shares_blocks).free
    out = patched_copy(delta, base, shares_blocks / "out")
    os.sync()
    assert before - shutil.disk_usage(shares_blocks).free < size / 4
    assert delta.is_applied(Checkpoint.open(out)) and not delta.is_applied(Checkpoint.open(base.folder))


def test_too_little_room_is_said_before_a_byte_is_copied(source, tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "clone", lambda *_: False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 5))
    (tmp_path / "scratch").mkdir()
    with pytest.raises(RunError, match=r"needs 300 kB and .* has 5 bytes free"):
        copy_files([source], tmp_path / "scratch", tmp_path / "out")
    assert not list((tmp_path / "scratch").iterdir())


def test_a_large_copy_shows_how_far_it_is(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(copies, "clone", lambda *_: False)
    monkeypatch.setattr(copies, "_SHOWN", 100_000)
    (tmp_path / "scratch").mkdir()
    assert not copy_files([source], tmp_path / "scratch", tmp_path / "out")
    assert "copy 0.00/0.00 GB  eta 0:00" in capsys.readouterr().err


def test_a_disk_that_fills_up_leaves_no_copy(tmp_path, folders, monkeypatch):
    base = Checkpoint.open(folders("mixtral"))
    real, calls = os.fsync, []

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file)

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(copies, "clone", lambda *_: False)
    with pytest.raises(RunError, match="No space left"):
        patched_copy(make_delta(base), base, tmp_path / "out")
    assert not list(tmp_path.iterdir())
