"""A run that is steered to a limit against fixed weights: where it ends, and how much of their saved load it has there.

    python benchmarks/steered.py [--seeds 0,1,2] [--limit +1%] [--weights 0.3,0.5,0.65,0.8,1,1.3] [--work build/steered]

The fixed weights are trained for the first seed, the steered run for each; all are measured on the texts of a seed that steered nothing.
Saved load is that of a cache of C slots against the base with LRU; the fixed weights' is interpolated linearly to the steered run's
perplexity. About 3 minutes a run on one core. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from remoe_cli import recipe as recipes
from remoe_cli.delta import Delta, put
from remoe_cli.families import find_gates
from remoe_cli.families.loader import in_memory, load_resident
from remoe_cli.hub.resolve import resolve
from remoe_cli.measure.steering import halves
from remoe_cli.measure.swept import Place, record_text, replayed, Texts
from remoe_cli.report.concentration import concentration_figures
from remoe_cli.run import Run
from remoe_cli.train.data import load_documents, load_tokenizer

CAPACITIES = (8, 12, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--limit", default="+1%")
    parser.add_argument("--weights", default="0.3,0.5,0.65,0.8,1,1.3")
    parser.add_argument("--work", type=Path, default=Path("build/steered"))
    asked = parser.parse_args()
    seeds = asked.seeds.split(",")
    reports = [sweep(seed, ("limit," + asked.weights) if seed == seeds[0] else "limit", asked) for seed in seeds]
    fixed = {f"{arm['weight']:g}": Path(arm["run"]) for arm in reports[0]["arms"] if arm["weight"]}
    control = Path(reports[0]["arms"][1]["run"])
    print(
        f"{reports[0]['conditions']['device_name']}, {reports[0]['conditions']['dtype']}, remoe {reports[0]['remoe']}\n"
    )
    shares = []
    for seed, report in zip(seeds, reports, strict=True):
        arm = next(arm for arm in report["arms"] if arm["steering"])
        found = measured(
            {"base": None, "cross entropy alone": control, **fixed, f"steered to {asked.limit}": Path(arm["run"])}, seed
        )
        print(f"Seed {seed}:\n\n{table(found)}\n")
        *known, (steered, saved) = [
            (one.change, [-load for load in one.loads]) for name, one in found.items() if name[0] not in "bc"
        ]
        at, fixed_saved = zip(*sorted(known), strict=True)
        interpolated = [float(np.interp(steered, at, column)) for column in zip(*fixed_saved, strict=True)]
        shares.append(
            [arm["steering"]["change"], steered, *(one / other for one, other in zip(saved, interpolated, strict=True))]
        )
    print(
        "| seed | steering texts | other texts | "
        + " | ".join(f"of the fixed weights' saving, C = {c}" for c in CAPACITIES)
        + " |"
    )
    print("|---|---|---|" + "---|" * len(CAPACITIES))
    for seed, (steering, other, *of) in zip(seeds, shares, strict=True):
        print(
            f"| {seed} | {100 * steering:+.2f} % | {100 * other:+.2f} % | "
            + " | ".join(f"{100 * one:.1f} %" for one in of)
            + " |"
        )


class Measured(NamedTuple):
    """change: of perplexity; loads: the change of LRU's at each of CAPACITIES; both against the base."""

    change: float
    eor: float
    effective_experts: float
    top_8_mass: float
    loads: list[float]


def measured(runs: dict[str, Path | None], seed: str) -> dict[str, Measured]:
    """Each run's gates on the same texts, those that steered nothing in the steered runs of this seed."""
    checkpoint = resolve("demo")
    recipe = recipes.override(recipes.load("remoe", "demo"), [f"train.seed={seed}"])
    documents = load_documents(recipe.data, load_tokenizer(checkpoint), seed=recipe.train.seed)
    texts = Texts(halves(documents)[1].heldout, recipe.train.sequence, recipe.evaluate.rows, recipe.train.micro_batch)
    model = load_resident(checkpoint, torch.float32, "cpu")
    gates = find_gates(model)
    stock = {name: tensor.detach().clone() for gate in gates for name, tensor in gate.parameters.items()}
    found: dict[str, Measured] = {}
    of_base: tuple[float, list[float]] | None = None
    for name, run in runs.items():
        put(model, in_memory(model, checkpoint, Delta.load(Run(run).delta).tensors) if run else stock)
        text, trace = record_text(model, gates, None, texts)
        loads = [replayed(trace, Place(c, "lru", "forced"), 1)["loads_a_token"] for c in CAPACITIES]
        quality = text.measures()
        of_base = of_base or (quality.loss, loads)
        mean = concentration_figures(trace)
        change = math.expm1(quality.loss - of_base[0])
        against = [load / base - 1 for load, base in zip(loads, of_base[1], strict=True)]
        found[name] = Measured(change, quality.eor, mean["effective_experts"], mean["top_8_mass"], against)
    return found


def table(found: dict[str, Measured]) -> str:
    columns = [
        "weight",
        "perplexity",
        "EOR",
        "effective experts",
        "top-8 mass",
        *(f"load, C = {c}" for c in CAPACITIES),
    ]
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    for name, one in found.items():
        loads = " | ".join(f"{100 * load:+.1f} %" for load in one.loads)
        lines.append(
            f"| {name} | {100 * one.change:+.2f} % | {one.eor:.3f} | {one.effective_experts:.1f} | {one.top_8_mass:.3f} | {loads} |"
        )
    return "\n".join(lines)


def sweep(seed: str, weights: str, asked: argparse.Namespace) -> dict[str, Any]:
    out = asked.work / f"seed-{seed}"
    command = [
        "sweep",
        "demo",
        "--weights",
        weights,
        "--max-ppl",
        asked.limit,
        "--cache",
        ",".join(map(str, CAPACITIES)),
    ]
    settings = ["--policy", "lru,decayed_weight", "--set", f"train.seed={seed}", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "remoe_cli", *command, *settings], check=True, stdout=sys.stderr)
    return json.loads((out / "sweep.json").read_text())


if __name__ == "__main__":
    main()
