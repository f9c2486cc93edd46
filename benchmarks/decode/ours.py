"""The offloaded decoder on one checkpoint: a list of requests, decoded one after the other, with what each one cost.

    python -m decode.ours < JOB.json

JOB: model (folder or name), threads, device, readers, ram (bytes), steps, each of them:
  capacity, policy, throttle, guess, warm   how the decoder is configured (again only where something changes)
  gates       {"delta": RUN}, {"skew": S}: the mean of each gate's row S times as large, or nothing: the base's
  prompt, forced   ids; floor: whether the loads are replayed without the model; best, trace: whether the likeliest ids and
                   the chosen experts are told; label: comes back with the result
or probe: so many reads of one expert's size without a decoder, for the storage's own speed.
Prints one line of JSON: a list of what each step gave, in milliseconds and bytes; with `simulate` in the job, whether the
counts are the simulator's. A GPU's overlap is in gpu.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from decode.probe import bandwidth
from remoe_cli.apply import find_delta
from remoe_cli.cache import replay
from remoe_cli.delta import gates_for
from remoe_cli.hub.resolve import resolve
from remoe_cli.offload import OffloadedDecoder
from remoe_cli.offload.settings import Settings


def main() -> None:
    print(json.dumps(decode(json.load(sys.stdin))))


def decode(job: dict) -> list[dict]:
    checkpoint = resolve(job["model"])
    fixed = {"readers": job.get("readers", 2), "ram": job.get("ram", 0)}
    results: list[dict] = []
    decoder, configured, gated = None, None, None
    try:
        for step in job["steps"]:
            if "probe" in step:
                assert decoder is not None, "a probe comes after a request"
                speed = bandwidth(checkpoint.folder, decoder.expert_bytes, step["probe"])
                results.append({"label": step.get("label"), "bandwidth": speed})
                continue
            wanted = {
                "capacity": step["capacity"], "policy": step.get("policy", "lru"),
                "settings": Settings(
                    **fixed, warm=step.get("warm", "cold"), throttle=step.get("throttle"), guess=step.get("guess", 0)
                ),
            }  # fmt: skip
            if decoder is None:
                decoder = OffloadedDecoder(
                    checkpoint, threads=job["threads"], device=job.get("device", "cpu"), **wanted
                )
            elif wanted != configured:
                decoder.configure(**wanted)
            if (gates := step.get("gates")) != gated:
                decoder.apply_gates(_gates(decoder, gates) if gates else {})
            configured, gated = wanted, gates
            results.append(_decode(decoder, step, simulate=job.get("simulate", False)))
    finally:
        if decoder is not None:
            decoder.close()
    return results


def _gates(decoder: OffloadedDecoder, wanted: dict) -> dict[str, torch.Tensor]:
    if "delta" in wanted:
        return gates_for(decoder.disk_names, find_delta(wanted["delta"]))
    scaled = {}
    for name, disk in decoder.disk_names.items():
        gate = decoder.checkpoint.read(disk).float()
        scaled[name] = gate + (wanted["skew"] - 1) * gate.mean(1, keepdim=True)
    return scaled


def _decode(decoder: OffloadedDecoder, step: dict, *, simulate: bool) -> dict[str, Any]:
    done = decoder.decode(
        step["prompt"], len(step["forced"]), forced=step["forced"], keep_logits=step.get("best", False)
    )
    counts = done.counts
    found: dict[str, Any] = {
        "label": step.get("label"),
        "ttft_s": done.latency.ttft_s,
        "itl_s": list(done.latency.itl_s),
        "hits": counts.hits,
        "misses": counts.misses,
        "loads": [len(loads) for loads in done.loads],
        "layer_loads": [_by_layer(loads, decoder.n_layers) for loads in done.loads],
        "top_k": decoder.top_k,
        "expert_bytes": decoder.expert_bytes,
        "read_bytes": counts.decode.read_bytes,
        "bytes": counts.decode.bytes,
        "busy_s": counts.decode.busy_s,
        "prefill": {
            "bytes": counts.prefill.bytes,
            "read_bytes": counts.prefill.read_bytes,
            "busy_s": counts.prefill.busy_s,
        },
        "split_s": {key: list(values) for key, values in done.split.tokens.items()},
        "prefill_split_s": dict(done.split.prefill),
        "io": decoder.io,
        "io_reason": decoder.io_reason,
        "eor": _overlap(done.trace),
        "best": done.logits.argmax(-1).tolist() if done.logits is not None else None,
    }
    if simulate and step.get("warm", "cold") == "cold":
        simulated = replay(done.trace, decoder.policy, decoder.capacity)
        found["counts_match"] = (simulated.hits, simulated.misses) == (counts.hits, counts.misses)
    if step.get("trace"):
        found["experts"] = done.trace.experts.tolist()
    if step.get("floor"):
        floor = decoder.floor(done)
        found["floor_s"] = list(floor.token_s)
        found["floor_bandwidth"] = floor.bandwidth
    return found


def _by_layer(loads: list[tuple[int, int]], n_layers: int) -> list[int]:
    counts = [0] * n_layers
    for layer, _ in loads:
        counts[layer] += 1
    return counts


def _overlap(trace) -> float:
    """EOR of the tokens that were fed one by one."""
    experts_NLK = trace.experts[~trace.prefill]
    pairs = zip(experts_NLK[:-1].reshape(-1, trace.top_k).tolist(), experts_NLK[1:].reshape(-1, trace.top_k).tolist())
    shared = [len(set(before) & set(after)) / trace.top_k for before, after in pairs]
    return sum(shared) / len(shared) if shared else float("nan")


if __name__ == "__main__":
    main()
