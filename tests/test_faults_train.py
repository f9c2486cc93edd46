"""kill -9 and Ctrl-C at random instants of finetune, then --resume: the gates of the run that nobody stopped, byte for byte."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from commands import make_model, make_texts, QUICK
from faults import chosen

from remoe_cli.delta import Delta

STEPS = 30
ASKED = ["--steps", STEPS, "--set", "train.save_seconds=0", *QUICK]


def start(folder, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "remoe_cli", "finetune", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(process) -> str:
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in err, err
    return err


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(folder with model/, texts.jsonl and the whole run, its gates file)"""
    folder = tmp_path_factory.mktemp("kill")
    make_model(folder / "model")
    make_texts(folder / "texts.jsonl")
    finished(start(folder, "model", "--data", "texts.jsonl", "--out", "whole", *ASKED))
    return folder, (folder / "whole/delta/gates.safetensors").read_bytes()


@pytest.mark.parametrize("case", chosen(range(20)))
def test_kill_9_and_resume_end_with_the_same_gates(uninterrupted, case):
    folder, gates = uninterrupted
    chance = random.Random(case)
    run, step = folder / f"killed-{case}", chance.randrange(1, STEPS)
    process = start(folder, "model", "--data", "texts.jsonl", "--out", run, *ASKED)
    deadline = time.monotonic() + 120
    metrics = run / "metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.is_file() and metrics.read_bytes().count(b"\n") >= step:
            time.sleep(chance.uniform(0, 0.03))  # any instant of the steps that follow, the writing of a state included
            break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (run / "delta").exists()
    err = finished(start(folder, "--resume", "--out", run))
    assert "Going on after step" in err
    assert (run / "delta/gates.safetensors").read_bytes() == gates
    assert (run / "metrics.jsonl").read_text().count("\n") == STEPS
    assert not list(run.rglob("*.tmp*"))


@pytest.mark.parametrize("case", chosen(range(20)))
def test_ctrl_c_at_any_instant_ends_cleanly_and_resume_ends_with_the_same_gates(uninterrupted, case):
    folder, gates = uninterrupted
    run = folder / f"interrupted-{case}"
    process = start(folder, "model", "--data", "texts.jsonl", "--out", run, *ASKED)
    first = process.stderr.readline()  # from here on Ctrl-C is remoe's to handle
    time.sleep(random.Random(case).uniform(0, 8))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130), err
    assert "Traceback" not in err and "Exception ignored" not in err, first + err
    assert not list(folder.rglob("*.tmp*")), err
    if process.returncode == 130 and run.exists():
        assert "Interrupted." in err or (run / "delta/remoe.json").is_file()
        assert not (run / "delta").exists() or Delta.load(run / "delta")
    if process.returncode == 130:
        finished(start(folder, "model", "--data", "texts.jsonl", "--resume", "--out", run, *ASKED))
    assert (run / "delta/gates.safetensors").read_bytes() == gates
