"""The charts of report.html, each as an inline SVG whose colours are the page's own (light or dark), and the card's PNG.

An arm keeps its place in `arms`, and so its colour, on every chart. None where a report has nothing to draw.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np

from remoe_cli.report.concentration import against_uniform

HEADLINE = "headline.png"  # the card's picture, in a run and beside a delta
Report = Mapping[str, Any]
Draw = Callable[[Any, "Colours"], None]


class Colours(NamedTuple):
    """Of a chart; arms: by an arm's place in the report."""

    ink: str
    muted: str
    line: str
    arms: tuple[str, ...]

    def arm(self, place: int) -> str:
        return self.arms[place % len(self.arms)]


# on the page these stand for the custom properties --ink, --muted, --line, --arm-0, ...: see `_svg`
_PAGE = Colours("#0a0a0a", "#0b0b0b", "#0c0c0c", tuple(f"#0d0d{place:02x}" for place in range(8)))
_PAPER = Colours(
    "#1c2530", "#5d6875", "#d5dbe2", ("#6b7683", "#1b6ca8", "#c2410c", "#3b8a4e", "#7c4fae", "#b0568f", "#2a8f8f", "#8a6d1a")
)  # fmt: skip
_DARK = Colours(
    "#e8edf2", "#98a4b1", "#303a45", ("#8d99a6", "#5aa9e6", "#f08a4b", "#6cc081", "#ad8ae0", "#e08ac0", "#5ec4c4", "#c9a94a")
)  # fmt: skip
PAGE_COLOURS = [  # name of the custom property, light, dark
    *zip(Colours._fields, _PAPER[:3], _DARK[:3]),
    *((f"arm-{place}", light, dark) for place, (light, dark) in enumerate(zip(_PAPER.arms, _DARK.arms))),
]
_WIDE = 4.6  # inches of 72 dots: about a phone's width, so that letters keep their size there


def hit_curves(report: Report) -> str | None:
    """Hit ratio by slots a layer: LRU a line an arm, Belady dashed."""
    arms = [(place, arm) for place, arm in enumerate(report["arms"]) if arm.get("routing")]
    if not arms:
        return None

    def draw(figure: Any, colours: Colours) -> None:
        _hit_curves(figure.subplots(), colours, arms, report["conditions"]["capacities"])

    return _svg(draw, 3.4)


def _hit_curves(
    axes: Any, colours: Colours, arms: Sequence[tuple[int, Mapping[str, Any]]], capacities: Sequence[int]
) -> None:
    for place, arm in arms:
        of = arm["routing"]["curve"]
        axes.plot(of["capacity"], of["lru"], color=colours.arm(place), label=f"{arm['name']}, LRU")
        axes.plot(
            of["capacity"],
            of["belady"],
            color=colours.arm(place),
            linestyle=(0, (3, 2)),
            linewidth=1,
            label=f"{arm['name']}, Belady",
        )
    for capacity in capacities:
        axes.axvline(capacity, color=colours.muted, linestyle=":", linewidth=0.8)
    axes.set(xlabel="slots a layer (dotted: those of the table)", ylabel="hit ratio", ylim=(0, 1.02))
    axes.legend(loc="lower right")


def pareto(report: Report) -> str | None:
    """Perplexity against MB a token: LRU filled, the other simulated policies hollow, one marker a cache size."""
    return _svg(lambda figure, colours: _pareto(figure.subplots(), colours, report), 3.4)


