"""Routing traces of decoding, many requests at once: forced continuations and greedy ones.

Shape letters: R requests, P prompt tokens, S counted one-token steps, L MoE layers, K experts a token.
"""

from collections.abc import Callable

import numpy as np
import torch

from remoe_cli.families import Gate, Routed, RouterTap
from remoe_cli.families.experts import recorded_order
from remoe_cli.families.loader import kept_cache
from remoe_cli.report.figures import Decoded
from remoe_cli.routing.trace import RoutingTrace


@torch.no_grad()
def decode(
    model: torch.nn.Module,
    gates: list[Gate],
    prompts_RP: torch.Tensor,
    steps: int,
    forced_RS: torch.Tensor | None = None,
    *,
    batch: int = 32,
    provenance: dict | None = None,
    on_batch: Callable[[int], None] = lambda done: None,
) -> Decoded:
    """Prefills each prompt, then feeds `steps` tokens one by one: forced_RS, or the model's own greedy choice.

    All prompts have one length, so no row is padded. The end token is ignored, so that all requests count `steps` steps
    (ReMoE's protocol). Prefill routing is not in the trace.
    """
    device = next(model.parameters()).device
    choices, weights, fed = [], [], []
    for begin in range(0, len(prompts_RP), batch):
        part = slice(begin, begin + batch)
        forced = None if forced_RS is None else forced_RS[part].to(device)
        with RouterTap(gates) as tap:
            chosen, weight, ids = _batch(model, tap, prompts_RP[part].to(device), steps, forced)
        choices.append(chosen)
        weights.append(weight)
        fed.append(ids)
        on_batch(min(begin + batch, len(prompts_RP)))
    experts_TLK, weights_TLK = np.concatenate(choices), np.concatenate(weights)
    trace = RoutingTrace(
        experts_TLK,
        np.arange(len(prompts_RP) + 1, dtype=np.int64) * steps,
        np.zeros(len(experts_TLK), dtype=bool),
        gates[0].n_experts,
        weights_TLK,
        {"kind": "greedy" if forced_RS is None else "forced", **(provenance or {})},
    )
    return Decoded(trace, np.concatenate(fed))


def _batch(model, tap: RouterTap, prompts_RP: torch.Tensor, steps: int, forced_RS: torch.Tensor | None):
    out = model(prompts_RP, use_cache=True, logits_to_keep=1)
    chosen, weight, fed = [], [], []
    next_R = out.logits[:, -1].argmax(-1)
    for step in range(steps):
        ids_R = next_R if forced_RS is None else forced_RS[:, step]
        tap.start()
        out = model(ids_R[:, None], use_cache=True, **kept_cache(out))
        experts_RLK, weights_RLK = canonical(tap.take())
        chosen.append(experts_RLK)
        weight.append(weights_RLK)
        fed.append(ids_R.cpu().numpy())
        next_R = out.logits[:, -1].argmax(-1)
    return (
        np.stack(chosen, 1).reshape(-1, *chosen[0].shape[1:]),
        np.stack(weight, 1).reshape(-1, *weight[0].shape[1:]),
        np.stack(fed, 1),
    )


def canonical(routed: list[Routed]) -> tuple[np.ndarray, np.ndarray]:
    """experts [N, L, K] int16 and weights [N, L, K] float16, each token's experts in the recorded order."""
    experts, weights = [], []
    for layer in routed:
        weight_NK, choice_NK = layer.weight_NK.float().cpu().numpy(), layer.choice_NK.cpu().numpy()
        order = recorded_order(choice_NK, weight_NK)
        experts.append(np.take_along_axis(choice_NK, order, -1).astype(np.int16))
        weights.append(np.take_along_axis(weight_NK, order, -1).astype(np.float16))
    return np.stack(experts, 1), np.stack(weights, 1)
