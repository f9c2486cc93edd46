"""remoe decode: what it was asked and what it did, and every mistake as one line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_models
from commands import make_model, make_run, refused


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("decode"))


def test_requested_and_effective_settings(remoe, model):
    done = json.loads(remoe("decode", model, "--cache", 99, "--tokens", 3, "--threads", 1, "--json").out)
    assert done["requested"] == {"capacity": 99, "threads": 1, "device": None}
    assert (done["capacity"], done["threads"], done["dtype"], done["policy"]) == (8, 1, "float32", "lru")
    assert done["new_tokens"] == 3 and done["hits"] + done["misses"] == 2 * 2 * 2  # two steps, two layers, top-2
    shown = remoe("decode", model, "--cache", 99, "--tokens", 3).out
    assert "C = 8 (all there are; 99 asked for)" in shown and "float32" in shown
    assert "asked for" not in remoe("decode", model, "--cache", 8, "--tokens", 3).out


def test_a_policy_with_a_parameter_and_one_that_needs_probabilities(remoe, model):
    for policy in ("lrfu:0.1", "decayed", "gate"):
        ran = remoe("decode", model, "--cache", 2, "--tokens", 6, "--policy", policy, "--admission", "bypass", "--json")
        done = json.loads(ran.out)
        assert (done["policy"], done["admission"]) == (policy, "bypass") and done["hits"] + done["misses"] == 5 * 2 * 2


def test_a_delta_by_folder_by_run_and_by_the_runs_name(remoe, run):
    Path("runs").mkdir()
    Path("runs/mine").symlink_to(run)
    texts = [
        json.loads(remoe("decode", run.parent / "model", "--cache", 2, "--tokens", 8, "--json", *delta).out)
        for delta in ([], ["--delta", run / "delta"], ["--delta", run], ["--delta", "mine"])
    ]
    base, *tuned = [(done["text"], done["misses"]) for done in texts]
    assert tuned[0] == tuned[1] == tuned[2] != base


def test_what_cannot_be_decoded(remoe, model):
    for options, words in (
        (["--threads", 0], "--threads is 1 to"),
        (["--threads", -1], "not -1"),
        (["--threads", 10**6], "--threads is 1 to"),
        (["--tokens", 0], "--tokens is at least 1"),
        (["--tokens", 10**9], "more than the 256"),
        (["--device", "tpu"], "--device is cpu, cuda or cuda:N"),
        (["--device", ""], "--device is cpu"),
        (["--device", "cpu:3"], "--device is cpu, cuda or cuda:N"),
        (["--device", "cpu:0"], "--device is cpu"),
        (["--device", "cuda:07"], "--device is cpu"),
        (["--device", "cuda:x"], "--device is cpu"),
        (["--device", "cuda:99"], "no cuda:99"),
        (["--policy", "belady"], "lru, lfu, fifo"),
        (["--policy", "belady"], "what only a replay has"),
        (["--policy", "hindsight"], "what only a replay has"),
        (["--policy", "static"], "what only a replay has"),
        (["--policy", ""], "lru, lfu, fifo"),
        (["--policy", "lrru"], "did you mean"),
        (["--policy", "lru:2"], "takes no parameter"),
        (["--policy", "decayed:7"], "not '7'"),
        (["--policy", "decayed:x"], "not 'x'"),
        (["--admission", "free"], "forced or bypass"),
        (["--prompt", "\udcff"], "not UTF-8"),
        (["--delta", "nothing-here"], "nothing-here"),
        (["--delta", "."], "not a delta"),
    ):
        refused(remoe("decode", model, "--cache", 2, *options), words)
    refused(remoe("decode", tiny_models.make("olmoe", "bare"), "--cache", 2), "tokenizer")
    for cache in (1, 0, -3):
        refused(remoe("decode", model, "--cache", cache), f"--cache {cache} is too small", "--cache 2")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_ctrl_c_while_decoding(tmp_path):
    model = make_model(tmp_path / "model", max_position_embeddings=10**6)
    command = [sys.executable, "-m", "remoe_cli", "decode", str(model), "--cache", "2", "--tokens", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not opened(process.pid, ".safetensors"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "") and err.splitlines()[-1:] == ["Interrupted."], err
    assert "Traceback" not in err


def opened(pid: int, ending: str) -> bool:
    """Whether the process holds a file of that ending: the experts' files stay open while it decodes."""
    folder = Path(f"/proc/{pid}/fd")
    for link in os.listdir(folder):
        try:
            if os.readlink(folder / link).endswith(ending):
                return True
        except OSError:
            continue
    return False
