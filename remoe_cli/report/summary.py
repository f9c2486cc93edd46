"""What a delta itself says of its report: a few flat figures, base against tuned."""

from typing import Any

from remoe_cli.report.rows import cell


def summary(report: dict[str, Any]) -> dict[str, float | str | None]:
    """Held-out perplexity, and LRU hits and misses of forced decode at the smallest cache, of both arms.

    cache: slots a layer; *_change: relative (0.02 = 2 % more), null where the report has none.
    """
    base, tuned = (next(arm for arm in report["arms"] if arm["role"] == role) for role in ("base", "tuned"))
    capacity = min(report["conditions"]["capacities"])
    before, after = cell(base, capacity), cell(tuned, capacity)
    return {
        "perplexity_base": base["text"]["perplexity"],
        "perplexity_tuned": tuned["text"]["perplexity"],
        "perplexity_change": tuned["text"]["perplexity_change"],
        "cache": capacity,
        "hit_base": before["hit_ratio"],
        "hit_tuned": after["hit_ratio"],
        "misses_base": before["misses"],
        "misses_tuned": after["misses"],
        "misses_change": after["misses_change"],
    }
