"""Spatio-temporal coverage: the temporal score of the token before, plus the spatio head of the layer before.
Without heads the score is P of the token before alone."""

from torch import Tensor

from remoe_cli.objectives.coverage import from_layer_before, from_token_before, over_pairs
from remoe_cli.objectives.remoe import in_place_of_reuse, Routing, Segments
from remoe_cli.recipe import Objective


def coverage(routing: Routing, segments: Segments, settings: Objective) -> Tensor:
    """Sum over t >= 2 of what the best by P_{t-1} + temporal_{t-1} + spatio of the layer before miss of P_t."""
    scores_LME = from_token_before(routing)
    if routing.spatio_LNE is not None:
        scores_LME = scores_LME + from_layer_before(routing)
    return over_pairs(scores_LME, routing, segments, settings)


weights, terms, scales = in_place_of_reuse("coverage", coverage)
