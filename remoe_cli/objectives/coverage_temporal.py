"""Temporal coverage: what the gate asks for at the next token should be among the best by P + temporal head at this one.
Without the head the score is P alone."""

from torch import Tensor

from remoe_cli.objectives.coverage import from_token_before, over_pairs
from remoe_cli.objectives.remoe import in_place_of_reuse, Routing, Segments
from remoe_cli.recipe import Objective


def coverage(routing: Routing, segments: Segments, settings: Objective) -> Tensor:
    """Sum over t >= 2 of what the best by P_{t-1} + temporal_{t-1} miss of P_t."""
    return over_pairs(from_token_before(routing), routing, segments, settings)


weights, terms, scales = in_place_of_reuse("coverage", coverage)
