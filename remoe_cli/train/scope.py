"""What a run trains (train.scope): gates, the heads beside them, low-rank adapters on attention, or everything.

Shape letters: E routed experts, D hidden size; of a projection [O, I], R the adapter's rank.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn, Tensor
from torch.nn.utils import parametrize

from remoe_cli.families import Gate, Heads
from remoe_cli.families.spread import whole
from remoe_cli.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = ".self_attn."
LAYERS_STAY = ("gates", "heads", "gates+heads")  # scopes that leave all of a layer but its gates as it is


class Scope:
    """parameters: what the optimiser moves, by name: gates, heads, then the rest. heads: those that the objective reads,
    maybe none. moves_model: False where only heads train, so that the model's pass needs no gradient."""

    def __init__(self, model: "PreTrainedModel", gates: Sequence[Gate], recipe: Recipe) -> None:
        """Freezes the rest of the model; adapters start as no change, heads as their gates."""
        scope = recipe.train.scope
        self._gates = list(gates)
        self.heads = Heads.of_gates(gates, recipe.heads)
        self.moves_model = scope != "heads"
        self._adapted: dict[str, nn.Linear] = {}
        model.requires_grad_(False)
        self.parameters: dict[str, Tensor] = {}
        if self.moves_model:
            self.parameters |= {name: p for gate in gates for name, p in gate.parameters.items()}
        self.parameters |= self._head_tensors()
        if scope == "gates+lora":
            self.parameters |= self._adapt(model, recipe.train.lora_rank)
        if scope == "full":
            self.parameters |= {name: p for name, p in model.named_parameters() if name not in self.parameters}
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)

    def trained_gates(self) -> dict[str, Tensor]:
        """Every gate of the model as it is there, fp32 (fp64 for fp64 models)."""
        return {name: _precise(p) for gate in self._gates for name, p in gate.parameters.items()}

    def trained_heads(self, masters: dict[str, Tensor]) -> Heads | None:
        """The heads of these masters, None where there are none."""
        if not self.heads.kinds:
            return None
        found = {kind: [masters[_name(gate, kind)] for gate in self._gates] for kind in self.heads.kinds}
        return Heads(**found)

    def trained_others(self, masters: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is neither gate nor head, by the model's own names; adapters are first added to their weights, for good."""
        if not self._adapted:
            apart = self.trained_gates() | self._head_tensors()
            return {name: tensor for name, tensor in masters.items() if name not in apart}
        for module in self._adapted.values():
            parametrize.remove_parametrizations(module, "weight")
            module.weight.requires_grad_(False)
        return {f"{name}.weight": module.weight.detach().cpu() for name, module in self._adapted.items()}

    def _head_tensors(self) -> dict[str, Tensor]:
        heads = {kind: getattr(self.heads, kind) for kind in self.heads.kinds}
        return {_name(gate, kind): heads[kind][i] for kind in heads for i, gate in enumerate(self._gates)}

    def _adapt(self, model: "PreTrainedModel", rank: int) -> dict[str, Tensor]:
        found = [(n, m) for n, m in model.named_modules() if ATTENTION in n and isinstance(m, nn.Linear)]
        parameters: dict[str, Tensor] = {}
        for name, module in found:
            adapter = _Adapter(module.weight, rank)
            parametrize.register_parametrization(module, "weight", adapter, unsafe=True)
            self._adapted[name] = module
            parameters |= {f"{name}.{part}": parameter for part, parameter in adapter.named_parameters()}
        return parameters


class _Adapter(nn.Module):
    """W + up @ down (LoRA, arXiv 2106.09685, with alpha = rank)."""

    def __init__(self, weight_OI: Tensor, rank: int) -> None:
        super().__init__()
        like = _precise(weight_OI)
        self.down = nn.Parameter(nn.init.kaiming_uniform_(like.new_empty(rank, like.shape[1]), a=math.sqrt(5)))
        self.up = nn.Parameter(like.new_zeros(like.shape[0], rank))

    def forward(self, weight_OI: Tensor) -> Tensor:
        return weight_OI + (self.up @ self.down).to(weight_OI.dtype)


def _name(gate: Gate, kind: str) -> str:
    """A head's name: its gate's weight's, with the last part replaced."""
    return f"{gate.names[0].rpartition('.')[0]}.{kind}"


def _precise(tensor: Tensor) -> Tensor:
    return whole(tensor).to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
