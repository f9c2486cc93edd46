"""The report as a table for a person."""

from io import StringIO
from typing import Any

from rich.console import Console

from remoe_cli.report.renderers import tasks
from remoe_cli.report.renderers.grid import grid
from remoe_cli.report.rows import conditions, table


def terminal(report: dict[str, Any], width: int = 110) -> str:
    """Plain text, at most `width` columns."""
    names, rows = table(report)
    lines: list[list[str]] = []
    group = None
    for row in rows:
        if group is not None and row.group != group:
            lines.append(["", *[""] * len(names)])
        if row.group != group and row.group != "text":
            lines.append([row.group, *[""] * len(names)])
        lines.append([row.label if row.group == "text" else f"  {row.label}", *row.cells])
        group = row.group
    out = Console(file=StringIO(), width=width, highlight=False)
    for line in grid(["", *names], lines, width):
        out.print(line, markup=False)
    scores = tasks.terminal(report, width)
    for line in [
        *([""] if scores else []),
        *scores,
        "",
        *conditions(report),
        *tasks.sentences(report),
        *(f"Note: {note}" for note in report["notes"]),
    ]:
        out.print(line, markup=False)
    return out.file.getvalue()  # type: ignore[attr-defined]
