"""The results as Markdown: conditions, each bar with its verdict, and a table for each part."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from decode.rounds import Bar, number, SKIP
from decode.setup import Setup

TITLES = {
    "peers": "Against llama.cpp in equal memory", "accelerate": "Against accelerate's disk offload", "ram": "All in RAM",
    "floor": "Against the I/O floor", "linear": "Proportional to missed bytes", "sizes": "Slots", "context": "Context",
    "layers": "Layers", "ttft": "First token", "demo": "Widened demo, base against tuned gates",
}  # fmt: skip


def conditions(setup: Setup) -> dict[str, Any]:
    g = setup.geometry
    return {
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {_memory_gb():.0f} GB, {platform.system()} {platform.release()}",
        "load before": round(os.getloadavg()[0], 2),
        "checkpoint": f"random weights, {g.layers} layers (1 dense), {g.experts} experts of {number(setup.expert_bytes / 1e6)} MB a layer, "
        f"top-{g.top_k}, bf16, {number(setup.dense_bytes / 1e9)} GB outside the experts",
        "request": f"{setup.prompt} + {setup.tokens} forced ids, the first {SKIP} decoded ones left out",
        "threads": f"{setup.threads} to compute, remoe 2 more to read",
        "versions": {name: _version(name) for name in ("torch", "transformers", "accelerate", "remoe-cli")},
        "commit": _commit(),
    }  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    lines = ["# The offloaded decoder, measured", ""]
    lines += [f"- {key}: {value}" for key, value in results["conditions"].items()]
    lines += [f"- note: {note}" for note in results["notes"]]
    lines += [
        "",
        "Ratios are medians over rounds of the ratio within a round, in brackets the least and the greatest.",
        "",
    ]
    bars = [bar for part in results["parts"].values() for bar in part["bars"]]
    lines += table([bar_row(bar) for bar in bars])
    for name, part in results["parts"].items():
        if part["rows"]:
            lines += [f"## {TITLES[name]}", "", *table(part["rows"])]
        if "fit" in part:
            lines += ["Straight line: " + ", ".join(f"{number(v)} {k}" for k, v in part["fit"].items()), ""]
        if "split_ms" in part:
            lines += ["A token's ms: " + ", ".join(f"{k} {number(v)}" for k, v in part["split_ms"].items()), ""]
    return "\n".join(lines)


def bar_row(bar: Bar) -> dict[str, Any]:
    sign = "at least" if bar.better == "more" else "at most"
    return {
        "bar": bar.name, "": bar.note, "measured": f"{bar.found} {bar.unit}".strip(), "rounds": bar.found.rounds,
        "pass": f"{sign} {number(bar.passing)}" if bar.passing != float("inf") else "runs",
        "stretch": number(bar.stretch) if bar.stretch is not None else "", "verdict": bar.verdict,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Of all keys that any row has, in the order in which they come up."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    if not keys:
        return []
    body = ["| " + " | ".join("" if row.get(key) is None else str(row[key]) for key in keys) + " |" for row in rows]
    return ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys), *body, ""]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or None
