"""Against what the bytes allow: the I/O floor, proportionality to missed bytes, sizes, contexts, layers, the first token."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from decode.checkpoint import shorter
from decode.peers import split_ms
from decode.rounds import Bar, line, number, Spread, spread, steady
from decode.setup import Setup

SIZES = (7, 12, 24)
ALL_SIZES = (6, 8, 12, 16, 24, 32, 48, 64)
SKEWS = (0, 0.5, 1, 1.5, 2.5, 4)
CONTEXTS = (8, 2048)
LAYERS = (2, 4, 6, 8)
PROMPTS = (8, 32, 128)


def floor(setup: Setup) -> dict[str, Any]:
    """TPOT against the same loads without the model plus the model without loads."""
    sizes = [c for c in SIZES if c < setup.geometry.experts]
    request, tokens = setup.request(), setup.tokens
    every = {"capacity": setup.geometry.experts, "warm": "carry", "label": "fill", **request}
    steps = [{"capacity": c, "floor": True, "label": c, **request} for c in sizes]
    found: list[dict] = []
    for result in setup.ours([*steps, every, {**every, "label": "hit"}] * setup.rounds):
        if not found or result["label"] in found[-1]:
            found.append({})
        found[-1][result["label"]] = result
    bars, rows = [], []
    for c in sizes:
        tpot = [_mean(one[c]["itl_s"]) for one in found]
        io = [_mean(one[c]["floor_s"]) for one in found]
        hit = [_mean(one["hit"]["itl_s"]) for one in found]
        other = [h - _mean(one["hit"]["split_s"]["experts"]) for h, one in zip(hit, found)]
        strict = spread([t / (i + o) for t, i, o in zip(tpot, io, other)])
        loose = spread([t / (i + h) for t, i, h in zip(tpot, io, hit)])
        bars.append(Bar("TPOT against I/O floor + all-hit TPOT", loose, 1.1, better="less", note=f"C = {c}"))
        bars.append(
            Bar("TPOT against I/O floor + the rest of all-hit", strict, 1.25, better="less", note=f"C = {c}, stretch")
        )
        results = [one[c] for one in found]
        rows.append(
            {
                "C": c, "TPOT ms": _ms(tpot), "I/O floor ms": _ms(io), "all hit ms": _ms(hit),
                "MB a token": number(_mb(results[0])), "floor GB/s": number(fmean(r["floor_bandwidth"] for r in results) / 1e9),
                "io": results[0]["io"], "counts match": all(r["counts_match"] for r in results),
                **{f"{key} ms": number(value) for key, value in split_ms(results).items()},
            }
        )  # fmt: skip
    book = spread([1e3 * _mean(one[sizes[0]]["split_s"]["bookkeeping"]) / setup.n_layers for one in found])
    bars.append(Bar("bookkeeping a layer", book, 1, better="less", unit="ms", note=f"C = {sizes[0]}"))
    moved = [r["read_bytes"] / r["bytes"] for one in found for r in one.values() if r["bytes"]]
    bars.append(Bar("bytes read against bytes of experts", spread(moved), 1.01, better="less"))
    return {"bars": bars, "rows": rows, "rounds": found, "tokens": tokens}


def linear(setup: Setup) -> dict[str, Any]:
    """TPOT over the bytes that gates of more and less skew make it miss, at one size."""
    capacity = 8
    steps = [{"capacity": capacity, "gates": {"skew": skew}, "label": skew, **setup.request()} for skew in SKEWS]
    found = _by_label(setup.ours([*steps, {"probe": 48, "label": "probe"}] * setup.rounds))
    bandwidth = spread([one["bandwidth"] for one in found["probe"]])
    rows, xs, ys = [], [], []
    for skew in SKEWS:
        missed = spread([_mb(one) for one in found[skew]]).median
        tpot = spread([1e3 * _mean(one["itl_s"]) for one in found[skew]])
        xs.append(missed)
        ys.append(tpot.median)
        rows.append(
            {"skew": skew, "EOR": number(found[skew][0]["eor"]), "MB a token": number(missed), "TPOT ms": str(tpot)}
        )
    slope, intercept, fit = line(xs, ys)  # ms a MB
    fits = [
        line([_mb(found[s][r]) for s in SKEWS], [1e3 * _mean(found[s][r]["itl_s"]) for s in SKEWS])
        for r in range(setup.rounds)
    ]
    rate = [1 / f[0] / (one["bandwidth"] / 1e9) for f, one in zip(fits, found["probe"])]
    bars = [
        Bar("TPOT is linear in missed bytes, R2", Spread(fit, min(f[2] for f in fits), max(f[2] for f in fits), setup.rounds), 0.95, unit="", note=f"C = {capacity}"),
        Bar("its slope against O_DIRECT reads alone", spread(rate), 0.8, note=f"{number(bandwidth.median / 1e9)} GB/s by O_DIRECT"),
    ]  # fmt: skip
    fitted = {"ms a MB": slope, "ms": intercept, "R2": fit, "GB/s": 1 / slope}
    return {"bars": bars, "rows": rows, "rounds": found, "fit": fitted, "points": list(zip(xs, ys))}


def sizes(setup: Setup) -> dict[str, Any]:
    """More slots never cost time."""
    wanted = [c for c in ALL_SIZES if setup.geometry.top_k <= c <= setup.geometry.experts]
    found = _by_label(setup.ours([{"capacity": c, "label": c, **setup.request()} for c in wanted] * setup.rounds))
    medians = [spread([_mean(one["itl_s"]) for one in found[c]]) for c in wanted]
    growth = [
        spread([_mean(b["itl_s"]) / _mean(a["itl_s"]) for a, b in zip(found[small], found[large])])
        for small, large in zip(wanted, wanted[1:])
    ]
    worst = max(growth, key=lambda one: one.median)
    # the largest sizes load the same and differ by what two equal runs do
    bars = [Bar("TPOT at one size against the next smaller, the worst", worst, 1.05, better="less")]
    rows = [
        {"C": c, "TPOT ms": _ms([_mean(one["itl_s"]) for one in found[c]]), "MB a token": number(_mb(found[c][0]))}
        for c in wanted
    ]
    return {
        "bars": bars,
        "rows": rows,
        "rounds": found,
        "points": [(c, 1e3 * m.median) for c, m in zip(wanted, medians)],
    }


def context(setup: Setup) -> dict[str, Any]:
    """What a long context adds: to what users see at a small cache, and with all experts in their slots (attention alone)."""
    lengths = (CONTEXTS[0], min(CONTEXTS[-1], setup.geometry.context - setup.tokens - 1))
    sizes = {"C = 8": {"capacity": 8}, "all hit": {"capacity": setup.geometry.experts, "warm": "carry"}}
    steps: list[dict] = []
    for name, how in sizes.items():
        asked = [{**how, **setup.request(prompt=length), "label": f"{name}, {length}"} for length in lengths]
        fill = [{**step, "label": "fill"} for step in asked] if "warm" in how else []
        steps += fill + asked * setup.rounds
    found = _by_label(setup.ours(steps))
    bars, rows = [], []
    for name in sizes:
        short, long = ([_mean(one["itl_s"]) for one in found[f"{name}, {length}"]] for length in lengths)
        grown = spread([b / a for a, b in zip(short, long)])
        note = f"{name}, {lengths[0]} to {lengths[1]}"
        bars.append(Bar("TPOT in a long context", grown, 1.1, better="less", note=note))
        for length, tpot in zip(lengths, (short, long)):
            results = found[f"{name}, {length}"]
            rows.append(
                {
                    "size": name, "context": length, "TPOT ms": _ms(tpot), "MB a token": number(_mb(results[0])),
                    "attention ms": number(split_ms(results)["attention"]),
                }
            )  # fmt: skip
    return {"bars": bars, "rows": rows, "rounds": found}


def layers(setup: Setup) -> dict[str, Any]:
    """TPOT grows by the same for each layer."""
    counts = [n for n in LAYERS if n <= setup.geometry.layers] if setup.geometry.layers >= 8 else [2, 3]
    found: dict[str, list[dict]] = {str(n): [] for n in counts}
    for _ in range(setup.rounds):
        for n in counts:
            folder = shorter(setup.model, setup.work / f"layers-{n}", n)
            found[str(n)].append(setup.ours([{"capacity": 8, **setup.request()}], model=folder))
    tpots = [spread([1e3 * _mean(one["itl_s"]) for one in found[str(n)]]) for n in counts]
    fits = [line(counts, [1e3 * _mean(found[str(n)][r]["itl_s"]) for n in counts]) for r in range(setup.rounds)]
    slope, intercept, fit = line(counts, [one.median for one in tpots])
    bars = [Bar("TPOT is linear in layers, R2", Spread(fit, min(f[2] for f in fits), max(f[2] for f in fits), setup.rounds), 0.95, unit="", note="C = 8")]  # fmt: skip
    rows = [{"layers": n, "TPOT ms": str(tpot)} for n, tpot in zip(counts, tpots)]
    return {"bars": bars, "rows": rows, "rounds": found, "fit": {"ms a layer": slope, "ms": intercept}}


def ttft(setup: Setup) -> dict[str, Any]:
    """The first token against the prompt's experts read once."""
    prompts = [p for p in PROMPTS if p < setup.geometry.context - 8]
    steps: list[dict] = []
    for prompt in prompts:
        steps += [
            {"capacity": 12, "label": prompt, **setup.request(2, prompt)},
            {"probe": 48, "label": f"probe {prompt}"},
        ]
    found = _by_label(setup.ours(steps * setup.rounds))
    bars, rows = [], []
    for prompt in prompts:
        pairs = list(zip(found[prompt], found[f"probe {prompt}"]))
        against = spread([one["ttft_s"] / (one["prefill"]["bytes"] / probe["bandwidth"]) for one, probe in pairs])
        gb = number(fmean(one["prefill"]["bytes"] for one, _ in pairs) / 1e9)
        bars.append(
            Bar(
                "TTFT against the prompt's experts read once",
                against,
                1.3,
                better="less",
                note=f"{prompt} tokens, {gb} GB",
            )
        )
        rows.append(
            {"prompt": prompt, "ttft s": str(spread([one["ttft_s"] for one, _ in pairs])), "GB": gb,
             "O_DIRECT GB/s": number(fmean(probe["bandwidth"] for _, probe in pairs) / 1e9),
             **{f"{key} s": number(fmean(one["prefill_split_s"][key] for one, _ in pairs)) for key in pairs[0][0]["prefill_split_s"]}}
        )  # fmt: skip
    return {"bars": bars, "rows": rows, "rounds": found}


def _by_label(results: Sequence[dict]) -> dict[Any, list[dict]]:
    found: dict[Any, list[dict]] = {}
    for one in results:
        found.setdefault(one["label"], []).append(one)
    return found


def _mean(seconds: Sequence[float]) -> float:
    return fmean(steady(seconds))


def _mb(result: dict) -> float:
    return fmean(steady(result["loads"])) * result["expert_bytes"] / 1e6


def _ms(seconds: Sequence[float]) -> str:
    return str(spread([1e3 * one for one in seconds]))
