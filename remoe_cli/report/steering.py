"""How a steered run is told: in the summary of a run and in report.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def steered_lines(steering: Mapping[str, Any], reported_change: float) -> list[str]:
    """steering: as run.json has it; reported_change: of the perplexity of the held-out texts that did not steer."""
    if "change" not in steering:
        return [f"steered to {_percent(steering['limit'])}, but interrupted before it was there"]
    lines = [
        f"steered to {_percent(steering['limit'])}: {_percent(steering['change'])} perplexity on the {steering['texts']} texts "
        f"that steered, {_percent(reported_change)} on the others"
    ]
    if (ce_only := steering["ce_only"]) is not None:
        tax = (1 + reported_change) / (1 + ce_only["reported_change"]) - 1
        lines.append(
            f"cross entropy alone ({ce_only['run']}): {_percent(ce_only['change'])} and {_percent(ce_only['reported_change'])}, so "
            f"locality itself costs {_percent(tax)} on the others"
        )
    return lines


def _percent(change: float) -> str:
    return f"{100 * change:+.2f} %"
