"""`remoe finetune deepseek-ai/DeepSeek-V2-Lite` with no further option, as a process of its own, against a real HTTP server."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_models
import tiny_tokenizers
from loopback_hub import Account, LoopbackHub
from test_delta import hashes

BASE, DATA = "deepseek-ai/DeepSeek-V2-Lite", "teknium/OpenHermes-2.5"


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "model"
    tiny_models.make("deepseek_v2", folder, vocab_size=400)
    tiny_tokenizers.wrapped().save_pretrained(folder)
    rows = [
        {
            "conversations": [
                {"from": "human", "value": f"question {i}: what is {i} + {i}?"},
                {"from": "gpt", "value": f"it is {2 * i}. " * 40},
            ]
        }
        for i in range(50)
    ]
    with LoopbackHub() as server:
        server.add("model", BASE, {path.name: path.read_bytes() for path in folder.iterdir()})
        server.add("dataset", DATA, {"openhermes2_5.json": json.dumps(rows).encode()})
        yield server


@pytest.fixture
def remoe(hub, tmp_path):
    work = tmp_path / "work"
    work.mkdir()

    def start(*arguments, token=None):
        environment = {**os.environ, **hub.environment(tmp_path / "home", token), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "remoe_cli", *map(str, arguments)]
        return subprocess.Popen(
            command, cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    start.work = work
    return start


def finished(process, seconds=300):
    out, err = process.communicate(timeout=seconds)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def the_run(work: Path) -> Path:
    return next((work / "runs").iterdir())


def test_three_steps_then_eval_push_and_apply_from_the_hub(hub, remoe, tmp_path):
    code, out, err = finished(remoe("finetune", BASE, "--steps", "3"))
    assert code == 0, err
    assert "Next: remoe eval" in out
    run = the_run(remoe.work)
    facts = json.loads((run / "delta/remoe.json").read_text())
    commit = hub.repos["model", BASE].refs["main"]
    assert facts["base"] == BASE and facts["commit"] == commit
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3

    code, out, err = finished(remoe("eval", "--cache", "2,4", "--json"))
    assert code == 0, err
    assert all(row["counts_match"] and row["exact"] for arm in json.loads(out)["arms"] for row in arm["measured"])

    code, _, err = finished(remoe("push"))
    assert code == 1 and "token" in err
    hub.accounts["secret-token"] = Account("me")
    code, out, err = finished(remoe("push", token="secret-token"))
    assert code == 0, err
    assert "secret-token" not in out + err
    pushed = hub.files("model", "me/DeepSeek-V2-Lite-remoe")
    assert {"gates.safetensors", "remoe.json", "recipe.yaml", "report.json", "README.md"} <= set(pushed)
    assert commit in pushed["README.md"].decode()
    code, out, err = finished(remoe("push", token="secret-token"))
    assert code == 0 and "Unchanged" in out, err

    code, out, err = finished(
        remoe("apply", "me/DeepSeek-V2-Lite-remoe", f"{BASE}@{commit}", "--out", "patched", token="secret-token")
    )
    assert code == 0, err
    before, after = hashes(tmp_path / "model"), hashes(remoe.work / "patched")
    assert {name for name in before if before[name] != after[name]} <= set(facts["gates"])


def test_ctrl_c_after_the_third_step_keeps_a_delta_that_applies(hub, remoe, tmp_path):
    process = remoe("finetune", BASE)
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            metrics = list((remoe.work / "runs").glob("*/metrics.jsonl"))
            if metrics and len(metrics[0].read_text().splitlines()) >= 3:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        code, out, err = finished(process)
    finally:
        process.kill()
    assert code == 130, err
    assert "interrupted" in out and "Go on: remoe finetune --resume" in out and "Next:" not in out
    run = the_run(remoe.work)
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    assert not list(run.rglob("*.tmp*"))
    steps = json.loads((run / "run.json").read_text())["steps"]
    code, _, err = finished(remoe("push", "--to", "pushed"))
    assert code == 0, err
    assert f"for {steps} of 2000 steps (interrupted)" in (remoe.work / "pushed/README.md").read_text()
    code, _, err = finished(remoe("apply", run, BASE, "--out", "patched"))
    assert code == 0, err
    assert (remoe.work / "patched/config.json").is_file()
