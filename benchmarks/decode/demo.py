"""The headline: the demo's own routing with experts of real size, base against tuned gates, on the same held-out text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from decode import limits
from decode.peers import split_ms
from decode.rounds import Bar, number, Spread, spread, steady
from decode.setup import python, Setup

CAPACITY = 12
PROMPT, EXPERTS = 16, 64
RECIPE = "demo-strong"
ARMS = ("base", "tuned")


def demo(setup: Setup, copies: int = 512) -> dict[str, Any]:
    """Both arms in turn, round by round, another held-out text each round; then what bytes and compute predict."""
    wide, delta = _widened(setup, copies), setup.delta or _tuned(setup)
    requests = _requests(setup)
    steps: list[dict] = []
    for turn, request in enumerate(requests):
        for arm in ARMS if turn % 2 == 0 else ARMS[::-1]:
            gates = {"gates": {"delta": delta}} if arm == "tuned" else {}
            steps.append({"label": arm, "capacity": CAPACITY, "floor": True, **gates, **request})
        for arm in ARMS:
            gates = {"gates": {"delta": delta}} if arm == "tuned" else {}
            every = {"capacity": EXPERTS, "warm": "carry", **gates, **request}
            steps += [{**every, "label": f"{arm} fill"}, {**every, "label": f"{arm} hit"}]
    found: list[dict] = []
    for result in setup.ours(steps, model=wide):
        if not found or result["label"] in found[-1]:
            found.append({})
        found[-1][result["label"]] = result
    measured = [_tpot(one["base"]) / _tpot(one["tuned"]) for one in found]
    predicted = [_added(one) for one in found]
    pipelined = [_pipelined(one) for one in found]
    loads = [_mb(one["base"]) / _mb(one["tuned"]) for one in found]
    equal = _equal_choices(setup, wide, requests)
    where = f"C = {CAPACITY}, {copies} copies, {len(found)} rounds, {delta}"
    less: dict[str, Any] = {"better": "less", "unit": ""}
    bars = [
        Bar("widened demo: base / tuned TPOT", spread(measured), 1.5, note=where),
        Bar("widened demo: against all-hit + missed bytes / bandwidth, off by", _off(measured, predicted), 0.1, **less),
        Bar("widened demo: against the same, loads beside experts, off by", _off(measured, pipelined), 0.1, **less),
        Bar("widened demo: share of equal expert choices", spread([equal]), 0.99, unit=""),
    ]
    rows = [
        {
            "arm": arm,
            "TPOT ms": str(spread([1e3 * _tpot(one[arm]) for one in found])),
            "all-hit ms": str(spread([1e3 * _tpot(one[f"{arm} hit"]) for one in found])),
            "I/O floor ms": str(spread([1e3 * fmean(steady(one[arm]["floor_s"])) for one in found])),
            "MB a token": number(fmean(_mb(one[arm]) for one in found)),
            "hit %": number(100 * fmean(one[arm]["hits"] / (one[arm]["hits"] + one[arm]["misses"]) for one in found)),
            "EOR": number(fmean(one[arm]["eor"] for one in found)),
            "counts match": all(one[arm]["counts_match"] for one in found),
            **{f"{key} ms": number(value) for key, value in split_ms([one[arm] for one in found]).items()},
        }
        for arm in ARMS
    ]
    headline = {
        "ratio": spread(measured)._asdict(), "predicted": spread(predicted)._asdict(),
        "pipelined": spread(pipelined)._asdict(), "loads": spread(loads)._asdict(),
        "tpot_ms": {arm: [1e3 * _tpot(one[arm]) for one in found] for arm in ARMS},
        "mb": {arm: [_mb(one[arm]) for one in found] for arm in ARMS},
        "hit_ms": {arm: [1e3 * _tpot(one[f"{arm} hit"]) for one in found] for arm in ARMS},
    }  # fmt: skip
    return {"bars": bars, "rows": rows, "rounds": found, "headline": headline, "equal_choices": equal}


def _off(measured: list[float], predicted: list[float]) -> Spread:
    return spread([abs(m / p - 1) for m, p in zip(measured, predicted)])


def _load_s(one: dict) -> float:
    """Of one expert, by the round's I/O floor."""
    return sum(sum(steady(one[arm]["floor_s"])) for arm in ARMS) / sum(sum(steady(one[arm]["loads"])) for arm in ARMS)


def _added(one: dict) -> float:
    """base / tuned, where a token takes its all-hit time and then its missed bytes."""
    base, tuned = (_tpot(one[f"{arm} hit"]) + fmean(steady(one[arm]["loads"])) * _load_s(one) for arm in ARMS)
    return base / tuned


def _pipelined(one: dict) -> float:
    """base / tuned, where loads and experts of a layer run beside each other. Three times go in, none of them from the runs that
    are predicted: of one load, of one expert and of the rest of a token (all hits)."""
    load = _load_s(one)
    hits = [one[f"{arm} hit"] for arm in ARMS]
    experts = fmean(fmean(steady(hit["split_s"]["experts"])) for hit in hits)
    rest = fmean(map(_tpot, hits)) - experts
    n_layers = len(hits[0]["layer_loads"][0])
    expert = experts / n_layers / hits[0]["top_k"]

    def layer(missed: int) -> float:
        """Those in their slots run first, then each as it lands."""
        done = (hits[0]["top_k"] - missed) * expert
        for landed in range(1, missed + 1):
            done = max(done, landed * load) + expert
        return done

    def token(arm: str) -> float:
        return rest + fmean(sum(map(layer, missed)) for missed in steady(one[arm]["layer_loads"]))

    return token("base") / token("tuned")


def _equal_choices(setup: Setup, wide: Path, requests: list[dict]) -> float:
    """Of the demo as it is and widened, on the same tokens: K experts of a token in a layer, as sets."""
    steps = [{"capacity": EXPERTS, "trace": True, **request} for request in requests[:2]]
    traces = [setup.ours(steps, model=model) for model in (wide, Path("demo"))]
    shares = []
    for ours, theirs in zip(*traces):
        for a, b in zip(ours["experts"], theirs["experts"]):
            shares += [len(set(x) & set(y)) / len(x) for x, y in zip(a, b)]
    return fmean(shares)


def _widened(setup: Setup, copies: int) -> Path:
    folder = setup.work.parent / f"demo-x{copies}"
    if not (folder / "model.safetensors.index.json").is_file():
        print(f"widening the demo in {folder}", file=sys.stderr)
        subprocess.run([*python("decode.widen"), str(folder), "--copies", str(copies)], check=True, cwd=limits.BENCH)
    return folder


def _tuned(setup: Setup) -> str:
    folder = setup.work.parent / RECIPE
    if not (folder / "delta").is_dir():
        print(f"remoe finetune demo --recipe {RECIPE} --out {folder}", file=sys.stderr)
        command = [*python("remoe_cli"), "finetune", "demo", "--recipe", RECIPE, "--out", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(folder)


def _requests(setup: Setup) -> list[dict]:
    """Stretches of the demo's held-out documents, from documents far from each other."""
    done = subprocess.run(
        [*python("decode.heldout"), str(setup.rounds), str(PROMPT), str(setup.tokens + 1)],
        check=True, capture_output=True, text=True, cwd=limits.BENCH,
    )  # fmt: skip
    return json.loads(done.stdout)


def _tpot(result: dict) -> float:
    return fmean(steady(result["itl_s"]))


def _mb(result: dict) -> float:
    return fmean(steady(result["loads"])) * result["expert_bytes"] / 1e6
