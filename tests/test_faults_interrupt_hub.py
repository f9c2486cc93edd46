"""Ctrl-C at random instants of a download and of a push, as real processes against a slow Hub."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import tiny_models
from faults import chosen
from loopback_hub import Account, Fault, LoopbackHub
from test_delta import make_delta

from remoe_cli import run as runs
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.recipe import load

BASE, TOKEN = "org/tiny-moe", "hf_secret-of-this-test"
INSTANTS = [random.Random(number).uniform(0, 3) for number in range(20)]  # seconds after the first request


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tiny_models.make("mixtral", tmp_path_factory.mktemp("base") / "tiny-moe")
    with LoopbackHub() as server:
        server.add("model", BASE, {path.name: path.read_bytes() for path in folder.iterdir()})
        server.accounts[TOKEN] = Account("me")
        server.folder = folder
        yield server


@pytest.fixture(scope="module")
def work(hub, tmp_path_factory):
    """A folder with a run of the base."""
    work = tmp_path_factory.mktemp("work")
    run = runs.create(BASE, load("remoe", "mixtral"), work / "runs/a-run")
    delta = make_delta(Checkpoint.open(hub.folder, BASE, hub.repos["model", BASE].refs["main"]))
    delta.save(run.delta)
    run.note(base=BASE, commit=delta.commit, status="finished", steps=7)
    return work


@pytest.fixture
def start(hub, work, tmp_path):
    def start(*arguments):
        environment = {**os.environ, **hub.environment(tmp_path / "home", TOKEN), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "remoe_cli", *arguments]
        return subprocess.Popen(command, cwd=work, env=environment, stdout=-1, stderr=-1, text=True)

    return start


def interrupted(hub, process, instant: float) -> int:
    """Its exit code, after Ctrl-C `instant` seconds after its first request."""
    hub.log.clear()
    try:
        while not hub.log and process.poll() is None:
            time.sleep(0.005)
        time.sleep(instant)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode in (0, 130), err
    assert "Traceback" not in err and "Exception ignored" not in err and "hf_" not in out + err, err
    if process.returncode == 130:
        assert time.monotonic() - sent < 5, "Ctrl-C was not answered at once"
        assert re.findall("(?m)^Interrupted.*$", err) == ["Interrupted."], err
    return process.returncode


def finished(process) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


@pytest.mark.parametrize("instant", chosen(INSTANTS), ids=lambda instant: f"{instant:.2f}s")
def test_ctrl_c_in_a_download(hub, work, start, tmp_path, instant):
    command = ("apply", "a-run", BASE, "--out", "patched")
    hub.faults = [Fault("GET .*/resolve/.*", pace=0.1), Fault("GET /api", delay=0.3)]
    code = interrupted(hub, start(*command), instant)
    hub.faults = []
    there = hub.files("model", BASE)
    for path in (tmp_path / "home").rglob("snapshots/*/*"):
        assert path.read_bytes() == there[path.name], "a partial file under a final name"
    assert not list((tmp_path / "home").rglob("*.incomplete"))
    assert (work / "patched").exists() == (code == 0)
    assert not [path for path in work.iterdir() if path.name.startswith(".patched")], "a scratch folder was left"
    shutil.rmtree(work / "patched", ignore_errors=True)
    finished(start(*command))
    assert Checkpoint.open(work / "patched").model_type == "mixtral"
    shutil.rmtree(work / "patched")


@pytest.mark.parametrize("instant", chosen(INSTANTS), ids=lambda instant: f"{instant:.2f}s")
def test_ctrl_c_in_a_push(hub, start, instant):
    name = f"me/d{int(1000 * instant)}"
    command = ("push", "a-run", name)
    hub.faults = [Fault(".", delay=0.3)]
    code = interrupted(hub, start(*command), instant)
    time.sleep(0.5)  # what the Hub has received it may still do
    hub.faults = []
    files = hub.files("model", name) if ("model", name) in hub.repos else {}
    assert set(files) in (
        set(),
        {".gitattributes"},
        whole := {".gitattributes", "README.md", "gates.safetensors", "recipe.yaml", "remoe.json"},
    )
    assert code == 130 or set(files) == whole
    out = finished(start(*command))
    assert ("Unchanged" if set(files) == whole else "Pushed to") in out
    assert set(hub.files("model", name)) == whole
