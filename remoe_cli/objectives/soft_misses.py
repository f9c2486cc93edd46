"""Soft misses: the share of a token's experts that the deployed cache will not hold, made differentiable.

Probability far above or below the K-th rank decides nothing, so all the pressure is put where an expert may enter or leave
the choice: each expert outside the cache counts by how nearly it is chosen. The other terms are ReMoE's. Proposed by this
project; docs/recipes.md.

Shape letters: L MoE layers, N slots of a micro-batch, E routed experts, K experts a token.
"""

import torch
from torch import Tensor

from remoe_cli.objectives.remoe import in_place_of_reuse, Routing, Segments
from remoe_cli.objectives.resident_mass import contents
from remoe_cli.recipe import Objective


def misses(routing: Routing, segments: Segments, settings: Objective) -> Tensor:
    """Sum over pairs of (1/K) sum over the experts that the cache does not hold before t of sigmoid((log P_t - theta) / tau),
    theta halfway between the K-th and the next largest log P (its gradient kept). tau towards 0: the miss ratio of the K
    likeliest experts. The contents are a constant."""
    logp_LNE, top_k = routing.logp_LNE, routing.choice_LNK.shape[-1]
    if top_k == logp_LNE.shape[-1]:
        return (0 * logp_LNE).sum()  # every expert is chosen, whatever the gate says
    theta_LN1 = logp_LNE.topk(top_k + 1, -1).values[..., -2:].mean(-1, keepdim=True)
    chosen_LNE = torch.sigmoid((logp_LNE - theta_LN1) / settings.misses_tau)
    missed_LN = (chosen_LNE * ~contents(routing, segments, settings)).sum(-1)[:, 1:] / top_k
    return (missed_LN.mean(0) * segments.pairs(1)).sum()


weights, terms, scales = in_place_of_reuse("misses", misses)
