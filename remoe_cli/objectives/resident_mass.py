"""Resident mass: probability belongs on the experts that the deployed cache will hold.

ReMoE's reuse looks one token back; a cache of C slots remembers more. Here the cache itself is run over the model's own
choices, and the mass of P on its contents before each token is what counts. With C = K and LRU it is ReMoE's reuse. The
other terms are ReMoE's. Proposed by this project; docs/recipes.md.

Shape letters: L MoE layers, N slots of a micro-batch, E routed experts, K experts a token.
"""

import torch
from torch import Tensor

from remoe_cli.cache import ExpertCache
from remoe_cli.objectives.remoe import in_place_of_reuse, minus_log_mean, Routing, Segments
from remoe_cli.recipe import Objective


def resident(routing: Routing, segments: Segments, settings: Objective) -> Tensor:
    """Sum over documents of pairs * -log(rho + 1e-8), rho the mean over t >= 2 of (1/K) sum of P_t over the experts that a
    cache of `settings.cache` slots holds before t. The contents are a constant; the mean is at least log K."""
    held_LNE = contents(routing, segments, settings)
    mass_LN = (routing.logp_LNE.exp() * held_LNE)[:, 1:].sum(-1) / routing.choice_LNK.shape[-1]
    return minus_log_mean(mass_LN, segments)


@torch.no_grad()
def contents(routing: Routing, segments: Segments, settings: Objective) -> Tensor:
    """[L, N, E] bool: what the cache holds before each token; a fresh one for each document, nothing in padding."""
    if settings.policy == "lru" and settings.admission == "forced":
        return _most_recent(routing, segments, settings.cache)
    return _simulated(routing, segments, settings)


def _most_recent(routing: Routing, segments: Segments, slots: int) -> Tensor:
    """LRU without a loop: the experts of the `slots` latest touches. Of one token's, the likeliest is touched last."""
    n_layers, n_slots, n_experts = routing.logp_LNE.shape
    top_k = routing.choice_LNK.shape[-1]
    slots = max(min(slots, n_experts), top_k)
    order_LNK = routing.logp_LNE.gather(-1, routing.choice_LNK).argsort(-1).argsort(-1)
    slot_N1 = torch.arange(n_slots, device=order_LNK.device)[:, None]
    touch_LNK = slot_N1 * top_k + order_LNK
    touched_LNE = torch.full((n_layers, n_slots, n_experts), -1, device=order_LNK.device)
    touched_LNE.scatter_(-1, routing.choice_LNK, touch_LNK)
    before_LNE = torch.full_like(touched_LNE, -1)
    before_LNE[:, 1:] = touched_LNE.cummax(1).values[:, :-1]
    begin_N1 = (slot_N1[:, 0] - segments.position_N)[:, None] * top_k
    real_N1 = (segments.document_N >= 0)[:, None]
    before_LNE = before_LNE.masked_fill((before_LNE < begin_N1) | ~real_N1, -1)
    oldest_LN1 = before_LNE.topk(slots, -1).values[..., -1:]
    return (before_LNE >= oldest_LN1) & (before_LNE >= 0)


def _simulated(routing: Routing, segments: Segments, settings: Objective) -> Tensor:
    """Any policy of the simulator, one token after the other."""
    p_LNE = routing.logp_LNE.exp()
    weight_LNK = p_LNE.gather(-1, routing.choice_LNK)
    order_LNK = weight_LNK.argsort(-1)
    touched = routing.choice_LNK.gather(-1, order_LNK).cpu().tolist()
    weights = weight_LNK.gather(-1, order_LNK).cpu().tolist()
    chances = p_LNE.cpu().tolist()
    n_experts = p_LNE.shape[-1]
    slots = max(min(settings.cache, n_experts), routing.choice_LNK.shape[-1])
    held_LNE = torch.zeros(p_LNE.shape, dtype=torch.bool)
    positions = torch.where(segments.document_N >= 0, segments.position_N, -1).tolist()
    for layer in range(len(p_LNE)):
        cache = ExpertCache(slots, settings.policy, n_experts=n_experts, admission=settings.admission)
        for slot, position in enumerate(positions):
            if position < 0:
                continue
            if position == 0:
                cache.reset()
            held_LNE[layer, slot, list(cache.resident)] = True
            cache.step(touched[layer][slot], weights[layer][slot], chances[layer][slot])
    return held_LNE.to(p_LNE.device)


weights, terms, scales = in_place_of_reuse("resident", resident)
