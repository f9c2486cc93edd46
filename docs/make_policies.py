"""Rewrites the tables of docs/policies.md: every policy on every shared trace, and on the demo's base and tuned gates.

    python docs/make_policies.py [--run RUNS/NAME] [--work build/policies] [--shared ../shared]

Without --run it finetunes the demo first (a few minutes on 2 cores). Traces are kept in --work and used again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from remoe_cli.cache import choose
from remoe_cli.cache.policies import ALONE
from remoe_cli.replay import Asked, replay

DOC = Path(__file__).parent / "policies.md"
BEGIN, END = "<!-- begin: python docs/make_policies.py -->", "<!-- end -->"
DEEPSEEK, QWEN3 = 17_301_504, 9_437_184  # bytes of a bf16 expert: 3 x hidden x intermediate x 2


class Column(NamedTuple):
    """One trace of a table. source: under shared/data/traces, or None for the demo's, which are recorded."""

    title: str
    source: str | None
    fit: str | None = None
    against: str | None = None


class Table(NamedTuple):
    title: str
    top_k: int
    expert_bytes: int | None
    columns: dict[str, Column]


TABLES = [
    Table(
        "DeepSeek-V2-Lite (26 layers, top-6 of 64; bf16): esft intent and summary",
        6,
        DEEPSEEK,
        {
            "intent": Column("intent", "esft/intent.npz", fit="summary"),
            "summary": Column("summary", "esft/summary.npz", fit="intent"),
        },
    ),
    Table(
        "Qwen3-30B-A3B (48 layers, top-8 of 128; bf16): code and general",
        8,
        QWEN3,
        {
            "code": Column("code", "cacheable-by-design/qwen3-30b-a3b/code.npz", fit="general"),
            "general": Column("general", "cacheable-by-design/qwen3-30b-a3b/general.npz", fit="code"),
        },
    ),
    Table(
        "bigmoe-on-edge (Q4_K_M, run with top-6 of 128): qwen (Qwen3-30B-A3B, 48 layers) and gemma (gemma-4-26B, 30 layers)",
        6,
        None,
        {
            "qwen": Column("qwen", "bigmoe-on-edge/qwen.route.csv.gz"),
            "gemma": Column("gemma", "bigmoe-on-edge/gemma.route.csv.gz"),
        },
    ),
    Table(
        "demo (5 layers, top-6 of 64; bf16): base gates, and gates tuned with the recipe remoe",
        6,
        None,
        {
            "base": Column("base", None, fit="base-fit"),
            "tuned": Column("tuned", None, fit="tuned-fit", against="base"),
        },
    ),
]


