"""Rewrites the tables of docs/prefetch.md: every prefetcher beside LRU, the best policies and Belady, at equal memory.

    python docs/make_rivals.py [--run RUNS/NAME] [--work build/policies] [--shared ../shared] [--only NAME,NAME]

Without --run it finetunes the demo first (a few minutes on 2 cores). Traces and results are kept in --work and used again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remoe_cli.demo.corpus import documents
from remoe_cli.replay import Asked
from remoe_cli.replay import replay as measured
from remoe_cli.routing import read, write
from remoe_cli.routing.trace import FLOATS

DOC = Path(__file__).parent / "prefetch.md"
BEGIN, END = "<!-- begin: python docs/make_rivals.py -->", "<!-- end -->"


class Column(NamedTuple):
    """One trace. source: under shared/data/traces, None for the demo's, which are recorded."""

    title: str
    top_k: int
    expert_bytes: int | None
    source: str | None = None
    tokens: int | None = None


COLUMNS = {
    "base": Column("demo, base gates (5 layers, top-6 of 64)", 6, None),
    "tuned": Column("demo, gates tuned with the recipe demo-strong (remoe-plus, strong)", 6, None),
    "intent": Column(
        "esft intent (DeepSeek-V2-Lite, 26 layers, top-6 of 64), its first 2000 tokens",
        6,
        17_301_504,
        "esft/intent.npz",
        2000,
    ),
    "code": Column(
        "Qwen3-30B-A3B code (48 layers, top-8 of 128), its first 2000 tokens",
        8,
        9_437_184,
        "cacheable-by-design/qwen3-30b-a3b/code.npz",
        2000,
    ),
    "general": Column(
        "Qwen3-30B-A3B general (48 layers, top-8 of 128), its first 2000 tokens",
        8,
        9_437_184,
        "cacheable-by-design/qwen3-30b-a3b/general.npz",
        2000,
    ),
}