def _pareto(axes: Any, colours: Colours, report: Report) -> None:
    capacities = report["conditions"]["capacities"]
    markers = dict(zip(capacities, "osD^vP*X" * (1 + len(capacities) // 8)))
    for place, arm in enumerate(report["arms"]):
        change = 100 * (arm["text"]["perplexity_change"] or 0.0)
        for capacity in capacities:
            cells = [one for one in arm["cache"] if one["trace"] == "forced" and one["capacity"] == capacity]
            for one in sorted(cells, key=lambda one: one["policy"] == "lru"):
                if one["mb_a_token"] is None:
                    continue
                lru = one["policy"] == "lru"
                axes.plot(
                    change, one["mb_a_token"], marker=markers[capacity], markersize=7 if lru else 4, linestyle="",
                    markerfacecolor=colours.arm(place) if lru else "none", markeredgecolor=colours.arm(place), markeredgewidth=0.9, clip_on=False,
                )  # fmt: skip
        axes.plot([], [], color=colours.arm(place), linewidth=4, label=arm["name"])
    for capacity in capacities:
        axes.plot([], [], color=colours.muted, marker=markers[capacity], linestyle="", label=f"C = {capacity}")
    axes.margins(x=0.12)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="perplexity, change in % (left is better)", ylabel="MB a token (down is better)")
    axes.legend(loc="best", ncols=2)


def heatmap(report: Report) -> str | None:
    """Expert x layer, base and tuned: how often each expert is used, against all being used alike."""
    arms = [(place, arm) for place, arm in enumerate(report["arms"]) if arm.get("routing")]
    if not arms:
        return None
    layers = max(len(arm["routing"]["uses"]) for _, arm in arms)

    def draw(figure: Any, colours: Colours) -> None:
        from matplotlib.colors import LinearSegmentedColormap, LogNorm

        # as often as the mean is the page's own ground
        shades = LinearSegmentedColormap.from_list(
            "", [(0.13, 0.42, 0.72, 1), (0.5, 0.5, 0.5, 0), (0.82, 0.28, 0.1, 1)]
        )
        panels = np.ravel(figure.subplots(len(arms), 1, squeeze=False, sharex=True))
        for axes, (_, arm) in zip(panels, arms, strict=True):
            uses_LE = np.maximum(against_uniform(np.array(arm["routing"]["uses"])), 1 / 8)
            shown = axes.imshow(uses_LE, norm=LogNorm(1 / 8, 8), cmap=shades, aspect="auto", interpolation="none")
            axes.grid(False)
            axes.set_title(arm["name"])
            axes.set_ylabel("MoE layer")
            axes.yaxis.get_major_locator().set_params(integer=True)
        panels[-1].set_xlabel("expert")
        bar = figure.colorbar(shown, ax=panels.tolist(), ticks=[1 / 8, 1, 8], pad=0.02, aspect=30)
        bar.ax.minorticks_off()
        bar.ax.set_yticklabels(["1/8", "mean", "8x"])
        bar.outline.set_visible(False)

    return _svg(draw, len(arms) * (0.75 + min(0.07 * layers, 2.2)) + 0.4)


def ribbon(report: Report) -> str | None:
    """Experts of one layer token by token: grey where the token before used them too, coloured where they come anew."""
    arms = [(place, arm) for place, arm in enumerate(report["arms"]) if arm.get("routing")]
    if not arms:
        return None
    pair = [arms[0], arms[-1]] if len(arms) > 1 else arms

    def draw(figure: Any, colours: Colours) -> None:
        panels = np.ravel(figure.subplots(len(pair), 1, squeeze=False, sharex=True))
        for axes, (place, arm) in zip(panels, pair, strict=True):
            of = arm["routing"]["ribbon"]
            kept, fresh = kept_and_fresh(of["experts"], of["starts"])
            for points, colour in ((kept, colours.muted), (fresh, colours.arm(place))):
                x = [at for token, _ in points for at in (token - 0.5, token + 0.5, np.nan)]
                y = [at for _, expert in points for at in (expert, expert, np.nan)]
                axes.plot(x, y, color=colour, linewidth=1.6, solid_capstyle="butt")
            for start in of["starts"][1:]:
                axes.axvline(start - 0.5, color=colours.muted, linewidth=0.6, linestyle=":")
            axes.grid(False)
            axes.set_title(f"{arm['name']}: {len(kept)} of {len(kept) + len(fresh)} used by the token before too")
            axes.set_ylabel("expert")
        panels[-1].set_xlabel(f"token, MoE layer {pair[0][1]['routing']['ribbon']['layer']} (dotted: a new request)")

    return _svg(draw, 1.9 * len(pair) + 0.3)


def kept_and_fresh(
    experts_TK: Sequence[Sequence[int]], starts: Sequence[int]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(token, expert) of the accesses whose expert the token before used in the same request, and of all others."""
    kept: list[tuple[int, int]] = []
    fresh: list[tuple[int, int]] = []
    before: set[int] = set()
    for token, experts in enumerate(experts_TK):
        before = set() if token in starts else before
        for expert in experts:
            (kept if expert in before else fresh).append((token, expert))
        before = set(experts)
    return kept, fresh


def reuse(report: Report) -> str | None:
    """How many tokens ago an expert was used last: shares of the accesses."""
    arms = [(place, arm) for place, arm in enumerate(report["arms"]) if arm.get("routing")]
    if not arms:
        return None

    def draw(figure: Any, colours: Colours) -> None:
        axes = figure.subplots()
        bounds = max((arm["routing"]["reuse"]["up_to"] for _, arm in arms), key=len)
        width = 0.8 / len(arms)
        for at, (place, arm) in enumerate(arms):
            of = arm["routing"]["reuse"]
            shares = [*of["share"], *[0] * (len(bounds) - len(of["share"])), of["first"]]
            places = np.arange(len(shares)) + (at - (len(arms) - 1) / 2) * width
            axes.bar(
                places, [100 * (share or 0) for share in shares], width, color=colours.arm(place), label=arm["name"]
            )
        names = [str(bound) if bound <= 2 else f"≤{bound}" for bound in bounds]
        axes.set_xticks(range(len(bounds) + 1), [*names, "first"])
        axes.grid(axis="x", visible=False)
        axes.set(xlabel="tokens since the expert's last use in its layer", ylabel="% of accesses")
        axes.legend(loc="best")

    return _svg(draw, 3.0)


def token_times(report: Report) -> str | None:
    """Measured tokens from quickest to slowest: what of each was waiting for experts, their arithmetic, the rest."""
    rows = [
        (place, arm, one)
        for place, arm in enumerate(report["arms"])
        for one in arm["measured"]
        if not one["skipped"] and one.get("policy", "lru") == "lru" and one.get("tokens_ms", {}).get("whole")
    ]
    if not rows:
        return None
    capacity = min(one["capacity"] for _, _, one in rows)
    rows = [row for row in rows if row[2]["capacity"] == capacity]

    def draw(figure: Any, colours: Colours) -> None:
        panels = np.ravel(figure.subplots(1, len(rows), squeeze=False, sharey=True))
        most = max(np.percentile(one["tokens_ms"]["whole"], 99) for _, _, one in rows)
        for axes, (place, arm, one) in zip(panels, rows, strict=True):
            of = {name: np.array(values) for name, values in one["tokens_ms"].items()}
            share = np.linspace(0, 100, len(of["whole"]))
            rest = of["whole"] - of["wait"] - of["experts"]
            axes.stackplot(
                share, of["wait"], of["experts"], rest, colors=[colours.arm(place), colours.muted, colours.line], linewidth=0,
                labels=["waiting for experts", "experts' arithmetic", "all else"],
            )  # fmt: skip
            axes.set_title(f"{arm['name']}\nmedian token {np.median(of['whole']):.3g} ms")
            axes.set(xlim=(0, 100), ylim=(0, 1.1 * most), xlabel="% of tokens")
        panels[0].set_ylabel(f"ms a token, C = {capacity}")
        figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=3)

    return _svg(draw, 3.1)


def losses(report: Report) -> str | None:
    """Cross-entropy and expert overlap of the training batches, a line an arm."""
    arms = [(place, arm) for place, arm in enumerate(report["arms"]) if arm.get("training")]
    if not arms:
        return None
    shown = [name for name in ("ce", "eor") if any(name in arm["training"] for _, arm in arms)]
    titles = {"ce": "cross-entropy, nats", "eor": "expert overlap (EOR)"}

    def draw(figure: Any, colours: Colours) -> None:
        panels = np.ravel(figure.subplots(len(shown), 1, squeeze=False, sharex=True))
        for axes, name in zip(panels, shown, strict=True):
            for place, arm in arms:
                of = arm["training"]
                if name in of:
                    axes.plot(
                        of["step"],
                        [np.nan if v is None else v for v in of[name]],
                        color=colours.arm(place),
                        linewidth=1,
                        label=arm["name"],
                    )
            axes.set_title(titles[name])
        panels[-1].set_xlabel("step")
        panels[-1].legend(loc="best")

    return _svg(draw, 1.7 * len(shown) + 0.5)


def headline_png(report: Report, title: str) -> bytes:
    """For a card: hit curves and the price in perplexity, with the verdict above."""
    arms = [(place, arm) for place, arm in enumerate(report["arms"]) if arm.get("routing")]

    def draw(figure: Any, colours: Colours) -> None:
        if arms:
            left, right = figure.subplots(1, 2)
            _hit_curves(left, colours, arms, report["conditions"]["capacities"])
        else:
            right = figure.subplots()
        _pareto(right, colours, report)
        figure.suptitle(_wrapped(title), fontsize=10, x=0.02, ha="left")

    out = BytesIO()
    _save(draw, (9.6, 4.2), out, "png", _PAPER)
    return out.getvalue()


def _wrapped(text: str, width: int = 120) -> str:
    return "\n".join(textwrap.wrap(text, width))


def _svg(draw: Draw, height: float) -> str:
    out = BytesIO()
    _save(draw, (_WIDE, height), out, "svg", _PAGE)
    text = out.getvalue().decode()
    text = text[text.index("<svg") :]
    for colour, (name, *_) in zip((*_PAGE[:3], *_PAGE.arms), PAGE_COLOURS, strict=True):
        text = text.replace(colour, f"var(--{name})")
    # one page holds several: only ids that something refers to stay, made unique by their content
    salt = hashlib.sha256(text.encode()).hexdigest()[:8]
    referred = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{salt}-{found[1]}"' if found[1] in referred else "", text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{salt}-", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"', r"\1", text, count=1)


def _save(draw: Draw, size: tuple[float, float], out: BytesIO, form: str, colours: Colours) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    ink, muted, line, _ = colours
    style: Any = {
        "svg.fonttype": "none", "svg.hashsalt": "remoe", "font.size": 9, "text.color": ink, "axes.labelcolor": ink,
        "xtick.color": muted, "ytick.color": muted, "axes.edgecolor": line, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.color": line, "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False,
        "legend.fontsize": 8, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.facecolor": "none",
        "figure.facecolor": "none" if form == "svg" else "white",
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, colours)
        figure.savefig(
            out, format=form, dpi=72 if form == "svg" else 150, metadata={"Date": None} if form == "svg" else None
        )
