"""Refinement ahead of a step: which scores say what the next step will ask for, and what they bring in (Algorithm 2 of
CacheRouter, arXiv 2609.04895).

Shape letters: E routed experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remoe_cli.cache.policy import Policy
from remoe_cli.routing import RoutingTrace

Row = np.ndarray | None


def scores_ahead(
    policy: Policy,
    probabilities: Sequence[float] | np.ndarray | None,
    temporal: Sequence[float] | np.ndarray | None,
    spatio: Sequence[float] | np.ndarray | None,
) -> list[float] | None:
    """[E], what a cache of layer l is refined by before the step of token t: the sum of those rows that the policy takes.

    probabilities, temporal: of the token before in this layer, (t - 1, l). spatio: of the layer before, (t, l - 1); in the
    first MoE layer of the last one, (t - 1, L - 1). All float16, as traces hold them. A row that does not exist (no earlier token in
    this request, no head) is None and adds nothing; where none exists, nothing can be foreseen: None.
    """
    given = {"probabilities": probabilities, "temporal": temporal, "spatio": spatio}
    rows = [row for name in policy.refines if (row := given[name]) is not None]
    if not rows:
        return None
    summed: np.ndarray = np.array(rows, np.float16).astype(np.float64).sum(axis=0)
    return summed.tolist()


def candidates(scores: Sequence[float], most: int) -> list[int]:
    """At most `most` experts, of highest score first, of equals the lower id."""
    return sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))[:most]


def rows_before(trace: RoutingTrace, row: int, layer: int, first: int) -> tuple[Row, Row, Row]:
    """The rows that `scores_ahead` takes for token `row` of a trace, in a request that begins at token `first`."""

    def of(array: Row, token: int, at: int) -> Row:
        return None if array is None or token < first else array[token, at]

    return (
        of(trace.probabilities, row - 1, layer),
        of(trace.temporal, row - 1, layer),
        of(trace.spatio, row, layer - 1) if layer else of(trace.spatio, row - 1, trace.n_layers - 1),
    )
