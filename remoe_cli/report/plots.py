"""Plots as PNG files: a steered run's path, the price of locality, concentration by expert and layer.

Nothing here says a figure that report.json or the sweep's JSON does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from remoe_cli import atomic
from remoe_cli.report.concentration import against_uniform

_COLOURS = ("#1b6ca8", "#c98b2b", "#3b8a4e", "#a33b3b", "#6b4f9e", "#2a9d9d", "#b0568f", "#7a6a3a")
_GREY = "#8a8a8a"


def plot_steering(path: Sequence[Mapping[str, Any]], limit: float, out: Path) -> None:
    """path: `step`, `change` of the perplexity (.01 is 1 %) and `steer`, the factor from there on; limit: as change."""
    figure = _figure(5.6, 4.2)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = [point["step"] for point in path]
    above.plot(steps, [100 * point["change"] for point in path], color=_COLOURS[0], marker=".")
    above.axhline(100 * limit, color=_GREY, linestyle="--", linewidth=1)
    above.set_ylabel("perplexity, change in %")
    known = [(point["step"], point["steer"]) for point in path if point["steer"] is not None]
    known.append((steps[-1], known[-1][1]))
    below.step(*zip(*known, strict=True), where="post", color=_COLOURS[1])
    below.set_ylabel("factor of the\nlocality terms")
    below.set_xlabel("step")
    below.set_ylim(bottom=0)
    _save(figure, out)


def plot_pareto(rows: Sequence[Mapping[str, Any]], limit: float | None, out: Path) -> None:
    """rows: `arm`, `capacity`, `perplexity_change`, `mb_a_token`, `frontier`. One panel for each cache size; arms keep
    their colour, the frontier is joined."""
    capacities = sorted({row["capacity"] for row in rows})
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    columns = min(3, len(capacities))
    lines = -(-len(capacities) // columns)
    figure = _figure(4.6 * columns, 3.6 * lines + 0.25 * len(arms) / 3)
    panels = list(np.ravel(figure.subplots(lines, columns, squeeze=False)))
    for axes, capacity in zip(panels, capacities):
        here = [row for row in rows if row["capacity"] == capacity]
        for place, arm in enumerate(arms):
            points = [(100 * row["perplexity_change"], row["mb_a_token"]) for row in here if row["arm"] == arm]
            colour = _GREY if arm == "base" else _COLOURS[place % len(_COLOURS)]
            axes.scatter(*zip(*points), s=16, color=colour, label=arm, zorder=2) if points else None
        best = sorted((100 * row["perplexity_change"], row["mb_a_token"]) for row in here if row["frontier"])
        if best:
            axes.plot(*zip(*best), color="black", linewidth=0.8, zorder=1)
        if limit is not None:
            axes.axvline(100 * limit, color=_GREY, linestyle="--", linewidth=1)
        axes.set_title(f"C = {capacity}", fontsize=10)
        axes.set_xlabel("perplexity, change in %")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("MB a token")
    for axes in panels[len(capacities) :]:
        axes.set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    _save(figure, out)


def plot_usage(uses: Mapping[str, np.ndarray], out: Path) -> None:
    """uses: arm -> [L, E] uses. Expert x layer for each arm: how often an expert is used, against all being used alike."""
    from matplotlib.colors import LogNorm

    layers = max(len(uses_LE) for uses_LE in uses.values())
    figure = _figure(8, len(uses) * (0.9 + 0.11 * layers))
    panels = np.ravel(figure.subplots(len(uses), 1, squeeze=False, sharex=True))
    for axes, (arm, uses_LE) in zip(panels, uses.items(), strict=True):
        shown = axes.imshow(
            np.maximum(against_uniform(uses_LE), 1 / 8), norm=LogNorm(1 / 8, 8), cmap="RdBu_r", aspect="auto"
        )
        axes.set_title(arm, fontsize=9, loc="left")
        axes.set_ylabel("layer")
        axes.set_yticks(range(0, len(uses_LE), max(1, len(uses_LE) // 6)))
    panels[-1].set_xlabel("expert")
    bar = figure.colorbar(shown, ax=panels.tolist(), ticks=[1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8])
    bar.ax.minorticks_off()
    bar.ax.set_yticklabels(["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    bar.set_label("uses, against the mean")
    _save(figure, out)


def plot_layers(figures: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """figures: arm -> `concentration_figures`. Effective experts, top-8 mass and max frequency of each layer."""
    titles = {"effective_experts": "effective experts", "top_8_mass": "top-8 mass", "max_frequency": "max frequency"}
    figure = _figure(11, 3.8)
    panels = figure.subplots(1, len(titles))
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for place, (arm, found) in enumerate(figures.items()):
            colour = _GREY if arm == "base" else _COLOURS[place % len(_COLOURS)]
            if (values := found["layers"][key]) is not None:
                axes.plot(range(len(values)), values, marker=".", color=colour, label=arm)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("MoE layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(bottom=0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    _save(figure, out)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, out: Path) -> None:
    with atomic.new_file(out) as stream:
        figure.savefig(stream, dpi=130, format="png")
