"""Two arms on the same items: did the score change, and could that be chance? numpy only.

Where every item is right or wrong the test is McNemar's, exact: of the items that only one arm got right, as many would fall to
either by the toss of a coin. Else signs are flipped at random (Fisher's randomisation test for pairs), of which McNemar's
is the case with 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from remoe_cli.report import metrics

_FLIPS = 10_000
_BLOCK = 1 << 20  # signs drawn together


class Items(NamedTuple):
    """An arm's result on N items: got_N of possible_N each, so that its score is the ratio of the sums."""

    got_N: Sequence[float]
    possible_N: Sequence[float]

    @property
    def score(self) -> float | None:
        return metrics.ratio(sum(self.got_N), sum(self.possible_N))

    @property
    def binary(self) -> bool:
        """Whether every item is one thing, right or wrong."""
        return all(one == 1 for one in self.possible_N) and all(one in (0, 1) for one in self.got_N)


def compare(before: Items, after: Items, seed: int = 0) -> dict[str, Any]:
    """`change` of the score with its `change_95` (paired bootstrap over items), `p` of no change (two-sided) by `test`;
    `gained` and `lost`: items that only after, only before got right (None where items are not just right or wrong).

    Raises ValueError where the two are not of the same items.
    """
    if list(before.possible_N) != list(after.possible_N):
        raise ValueError("compare: these are not results on the same items")
    first, second = before.score, after.score
    change = None if first is None or second is None else second - first
    interval = metrics.bootstrap_change(before, after, metrics.difference, seed=seed)
    gained = lost = None
    if before.binary and after.binary:
        gained = sum(1 for one, other in zip(before.got_N, after.got_N) if other > one)
        lost = sum(1 for one, other in zip(before.got_N, after.got_N) if other < one)
        test, p = "mcnemar", mcnemar(gained, lost)
    else:
        test, p = "sign-flip", sign_flip(np.subtract(after.got_N, before.got_N), seed)
    return {
        "change": change, "change_95": interval and list(interval), "test": test, "p": p, "gained": gained, "lost": lost,
    }  # fmt: skip


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided p of the exact test: twice the chance of so few or fewer on the rarer side of gained + lost tosses, at most 1."""
    tosses, ways, tail = gained + lost, 1, 0
    for few in range(min(gained, lost) + 1):
        tail += ways  # of so few among the tosses
        ways = ways * (tosses - few) // (few + 1)
    return min(1.0, 2 * tail / 2**tosses)


def sign_flip(differences_N: np.ndarray, seed: int = 0, flips: int = _FLIPS) -> float:
    """Two-sided p that the sum of the differences is no further from 0 than by random signs; at least 1 / (flips + 1)."""
    differences_N = differences_N[differences_N != 0]
    if not len(differences_N):
        return 1.0
    rng = np.random.default_rng(seed)
    found, reached = abs(differences_N.sum()) * (1 - 1e-12), 0
    size = max(1, _BLOCK // len(differences_N))
    for start in range(0, flips, size):
        signs = rng.integers(0, 2, size=(min(size, flips - start), len(differences_N))) * 2 - 1
        reached += int((np.abs(signs @ differences_N) >= found).sum())
    return (reached + 1) / (flips + 1)
