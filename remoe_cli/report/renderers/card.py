"""The model card of a pushed delta, written from its report."""

from typing import Any, TYPE_CHECKING

import yaml

from remoe_cli.recipe import Recipe
from remoe_cli.report.rows import table

if TYPE_CHECKING:
    from remoe_cli.delta import Delta


def card(delta: "Delta", recipe: Recipe, facts: dict[str, Any], report: dict[str, Any] | None) -> str:
    """README.md: metadata block, results with their conditions, how to use, limits. facts: the run's run.json."""
    header: dict[str, Any] = {
        "library_name": "remoe",
        "tags": ["remoe", "mixture-of-experts", "expert-cache", "router", delta.model_type],
    }
    if delta.base.count("/") == 1 and not delta.base.startswith((".", "/")):
        header |= {"base_model": delta.base, "base_model_relation": "adapter"}
    pinned = delta.base + (f"@{delta.commit}" if delta.commit else "")
    layers = len({name.split(".layers.")[1].split(".")[0] for name in delta.tensors})
    size = sum(t.numel() * t.element_size() for t in delta.tensors.values()) / 1e6
    results = (
        results_markdown(report) if report else "Not evaluated yet: `remoe eval --cache 6` writes the figures here.\n"
    )
    return f"""---
{yaml.safe_dump(header, sort_keys=False).strip()}
---

# Cacheable router gates for {delta.base}

A router delta: the gates of {layers} MoE layers ({size:.2f} MB), tuned with the `{recipe.name}` recipe so that neighbouring
tokens use the same experts more often. Everything else in the model is unchanged. When only some experts fit in fast
memory, fewer of them have to be loaded for each token.

Base: `{pinned}` ({delta.model_type}). {100 * delta.changed:.1f} % of the gate elements differ from the base after the cast to its dtype.

## Results

{results}
## Use

    pip install remoe-cli

    import remoe_cli
    model = remoe_cli.load("{pinned}", "THIS_REPO")

or write a patched checkpoint that every loader can read:

    remoe apply THIS_REPO {pinned} --out patched

The delta is refused on any other base or revision: `remoe.json` holds the sha256 of every gate it was made from.

## Limits

- Trained on {recipe.data.source} for {_steps(recipe, facts)}; gates tuned on one kind of text may help another less.
- Cache figures are for one sequence at a time, with a fresh cache for each request.
- Times depend on the machine; bytes a token do not.

Method: ReMoE (arXiv 2605.27081). The full recipe is in `recipe.yaml`{", all figures in `report.json`" if report else ""}.
"""


def _steps(recipe: Recipe, facts: dict[str, Any]) -> str:
    """The steps that were really made."""
    done = facts["steps"]
    return (
        f"{done} steps" if done == recipe.train.steps else f"{done} of {recipe.train.steps} steps ({facts['status']})"
    )


def results_markdown(report: dict[str, Any]) -> str:
    """The table and its conditions in Markdown."""
    names, rows = table(report)
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for row in rows:
        label = row.label.strip() if row.group == "text" else f"{row.group}: {row.label}"
        lines.append(f"| {label} | {' | '.join(row.cells)} |")
    c = report["conditions"]
    lines += [
        "",
        f"Text: {c['text_tokens']:,} held-out tokens of {c['data']}. Traces: {c['requests']} held-out requests, "
        f"{c['prompt_tokens']} prompt tokens, {c['new_tokens']} forced one-token steps (greedy beside it), cold cache for each "
        f"request, step-atomic. Measured: {c['measured_requests']} requests on {c['device_name']}, {c['dtype']}, "
        f"{c['threads']} thread(s), io {c['io']}; torch {c['torch']}, transformers {c['transformers']}.",
        *[f"Note: {note}" for note in report["notes"]],
    ]
    return "\n".join(lines) + "\n"
