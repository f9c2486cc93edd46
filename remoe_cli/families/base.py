"""What a family says about itself, and how its gates are found in a loaded model."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from remoe_cli.errors import FamilyError
from remoe_cli.families.outputs import Call, called, Read, standard
from remoe_cli.families.scores import Score, SOFTMAX

if TYPE_CHECKING:
    import torch
    from torch import nn

# Class names of routers over all of transformers 5; `Gate$` alone would also match forget gates. Routers of image patches, and
# those that look experts up by token id, have no gate to tune.
_ROUTER_CLASS = re.compile(r"(Router|TopKGating|MoEV1Gate)$")
_NO_GATE = re.compile(r"Vision|Hash")
_STACK = re.compile(r"^(.*?\b(?:layers|blocks))\.\d+\.")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class Family:
    """One model type. Paths are inside a decoder layer, in memory, unless said otherwise.

    router, experts: modules; shared: of the experts that every token runs, "" where there are none (or they are not one
    module). tensors: the gate's parameters below the router, the weight [E, D] first. disk: the router on disk, "" as in
    memory; stack: what holds the layers there. score: its rule, or one by configuration. renormalised: whether the K weights are
    scaled to one sum (with top_k = 1 cross entropy then gives the gate no gradient). bias: the selection bias, which selects
    and never weighs, "" where there is none. read, call: of the router's outputs and arguments. input: the module below the
    router that takes the gate's own input, "" the router itself. early: whether the block hands its own input to the
    router. capped: the router's attribute that bounds its logits by a tanh. apart: other routers, which stay as they are.
    reroutes: whether the K weights are P's, times one factor or scaled to one sum, so that those of other experts are known.
    adapts: whether the module that owns the gate is called, so that PEFT can put another in its place. entangled: what its
    layers share beside hidden states, "" nothing. wrappers: multimodal model types of which this is the text part.
    """

    model_type: str
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    disk: str = ""
    tensors: tuple[str, ...] = ("weight",)
    score: Score | Callable[[dict], Score] = SOFTMAX
    renormalised: Callable[[dict], bool] = lambda config: True
    shared: str = ""
    bias: str = ""
    read: Read = standard
    call: Call = called
    input: str = ""
    early: bool = True
    capped: str = ""
    apart: tuple[str, ...] = ()
    reroutes: bool = True
    adapts: bool = True
    entangled: str = ""
    stack: str = "layers"
    wrappers: tuple[str, ...] = ()

    def disk_name(self, layer: int, tensor: str) -> str:
        """How the on-disk name of a gate tensor ends; what comes before is the model's prefix."""
        return f"{self.stack}.{layer}.{self.disk or self.router}.{tensor}"


@dataclass(frozen=True)
class Gate:
    """One MoE layer's gate. layer: decoder layer index; block: the MoE block, which calls router, experts and shared (None
    where the family has none); names: in-memory parameter names, weight first; bias: the name of its selection bias, "" none;
    score, renormalised: as this model's configuration has them."""

    layer: int
    block: "nn.Module"
    router: "nn.Module"
    experts: "nn.Module"
    shared: "nn.Module | None"
    names: tuple[str, ...]
    n_experts: int
    top_k: int
    family: Family
    score: Score
    renormalised: bool
    bias: str = ""

    @property
    def parameters(self) -> dict:
        """In-memory name -> parameter."""
        tensors = zip(self.names, self.family.tensors, strict=True)
        return {name: self.router.get_parameter(tensor) for name, tensor in tensors}

    @property
    def weight(self) -> "torch.Tensor":
        """[E, D]"""
        return self.router.get_parameter(self.family.tensors[0])

    @property
    def input(self) -> "nn.Module":
        """The module that takes the gate's own input."""
        return self.router.get_submodule(self.family.input)

    @property
    def biases(self) -> dict:
        """In-memory name -> the selection bias, as it is stored; empty where there is none."""
        if not self.bias:
            return {}
        path = self.family.bias.removeprefix(self.family.router + ".")
        inside = path != self.family.bias
        return {self.bias: _tensor(self.router, path) if inside else _tensor(self.block, path.rpartition(".")[2])}

    @property
    def selection_bias(self) -> "torch.Tensor | None":
        """[E], what the family adds to its scores before it selects; a view."""
        return next((tensor.detach().view(-1) for tensor in self.biases.values()), None)

    def logits(self, hidden_ND: "torch.Tensor", *tensors: "torch.Tensor") -> "torch.Tensor":
        """[N, E] of the gate's own input and a weight [E, D] (and bias [E]) in the gate's place."""
        from torch.nn import functional as F

        logits_NE = F.linear(hidden_ND.to(tensors[0].dtype), *tensors)
        cap = float(getattr(self.router, self.family.capped)) if self.family.capped else 0.0
        return (logits_NE / cap).tanh() * cap if cap > 0 else logits_NE

    def ranking(self, logits_NE: "torch.Tensor") -> "torch.Tensor":
        """[N, E] fp32: what the router selects by, but for groups."""
        return self.score.ranking(logits_NE, self.selection_bias)

    def read(self, outputs: Any) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        """Of the router's outputs: logits [N, E], weights [N, K] and choice [N, K]."""
        return self.family.read(self, outputs)


