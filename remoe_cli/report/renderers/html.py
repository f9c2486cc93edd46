"""The report as one HTML file: no script, no network, light and dark, for a phone and for a desk."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from remoe_cli.report import charts
from remoe_cli.report.renderers import tasks
from remoe_cli.report.rows import conditions, table
from remoe_cli.report.verdict import verdict

_HEADLINE = (
    "perplexity", "perplexity, change", "EOR, forced decode", "EOR, forced decode, change", "LRU hit", "LRU misses, change",
    "LRU MB a token", "measured tpot, p50 ms",
)  # fmt: skip
_CHARTS = (
    (charts.hit_curves, "How often an expert is there", "Hit ratio by cache size. Dashed: Belady, which knows the future; no cache can do better on the same requests with forced admission."),
    (charts.pareto, "What it costs, what it saves", "Filled: LRU; hollow: the other simulated policies. Gates move a point sideways, slots and policies up and down."),
    (charts.heatmap, "Which experts are used", "Uses of each expert in each MoE layer while decoding, against all experts of the layer being used alike."),
    (charts.ribbon, "Experts of one layer, token by token", "Grey: the token before used the expert too, so it is in any cache. In colour: used anew."),
    (charts.reuse, "When experts come back", "Accesses by the tokens since the same layer used the expert last; first: not before in this request."),
    (charts.token_times, "Where a token's time goes", "Measured tokens, from quickest to slowest."),
    (charts.losses, "Training", "Batches of the training run; the objective's own terms are in metrics.jsonl."),
)  # fmt: skip


def html(report: dict[str, Any]) -> str:
    """A whole document. Raises KeyError and the like for a report of another format."""
    names, rows = table(report)
    drawn = [(title, words, chart(report)) for chart, title, words in _CHARTS]
    return _template().render(
        report=report,
        verdict=verdict(report),
        names=names,
        headline=[
            row for row in rows if row.label in _HEADLINE and (row.group == "text" or row.group.startswith("C = "))
        ],
        rows=rows,
        scores=tasks.by_arm(report),
        conditions=[*conditions(report), *tasks.sentences(report)],
        charts=[one for one in drawn if one[2]],
        colours=charts.PAGE_COLOURS,
    )


def _template() -> Any:
    loader = PackageLoader("remoe_cli.report", "renderers")
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template("report.html.j2")
