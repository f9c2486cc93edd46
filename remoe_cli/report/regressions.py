"""What `remoe eval --fail-on-regress` fails on."""

import math
from typing import Any

from remoe_cli.errors import UsageError
from remoe_cli.report.rows import cell


def check_percent(percent: float | None) -> None:
    """Raises UsageError for what is no share of a figure."""
    if percent is not None and not 0 <= percent < math.inf:
        raise UsageError(
            f"--fail-on-regress is a percentage of 0 or more, not {percent}.", "remoe eval --fail-on-regress 1"
        )


def regressions(report: dict[str, Any], percent: float) -> list[str]:
    """What is more than `percent` % worse in the tuned arm than in the base: perplexity, or LRU misses at a cache size.
    A perplexity that is not finite is worse than any."""
    base, tuned = (next(arm for arm in report["arms"] if arm["role"] == role) for role in ("base", "tuned"))
    limit, found = 1 + percent / 100, []
    before, after = (arm["text"]["perplexity"] for arm in (base, tuned))
    if before is None or after is None:
        found.append(f"perplexity is not finite ({'base' if before is None else 'tuned'} gates)")
    elif not after <= limit * before:
        found.append(f"perplexity {before:.3f} -> {after:.3f}")
    for capacity in report["conditions"]["capacities"]:
        before, after = (cell(arm, capacity)["misses"] for arm in (base, tuned))
        if not after <= limit * before:
            found.append(f"LRU misses at C = {capacity}: {before:,} -> {after:,}")
    return found
