"""remoe decode with a delta that has heads, and the measured cells of arms that have some."""

import json
from pathlib import Path

import numpy as np
import torch
from commands import refused
from decoding import heads_of
from tiny_models import TOP_K, VOCABULARY

from remoe_cli.delta import Delta, heads_on_disk
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.measure.offloaded import measure_offloaded
from remoe_cli.measure.requests import Requests
from remoe_cli.offload import OffloadedDecoder, Settings


def make_delta(model: Path, folder: Path) -> Path:
    """Heads beside the base's own gates, as a run of scope heads leaves them."""
    checkpoint = Checkpoint.open(model)
    with OffloadedDecoder(checkpoint, TOP_K) as decoder:
        heads = heads_on_disk(heads_of(decoder), decoder.disk_names, decoder.gates)
        gates = {name: checkpoint.read(name) for name in decoder.disk_names.values()}
    Delta.of(checkpoint, gates, "heads-only", {}, heads).save(folder)
    return folder


def test_the_command_decodes_with_the_heads_of_a_delta(remoe, model):
    options = ("decode", model, "--cache", 3, "--tokens", 12, "--delta", make_delta(model, Path("delta")), "--policy")
    base, temporal, ahead = (
        json.loads(remoe(*options, policy, "--json").out)["rows"][0]
        for policy in ("lru", "temporal", "spatio_temporal:4")
    )
    assert base["texts"] == temporal["texts"] == ahead["texts"]
    assert (base["proactive"], temporal["proactive"]) == (0, 0) and ahead["proactive"] > 0
    assert ahead["reads"] == ahead["misses"] + ahead["proactive"]
    a, d, p = ahead["accesses"], ahead["misses"], ahead["proactive"]
    assert ahead["adjusted_hit_ratio"] == (a - d) / (a + p) < ahead["hit_ratio"]
    assert temporal["adjusted_hit_ratio"] == temporal["hit_ratio"]
    shown = remoe(*options, "spatio_temporal:4").out
    assert f"{ahead['adjusted_hit_ratio']:.3f} adjusted" in shown and f"{p:,} loaded ahead" in shown
    assert "adjusted" not in remoe(*options, "temporal").out
    table = remoe(*options, "gate_ahead:3", "--throttle", "none,100MB/s").out.splitlines()
    assert "adjusted" in table[0] and table[0].split().index("D") + 1 == table[0].split().index("P")
    passing = json.loads(remoe(*options, "spatio:4", "--admission", "bypass", "--ram", "1MB", "--json").out)["rows"][0]
    assert passing["texts"] == base["texts"] and passing["reads"] == passing["misses"] + passing["proactive"]


def test_the_command_says_what_is_missing(remoe, model):
    options = ("decode", model, "--cache", 3)
    for more, words in (
        (
            ["--policy", "spatio_temporal:4"],
            ["needs the temporal and the spatio head", "--delta", "--policy gate_ahead"],
        ),
        (["--policy", "temporal"], ["needs the temporal head", "--policy retention"]),
        (["--policy", "spatio:4"], ["bypass only", "--admission bypass"]),
        (["--policy", "gate_ahead:2", "--guess", 1], ["takes no --guess", "--policy gate_ahead:2"]),
        (["--policy", "gate_ahead:2", "--batch", 2], ["neither --batch nor"]),
        (["--policy", "gate_ahead:2", "--warm", "batch"], ["neither --batch nor"]),
        (["--policy", "gate_ahead:x"], ["whole number"]),
    ):
        refused(remoe(*options, *more), *words)


def test_applied_gates_have_no_base_beside_them(remoe, model):
    checkpoint = Checkpoint.open(model)
    with OffloadedDecoder(checkpoint, TOP_K) as decoder:
        gates = {name: checkpoint.read(name) + 0.5 for name in decoder.disk_names.values() if "gate" in name}
    Delta.of(checkpoint, gates, "tuned", {}).save(Path("delta"))
    assert remoe("apply", "delta", model, "--out", "applied").code == 0
    options = ("--cache", 3, "--delta", "delta", "--prompts", "demo", "--context", 4, "--tokens", 3, "--forced")
    ran = remoe("decode", "applied", *options, "--beside-base")
    refused(
        ran,
        "holds the tuned gates already",
        "remoe decode applied --cache 3 --delta delta",
        f"remoe decode {model} --cache 3",
    )


def test_measured_cells_of_policies_that_an_arm_can_serve(folders):
    rng = np.random.default_rng(0)
    requests = Requests(*(torch.from_numpy(rng.integers(3, VOCABULARY, shape)) for shape in ((2, 8), (2, 6))))
    with OffloadedDecoder(Checkpoint.open(folders("olmoe")), 3, settings=Settings(ram=100_000)) as decoder:
        found = measure_offloaded(
            decoder, {"base": {}, "tuned": {}}, requests, [1, 3], heads={"base": None, "tuned": heads_of(decoder)},
            policies=["lru", "belady", "gate_ahead:3", "spatio_temporal:3", "spatio:3"],
        ).rows  # fmt: skip
    shown = {arm: [row["policy"] for row in rows if not row["skipped"]] for arm, rows in found.items()}
    assert shown == {"base": ["lru", "gate_ahead:3"], "tuned": ["lru", "gate_ahead:3", "spatio_temporal:3"]}
    for row in (row for rows in found.values() for row in rows if not row["skipped"]):
        assert row["counts_match"] and row["exact"] and (row["proactive"] > 0) == (row["policy"] != "lru")
