"""Objectives at equal quality on the demo: each is steered to the same perplexity, for several seeds, and meets every cache.

    python benchmarks/equal_quality.py [--seeds 0,1,2] [--limit +1%] [--work build/equal-quality]

One `remoe sweep` a seed, in which all arms have the same texts, steps, rates and schedule; what is in --work is not done again.
About 50 minutes a seed on one core. Prints Markdown tables: mean over the seeds [least, greatest].
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ARMS = {  # name of the recipe -> what --recipe takes
    "remoe": "remoe",
    "heads-only": "heads-only",
    "coverage-gates": str(HERE / "arms/coverage-gates.yaml"),
    "coverage-heads": str(HERE / "arms/coverage-heads.yaml"),
    "coverage-lora": str(HERE / "arms/coverage-lora.yaml"),
    "resident-mass-alone": str(HERE / "arms/resident-mass-alone.yaml"),
    "resident-mass": "resident-mass",
    "decayed-coverage": "decayed-coverage",
    "remoe-plus-text": str(HERE / "arms/remoe-plus-text.yaml"),
    "remoe-plus": "remoe-plus",
    "remoe-base": str(HERE / "arms/remoe-base.yaml"),
    "resident-mass-base": str(HERE / "arms/resident-mass-base.yaml"),
}
SHARED = (
    "train.steps=400", "train.micro_batch=4", "train.lr_warmup=0.1", "train.schedule=constant", "train.weight_decay=0", "objective.cache=12",
)  # fmt: skip
CAUSAL = ("decayed_weight", "lfru", "lrfu:0.1")
HEADS = ("temporal", "temporal_decayed:1")
AHEAD = (4, 8)
CAPACITIES = (8, 12, 16)
# Points of LRU's load that a point of perplexity is worth, of ReMoE between +.95 and +1.73 % (steered.py): arms end beside the
# limit on texts that steered nothing, and this moves them to the same place
SLOPE = {8: -6.2, 12: -6.5, 16: -6.8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--limit", default="+1%")
    parser.add_argument("--work", type=Path, default=Path("build/equal-quality"))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--rows", type=int, default=96, help="held-out rows that the figures are of")
    asked = parser.parse_args()
    arms = asked.arms.split(",")
    reports = [sweep(seed, arms, asked) for seed in asked.seeds.split(",")]
    print(conditions(reports, asked))
    print(quality(reports))
    for capacity in CAPACITIES:
        print(f"\nC = {capacity}\n\n{loads(reports, capacity)}")


def sweep(seed: str, arms: Sequence[str], asked: argparse.Namespace) -> dict[str, Any]:
    """sweep.json of one seed."""
    out = asked.work / f"seed-{seed}"
    settings = [word for setting in (*SHARED, f"train.seed={seed}") for word in ("--set", setting)]
    recipes = [word for arm in arms for word in ("--recipe", ARMS[arm])]
    numbers = [
        "--cache", ",".join(map(str, CAPACITIES)), "--policy", ",".join(("lru", *CAUSAL, *HEADS)), "--ahead", ",".join(map(str, AHEAD)),
        "--rows", str(asked.rows),
    ]  # fmt: skip
    command = ["sweep", "demo", *recipes, "--weights", "limit", "--max-ppl", asked.limit, *numbers, *settings]
    subprocess.run([sys.executable, "-m", "remoe_cli", *command, "--out", str(out)], check=True, stdout=sys.stderr)
    return json.loads((out / "sweep.json").read_text())


def conditions(reports: Sequence[dict[str, Any]], asked: argparse.Namespace) -> str:
    of = reports[0]["conditions"]
    return (
        f"{len(reports)} seeds ({asked.seeds}), limit {asked.limit}; {', '.join(SHARED)}; {of['rows']} rows of {of['row_tokens']} held-out tokens that "
        f"steered nothing ({of['tokens']:,} tokens, {of['requests']} requests); {of['device_name']}, {of['dtype']}, remoe {reports[0]['remoe']}\n"
    )


def quality(reports: Sequence[dict[str, Any]]) -> str:
    """What each arm is, without caches."""
    lines = ["| arm | perplexity | on the steering texts | EOR | effective experts |", "|---|---|---|---|---|"]
    for name in names(reports):
        found = [arm(report, name) for report in reports]
        steered = [one["steering"]["change"] for one in found if one["steering"]]
        experts = [one["concentration"]["effective_experts"] for one in found]
        lines.append(
            f"| {name} | {spread([one['perplexity_change'] for one in found], change)} | {spread(steered, change) if steered else ''} "
            f"| {spread([one['eor'] for one in found], '{:.3f}'.format)} | {spread(experts, '{:.1f}'.format)} |"
        )
    return "\n".join(lines)


def loads(reports: Sequence[dict[str, Any]], capacity: int) -> str:
    """Hit, AdjHit and MB a token against the base with LRU and as many slots: LRU, the best policy without a head, the best with one."""
    lines = [
        "| arm | LRU: hit | load | moved to the limit | best causal | hit | load | best with heads | hit | AdjHit | load |",
        "|---|" + "---|" * 9,
    ]
    for name in names(reports):
        row = [name]
        lru = cells(reports, name, capacity, "lru")
        row += [spread([one["hit_ratio"] for one in lru], share), load(lru)]
        row.append(moved(lru, reports[0]["limit"], capacity) if arm(reports[0], name)["steering"] else "")
        plain = best(
            reports, name, capacity, lambda policy: not policy.startswith(("temporal", "spatio")) and policy != "belady"
        )
        row += [plain, spread([one["hit_ratio"] for one in cells(reports, name, capacity, plain)], share),
                load(cells(reports, name, capacity, plain))]  # fmt: skip
        head = best(reports, name, capacity, lambda policy: policy.startswith(("temporal", "spatio")))
        of = cells(reports, name, capacity, head) if head else []
        row += [head, spread([one["hit_ratio"] for one in of], share), spread([one["adjusted_hit_ratio"] for one in of], share),
                load(of)] if head else [""] * 4  # fmt: skip
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def names(reports: Sequence[dict[str, Any]]) -> list[str]:
    return [one["name"] for one in reports[0]["arms"] if all(any(other["name"] == one["name"] for other in r["arms"]) for r in reports)]  # fmt: skip


def arm(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in report["arms"] if one["name"] == name)


def cells(reports: Sequence[dict[str, Any]], name: str, capacity: int, policy: str) -> list[dict[str, Any]]:
    """One a seed."""
    place = (name, capacity, policy, "forced", 0)
    keys = ("arm", "capacity", "policy", "admission", "bonus")
    return [cell for report in reports for cell in report["cells"] if tuple(cell[key] for key in keys) == place]


def best(reports: Sequence[dict[str, Any]], name: str, capacity: int, of: Callable[[str], bool]) -> str:
    """The policy of least mean load, among those; "" where there is none."""
    policies = {
        cell["policy"] for report in reports for cell in report["cells"] if cell["arm"] == name and of(cell["policy"])
    }
    return min(
        policies,
        key=lambda policy: mean([one["mb_a_token"] for one in cells(reports, name, capacity, policy)]),
        default="",
    )


def load(of: Sequence[dict[str, Any]]) -> str:
    """Against the base with LRU; beside it half the 95 % interval of the texts."""
    width = mean(
        [
            (one["mb_a_token_95"][1] - one["mb_a_token_95"][0]) / 2 / one["mb_a_token"] * (1 + one["load_change"])
            for one in of
        ]
    )
    return f"{spread([one['load_change'] for one in of], change)} ±{100 * width:.1f}"


def moved(of: Sequence[dict[str, Any]], limit: float, capacity: int) -> str:
    """LRU's load at the limit, along SLOPE."""
    at = [one["load_change"] + SLOPE[capacity] * (limit - one["perplexity_change"]) for one in of]
    return spread(at, change)


def spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    if len(values) == 1 or max(values) == min(values):
        return shown(mean(values))
    return f"{shown(mean(values))} [{shown(min(values))}, {shown(max(values))}]"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def change(value: float) -> str:
    return f"{100 * value:+.1f}"


def share(value: float) -> str:
    return f"{100 * value:.1f}"


if __name__ == "__main__":
    main()
