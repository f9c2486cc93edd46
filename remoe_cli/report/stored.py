"""Reports as files: found, read, written, and several put side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remoe_cli.errors import command, RunError
from remoe_cli.report.rows import table

FORMAT = 1
_SAME = ("data", "seed", "requests", "prompt_tokens", "new_tokens", "text_tokens", "draws")


def to_json(report: dict[str, Any]) -> str:
    """A line a key, but lists of numbers in one line."""
    text = json.dumps(report, indent=1, allow_nan=False)
    number = r"(?:-?[\d.]+(?:e[+-]?\d+)?|null)"
    return re.sub(rf"\[\s+{number}(?:,\s+{number})*\s+\]", lambda found: re.sub(r"\s+", "", found[0]), text) + "\n"


def read(path: Path) -> dict[str, Any]:
    """Raises RunError where the file is missing, damaged, or of another format."""
    again = command("eval", path.parent if (path.parent / "run.json").is_file() else "RUN", cache=6)
    try:
        report = json.loads(path.read_text())
        table(report)
    except FileNotFoundError:
        raise RunError(f"{path} is not there: that run was not evaluated yet.", again) from None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError):
        raise RunError(f"{path} is damaged, or of another version of remoe.", again) from None
    return report


def beside(reports: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """One report of the first one's base and every tuned arm, named by recipe, or by `names` where recipes are the same.

    Cells are those of the cache sizes and policies that all have. A change is the one against that report's own base, and a note
    says what was measured otherwise. Raises RunError for reports of different bases, or without a cache size in common.
    """
    first = reports[0]
    for report, name in zip(reports, names, strict=True):
        if any(report["base"][key] != first["base"][key] for key in ("id", "commit", "expert_bytes", "moe_layers")):
            raise RunError(
                f"{names[0]} is of the base {first['base']['id']}, {name} of {report['base']['id']}: compare runs of one base.",
                command("report", names[0]),
            )
    capacities = sorted(set.intersection(*({*report["conditions"]["capacities"]} for report in reports)))
    if not capacities:
        sizes = ",".join(map(str, first["conditions"]["capacities"]))
        raise RunError(
            f"{' and '.join(names)} have no cache size in common.", f"remoe eval RUN --cache {sizes} of each"
        )
    arms = [report["arms"][-1] for report in reports]
    recipes = [arm["name"] for arm in arms]
    shown = (
        recipes if len({*recipes}) == len(recipes) else [f"{recipe} ({name})" for recipe, name in zip(recipes, names)]
    )
    policies = set.intersection(
        *({(one["policy"], one["admission"]) for one in arm["cache"]} for arm in [first["arms"][0], *arms])
    )
    return {
        **first,
        "run": [report["run"] for report in reports],
        "arms": [
            _narrowed({**arm, "name": name}, capacities, policies)
            for arm, name in zip([first["arms"][0], *arms], ["base", *shown])
        ],
        "domains": [],
        "steering": None,
        "conditions": {**first["conditions"], "capacities": capacities},
        "notes": [
            note for report, name in zip(reports[1:], names[1:]) for note in _otherwise(first, report, names[0], name)
        ],
    }


def _narrowed(arm: dict[str, Any], capacities: Sequence[int], policies: set[tuple[str, str]]) -> dict[str, Any]:
    cells = [
        one for one in arm["cache"] if one["capacity"] in capacities and (one["policy"], one["admission"]) in policies
    ]
    return {**arm, "cache": cells, "measured": [one for one in arm["measured"] if one["capacity"] in capacities]}


def _otherwise(first: dict[str, Any], other: dict[str, Any], its_name: str, name: str) -> list[str]:
    """What makes figures of two reports not comparable as they stand."""
    differ = [key for key in _SAME if first["conditions"].get(key) != other["conditions"].get(key)]
    shown = [f"{key} {first['conditions'].get(key)} and {other['conditions'].get(key)}" for key in differ]
    timed = any(
        first["conditions"].get(key) != other["conditions"].get(key)
        for key in ("device_name", "threads", "dtype", "offload")
    )
    return [
        *(
            [
                f"{its_name} and {name} were not measured alike: {', '.join(shown)}; changes are against each one's own base"
            ]
            if differ
            else []
        ),
        *([f"the times of {its_name} and {name} were not measured under the same conditions"] if timed else []),
    ]
