"""What the decoder's benchmarks are made of, where it can be wrong without being noticed."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from decode import limits, ours, probe, report, rounds
from decode.checkpoint import make, shorter, TINY
from decode.widen import widen

from remoe_cli import demo
from remoe_cli.families.loader import load_resident
from remoe_cli.hub.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    make(out, TINY, gguf=False)
    return out / "hf"


def steps(capacity: int, **more) -> dict:
    ids = list(range(2, 34))
    return {"capacity": capacity, "prompt": ids[:8], "forced": ids[8:], **more}


def test_widened_demo_says_the_same(tmp_path):
    source = Checkpoint.open(demo.PATH, "demo")
    wide = Checkpoint.open(widen(source, tmp_path / "wide", 4))
    assert wide.tensors["model.layers.1.mlp.experts.3.down_proj.weight"].shape == (128, 4 * 48)
    ids = torch.arange(3, 35)[None]
    before, after = (load_resident(c, torch.float32, "cpu")(ids).logits for c in (source, wide))
    assert (before - after).abs().max() < 1e-4 * before.abs().max()
    assert torch.equal(
        wide.read("model.layers.1.mlp.experts.0.down_proj.weight").float()[:, ::4] * 4,
        source.read("model.layers.1.mlp.experts.0.down_proj.weight").float(),
    )


def test_requests_of_the_decoder(tiny):
    job = {
        "model": str(tiny),
        "threads": 1,
        "simulate": True,
        "steps": [
            steps(6, floor=True, best=True, trace=True),
            steps(TINY.experts, warm="carry"),
            steps(TINY.experts, warm="carry"),
            {"probe": 2},
            steps(6, gates={"skew": 8}),
        ],
    }
    cold, _, hit, probed, skewed = json.loads(json.dumps(ours.decode(job)))
    assert cold["counts_match"] and sum(cold["loads"]) == cold["misses"] and len(cold["floor_s"]) == len(cold["itl_s"])
    assert len(cold["experts"]) == 8 + 23 and len(cold["best"]) == 24
    assert hit["misses"] == 0 and sum(hit["loads"]) == 0
    assert probed["bandwidth"] > 0
    assert skewed["eor"] > cold["eor"] and skewed["misses"] < cold["misses"]


def test_fewer_layers_are_the_same_files(tiny, tmp_path):
    short = Checkpoint.open(shorter(tiny, tmp_path / "short", 2))
    assert max(int(name.split(".")[2]) for name in short.tensors if ".layers." in name) == 1
    logits = load_resident(short, torch.float32, "cpu")(torch.arange(2, 8)[None]).logits
    assert logits.isfinite().all()


def test_checkpoint_routes_with_overlap(tmp_path):
    """Without the shared direction a token's experts would repeat by chance alone."""
    scattered, skewed = tmp_path / "scattered", tmp_path / "skewed"
    make(scattered, TINY, skew=0, gguf=False)
    make(skewed, TINY, skew=2.5, gguf=False)
    eor = [
        ours.decode({"model": str(folder / "hf"), "threads": 1, "steps": [steps(6)]})[0]["eor"]
        for folder in (scattered, skewed)
    ]
    assert eor[0] < 0.4 < eor[1]  # chance: K/E = .25


def test_statistics():
    turns = rounds.interleave({"a": lambda: 1, "b": lambda: 2}, 3, "test")
    assert [list(one) for one in turns] == [["a", "b"], ["b", "a"], ["a", "b"]]
    values = [{"a": 2.0, "b": 1.0}, {"a": 9.0, "b": 3.0}, {"a": 8.0, "b": 2.0}]
    found = rounds.ratio(values, lambda one: one["a"], lambda one: one["b"])
    assert found == (3, 2, 4, 3)  # not the ratio of medians, 4
    assert rounds.percentile([5, 1, 2, 3, 4], 0.5) == 3 and rounds.percentile(list(range(1, 21)), 0.95) == 19
    assert rounds.line([0, 1, 2], [1, 3, 5]) == pytest.approx((2, 1, 1))
    assert rounds.Bar("x", found, 2.5, 3.5).verdict == "pass"
    assert rounds.Bar("x", found, 3.5).verdict == "MISSED"
    assert rounds.Bar("x", found, 3.5, 3, better="less").verdict == "stretch"
    assert report.table([{"a": 1}, {"b": 2}]) == ["| a | b |", "|---|---|", "| 1 |  |", "|  | 2 |", ""]


def test_overlap_of_spans():
    from gpu import shared_time

    assert shared_time([(0, 4), (2, 6)], [(5, 9), (1, 2)]) == 2  # joined to 0 to 6
    assert shared_time([(0, 1)], [(1, 2)]) == 0


def test_probe_and_eviction(tiny):
    limits.evict(tiny)
    assert probe.bandwidth(tiny, 20_000, 4) > 0
    assert limits.read_ahead_kb(tiny) is None or limits.read_ahead_kb(tiny) >= 0


@pytest.mark.skipif(limits.can_limit() is not None, reason="memory limits are not permitted here")
def test_a_limit_holds():
    program = [sys.executable, "-c", "import sys; n = len(bytearray(int(sys.argv[1]) << 20)); print(n)"]
    ran = limits.run([*program, "50"], limit=100 << 20)
    assert ran.answer == 50 << 20 and 50 << 20 < ran.peak_bytes <= 100 << 20
    with pytest.raises(limits.Killed):
        limits.run([*program, "200"], limit=100 << 20)


def test_a_mapping_has_its_own_read_ahead(tmp_path, monkeypatch):
    """The disk (here a file in its place) has its own setting back while the process still runs."""
    setting, file = tmp_path / "read_ahead_kb", tmp_path / "mapped"
    setting.write_text("4096")
    file.write_bytes(bytes(8192))
    monkeypatch.setattr(limits, "_read_ahead", lambda _: setting)
    program = (
        "import mmap, sys, time; from pathlib import Path\n"
        "opened = open(sys.argv[1], 'rb'); at = Path(sys.argv[2]); during = at.read_text()\n"
        "mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)\n"
        "time.sleep(0.5); print([int(during), int(at.read_text())])"
    )
    assert limits.run([sys.executable, "-c", program, str(file), str(setting)], mapping=(file, 64)).answer == [64, 4096]
    assert setting.read_text() == "4096"
