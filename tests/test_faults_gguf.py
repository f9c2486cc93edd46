"""kill -9 at random instants of an in-place patch, of its undo and of a copy, and disks that take nothing more: each file is
the old one or the new one, or the next call makes it so."""

import contextlib
import itertools
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import demo_gguf
import pytest
import torch
from faults import chosen
from safetensors.torch import save_file

from remoe_cli.delta import Delta
from remoe_cli.errors import RunError
from remoe_cli.gguf import patch_copy, patch_in_place, state, undo
from remoe_cli.gguf.header import read_header
from remoe_cli.gguf.names import GATE
from remoe_cli.hub.checkpoint import Checkpoint

LAYERS, EXPERTS, HIDDEN = 6, 64, 2048  # gates of 3 MB
HOWS = ("line", "piece", "time")  # before a line, within a write, after some time
CRITICAL = ("journal.py", "patch.py", "atomic.py", "copies.py")  # what writes
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """(delta, base GGUF bytes, tuned GGUF bytes), the gates last in the file."""
    folder = tmp_path_factory.mktemp("known")
    generator = torch.Generator().manual_seed(3)
    names = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(1, LAYERS)]
    base = {name: torch.randn(EXPERTS, HIDDEN, generator=generator).bfloat16() for name in names}
    save_file(base, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v2", "num_hidden_layers": LAYERS}))
    checkpoint = Checkpoint.open(folder)
    delta = Delta.of(checkpoint, {name: gate + 1 for name, gate in base.items()}, "remoe", {})
    file = demo_gguf.write_gates(checkpoint, folder / "model.gguf", further=1 << 20)
    tuned = patch_copy(delta, file, folder / "tuned.gguf").files[0]
    return delta, file.read_bytes(), tuned.read_bytes()


def forked(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> int:
    """Starts work() in a child, which calls before() first; the child's number."""
    child = os.fork()
    if child:
        return child
    try:
        signal.alarm(120)
        before()
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def ended(child: int) -> int:
    """0, the exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Lines:
    """Counts the lines that run of what writes, and kills this process before the line of that number."""

    def __init__(self, until: int | None = None) -> None:
        self.count, self._until = 0, until

    def start(self) -> None:
        sys.settrace(self)

    def __call__(self, frame: FrameType, event: str, argument: object):
        if not frame.f_code.co_filename.endswith(CRITICAL) or "remoe_cli" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.count += 1
            if self.count == self._until:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def lines_of(work: Callable[[], object]) -> int:
    lines = Lines()
    lines.start()
    try:
        work()
    finally:
        sys.settrace(None)
    return lines.count


def torn(number: int, share: float) -> None:
    """From here on the os.pwrite of that number writes a share of its bytes and is the process's last."""
    write, calls = os.pwrite, itertools.count(1)

    def last(handle: int, content: memoryview, offset: int) -> int:
        if next(calls) == number:
            write(handle, content[: int(len(content) * share)], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(handle, content, offset)

    os.pwrite = last  # in the child only


def has_begun(file: Path) -> bool:
    """Something besides the file and a whole journal is there: a journal that is pending, a scratch folder."""
    for path in file.parent.iterdir():
        with contextlib.suppress(OSError):
            if path.name.startswith(".") or (path.suffix == ".remoe-undo" and path.read_bytes()[8:9] == b"P"):
                return True
    return False


def begun(child: int, file: Path) -> None:
    """Waits until it writes, or has ended."""
    while not has_begun(file) and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.0005)


def killed(work: Callable[[], object], file: Path, how: str, case: int, length: tuple[int, float]) -> bool:
    """False where it ended before. length: of `lengths`."""
    chance = random.Random(case)
    if how == "line":
        code = ended(forked(work, Lines(chance.randint(1, length[0])).start))
    elif how == "piece":
        number, share = chance.randint(1, LAYERS - 1), chance.random()
        code = ended(forked(work, lambda: torn(number, share)))
    else:
        child = forked(work)
        begun(child, file)
        time.sleep(chance.uniform(0, length[1]))
        os.kill(child, signal.SIGKILL)
        code = ended(child)
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.fixture(scope="module")
def lengths(known, tmp_path_factory):
    """What is done -> (lines, seconds from the first write on) of one that nobody stops."""
    delta, base, _ = known
    file = tmp_path_factory.mktemp("lengths") / "model.gguf"
    out = file.with_name("out.gguf")
    file.write_bytes(base)
    found = {}
    for name, work in (
        ("copy", lambda: patch_copy(delta, file, out)),
        ("patch", lambda: patch_in_place(delta, file)),
        ("undo", lambda: undo(file)),
    ):
        lines = lines_of(work)
        out.unlink(missing_ok=True)
        if name == "patch":
            undo(file)
        if name == "undo":
            patch_in_place(delta, file)
        child = forked(work)
        begun(child, file)
        begin = time.monotonic()
        assert ended(child) == 0
        found[name] = (lines, time.monotonic() - begin)
        out.unlink(missing_ok=True)
    return found


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("case", chosen(range(50)))
def test_kill_9_in_an_in_place_patch(known, lengths, tmp_path, how, case):
    delta, base, tuned = known
    file = tmp_path / "model.gguf"
    file.write_bytes(base)
    killed(lambda: patch_in_place(delta, file), file, how, case, lengths["patch"])
    whole = file.read_bytes()
    assert whole in (base, tuned) or file.with_name("model.gguf.remoe-undo").is_file()
    if case // 10 % 3 == 0:
        undo(file)
        assert file.read_bytes() == base
    elif case // 10 % 3 == 1:
        assert patch_in_place(delta, file).state in ("patched", "already tuned") and file.read_bytes() == tuned
    else:
        out = patch_copy(delta, file, tmp_path / "out.gguf").files[0]
        assert out.read_bytes() == tuned and file.read_bytes() in (base, tuned)
        out.unlink()
    undo(file)
    assert file.read_bytes() == base and undo(file).state == "nothing to undo"
    patch_in_place(delta, file)
    undo(file)
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("case", chosen(range(50)))
def test_kill_9_in_an_undo(known, lengths, tmp_path, how, case):
    delta, base, tuned = known
    file = tmp_path / "model.gguf"
    file.write_bytes(base)
    patch_in_place(delta, file)
    killed(lambda: undo(file), file, how, case, lengths["undo"])
    whole = file.read_bytes()
    assert whole in (base, tuned) or file.with_name("model.gguf.remoe-undo").is_file()
    if case // 2 % 2:
        assert patch_in_place(delta, file).state in ("patched", "already tuned") and file.read_bytes() == tuned
    undo(file)
    assert file.read_bytes() == base and [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("case", chosen(range(50)))
def test_kill_9_in_a_copy(known, lengths, tmp_path, how, case):
    delta, base, tuned = known
    file, out = tmp_path / "model.gguf", tmp_path / "out.gguf"
    file.write_bytes(base)
    killed(lambda: patch_copy(delta, file, out), file, how, case, lengths["copy"])
    assert file.read_bytes() == base
    if out.exists():
        assert out.read_bytes() == tuned
        out.unlink()
    patch_copy(delta, file, out)
    assert out.read_bytes() == tuned and sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", "out.gguf"]


@pytest.mark.parametrize("case", chosen(range(20)))
def test_ctrl_c_in_an_in_place_patch_leaves_the_old_file_or_the_new_one(known, lengths, tmp_path, case):
    delta, base, tuned = known
    file = tmp_path / "model.gguf"
    file.write_bytes(base)
    child = forked(
        lambda: patch_in_place(delta, file), lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    begun(child, file)
    time.sleep(random.Random(case).uniform(0, lengths["patch"][1]))
    os.kill(child, signal.SIGINT)
    ended(child)
    journal = file.with_name("model.gguf.remoe-undo")
    assert file.read_bytes() == (tuned if journal.exists() else base) and not list(tmp_path.glob("*.tmp*"))


@pytest.mark.parametrize("last", [True, False])
def test_a_disk_that_takes_no_gate_leaves_the_old_file(known, tmp_path, last):
    """A limit on file sizes: with `last` only the last gate does not pass, nor does its way back, so that the journal stays;
    without, the journal does not pass either."""
    delta, base, _ = known
    file = tmp_path / "model.gguf"
    file.write_bytes(base)
    gates = [place for name, place in read_header(file).tensors.items() if GATE.fullmatch(name)]
    limit = gates[-1].offset + 8 if last else gates[0].offset + 8
    said = tmp_path / "said"

    def work() -> None:
        with pytest.raises(RunError) as raised:
            patch_in_place(delta, file)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        said.write_text(str(raised.value))

    code = ended(forked(work, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))))
    assert code == 0 and "cannot be written" in said.read_text()
    assert file.read_bytes() == base and file.with_name("model.gguf.remoe-undo").exists() == last
    if last:
        assert said.read_text().endswith(f"Try: remoe apply {file} --undo")
    assert undo(file).state == ("undone" if last else "nothing to undo") and file.read_bytes() == base
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", "said"]


def test_two_calls_at_once_do_not_mix(known, tmp_path):
    delta, base, tuned = known
    file = tmp_path / "model.gguf"
    file.write_bytes(base)
    codes = [ended(child) for child in [forked(lambda: patch_in_place(delta, file)) for _ in range(4)]]
    assert 0 in codes and file.read_bytes() == tuned and state(delta, file) == "tuned"
    undo(file)
    assert file.read_bytes() == base
