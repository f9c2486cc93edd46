"""Against what users run today, in the same memory: llama.cpp on a mapped file, accelerate's disk offload; and all in RAM."""

from __future__ import annotations

from typing import Any

from decode import limits
from decode.rounds import Bar, interleave, number, percentile, ratio, Round, Spread, spread, steady
from decode.setup import Setup

SIZES = (7, 12, 24)
GUESS = 2  # experts of the next layer that remoe's second row reads ahead
USUAL_KB = 128  # read-ahead of most Linux machines
FEW = 8  # tokens of a system that takes seconds for each
GPU_LESS = {"accelerate": 2_700_000_000, "least": 2_050_000_000}


def peers(setup: Setup) -> dict[str, Any]:
    """remoe, llama.cpp at the usual read-ahead and at the machine's, in the memory of C slots a layer."""
    if (reason := limits.can_limit()) is not None:
        setup.notes.append(f"no peers in equal memory: {reason}")
        return {"bars": [], "rows": []}
    bars, rows, raw = [], [], {}
    machine_kb = limits.read_ahead_kb(setup.gguf) if setup.program else None
    if setup.program and machine_kb is None:
        setup.notes.append("the read-ahead cannot be set here, so llama.cpp runs with the machine's own only")
    for capacity in SIZES:
        enough = setup.limit(capacity + 1)
        ahead = f"remoe --guess {GUESS}"
        plain, guessing = _step(setup, capacity), {**_step(setup, capacity), "guess": GUESS}
        # what remoe really takes of that is what the others get
        limit = setup.ours([guessing], limit=enough)["peak_bytes"]
        systems = {
            "remoe": lambda step=plain, m=enough: setup.ours([step], limit=m),
            ahead: lambda step=guessing, m=enough: setup.ours([step], limit=m),
        }
        if machine_kb is not None:
            systems["llama usual"] = lambda m=limit: setup.llama(tokens=setup.tokens, limit=m, read_ahead_kb=USUAL_KB)
        if setup.program is not None:
            systems["llama machine"] = lambda m=limit: setup.llama(tokens=min(FEW, setup.tokens), limit=m)
        found = interleave(systems, setup.rounds, f"peers, C = {capacity}")
        raw[str(capacity)] = found
        rows += [_row(name, capacity, limit, found, setup) for name in systems]
        where = f"C = {capacity}, {limit / 1e9:.2f} GB"
        for ours in ("remoe", ahead):
            note = where if ours == "remoe" else f"{where}, {ours.removeprefix('remoe ')}"
            if "llama usual" in systems:
                against = f"llama.cpp mmap, read-ahead {USUAL_KB} KB"
                bars.append(
                    Bar(f"p50 against {against}", _faster(found, ours, "llama usual", 0.5), 1.4, 1.8, note=note)
                )
                bars.append(Bar(f"p95 against {against}", _faster(found, ours, "llama usual", 0.95), 2, 3, note=note))
            if "llama machine" in systems:
                against = f"llama.cpp mmap, read-ahead {machine_kb} KB (as the machine is)"
                bars.append(Bar(f"p50 against {against}", _faster(found, ours, "llama machine", 0.5), 8, 12, note=note))
    return {"bars": bars, "rows": rows, "rounds": raw, "machine_read_ahead_kb": machine_kb}


def accelerate(setup: Setup) -> dict[str, Any]:
    """accelerate's disk offload where it just runs, and where it no longer does."""
    if (reason := limits.can_limit()) is not None:
        setup.notes.append(f"accelerate was not measured: {reason}")
        return {"bars": [], "rows": []}
    enough, least = GPU_LESS["accelerate"], GPU_LESS["least"]
    large = max(
        c
        for c in range(setup.geometry.top_k, setup.geometry.experts + 1)
        if setup.limit(c) <= enough or c == setup.geometry.top_k
    )
    few = min(FEW, setup.tokens)
    systems = {
        "remoe": lambda: setup.ours([_step(setup, large)], limit=enough),
        "accelerate": lambda: setup.accelerate(tokens=few, limit=enough, disk="experts"),
    }
    found = interleave(systems, setup.rounds, "accelerate")
    rows = [_row(name, large, enough, found, setup) for name in systems]
    bars = []
    if not any(one["accelerate"].get("killed") for one in found):
        note = f"C = {large}, {enough / 1e9:.2f} GB"
        bars.append(
            Bar("p50 against accelerate disk offload", _faster(found, "remoe", "accelerate", 0.5), 6, 10, note=note)
        )
    small = setup.ours([_step(setup, setup.geometry.top_k)], limit=least)
    theirs = setup.accelerate(tokens=few, limit=least, disk="experts")
    ran = spread([percentile(steady(small["itl_s"]), 0.5) * 1e3])
    fate = "killed" if theirs.get("killed") else f"{percentile(steady(theirs['itl_s']), 0.5) * 1e3:.0f} ms"
    note = f"C = {setup.geometry.top_k}; accelerate there: {fate}"
    bars.append(Bar("runs in 2.05 GB, p50", ran, float("inf"), better="less", unit="ms", note=note))
    return {"bars": bars, "rows": rows, "rounds": found, "least": {"remoe": small, "accelerate": theirs}}


