"""Spatio-only coverage: the layer before alone says what this layer will ask for. It needs its head."""

from torch import Tensor

from remoe_cli.objectives.coverage import from_layer_before, over_pairs
from remoe_cli.objectives.remoe import in_place_of_reuse, Routing, Segments
from remoe_cli.recipe import Objective


def coverage(routing: Routing, segments: Segments, settings: Objective) -> Tensor:
    """Sum over t >= 2 of what the best by the spatio head of the layer before miss of P_t."""
    return over_pairs(from_layer_before(routing), routing, segments, settings)


weights, terms, scales = in_place_of_reuse("coverage", coverage)
