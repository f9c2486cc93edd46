"""Cache policies: who leaves when a layer's slots are full.

To add one: a file here with a class as in `CachePolicy` below (it need not inherit), a line in POLICIES, and a row in
tests/test_cache.py. The file name is the name on the command line. A cache calls, once a step and in this order:

1. `touch(touched, misses)`: the step's experts in touch order, and those of them that were not resident. Here the
   policy updates what it remembers. It may remember experts that are not resident (LFU does).
2. `key(expert)`, for each expert that may leave: the lowest keys leave. Keys are any values that order totally and
   differ between experts, else who leaves is left to chance. Only experts that were touched before are asked about.

Admission (who may leave) and the slots belong to ExpertCache, not to the policy. A policy whose class says
`needs_future = True` is an oracle: it is built with the list of all later `touched`, and serves replay only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, Protocol

from remoe_cli.cache.policies.belady import Belady
from remoe_cli.cache.policies.fifo import Fifo
from remoe_cli.cache.policies.lfu import Lfu
from remoe_cli.cache.policies.lru import Lru
from remoe_cli.errors import CacheError


class CachePolicy(Protocol):
    """Ranks the experts of one layer; see the head of this file."""

    def touch(self, touched: Sequence[int], misses: Sequence[int]) -> None:
        """A step asked for `touched`; `misses` of them were not resident. Both in touch order."""

    def key(self, expert: int) -> Any:
        """The expert's rank among the residents: the lowest leaves."""

    def reset(self) -> None:
        """Forgets every touch."""


POLICIES: dict[str, Callable[..., CachePolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "belady": Belady,
}


def needs_future(name: str) -> bool:
    """True for a policy that must know the later steps, and so can't serve a decoder. Raises CacheError if unknown."""
    if name not in POLICIES:
        near = get_close_matches(name, POLICIES, 1)
        guess = f" (did you mean {near[0]}?)" if near else ""
        raise CacheError(f"no cache policy {name!r}{guess}; there are {', '.join(POLICIES)}", "remoe eval --cache 6")
    return bool(getattr(POLICIES[name], "needs_future", False))


def make_policy(name: str, future: Sequence[Sequence[int]] | None = None) -> CachePolicy:
    """A fresh policy for one layer. future: the `touched` of every step to come; only oracles read it.

    Raises CacheError for an unknown name, or for an oracle without a future.
    """
    if not needs_future(name):
        return POLICIES[name]()
    if future is None:
        causal = [other for other in POLICIES if not needs_future(other)]
        raise CacheError(
            f"policy {name!r} looks into the future, which only replay knows; a decoder can use {', '.join(causal)}",
            "remoe eval --cache 6",
        )
    return POLICIES[name](future)
