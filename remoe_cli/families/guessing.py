"""What the gate of the next MoE layer says of a layer's own hidden state.

Shape letters: N tokens, D hidden, E routed experts.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from remoe_cli.families.base import Gate

if TYPE_CHECKING:
    import torch


def guess(gates: Sequence[Gate], index: int, hidden_ND: "torch.Tensor") -> "torch.Tensor":
    """[N, E] probabilities; of the last layer, which has none after it, 0. hidden: the input of gate `index`, or near it."""
    following = gates[min(index + 1, len(gates) - 1)]
    found = following.score.probabilities(following.logits(hidden_ND, *following.parameters.values()))
    return found if index + 1 < len(gates) else found * 0