def find_gates(model: "nn.Module") -> list[Gate]:
    """Every gate of a loaded model, in layer order.

    The family's row and the shapes [E, D] beside the experts must agree with the routers' classes; where they do not, or
    where no layer has a gate, FamilyError names the model type.
    """
    from remoe_cli.families import known

    config: Any = model.config
    model_type, config = str(config.model_type), config.get_text_config()
    family = known(model_type)
    modules = dict(model.named_modules())
    by_class = {
        name
        for name, m in modules.items()
        if _ROUTER_CLASS.search(type(m).__name__) and not _NO_GATE.search(type(m).__name__)
    }
    by_class = {name for name in by_class if not name.endswith(family.apart)}
    by_row = {name for name, m in modules.items() if name.endswith("." + family.router) and _LAYER.search(name)}
    by_row = {name for name in by_row if not _NO_GATE.search(type(modules[name]).__name__)}
    by_row = {name for name in by_row if _is_gate(modules, name, family, config.hidden_size)}
    if by_class != by_row:
        raise FamilyError(
            f"{model_type}: router classes and the gate names of remoe's table disagree on "
            f"{len(by_class ^ by_row)} modules ({sorted(by_class ^ by_row)[0]}).",
            "pip install -U remoe-cli transformers",
        )
    if not by_row:
        raise FamilyError(
            f"{model_type}: no layer of this model has a router, so there is no gate to tune.", "remoe finetune demo"
        )
    settings = config.to_dict()
    score = family.score if isinstance(family.score, Score) else family.score(settings)
    renormalised = family.renormalised(settings)
    tensors = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    gates = []
    for name in by_row:
        router, layer = modules[name], int(_LAYER.search(name).group(1))  # type: ignore[union-attr]
        prefix = name.removesuffix(family.router)
        experts, block = modules[prefix + family.experts], modules[name.rpartition(".")[0]]
        shared = modules.get(prefix + family.shared) if family.shared else None
        names = tuple(f"{name}.{tensor}" for tensor in family.tensors)
        bias = prefix + family.bias if family.bias and prefix + family.bias in tensors else ""
        n_experts = router.get_parameter(family.tensors[0]).shape[0]
        top_k = _top_k(router, block, config)
        gates.append(
            Gate(layer, block, router, experts, shared, names, n_experts, top_k, family, score, renormalised, bias)
        )
    return sorted(gates, key=lambda gate: gate.layer)


def stack_of(gates: Sequence[Gate]) -> str:
    """The name of the list that holds the decoder layers, those without a gate too."""
    found = _STACK.match(gates[0].names[0])
    assert found is not None
    return found.group(1)


def decoder_layers(model: "nn.Module", gates: Sequence[Gate]) -> "Sequence[nn.Module]":
    """All of them, those without a gate too."""
    return list(model.get_submodule(stack_of(gates)).children())


def _is_gate(modules: dict, name: str, family: Family, hidden_size: int) -> bool:
    experts = modules.get(name.removesuffix(family.router) + family.experts)
    weight = dict(modules[name].named_parameters()).get(family.tensors[0])
    if experts is None or weight is None or weight.dim() != 2:
        return False
    rows, columns = weight.shape
    here = _n_experts(experts)  # with expert parallel a share of them
    spread = getattr(experts, "_is_expert_parallel", False) and here > 0 and rows % here == 0
    return columns == hidden_size and (rows == here or spread)


def _n_experts(experts: "nn.Module") -> int:
    """As the module says, else the rows of its first parameter."""
    found = getattr(experts, "num_experts", None)
    return int(next(experts.parameters()).shape[0] if found is None else found)


def _top_k(router: "nn.Module", block: "nn.Module", config: Any) -> int:
    for holder in (router, block):
        if hasattr(holder, "top_k"):
            return int(holder.top_k)  # type: ignore[arg-type]
    return int(config.top_k_experts)


def _tensor(module: "nn.Module", path: str) -> "torch.Tensor":
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)
