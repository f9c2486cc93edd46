"""Decayed coverage: the score is the gate's whole past in the document, older tokens with less weight, as the cache policy
`decayed_weight` remembers it; plus the temporal head where there is one. Proposed by this project.

Shape letters: L MoE layers, N slots of a micro-batch, E routed experts.
"""

import torch
from torch import Tensor

from remoe_cli.objectives.coverage import over_pairs
from remoe_cli.objectives.remoe import in_place_of_reuse, Routing, Segments
from remoe_cli.recipe import Objective


def coverage(routing: Routing, segments: Segments, settings: Objective) -> Tensor:
    """Sum over t >= 2 of what the best by sum_i decay^i P_{t-1-i} + temporal_{t-1} miss of P_t."""
    scores_LNE = decayed(routing.logp_LNE.exp(), segments, settings.decay)
    if routing.temporal_LNE is not None:
        scores_LNE = scores_LNE + routing.temporal_LNE
    return over_pairs(scores_LNE[:, :-1], routing, segments, settings)


def decayed(p_LNE: Tensor, segments: Segments, decay: float) -> Tensor:
    """[L, N, E]: sum over i >= 0 of decay^i * p at i tokens before, inside the document.

    Sums over 1, 2, 4, ... tokens, each from two of the one before, until what is left out is below rounding.
    """
    total_LNE, tokens = p_LNE, 1
    while tokens < p_LNE.shape[1] and decay**tokens > torch.finfo(p_LNE.dtype).eps / 8:
        inside_M1 = segments.pairs(tokens)[:, None]
        earlier_LME = decay**tokens * total_LNE[:, :-tokens] * inside_M1
        total_LNE = torch.cat([total_LNE[:, :tokens], total_LNE[:, tokens:] + earlier_LME], 1)
        tokens *= 2
    return total_LNE


weights, terms, scales = in_place_of_reuse("coverage", coverage)