def ram(setup: Setup) -> dict[str, Any]:
    """No limit, everything in memory: what computing alone takes."""
    every = {**_step(setup, setup.geometry.experts), "warm": "carry"}

    def ours() -> dict:
        _, second = setup.ours([every, every])
        assert second["misses"] == 0, "the second pass must find everything in its slots"
        return second

    systems = {"remoe": ours, "transformers": lambda: setup.accelerate(tokens=setup.tokens, limit=None, disk=None)}
    if setup.program is not None:
        systems["llama"] = lambda: setup.llama(tokens=setup.tokens, mapped=False)
    found = interleave(systems, setup.rounds, "all in RAM")
    bars = []
    if "llama" in systems:
        slower = ratio(found, lambda one: _p50(one["remoe"]), lambda one: _p50(one["llama"]))
        bars.append(Bar("all hits, against llama.cpp in RAM", slower, 1.5, 1.15, better="less"))
    slower = ratio(found, lambda one: _p50(one["remoe"]), lambda one: _p50(one["transformers"]))
    bars.append(Bar("C = E, against transformers with all in RAM", slower, 1.05, better="less"))
    rows = [_row(name, setup.geometry.experts, None, found, setup) for name in systems]
    return {"bars": bars, "rows": rows, "rounds": found, "split_ms": split_ms([one["remoe"] for one in found])}


def split_ms(results: list[dict]) -> dict[str, float]:
    """Where a token's time went: mean of the steady tokens, median over rounds."""
    keys = results[0]["split_s"]
    return {
        key: spread([1e3 * sum(part := steady(one["split_s"][key])) / len(part) for one in results]).median
        for key in keys
    }


def _step(setup: Setup, capacity: int) -> dict:
    return {"capacity": capacity, "best": True, **setup.request()}


def _p50(result: dict) -> float:
    return percentile(steady(result["itl_s"]), 0.5)


def _faster(found: list[Round], ours: str, peer: str, share: float) -> Spread:
    """How many times faster ours is."""
    return ratio(found, *(lambda one, s=s: percentile(steady(one[s]["itl_s"]), share) for s in (peer, ours)))


def _row(name: str, capacity: int, limit: int | None, found: list[Round], setup: Setup) -> dict[str, Any]:
    results = [one[name] for one in found if not one[name].get("killed")]
    row: dict[str, Any] = {
        "system": name,
        "C": capacity,
        "limit GB": limit and number(limit / 1e9),
        "rounds": len(results),
    }
    if not results:
        return row | {"p50 ms": "killed"}
    row["p50 ms"] = str(spread([1e3 * _p50(one) for one in results]))
    row["p95 ms"] = str(spread([1e3 * percentile(steady(one["itl_s"]), 0.95) for one in results]))
    row["ttft s"] = str(spread([one["ttft_s"] for one in results]))
    row["MB read a token"] = number(spread([_read_mb(one) for one in results]).median)
    peaks = [one["peak_bytes"] for one in results if one.get("peak_bytes")]
    row["peak GB"] = number(max(peaks) / 1e9) if peaks else None
    same = [a == b for one in found for a, b in zip(one["remoe"].get("best") or [], one[name].get("best") or [])]
    row["same argmax"] = f"{100 * sum(same) / len(same):.0f} %" if same else None
    return row


def _read_mb(result: dict) -> float:
    if "token_bytes" in result:
        part = steady(result["token_bytes"])
        return sum(part) / len(part) / 1e6
    part = steady(result["loads"])
    return sum(part) / len(part) * result["expert_bytes"] / 1e6
