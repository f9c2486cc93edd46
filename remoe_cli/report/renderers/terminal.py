"""The report as a table for a person."""

from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from remoe_cli.report.rows import table


def terminal(report: dict[str, Any], width: int = 100) -> str:
    """Plain text, at most `width` columns."""
    names, rows = table(report)
    view = Table(box=None, pad_edge=False, show_edge=False)
    view.add_column("")
    for name in names:
        view.add_column(name, justify="right")
    group = None
    for row in rows:
        if group is not None and row.group != group:
            view.add_row()
        if row.group != group and row.group != "text":
            view.add_row(row.group)
        view.add_row(row.label if row.group == "text" else f"  {row.label}", *row.cells)
        group = row.group
    out = Console(file=StringIO(), width=width, highlight=False)
    out.print(view)
    for line in _footer(report):
        out.print(line, markup=False)
    return out.file.getvalue()  # type: ignore[attr-defined]


def _footer(report: dict[str, Any]) -> list[str]:
    c, base = report["conditions"], report["base"]
    name = base["id"] + (f"@{base['commit'][:12]}" if base["commit"] else "")
    return [
        "",
        f"{name}: {base['moe_layers']} MoE layers, top-{base['top_k']} of {base['n_experts']}, {base['expert_bytes'] / 1e6:.3f} MB an expert.",
        f"Traces: {c['requests']} held-out requests of {c['prompt_tokens']} + {c['new_tokens']} tokens, cold cache each, step-atomic; "
        f"text: {c['text_tokens']:,} tokens of {c['data']}.",
        f"Measured: {c['measured_requests']} of the requests, {c['device_name']}, {c['dtype']}, {c['threads']} thread(s), io {c['io']}.",
        *[f"Note: {note}" for note in report["notes"]],
    ]
