"""Equal conditions for every system: a memory limit, a cold page cache, a read-ahead of one's own.

Page cache that a process brings in counts against its cgroup, so under a limit a mapped model and a private cache have the
same memory to use. Limits and the read-ahead need root.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
BENCH = Path(__file__).resolve().parents[1]


class Killed(Exception):
    """The kernel ended the process because its memory limit was reached."""


@dataclass(frozen=True)
class Ran:
    """answer: the last line of stdout, as JSON; peak_bytes: the most memory its cgroup held, page cache included; None
    without a limit."""

    answer: dict
    peak_bytes: int | None


def can_limit() -> str | None:
    """Why memory cannot be limited here, or None where it can."""
    if os.geteuid() != 0:
        return "memory limits need root"
    if not (CGROUPS / "memory").is_dir() and "memory" not in _controllers():
        return "no memory cgroup is mounted here"
    return None


def run(
    command: Sequence[str],
    *,
    limit: int | None = None,
    stdin: str = "",
    timeout: float = 1800,
    mapping: tuple[Path, int] | None = None,
) -> Ran:
    """Runs a system to its end and reads its answer. limit: bytes of memory, for anonymous memory and page cache alike.
    mapping: a file that it maps, and the read-ahead in KB that this mapping is to have.

    Raises Killed where the limit ended it, RuntimeError with the end of its stderr where it failed otherwise.
    """
    with _group(limit) as group:
        if group:
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with opened_with(*mapping) if mapping else nullcontext() as begun:
            done = subprocess.Popen(command, **pipes, text=True, cwd=BENCH, start_new_session=True)
            try:
                if begun:
                    begun(done.pid)
                out, err = done.communicate(stdin, timeout)
            except BaseException:
                os.killpg(done.pid, signal.SIGKILL)
                done.wait()
                raise
        peak = _peak(group) if group else None
    if done.returncode == -signal.SIGKILL:
        raise Killed
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command[:3]))} ended with {done.returncode}: {err.strip()[-800:]}")
    return Ran(json.loads(out.strip().splitlines()[-1]), peak)


def evict(path: Path) -> None:
    """Drops a file, or a folder's files, from the page cache."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_ahead_kb(path: Path) -> int | None:
    """Of the device that holds path; None where the kernel does not say."""
    setting = _read_ahead(path)
    return int(setting.read_text()) if setting else None


@contextmanager
def opened_with(file: Path, kb: int) -> Iterator[Callable[[int], None]]:
    """Files that are opened meanwhile get this read-ahead, which the kernel copies from the device into each opened file. Call
    what it gives with the id of the process that opens `file`: the device has its own setting back once that has mapped it.

    Raises RuntimeError where the setting cannot be changed.
    """
    setting = _read_ahead(file)
    if setting is None:
        raise RuntimeError(f"the kernel does not say the read-ahead of {file}")
    before, ended = setting.read_text(), threading.Event()
    watching: list[threading.Thread] = []

    def watch(process: int) -> None:
        while not ended.wait(0.01):
            try:
                if str(file) in Path(f"/proc/{process}/maps").read_text():
                    break
            except OSError:
                break
        setting.write_text(before)

    def begun(process: int) -> None:
        watching.append(threading.Thread(target=watch, args=(process,)))
        watching[0].start()

    try:
        setting.write_text(str(kb))
    except OSError as error:
        raise RuntimeError(f"{setting} cannot be changed: {error.strerror}") from None
    try:
        yield begun
    finally:
        ended.set()
        for thread in watching:
            thread.join()
        setting.write_text(before)


def _read_ahead(path: Path) -> Path | None:
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    places = (device, device.resolve().parent)  # a partition has no queue of its own
    return next((f for folder in places if (f := folder / "queue/read_ahead_kb").is_file()), None)


def _controllers() -> list[str]:
    listed = CGROUPS / "cgroup.controllers"
    return listed.read_text().split() if listed.is_file() else []


@contextmanager
def _group(limit: int | None) -> Iterator[Path | None]:
    """A memory cgroup (version 1 or 2), removed afterwards."""
    if limit is None:
        yield None
        return
    first = (CGROUPS / "memory").is_dir()
    group = (CGROUPS / "memory" if first else CGROUPS) / f"bench-{os.getpid()}-{time.monotonic_ns()}"
    if not first:
        (CGROUPS / "cgroup.subtree_control").write_text("+memory")
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit))
        if not first:
            (group / "memory.swap.max").write_text("0")
        yield group
    finally:
        for _ in range(50):  # the kernel gives it up shortly after the last process has left
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def _peak(group: Path) -> int | None:
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).is_file():
            return int((group / name).read_text())
    return None
