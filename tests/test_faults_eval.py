"""Ctrl-C at random instants of `remoe eval`, a process of its own: 130 and one line, nothing half written, and it works again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import make_run
from faults import chosen

EVAL = ("eval", "run", "--cache", "2,4", "--threads", "1")
INSTANTS = [random.Random(i).random() for i in range(20)]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Holds a run and a report of other conditions than EVAL's."""
    folder = tmp_path_factory.mktemp("eval")
    make_run(folder)
    code, _, err = ended(start(folder, *EVAL, "--no-measure"))
    assert code == 0, err
    return folder


@pytest.fixture(scope="module")
def seconds(place) -> float:
    """How long an undisturbed eval takes."""
    former = (place / "run/report.json").read_bytes()
    begin = time.monotonic()
    assert ended(start(place, *EVAL))[0] == 0
    took = time.monotonic() - begin
    for path in (place / "run").glob("report*"):
        path.unlink()
    (place / "run/report.json").write_bytes(former)
    return took


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "remoe_cli", *arguments], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize("instant", chosen(INSTANTS), ids="{:.3f}".format)
def test_ctrl_c(place, seconds, instant, remoe):
    run = place / "run"
    former, names = (run / "report.json").read_bytes(), {path.name for path in run.rglob("*")}
    process = start(place, *EVAL)
    time.sleep(0.1 + instant * seconds)  # the interpreter's own start is not ours
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code in (0, 130), err
    assert "Traceback" not in err and "Exception ignored" not in err, err
    assert code == 0 or err.splitlines()[-1] == "Interrupted."
    new, report = {path.name for path in run.rglob("*")} - names, (run / "report.json").read_bytes()
    if report == former:
        assert code == 130 and not new
    else:  # it came too late: the new report is whole, with the former beside it
        assert json.loads(report)["arms"] and len(new) == 1

    assert remoe("eval", run, *EVAL[2:], "--no-measure").code == 0
    for path in run.glob("report-*"):
        path.unlink()
