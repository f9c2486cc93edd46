"""Two processes that train one model over gloo: the gates of one process, and what happens when one of them dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_models
import torch
from commands import make_model, make_texts, QUICK
from training import documents_of, recipe_of

from remoe_cli.errors import UsageError
from remoe_cli.families import find_gates
from remoe_cli.families.loader import load_resident
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.recipe import Objective
from remoe_cli.train.packing import batches
from remoe_cli.train.ranks import ALONE, check_share, Ranks
from remoe_cli.train.trainer import _Loop, train

HERE = Path(__file__).parent
TRAINS = """
import sys
import torch
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from pathlib import Path
from test_ranks import trained
from remoe_cli.families.loader import load_expert_parallel
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.stream.sharded import load_sharded
from remoe_cli.stream.stream import Stream
from remoe_cli.train.ranks import Ranks

ranks = Ranks.join("cpu")
checkpoint = Checkpoint.open(Path({folder!r}))
way, target, out = sys.argv[1:]
layers = Stream(checkpoint, torch.float32) if way == "streamed" else None
if way == "ep":
    model = load_expert_parallel(checkpoint, torch.float32, 2)
else:
    model = layers.model if layers else load_sharded(checkpoint, torch.float32, "cpu")
if not layers:
    held = sum(p.to_local().nbytes for p in model.parameters() if hasattr(p, "to_local"))
    whole = sum(p.nbytes for p in model.parameters() if hasattr(p, "to_local"))
    assert 0 < held < 0.6 * whole
found = trained(model, target, ranks, layers)
if ranks.main:
    torch.save((found.gates, [stats.loss for stats in found.steps]), out)
ranks.leave()
"""


def trained(model, target: str, ranks: Ranks = ALONE, layers=None):
    """Three steps of four micro-batches of packed rows."""
    rows = batches(documents_of(*[32, 20, 12] * 10), 32, 1, repeat=True)
    recipe = recipe_of(Objective(target=target), steps=3, accumulation=4, lr=1e-2)
    return train(model, find_gates(model), rows, recipe, ranks=ranks, layers=layers)


def group(command: list[str], **more: str) -> list[subprocess.Popen]:
    """The same command as two processes that find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", **more}
    return [
        subprocess.Popen(
            command, env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    return Checkpoint.open(tiny_models.make("deepseek_v2", tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(("way", "target"), [("sharded", "base"), ("streamed", "text"), ("ep", "base")])
def test_two_processes_give_the_gates_of_one(checkpoint, tmp_path, way, target):
    code = TRAINS.format(tests=str(HERE), folder=str(checkpoint.folder))
    processes = group([sys.executable, "-c", code, way, target, str(tmp_path / "two.pt")])
    ended = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    gates, losses = torch.load(tmp_path / "two.pt")
    alone = trained(load_resident(checkpoint, torch.float32, "cpu"), target)
    assert losses == pytest.approx([stats.loss for stats in alone.steps], rel=1e-6)
    for name, gate in alone.gates.items():
        torch.testing.assert_close(
            gates[name], gate, rtol=0, atol=(1e-5 if way == "ep" else 1e-6) * float(gate.abs().max())
        )


def test_a_killed_process_ends_the_other_and_the_run_goes_on(tmp_path):
    make_model(tmp_path / "model")
    make_texts(tmp_path / "texts.jsonl", rows=120)
    command = [
        sys.executable,
        "-m",
        "remoe_cli",
        "finetune",
        str(tmp_path / "model"),
        "--data",
        str(tmp_path / "texts.jsonl"),
    ]
    command += ["--steps", "300", *QUICK, "--set", "train.save_seconds=0.2", "--out", str(tmp_path / "run")]
    first, second = group(command)
    metrics = tmp_path / "run" / "metrics.jsonl"
    begun = time.monotonic()
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) > 8):
        assert time.monotonic() - begun < 120 and first.poll() is None, first.communicate()
        time.sleep(0.1)
    second.send_signal(signal.SIGKILL)
    out, err = first.communicate(timeout=60)
    second.communicate()
    last = err.splitlines()[-1]
    assert first.returncode == 1 and not out and "Traceback" not in err
    assert "another process of this run has ended" in last and "are kept" in last and "--resume" in last
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["status"] == "failed" and facts["steps"] > 5 and (tmp_path / "run" / "delta" / "remoe.json").is_file()

    ran = subprocess.run(
        [*command[:4], "--resume", *command[5:]], capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.returncode == 0 and f"Going on after step {facts['steps']}" in ran.stderr, "in one process"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["steps"] == 300


def test_micro_batches_are_shared_out_evenly():
    micro = list(batches(documents_of(*[16] * 5), 16, 1))
    shares = [Ranks(rank, 2).share(micro) for rank in range(2)]
    assert [len(share) for share in shares] == [3, 3] and shares[0] == micro[0::2]
    assert (shares[1][-1].document_BT < 0).all() and shares[1][-1].ids_BT.shape == micro[0].ids_BT.shape
    assert ALONE.share(micro) == micro


def test_an_empty_micro_batch_adds_nothing(checkpoint):
    model = load_resident(checkpoint, torch.float32, "cpu")
    loop = _Loop(model, find_gates(model), recipe_of(steps=3))
    (batch,) = batches(documents_of(16), 16, 1)
    empty = Ranks(1, 2).share([batch])[0]
    found = loop.gradients([batch], 1)
    expected = {name: master.grad.clone() for name, master in loop.masters.tensors.items()}
    again = loop.gradients([batch, empty], 1)
    assert again == found
    for name, master in loop.masters.tensors.items():
        assert torch.equal(master.grad, expected[name])


@pytest.mark.parametrize(("accumulation", "world", "allowed"), [(3, 2, "2 or 4"), (1, 4, "4"), (6, 4, "4 or 8")])
def test_a_step_that_cannot_be_shared_is_refused(accumulation, world, allowed):
    with pytest.raises(UsageError, match=f"accumulation={allowed}"):
        check_share(recipe_of(accumulation=accumulation).train, world)
    check_share(recipe_of(accumulation=8).train, 4)


@pytest.mark.parametrize(
    ("world", "quantised", "words"), [(1, False, "several processes"), (2, True, "not stored quantised")]
)
def test_expert_parallel_that_cannot_be_is_refused(world, quantised, words):
    with pytest.raises(UsageError, match=words):
        check_share(recipe_of(accumulation=2).train, world, "ep", quantised)
    check_share(recipe_of(accumulation=2).train, 2, "ep")
