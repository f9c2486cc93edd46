"""The report as a Markdown table with its conditions, for the model card."""

from typing import Any

from remoe_cli.report.renderers import tasks
from remoe_cli.report.rows import conditions, table


def markdown(report: dict[str, Any]) -> str:
    names, rows = table(report)
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for row in rows:
        label = row.label.strip() if row.group == "text" else f"{row.group}: {row.label.strip()}"
        lines.append(f"| {label} | {' | '.join(row.cells)} |")
    scores = list(tasks.markdown(report))
    said = " ".join([*conditions(report), *tasks.sentences(report)])
    notes = [f"\nNote: {note}" for note in report["notes"]]
    return "\n".join([*lines, *(["", *scores] if scores else []), "", said, *notes]) + "\n"
