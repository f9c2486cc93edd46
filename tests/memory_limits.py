"""Commands in a memory cgroup of their own, where this machine lets one be made (root; version 1 or 2)."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def limited(limit: int, command: Sequence[str], *, above: int | None = None, **options) -> subprocess.CompletedProcess:
    """Runs the command with `limit` bytes of memory, page cache included. above: the limit of a cgroup around that one."""
    made: list[Path] = []
    try:
        for nbytes in (above, limit):
            if nbytes is not None:
                _make(made, nbytes)
        return subprocess.run(
            command, capture_output=True, text=True, preexec_fn=lambda: _enter(made[-1]), timeout=120, **options
        )
    finally:
        for folder in reversed(made):
            _remove(folder)


def _make(made: list[Path], limit: int) -> None:
    version_1 = (_V1 / "memory.limit_in_bytes").exists()
    around = made[-1] if made else _V1 if version_1 else _V2
    if not version_1:
        (around / "cgroup.subtree_control").write_text("+memory")
    folder = around / f"remoe_test_{os.getpid()}_{time.monotonic_ns()}"
    folder.mkdir()
    made.append(folder)
    (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit))


def _enter(folder: Path) -> None:
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def _remove(folder: Path) -> None:
    for _ in range(50):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.02)


def _permitted() -> bool:
    try:
        return limited(256 << 20, ["true"]).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


LIMITED = pytest.mark.skipif(not _permitted(), reason="no memory cgroup can be made here")
