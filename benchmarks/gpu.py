"""The offloaded decoder on a GPU, in under 6 minutes: experts come from pinned memory while others compute; then training, as
benchmarks/train.py measures it, in under 5.

    make bench-gpu
    python benchmarks/gpu.py --dry-run        the same code on a CPU and a tiny checkpoint, in seconds: its figures mean nothing

Bars: copies hide behind compute (or compute behind copies) for 80 % of the shorter of the two; TPOT is at most 1.25 times the
larger of the loads' bytes at the bandwidth of pinned memory and the all-hit TPOT; 8 times faster than accelerate's
device_map="auto" in the same GPU memory. Rounds are interleaved, ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import train
from decode import limits, report
from decode.checkpoint import Geometry, make, TINY
from decode.rounds import Bar, interleave, number, ratio, spread, steady
from decode.setup import python, Setup

from remoe_cli.hub.resolve import resolve
from remoe_cli.offload import OffloadedDecoder
from remoe_cli.offload.settings import Settings

LAYERS = 6
SIZES = (8, 16)
FEW = 8  # tokens of accelerate
TRAINED = train.ARMS[:4]  # experts one by one would take most of the time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, default=Path("build/bench/results"))
    asked = parser.parse_args()
    if not asked.dry_run and not torch.cuda.is_available():
        sys.exit("error: no CUDA device here. Try: python benchmarks/gpu.py --dry-run")
    device = "cpu" if asked.dry_run else "cuda"
    geometry = TINY if asked.dry_run else Geometry(layers=LAYERS)
    setup = Setup(asked.work.resolve() / f"gpu-{device}", geometry, asked.rounds, asked.tokens)
    if not (setup.model / "model.safetensors.index.json").is_file():
        make(setup.work, geometry, gguf=False)
    results = measure(setup, device)
    job = {"device": device, "steps": 6, "sequence": 2048, "accumulation": 4, "threads": torch.get_num_threads()}
    results["training"] = train.measure(job, 2, dry=asked.dry_run, arms=TRAINED)
    asked.out.mkdir(parents=True, exist_ok=True)
    stem = asked.out / f"gpu-{time.strftime('%Y%m%d-%H%M%S')}"
    text = markdown(results)
    stem.with_suffix(".json").write_text(json.dumps(results, default=Bar.row))
    stem.with_suffix(".md").write_text(text + "\n")
    print(text)


def measure(setup: Setup, device: str) -> dict[str, Any]:
    every = setup.n_layers * setup.geometry.experts * setup.expert_bytes
    settings = Settings(ram=every + (64 << 20), warm="carry")
    sizes = [c for c in SIZES if c < setup.geometry.experts]
    request = setup.request()
    bars, rows = [], []
    with OffloadedDecoder(
        resolve(str(setup.model)), setup.geometry.experts, threads=None, device=device, settings=settings
    ) as decoder:

        def run(capacity: int):
            if decoder.capacity != capacity:
                decoder.configure(capacity)
                decoder.decode(request["prompt"], len(request["forced"]), forced=request["forced"])  # fills both tiers
            return decoder.decode(request["prompt"], len(request["forced"]), forced=request["forced"])

        def one(capacity: int) -> dict[str, Any]:
            done = run(capacity)
            loads = [len(loads) for loads in done.loads]
            return {"itl_s": list(done.latency.itl_s), "mb": fmean(steady(loads)) * decoder.expert_bytes / 1e6}

        systems: dict[str, Any] = {"bandwidth": lambda: pinned_bandwidth(decoder.slot_bytes, device)}
        systems |= {str(c): lambda c=c: one(c) for c in (setup.geometry.experts, *sizes)}
        found = interleave(systems, setup.rounds, "gpu")
        hidden = {c: [overlap(lambda c=c: run(c), device) for _ in range(2)] for c in sizes}
    hit = str(setup.geometry.experts)
    for c in sizes:
        bound = ratio(
            found,
            lambda r, c=c: _tpot(r[str(c)]),
            lambda r, c=c: max(1e6 * r[str(c)]["mb"] / r["bandwidth"], _tpot(r[hit])),
        )
        bars.append(Bar("TPOT against the larger of copies and compute", bound, 1.25, better="less", note=f"C = {c}"))
        bars.append(Bar("copies and compute overlap, of the shorter", spread(hidden[c]), 0.8, unit="", note=f"C = {c}"))
    theirs = accelerate(setup, device, sizes[0])
    tpot = spread([_tpot(r[str(sizes[0])]) for r in found])
    faster = spread([_tpot(theirs) / _tpot(r[str(sizes[0])]) for r in found])
    bars.append(Bar('against accelerate device_map="auto"', faster, 8, note=f"memory of C = {sizes[0]}"))
    bandwidth = spread([r["bandwidth"] / 1e9 for r in found])
    for c in (setup.geometry.experts, *sizes):
        rows.append(
            {
                "system": "remoe", "C": c, "TPOT ms": str(spread([1e3 * _tpot(r[str(c)]) for r in found])),
                "MB a token": number(found[0][str(c)]["mb"]), "pinned GB/s": str(bandwidth),
            }
        )  # fmt: skip
    rows.append({"system": "accelerate", "C": sizes[0], "TPOT ms": number(1e3 * _tpot(theirs))})
    return {
        "conditions": report.conditions(setup) | {"device": _device(device), "threads": torch.get_num_threads()},
        "bars": bars, "rows": rows, "rounds": found, "accelerate": theirs, "tpot_s": tpot._asdict(),
    }  # fmt: skip


def pinned_bandwidth(size: int, device: str, copies: int = 32) -> float:
    """Bytes a second of copies of one expert's size, one after the other, from pinned memory (on a CPU: from memory)."""
    cuda = device == "cuda"
    source = torch.ones(size, dtype=torch.uint8, pin_memory=cuda)
    slots = torch.empty(4, size, dtype=torch.uint8, device=device)
    for slot in slots:
        slot.copy_(source)
    if not cuda:
        start = time.perf_counter()
        for i in range(copies):
            slots[i % 4].copy_(source)
        return copies * size / (time.perf_counter() - start)
    stream, (start_event, end) = torch.cuda.Stream(), (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        start_event.record()
        for i in range(copies):
            slots[i % 4].copy_(source, non_blocking=True)
        end.record()
    end.synchronize()
    return copies * size / (start_event.elapsed_time(end) / 1e3)


def overlap(decode, device: str) -> float:
    """Share of the shorter of copying and computing during which both went on. GPU: from the device's own record of each
    copy and kernel; CPU: from the split, reading less waiting."""
    if device != "cuda":
        done = decode()
        wait = sum(done.split.tokens["wait"])
        compute = sum(done.latency.itl_s) - wait
        return max(0.0, done.counts.decode.busy_s - wait) / max(1e-9, min(done.counts.decode.busy_s, compute))
    from torch.autograd import DeviceType
    from torch.profiler import profile, ProfilerActivity

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        decode()
        torch.cuda.synchronize()
    copies, kernels = [], []
    for event in record.events():
        if event.device_type == DeviceType.CUDA:
            span = (event.time_range.start, event.time_range.end)
            (copies if "HtoD" in event.name else kernels).append(span)
    return shared_time(copies, kernels) / max(1e-9, min(shared_time(copies, copies), shared_time(kernels, kernels)))


def shared_time(ones: Iterable[tuple[float, float]], others: Iterable[tuple[float, float]]) -> float:
    """How long a span of the one kind and one of the other went on at once."""
    left, right = _union(ones), _union(others)
    total, i, k = 0.0, 0, 0
    while i < len(left) and k < len(right):
        total += max(0.0, min(left[i][1], right[k][1]) - max(left[i][0], right[k][0]))
        if left[i][1] < right[k][1]:
            i += 1
        else:
            k += 1
    return total


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def accelerate(setup: Setup, device: str, capacity: int) -> dict[str, Any]:
    """device_map="auto" with as much GPU memory as the decoder's weights and slots take; the rest is in host memory."""
    request = setup.request(FEW)
    job = {
        "model": str(setup.model), "ids": request["prompt"] + request["forced"][:FEW], "prompt": setup.prompt,
        "threads": torch.get_num_threads(), "disk": None, "offload": str(setup.work / "accelerate"),
    }  # fmt: skip
    if device == "cuda":
        job["max_memory"] = {"0": setup.limit(capacity), "cpu": 200_000_000_000}
    return limits.run(python("decode.accelerated"), stdin=json.dumps(job)).answer


def markdown(results: dict[str, Any]) -> str:
    lines = ["# The offloaded decoder on a GPU", "", *(f"- {k}: {v}" for k, v in results["conditions"].items()), ""]
    lines += report.table([report.bar_row(bar) for bar in results["bars"]])
    return "\n".join([*lines, *report.table(results["rows"]), train.markdown(results["training"])])


def _tpot(result: dict[str, Any]) -> float:
    return fmean(steady(result["itl_s"]))


def _device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu (dry run: no figure here means anything)"


if __name__ == "__main__":
    main()
