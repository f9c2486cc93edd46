"""What the routers of transformers take and return, and how the same three things are read from each.

Shape letters: N tokens, D hidden size, E routed experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from remoe_cli.families.base import Gate

# (gate, the router's outputs) -> logits [N, E], weights [N, K], choice [N, K], all the router's own, graph kept
Read = Callable[["Gate", Any], "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"]
# (gate, the router's forward, its input [N, D]) -> the router's outputs
Call = Callable[["Gate", Callable, "torch.Tensor"], Any]


def standard(_gate: Gate, outputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits, weights, choice, maybe more."""
    return outputs[:3]


def probabilities_first(_gate: Gate, outputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gemma4: P in the place of logits. log P are logits as well as any."""
    import torch

    chances_NE, weight_NK, choice_NK = outputs
    return chances_NE.clamp_min(torch.finfo(chances_NE.dtype).tiny).log(), weight_NK, choice_NK


def scattered(gate: Gate, outputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """llama4: weights [N, E], 0 where an expert was not chosen, and logits."""
    weight_NE, logits_NE = outputs
    choice_NK = weight_NE.topk(gate.top_k, -1).indices
    return logits_NE, weight_NE.gather(-1, choice_NK), choice_NK


def sorted_by_expert(gate: Gate, outputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """jetmoe: for each place in the order of experts, where among N x K it came from, its token and weight; how many places each
    expert has; logits."""
    import torch

    places, _, sorted_weight, sizes, logits_NE = outputs
    experts = torch.arange(len(sizes), device=places.device)
    sorted_choice = experts.repeat_interleave(torch.tensor(sizes, device=places.device))
    choice_NK = torch.empty_like(places).scatter(0, places, sorted_choice).view(-1, gate.top_k)
    weight_NK = torch.zeros_like(sorted_weight).scatter(0, places, sorted_weight).view(-1, gate.top_k)
    return logits_NE, weight_NK, choice_NK


def chosen_by_block(gate: Gate, outputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dbrx: logits alone, from which the block's own function chooses."""
    weight_NK, choice_NK = gate.block.route_tokens_to_experts(outputs)  # type: ignore[operator]
    return outputs, weight_NK, choice_NK


def called(_gate: Gate, forward: Callable, x_ND: torch.Tensor) -> Any:
    return forward(x_ND)


def called_with_bias(gate: Gate, forward: Callable, x_ND: torch.Tensor) -> Any:
    """The block hands its selection bias over."""
    return forward(x_ND, gate.selection_bias)


def called_with_bias_3d(gate: Gate, forward: Callable, x_ND: torch.Tensor) -> Any:
    """afmoe: whose router takes batches of rows."""
    return forward(x_ND[None], gate.selection_bias)