def words(k: int, capacity: int, admission: str) -> list[str]:
    """Everybody with his own paper's way of evicting, as near as there is one."""
    if admission == "bypass":
        return [f"held+option:{capacity - k if capacity > k else capacity}:0.005", "belady"]
    return [
        "lru", "lfu", "lfru", "lrfu:0.1", f"lru+gate_next:{k}", f"lru+gate_next_shared:{k}", f"lfu+moe_infinity:{k}",
        f"lru+promoe:{k}:1", f"lfu+finemoe:{2 * k}:1", f"lfu+finemoe:{2 * k}:3", f"lru+st_moe:{k}", f"lru+step:{2 * k}:1:0.5",
        f"lru+step:{2 * k}:1:0.7",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a finished run of the demo with the recipe remoe-plus")
    parser.add_argument("--work", type=Path, default=Path("build/policies"))
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument(
        "--only", default=",".join(COLUMNS), help="columns that are measured; the others must be in --work"
    )
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    for name in asked.only.split(","):
        kept = asked.work / f"rivals-{name}.json"
        if not kept.exists():
            record(asked.work, name, asked.run, asked.shared)
            kept.write_text(json.dumps(measure(asked.work, name)))
    found = {name: kept for name in COLUMNS if (kept := asked.work / f"rivals-{name}.json").exists()}
    parts = [render(COLUMNS[name], json.loads(kept.read_text())) for name, kept in found.items()]
    masked = asked.work / "rivals-masked.json"
    if not masked.exists():
        masked.write_text(json.dumps(quality(asked.work)))
    text = DOC.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    DOC.write_text(head + "\n".join([BEGIN, "", *parts, render_quality(json.loads(masked.read_text())), END]) + tail)


def remoe(*given: object) -> str:
    done = subprocess.run([sys.executable, "-m", "remoe_cli", *map(str, given)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def record(work: Path, name: str, run: Path | None, shared: Path) -> None:
    """The trace, and for the demo a predictor of the same gates, trained on texts that the trace has not."""
    column, path = COLUMNS[name], work / f"rivals-{name}.trace"
    if column.source is not None:
        if not path.exists():
            whole = work / f"rivals-{name}-whole.trace"
            remoe("trace", "import", shared / "data" / "traces" / column.source, "-o", whole)
            trace = read(whole)
            n = min(column.tokens or trace.n_tokens, trace.n_tokens)
            cut = {field: array[:n] for field in FLOATS if (array := getattr(trace, field)) is not None}
            borders = np.unique(np.minimum(trace.borders, n))
            write(replace(trace, experts=trace.experts[:n], borders=borders, prefill=trace.prefill[:n], **cut), path)
            whole.unlink()
        return
    if run is None and name == "tuned":
        run = work / "run-plus"
        if not (run / "delta").exists():
            remoe("finetune", "demo", "--recipe", "remoe-plus", "--out", run)
    delta = ["--delta", run] if name == "tuned" else []
    texts = work / "train.jsonl"
    texts.write_text("".join(json.dumps({"text": one.text}) + "\n" for one in documents("train")))
    everything = "--probabilities", "--guesses", "--hidden"
    for target, more in ((path, []), (work / f"rivals-{name}-train.trace", ["--prompts", texts, "--requests", 96])):
        if not target.exists():
            remoe("trace", "demo", *delta, *more, *everything, "-o", target)
    if not (work / f"rivals-{name}.npz").exists():
        remoe("predictor", "train", work / f"rivals-{name}-train.trace", "-o", work / f"rivals-{name}.npz")


def measure(work: Path, name: str) -> list[dict[str, Any]]:
    """One row a policy, admission and cache size; `reason` where the trace can't fill it."""
    column = COLUMNS[name]
    k, rows = column.top_k, []
    predictor = work / f"rivals-{name}.npz"
    sizes = [k + 2, 2 * k, 4 * k]
    for admission, at_once in (("forced", [sizes]), ("bypass", [[size] for size in sizes])):
        for capacities in at_once:
            asked = Asked(
                capacities=capacities, policies=words(k, capacities[0], admission), admission=admission, pool=False, step="atomic",
                reset="request", warm="cold", touch_order="listed" if column.source else "weight",
                expert_bytes=column.expert_bytes, predictor=predictor if predictor.exists() else None,
            )  # fmt: skip
            report = measured(work / f"rivals-{name}.trace", asked, with_figures=False)
            rows += report["cells"] + report["unavailable"]
    return rows


def quality(work: Path) -> list[dict[str, Any]]:
    """The decoder held to the option's experts: what that does to the model."""
    rows = []
    for policy, admission, reroute in (
        ("lru", "forced", None), ("held+option:12:0.02", "bypass", "max-rank:64:0"), ("held+option:12:0.005", "bypass", "max-rank:64:0"),
    ):  # fmt: skip
        bent = ["--reroute", reroute] if reroute else []
        shape = "--requests", 8, "--context", 64, "--tokens", 64, "--cache", 12
        made = remoe("decode", "demo", "--forced", "--prompts", "demo", *shape, "--policy", policy, "--admission", admission, *bent, "--json")  # fmt: skip
        row = json.loads(made)["rows"][0]
        names = "hit_ratio", "adjusted_hit_ratio", "mb_a_token", "perplexity"
        rows.append({"policy": policy, "masked": bool(reroute), **{key: row[key] for key in names}})
    return rows


def render(column: Column, rows: list[dict[str, Any]]) -> str:
    sizes = sorted({row["capacity"] for row in rows})
    unit = "MB" if any(row.get("mb_a_token") for row in rows) else "loads"
    heads = [f"C={size} {what}" for size in sizes for what in ("hit", "adj", unit)]
    lines = [
        f"### {column.title}",
        "",
        f"| policy | {' | '.join(heads)} | tables |",
        f"|---|{'---:|' * (len(heads) + 1)}",
    ]
    shown = {}
    for row in rows:
        name = row["policy"] + (", bypass" if row["admission"] == "bypass" else "")
        shown.setdefault(name if "option" not in name else "held+option:C-K:0.005, bypass", {})[row["capacity"]] = row
    reasons = []
    for name, cells in shown.items():
        texts, held = [], ""
        for size in sizes:
            cell = cells.get(size)
            if cell is None or "reason" in cell:
                texts += ["n/a"] * 3
                if cell is not None and f"{name}: {cell['reason']}" not in reasons:
                    reasons.append(f"{name}: {cell['reason']}")
                continue
            load = cell["mb_a_token"] if unit == "MB" else cell["loads_a_token"]
            texts += [
                f"{100 * cell['hit_ratio']:.1f}",
                f"{100 * cell['adjusted_hit_ratio']:.1f}",
                f"{load:.3g}" if load < 100 else f"{load:.0f}",
            ]
            held = size_text(cell["prefetch_bytes"])
        lines.append(f"| {name} | {' | '.join(texts)} | {held} |")
    return "\n".join([*lines, *(f"\nn/a, {reason}." for reason in reasons), ""])


def size_text(size: int) -> str:
    return "" if not size else f"{size / 1e6:.2g} MB" if size < 1e7 else f"{size / 1e6:.0f} MB"


def render_quality(rows: list[dict[str, Any]]) -> str:
    lines = ["### Held to the option: demo, base gates, C = 12", ""]
    lines += ["| policy | routing | hit | adj | MB | perplexity |", "|---|---|---:|---:|---:|---:|"]
    for row in rows:
        numbers = f"{100 * row['hit_ratio']:.1f} | {100 * row['adjusted_hit_ratio']:.1f} | {row['mb_a_token']:.3f} | {row['perplexity']:.1f}"
        lines.append(f"| {row['policy']} | {'masked to the set' if row['masked'] else 'as it is'} | {numbers} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
