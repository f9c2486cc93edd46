"""Task quality as tables: the base's score beside each other arm's, with its change, interval and p."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remoe_cli.report.renderers.grid import grid
from remoe_cli.report.rows import number, Row

HEADER = ("task", "metric", "n", "base", "arm", "score", "change", "p")
_LEFT = (0, 1, 4)  # words


def table(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows under HEADER, scores and changes in %; one for each metric and each arm beside the base. Empty without tasks."""
    return [
        (
            task["task"], measure_name(metric), f"{metric['n']:,}", _percent(metric["arms"][0]["score"]), arm["name"],
            _percent(arm["score"]), _change(arm), _chance(arm["p"]),
        )
        for task in report.get("tasks") or []
        for metric in task["metrics"]
        for arm in metric["arms"][1:]
    ]  # fmt: skip


def by_arm(report: dict[str, Any]) -> list[Row]:
    """The same with a cell for each arm, as the other tables of a report have it."""
    return [
        Row(
            task["task"], f"{measure_name(metric)}, of {metric['n']:,}",
            [_percent(metric["arms"][0]["score"]), *map(_beside_base, metric["arms"][1:])],
        )
        for task in report.get("tasks") or []
        for metric in task["metrics"]
    ]  # fmt: skip


def sentences(report: dict[str, Any]) -> list[str]:
    """How the scores were made."""
    found, tasks = report["conditions"].get("tasks"), report.get("tasks") or []
    if not found or not tasks:
        return []
    template = "the tokenizer's chat template" if found["template"] == "chat" else "no chat template"
    limit = f"; the first {found['limit']} items of each" if found["limit"] else ""
    tests = {arm["test"] for task in tasks for metric in task["metrics"] for arm in metric["arms"][1:]}
    named = {"mcnemar": "McNemar's exact test", "sign-flip": "random sign flips"}
    return [
        f"Tasks: scores in %; every arm on the same items, changes in points with 95 % paired bootstrap intervals; p of no change by "
        f"{' or '.join(named[test] for test in named if test in tests)}{limit}. lm-eval {found['lm_eval']}, {template}, begin token: "
        f"{_BOS[found['bos']]}.",
        f"Items: {'; '.join(map(_items, tasks))}.",
    ]


def terminal(report: dict[str, Any], width: int) -> list[str]:
    """Lines of plain text, at most `width` columns; none without tasks."""
    rows = table(report)
    return grid(HEADER, rows, width, left=2) if rows else []


def markdown(report: dict[str, Any]) -> Iterator[str]:
    """Lines of a Markdown table; none without tasks."""
    rows = table(report)
    if rows:
        yield f"| {' | '.join(HEADER)} |"
        yield f"|{''.join('---|' if place in _LEFT else '---:|' for place in range(len(HEADER)))}"
        yield from (f"| {' | '.join(row)} |" for row in rows)


def measure_name(metric: dict[str, Any]) -> str:
    """With the rule that took the answer out of the text, where there are several: exact_match, strict-match."""
    return metric["metric"] + (f", {metric['filter']}" if metric["filter"] not in ("none", "create_test") else "")


_BOS = {"tokenizer": "one, by the tokenizer", "prompt": "one, in the prompt", "none": "none"}


def _items(task: dict[str, Any]) -> str:
    shots = f", {task['few_shot']}-shot" if task["few_shot"] is not None else ""
    parts = f" in {task['parts']} parts" if task["parts"] > 1 else ""
    cut = f", {task['cut']} prompts cut at their beginning" if task["cut"] else ""
    return f"{task['task']}, {task['items']:,} of {task['source']}{parts}{shots}{cut}"


def _beside_base(arm: dict[str, Any]) -> str:
    return f"{_percent(arm['score'])}, {_change(arm)}, p {_chance(arm['p'])}"


def _percent(score: float | None) -> str:
    return number(score if score is None else 100 * score, 1)


def _change(arm: dict[str, Any]) -> str:
    """+0.8 [-1.2, +2.8], in points."""
    if arm["change"] is None:
        return "n/a"
    ends = f" [{', '.join(f'{100 * end:+.1f}' for end in arm['change_95'])}]" if arm["change_95"] else ""
    return f"{100 * arm['change']:+.1f}{ends}"


def _chance(p: float | None) -> str:
    return "n/a" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
