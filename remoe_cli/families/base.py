"""What a family says about itself, and how its gates are found in a loaded model."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from remoe_cli.errors import FamilyError

if TYPE_CHECKING:
    from torch import nn

# Class names of routers over all of transformers 5; `Gate$` alone would also match forget gates.
_ROUTER_CLASS = re.compile(r"(Router|TopKGating|MoEV1Gate)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Family:
    """router, experts: module paths inside a decoder layer, in memory; shared: of the experts that every token runs, "" where
    there are none. tensors: the gate's parameters there.
    disk: on-disk name of a gate tensor, with {layer} and {tensor}. renormalised: whether the K weights are scaled
    to sum 1 (with top_k = 1 cross entropy then gives the gate no gradient)."""

    model_type: str
    router: str
    experts: str
    disk: str
    tensors: tuple[str, ...] = ("weight",)
    renormalised: Callable[[dict], bool] = lambda config: True
    shared: str = ""

    def disk_name(self, layer: int, tensor: str) -> str:
        return self.disk.format(layer=layer, tensor=tensor)


@dataclass(frozen=True)
class Gate:
    """One MoE layer's gate. layer: decoder layer index; block: the MoE block, which calls router, experts and shared (None
    where the family has none); names: in-memory parameter names, weight first."""

    layer: int
    block: "nn.Module"
    router: "nn.Module"
    experts: "nn.Module"
    shared: "nn.Module | None"
    names: tuple[str, ...]
    n_experts: int
    top_k: int

    @property
    def parameters(self) -> dict:
        """In-memory name -> parameter."""
        return {name: getattr(self.router, name.rpartition(".")[2]) for name in self.names}


def find_gates(model: "nn.Module") -> list[Gate]:
    """Every gate of a loaded model, in layer order.

    The family's name table and the shapes [E, D] beside the experts must agree; where they do not, or where no layer has
    a gate, FamilyError names the model type.
    """
    from remoe_cli.families import FAMILIES

    config: Any = model.config
    model_type = str(config.model_type)
    family = FAMILIES[model_type]
    modules = dict(model.named_modules())
    by_class = {
        name
        for name, m in modules.items()
        if _ROUTER_CLASS.search(type(m).__name__) and "Vision" not in type(m).__name__
    }
    by_table = {name for name in modules if name.endswith("." + family.router) and _LAYER.search(name)}
    by_table = {name for name in by_table if _is_gate(modules, name, family, config.hidden_size)}
    if by_class != by_table:
        raise FamilyError(
            f"{model_type}: router classes and the gate names of remoe's table disagree on "
            f"{len(by_class ^ by_table)} modules ({sorted(by_class ^ by_table)[0]}).",
            "pip install -U remoe-cli transformers",
        )
    if not by_table:
        raise FamilyError(
            f"{model_type}: no layer of this model has a router, so there is no gate to tune.", "remoe finetune demo"
        )
    gates = []
    for name in by_table:
        router, layer = modules[name], int(_LAYER.search(name).group(1))  # type: ignore[union-attr]
        prefix = name.removesuffix(family.router)
        experts = modules[prefix + family.experts]
        shared = modules[prefix + family.shared] if family.shared else None
        block = modules[name.rpartition(".")[0]]
        names = tuple(f"{name}.{tensor}" for tensor in family.tensors)
        n_experts, top_k = router.weight.shape[0], int(router.top_k)
        gates.append(Gate(layer, block, router, experts, shared, names, n_experts, top_k))
    return sorted(gates, key=lambda gate: gate.layer)


def _is_gate(modules: dict, name: str, family: Family, hidden_size: int) -> bool:
    experts = modules.get(name.removesuffix(family.router) + family.experts)
    weight = getattr(modules[name], "weight", None)
    return experts is not None and weight is not None and tuple(weight.shape) == (experts.num_experts, hidden_size)
