"""What a fine-tuning run ended with, for its caller, a person and a script."""

import shlex
from typing import Any, NamedTuple

from remoe_cli.delta import Delta
from remoe_cli.report.metrics import TextMeasures
from remoe_cli.report.steering import steered_lines
from remoe_cli.run import Run


class Finetuned(NamedTuple):
    """before, after: held-out text under base and tuned gates; after is None when Ctrl-C ended the run. steps: completed
    ones, those before a resume included."""

    run: Run
    delta: Delta
    before: TextMeasures
    after: TextMeasures | None
    steps: int
    interrupted: bool


def summary(done: Finetuned) -> str:
    """What the command ends with: before and after, the delta's size, the next command."""
    scope = done.run.recipe.train.scope
    what = f"elements of {len(done.delta.tensors)} tensors" if scope in ("full", "gates+lora") else "gate elements"
    changed = f"{100 * (done.delta.changed or 0):.1f} % of the {what} changed"
    if scope == "heads":
        changed = f"{sum(head.numel() for head in done.delta.heads.values()):,} head elements beside the base's gates"
    lines = [f"{done.run.folder}: {done.steps} steps, {changed}"]
    if done.delta.changed == 0 and scope != "heads":
        lines.append(
            f"Warning: none of the {what} survived the cast to the checkpoint's dtype; use more steps or a larger train.lr."
        )
    without = "   (interrupted: tuned gates not measured)" if done.after is None else ""
    lines.append(f"base   perplexity {done.before.perplexity:.3f}   EOR {done.before.eor:.3f}{without}")
    if done.after is not None:
        change = done.after.perplexity / done.before.perplexity - 1
        lines.append(
            f"tuned  perplexity {done.after.perplexity:.3f}   EOR {done.after.eor:.3f}   ({100 * change:+.2f} % perplexity)"
        )
        if steering := done.run.facts.get("steering"):
            lines += steered_lines(steering, change)
    folder = shlex.quote(str(done.run.folder))
    if done.interrupted:
        lines.append(f"Go on: remoe finetune --resume --out {folder}")
        return "\n".join(lines)
    facts = done.run.facts
    slots = max(facts["top_k"], min(6, facts["n_experts"] // 2))  # fewer than all experts, where K leaves that
    lines.append(f"Next: remoe eval {folder} --cache {slots}")
    return "\n".join(lines)


def as_json(done: Finetuned) -> dict[str, Any]:
    """The result for scripts."""
    return {
        "run": str(done.run.folder),
        "steps": done.steps,
        "interrupted": done.interrupted,
        "changed": done.delta.changed,
        "before": done.before._asdict(),
        "after": done.after._asdict() if done.after else None,
        "steering": done.run.facts.get("steering"),
    }
