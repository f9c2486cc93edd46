"""The report as a table for a person."""

from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from remoe_cli.report.renderers import tasks
from remoe_cli.report.rows import conditions, table


def terminal(report: dict[str, Any], width: int = 110) -> str:
    """Plain text, at most `width` columns."""
    names, rows = table(report)
    view = Table(box=None, pad_edge=False, show_edge=False)
    view.add_column("", no_wrap=True)
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
    if scores := tasks.terminal(report, width):
        out.print(f"\n{scores}", markup=False, end="")
    for line in ["", *conditions(report), *tasks.sentences(report), *(f"Note: {note}" for note in report["notes"])]:
        out.print(line, markup=False)
    return out.file.getvalue()  # type: ignore[attr-defined]
