"""Coverage of the probability that comes next by the experts a score would keep (CacheRouter, arXiv 2609.04895): what the
four coverage objectives share.

A score s over the experts keeps its `cache` best, softened so that it can be learned: m_e = sigmoid((s_e - theta) / tau),
theta the cache-th largest score, with its gradient. What the kept ones miss of a distribution q is sum_e q_e (1 - m_e).
The target q is the gate's own P, with its gradient unless `detach_target`: the gate is meant to move too.

Every loss is a sum over pairs of neighbouring tokens of one document, its mean over MoE layers taken; a document's first
token has no predecessor and is nobody's target, at any layer.

Shape letters: L MoE layers, N slots of a micro-batch, E routed experts.
"""

import torch
from torch import Tensor

from remoe_cli.objectives.remoe import Routing, Segments
from remoe_cli.recipe import Objective


def membership(scores_XE: Tensor, slots: int, tau: float) -> Tensor:
    """How much each expert belongs to the `slots` best, 0 to 1; the last of these has 1/2."""
    theta_X1 = scores_XE.topk(min(slots, scores_XE.shape[-1]), -1).values[..., -1:]
    return ((scores_XE - theta_X1) / tau).sigmoid()


def missed(scores_XE: Tensor, target_XE: Tensor, slots: int, tau: float) -> Tensor:
    """[X]: the probability in `target` that the `slots` best by score do not hold."""
    return (target_XE * (1 - membership(scores_XE, slots, tau))).sum(-1)


def over_pairs(scores_LME: Tensor, routing: Routing, segments: Segments, settings: Objective) -> Tensor:
    """Sum over pairs of what the scores miss of P at the later token. scores: [L, N - 1, E], those for slot n + 1 at n."""
    target_LME = routing.logp_LNE.exp()[:, 1:]
    if settings.detach_target:
        target_LME = target_LME.detach()
    missed_LM = missed(scores_LME, target_LME, settings.cache, settings.tau)
    return (missed_LM.mean(0) * segments.pairs(1)).sum()


def from_token_before(routing: Routing) -> Tensor:
    """[L, N - 1, E]: the gate's P at the token before, plus the temporal head's where there is one."""
    p_LNE = routing.logp_LNE.exp()
    return (p_LNE if routing.temporal_LNE is None else p_LNE + routing.temporal_LNE)[:, :-1]


def from_layer_before(routing: Routing) -> Tensor:
    """[L, N - 1, E]: the spatio head of the MoE layer before at the same token; for the first layer, of the last one at the
    token before."""
    spatio_LNE = routing.spatio_LNE
    assert spatio_LNE is not None
    return torch.cat([spatio_LNE[-1:, :-1], spatio_LNE[:-1, 1:]])