SWEEP = {
    "lrfu": (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1),
    "decayed_weight": (0.5, 0.8, 0.9, 0.95, 0.99),
    "decayed": (0.5, 0.6, 0.7, 0.8, 0.9, 0.95),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a finished run of the demo")
    parser.add_argument("--work", type=Path, default=Path("build/policies"))
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    record_demo(asked.work, asked.run)
    parts, best, swept = [], [], {}
    for table in TABLES:
        reports = {}
        for name, column in table.columns.items():
            if column.source is not None:
                import_trace(asked.work / f"{name}.trace", asked.shared / "data" / "traces" / column.source)
        for name, column in table.columns.items():
            reports[name] = measure(asked.work, name, column, table)
            swept[column.title] = sweep(asked.work, name, column, table)
        parts.append(render(table, reports))
        best += [digest(column.title, reports[name]) for name, column in table.columns.items()]
    text = DOC.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    DOC.write_text(head + "\n".join([BEGIN, "", DIGEST_HEAD, *best, "", sweep_text(swept), *parts, END]) + tail)


def remoe(*words: object) -> None:
    done = subprocess.run([sys.executable, "-m", "remoe_cli", *map(str, words)])
    if done.returncode:
        sys.exit(done.returncode)


def import_trace(path: Path, source: Path) -> None:
    if not path.exists():
        remoe("trace", "import", source, "-o", path)


def record_demo(work: Path, run: Path | None) -> None:
    """Base and tuned gates on the held-out requests of `remoe eval`, and on others (seed 1) to fit `static` on."""
    if run is None and not (work / "tuned-fit.trace").exists():
        run = work / "run"
        if not (run / "delta").exists():
            remoe("finetune", "demo", "--out", run)
    for name, seed in (("base", 0), ("tuned", 0), ("base-fit", 1), ("tuned-fit", 1)):
        path = work / f"{name}.trace"
        if not path.exists():
            with_delta = ["--delta", run] if name.startswith("tuned") else []
            remoe("trace", "demo", *with_delta, "--seed", seed, "--probabilities", "-o", path)


def measure(work: Path, name: str, column: Column, table: Table) -> dict[str, Any]:
    k = table.top_k
    return replay(work / f"{name}.trace", rules(work, column, table, [k, k + 2, 2 * k, 4 * k]), with_figures=False)


def sweep(work: Path, name: str, column: Column, table: Table) -> dict[str, float]:
    """Gap closed of each parameter, forced, at 2K slots."""
    wanted = [f"{policy}:{value:g}" for policy, values in SWEEP.items() for value in values]
    asked = replace(rules(work, column, table, [2 * table.top_k]), policies=wanted, admission="forced")
    return {cell["policy"]: cell["gap_closed"] for cell in replay(work / f"{name}.trace", asked, with_figures=False)["cells"]
            if cell["arm"] == "trace"}  # fmt: skip


def sweep_text(swept: dict[str, dict[str, float]]) -> str:
    lines = ["Parameters, forced, C = 2K; share of the gap closed:", "", f"| policy | {' | '.join(swept)} |"]
    lines.append(f"|---|{'---:|' * len(swept)}")
    for policy, values in SWEEP.items():
        for value in values:
            key = f"{policy}:{value:g}"
            row = [f"{100 * found[key]:.0f}%" if key in found else "n/a" for found in swept.values()]
            lines.append(f"| {key} | {' | '.join(row)} |")
    return "\n".join([*lines, ""])


def rules(work: Path, column: Column, table: Table, capacities: list[int]) -> Asked:
    return Asked(
        capacities=capacities,
        pool=False,
        step="atomic",
        reset="request",
        warm="cold",
        touch_order="listed" if column.source else "weight",
        fit=work / f"{column.fit}.trace" if column.fit else None,
        against=work / f"{column.against}.trace" if column.against else None,
        expert_bytes=table.expert_bytes,
    )


def cells_of(report: dict[str, Any]) -> dict[tuple[str, str, int], dict[str, Any]]:
    return {
        (cell["policy"], cell["admission"], cell["capacity"]): cell
        for cell in report["cells"]
        if cell["arm"] == "trace"
    }


def render(table: Table, reports: dict[str, dict[str, Any]]) -> str:
    sizes = next(iter(reports.values()))["capacities"]
    found = {name: cells_of(report) for name, report in reports.items()}
    heads = [f"{table.columns[name].title} C={size}" for name in reports for size in sizes]
    lines = [f"### {table.title}", "", f"| policy | admission | {' | '.join(heads)} |"]
    lines.append(f"|---|---|{'---:|' * len(heads)}")
    reasons: dict[str, list[str]] = {}
    for name, report in reports.items():
        for one in report["unavailable"]:
            reasons.setdefault(one["reason"], []).append(f"{one['policy']} ({name})")
    for policy in ALONE:
        for admission in ("forced", "bypass"):
            row = [cell_text(found[name].get((policy, admission, size))) for name in reports for size in sizes]
            lines.append(f"| {policy} | {admission} | {' | '.join(row)} |")
    for reason, who in reasons.items():
        lines.append(f"\nn/a, {', '.join(dict.fromkeys(who))}: {reason}.")
    return "\n".join([*lines, ""])


def cell_text(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "n/a"
    gap = cell["gap_closed"]
    return f"{number(cell['mb_a_token'])} {'n/a' if gap is None else f'{100 * gap:.0f}%'}"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


DIGEST_HEAD = """\
In short: the best causal policy of each trace and cache size, with the share of the gap it closes. Causal: it serves a running
decoder, or was fitted on another trace.

| trace | C | best with forced admission | best with bypass | hindsight | Belady, forced | left to foresight |
|---|---:|---|---|---:|---:|---:|"""


def digest(title: str, report: dict[str, Any]) -> str:
    """One row a cache size. Left: from the best causal cell to Belady with bypass on the same trace."""
    found = cells_of(report)
    lines = []
    for size in report["capacities"]:
        best = {}
        for admission in ("forced", "bypass"):
            causal = {
                policy: found[policy, admission, size]["gap_closed"]
                for policy in ALONE
                if "future" not in choose(policy).policy.needs and (policy, admission, size) in found
            }
            name = max(causal, key=lambda policy: causal[policy])
            ties = len({policy for policy in causal if causal[policy] == causal[name]})
            best[admission] = ("all alike" if ties > len(causal) // 2 else name, causal[name])
        oracles = [
            max(found["hindsight", admission, size]["gap_closed"] for admission in ("forced", "bypass")),
            found["belady", "forced", size]["gap_closed"],
        ]
        shown = " | ".join(f"{name} {100 * gap:.0f}%" for name, gap in best.values())
        left = found["belady", "bypass", size]["gap_closed"] - max(gap for _, gap in best.values())
        lines.append(
            f"| {title} | {size} | {shown} | {' | '.join(f'{100 * gap:.0f}%' for gap in oracles)} | {100 * left:.0f}% |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
