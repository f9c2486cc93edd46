"""Pictures of the results: the headline (base against tuned gates) and one sheet with the rest."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decode.demo import ARMS, CAPACITY
from decode.peers import GUESS
from decode.rounds import percentile, steady

NAMES = {
    "remoe": "remoe",
    f"remoe --guess {GUESS}": f"remoe, reading {GUESS} experts ahead",
    "llama usual": "llama.cpp, 128 KB read-ahead",
    "llama machine": "llama.cpp, read-ahead as it is",
}
COLOURS = {
    "remoe": "#1b6ca8",
    f"remoe --guess {GUESS}": "#6fb1d9",
    "llama usual": "#c98b2b",
    "llama machine": "#a33b3b",
    "base": "#8a8a8a",
    "tuned": "#1b6ca8",
}


def draw(parts: dict[str, Any], stem: Path) -> None:
    """STEM-headline.png and STEM.png, of what has been measured."""
    if "demo" in parts:
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        headline(*figure.subplots(1, 2), parts["demo"]["headline"])
        figure.savefig(stem.with_name(stem.name + "-headline.png"), dpi=140)
    drawn = [(name, panel) for name, panel in PANELS.items() if parts.get(name, {}).get("rows")]
    if drawn:
        columns = min(2, len(drawn))
        rows = -(-len(drawn) // columns)
        figure = Figure(figsize=(5.2 * columns, 3.7 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes, (name, panel) in zip(grid.flat, drawn):
            panel(axes, parts[name])
        for axes in list(grid.flat)[len(drawn) :]:
            axes.set_visible(False)
        figure.savefig(stem.with_suffix(".png"), dpi=140)


def headline(left: Axes, right: Axes, found: dict[str, Any]) -> None:
    for axes, key, what in ((left, "tpot_ms", "ms a token"), (right, "mb", "MB read a token")):
        for place, arm in enumerate(ARMS):
            values = found[key][arm]
            middle = median(values)
            axes.bar(place, middle, color=COLOURS[arm], width=0.6)
            if key == "tpot_ms":
                axes.bar(
                    place,
                    median(found["hit_ms"][arm]),
                    color="none",
                    hatch="///",
                    edgecolor="white",
                    width=0.6,
                )
            axes.plot([place] * len(values), values, "o", color="black", markersize=3, alpha=0.7)
            axes.text(place - 0.18, 0.97 * middle, f"{middle:.0f}", ha="center", va="top", color="white", fontsize=12)
        axes.set_xticks(range(len(ARMS)), [f"{arm} gates" for arm in ARMS])
        axes.set_ylabel(what)
        axes.set_ylim(0, 1.15 * max(max(found[key][arm]) for arm in ARMS))
    left.set_title(
        f"{found['ratio']['median']:.2f}x faster (bytes and compute predict {found['predicted']['median']:.2f}x)",
        fontsize=10,
    )
    right.set_title(f"{found['loads']['median']:.2f}x fewer loads, C = {CAPACITY}", fontsize=10)
    left.text(
        0.98, 0.98, "hatched: all experts resident; dots: rounds", transform=left.transAxes, ha="right", va="top", fontsize=8
    )  # fmt: skip


def _peers(axes: Axes, part: dict[str, Any]) -> None:
    sizes = list(part["rounds"])
    names = list(part["rounds"][sizes[0]][0])
    for place, name in enumerate(names):
        middles, lows, highs = [], [], []
        for size in sizes:
            rounds = [1e3 * percentile(steady(one[name]["itl_s"]), 0.5) for one in part["rounds"][size]]
            middles.append(median(rounds))
            lows.append(middles[-1] - min(rounds))
            highs.append(max(rounds) - middles[-1])
        width = 0.8 / len(names)
        at = [index + width * (place - (len(names) - 1) / 2) for index in range(len(sizes))]
        axes.bar(at, middles, 0.92 * width, yerr=(lows, highs), color=COLOURS[name], label=NAMES[name], capsize=2)
        for x, y, more in zip(at, middles, highs):
            axes.text(x, 1.08 * (y + more), f"{y:.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_yscale("log")
    limits = {str(row["C"]): row["limit GB"] for row in part["rows"]}
    axes.set_xticks(range(len(sizes)), [f"{limits[size]} GB\nC = {size}" for size in sizes])
    axes.set_ylabel("ms a token, p50")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.1)  # room for the numbers
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    axes.set_title("Equal memory (least and greatest round)", fontsize=10)


def _linear(axes: Axes, part: dict[str, Any]) -> None:
    xs, ys = zip(*part["points"])
    fit = part["fit"]
    axes.plot(xs, ys, "o", color=COLOURS["remoe"])
    ends = [0, max(xs)]
    axes.plot(ends, [fit["ms"] + fit["ms a MB"] * x for x in ends], color="black", linewidth=1)
    axes.set_xlabel("MB read a token")
    axes.set_ylabel("ms a token")
    axes.set_ylim(0)
    axes.set_title(f"{fit['ms']:.0f} ms + MB / {fit['GB/s']:.2f} GB/s, R2 {fit['R2']:.3f}", fontsize=10)


def _sizes(axes: Axes, part: dict[str, Any]) -> None:
    axes.plot(*zip(*part["points"]), "o-", color=COLOURS["remoe"])
    axes.set_xlabel("slots a layer (C)")
    axes.set_ylabel("ms a token")
    axes.set_ylim(0)
    axes.set_title("More slots", fontsize=10)


def _floor(axes: Axes, part: dict[str, Any]) -> None:
    keys = ("wait", "experts", "attention", "dense", "router", "bookkeeping")
    bottoms = [0.0] * len(part["rows"])
    for key in keys:
        heights = [float(row[f"{key} ms"]) for row in part["rows"]]
        axes.bar(range(len(heights)), heights, 0.6, bottom=bottoms, label=key)
        bottoms = [a + b for a, b in zip(bottoms, heights)]
    for place, row in enumerate(part["rows"]):
        io = float(row["I/O floor ms"].split()[0])
        axes.plot(
            [place - 0.4, place + 0.4],
            [io, io],
            color="black",
            linewidth=1.5,
            label="I/O alone" if place == 0 else None,
        )
    axes.set_xticks(range(len(part["rows"])), [f"C = {row['C']}" for row in part["rows"]])
    axes.set_ylabel("ms a token")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_title("Where a token's time goes", fontsize=10)


PANELS = {"peers": _peers, "floor": _floor, "linear": _linear, "sizes": _sizes}
