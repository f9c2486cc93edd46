"""A run that is steered to a limit against fixed weights: where it ends, and how much of their saved load it has there.

    python benchmarks/steered.py [--seeds 0,1,2] [--limit +1%] [--weights 0.3,0.5,0.65,0.8,1,1.3] [--work build/steered]

The fixed weights are trained for the first seed, the steered run for each. Saved load is that of a cache of C slots against the base
with LRU; the fixed weights' is interpolated linearly to the steered run's perplexity, both on texts that steered nothing. About 3 minutes
a run on one core. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

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
    fixed = sorted((arm for arm in reports[0]["arms"] if arm["weight"]), key=lambda arm: arm["perplexity_change"])
    print(
        f"{reports[0]['conditions']['device_name']}, {reports[0]['conditions']['dtype']}, remoe {reports[0]['remoe']}\n"
    )
    print(
        "| weight | perplexity | EOR | effective experts | top-8 mass | "
        + " | ".join(f"load, C = {c}" for c in CAPACITIES)
        + " |"
    )
    print("|---|---|---|---|---|" + "---|" * len(CAPACITIES))
    for name in ("base", "ce-only", *(arm["name"] for arm in sorted(fixed, key=lambda arm: arm["weight"]))):
        print(row(name, reports[0]))
    for seed, report in zip(seeds, reports, strict=True):
        arm = next(arm for arm in report["arms"] if arm["steering"])
        print(row(arm["name"], report, f"{asked.limit}, seed {seed}"))
    print("\n| seed | steering texts | other texts | cross entropy alone | " + " | ".join(f"of the fixed weights' saving, C = {c}" for c in CAPACITIES) + " |")  # fmt: skip
    print("|---|---|---|---|" + "---|" * len(CAPACITIES))
    for seed, report in zip(seeds, reports, strict=True):
        arm = next(arm for arm in report["arms"] if arm["steering"])
        control = next(one for one in report["arms"] if one["name"] == "ce-only")
        at = [one["perplexity_change"] for one in fixed]
        shares = []
        for capacity in CAPACITIES:
            saved = [-load(reports[0], one["name"], capacity) for one in fixed]
            shares.append(-load(report, arm["name"], capacity) / float(np.interp(arm["perplexity_change"], at, saved)))
        changes = [arm["steering"]["change"], arm["perplexity_change"], control["perplexity_change"]]
        print(f"| {seed} | " + " | ".join(f"{100 * value:+.2f} %" for value in changes) + " | " + " | ".join(f"{100 * value:.1f} %" for value in shares) + " |")  # fmt: skip


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


def row(name: str, report: dict[str, Any], title: str = "") -> str:
    arm = next(arm for arm in report["arms"] if arm["name"] == name)
    mean = arm["concentration"]
    loads = " | ".join(f"{100 * load(report, name, capacity):+.1f} %" for capacity in CAPACITIES)
    return f"| {title or name} | {100 * arm['perplexity_change']:+.2f} % | {arm['eor']:.3f} | {mean['effective_experts']:.1f} | {mean['top_8_mass']:.3f} | {loads} |"


def load(report: dict[str, Any], name: str, capacity: int) -> float:
    """Change of the load of LRU, against the base's."""
    place = (name, capacity, "lru", "forced", 0)
    keys = ("arm", "capacity", "policy", "admission", "bonus")
    return next(cell["load_change"] for cell in report["cells"] if tuple(cell[key] for key in keys) == place)


if __name__ == "__main__":
    main()
