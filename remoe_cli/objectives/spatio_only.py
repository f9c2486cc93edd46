"""Spatio-only coverage: the layer before alone says what this layer will ask for. It needs its head."""

from collections.abc import Callable

from torch import Tensor

from remoe_cli.objectives.coverage import from_layer_before, over_pairs, scales, terms_of, weights
from remoe_cli.objectives.remoe import Routing, Segments
from remoe_cli.recipe import Objective

__all__ = ["coverage", "scales", "terms", "weights"]


def coverage(routing: Routing, segments: Segments, settings: Objective) -> Tensor:
    """Sum over t >= 2 of what the best by the spatio head of the layer before miss of P_t."""
    return over_pairs(from_layer_before(routing), routing, segments, settings)


def terms(settings: Objective) -> dict[str, Callable[[Routing, Segments], Tensor]]:
    return terms_of(coverage, settings)
