"""Static: the experts that another trace used most are loaded before the start and rank highest for ever."""

from __future__ import annotations

from remoe_cli.cache.policy import Memory, Policy


def key(m: Memory, expert: int) -> float:
    # Of equal counts the lower id stays, as it was the one loaded before the start; exact up to 2^53.
    return m.fit[expert] * len(m.fit) - expert


POLICY = Policy(
    title="the most used experts of another trace (--fit) are loaded first; the least used there leaves",
    key=key,
    needs=("fit",),
    preload=True,
    source="hot-expert pinning as in Fiddler, arXiv 2402.07033",
)
