"""remoe merge: several deltas of one base as one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remoe_cli import atomic
from remoe_cli.apply import find_delta
from remoe_cli.delta.merge import merged
from remoe_cli.errors import command


def merge(names: Sequence[str], weights: Sequence[float] | None, out: Path) -> dict[str, Any]:
    """Writes the weighted average to the folder `out`, whole or not at all. names: as `remoe apply` finds a delta; weights:
    one a delta, by default all equal.

    Raises UsageError, DeltaError, HubError, or RunError when the folder is taken.
    """
    atomic.require_free(out)
    weights = [1.0] * len(names) if weights is None else list(weights)
    found = merged([find_delta(name) for name in names], weights, names)
    with atomic.new_folder(out) as scratch:
        found.save(scratch)
    return {
        "folder": str(out),
        "merged": [{"delta": name, "weight": w} for name, w in zip(names, weights, strict=True)],
        "base": found.base,
        "commit": found.commit,
        "recipe": found.recipe,
        "gates": len(found.tensors),
        "heads": len(found.heads),
    }


def summary(done: dict[str, Any]) -> str:
    pinned = done["base"] + (f"@{done['commit']}" if done["commit"] else "")
    heads = f" and {done['heads']} heads" if done["heads"] else ""
    return "\n".join(
        [
            f"{done['folder']}: {done['gates']} gates{heads}, {done['recipe']}",
            f"Next: {command('apply', done['folder'], pinned, out='DIR')}",
        ]
    )
