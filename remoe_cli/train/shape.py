"""The sizes of a model, from config.json and the headers of its files: what `needs` counts with."""

import re
from typing import Any, NamedTuple, TYPE_CHECKING

import torch

from remoe_cli.families import find_gates, Gate
from remoe_cli.families.frozen import can_be_frozen
from remoe_cli.families.loader import meta_model, renamed
from remoe_cli.families.outputs import scattered
from remoe_cli.families.quantised import BYTES, weights
from remoe_cli.families.refuse import quant_method
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.train.scope import ATTENTION

if TYPE_CHECKING:
    from torch import Tensor

_NORM_BYTES = 12  # for each element of the hidden state and layer: the inputs of norms and router in fp32
_SCORES = 2  # values for each head and pair of tokens, where attention is computed step by step
_COMPILED = 600_000_000  # bytes: oneDNN keeps up to 1024 products of half precision, one for each number of rows
_ROUTER_BYTES = 12  # for each token and expert: logits, scores


class Shape(NamedTuple):
    """A model computed in `dtype`. layers: bytes of each decoder layer in memory, gates apart; stored: as its files hold them;
    outside, stored_outside: of the rest; experts: bytes of the routed experts in memory; parameters: elements of all; gates:
    of the gates; adapted: of adapters of rank 1 on attention; lowest: the first layer with a gate; active: weights that a
    token meets, the head's included; kept: bytes a token that autograd keeps of each layer, and `scores` for each pair of tokens
    of a row and layer, 0 where the attention kernel keeps none; compiled: bytes of a CPU's compiled products; entangled:
    the family's own."""

    model: str
    dtype: torch.dtype
    layers: tuple[int, ...]
    stored: tuple[int, ...]
    outside: int
    stored_outside: int
    experts: int
    parameters: int
    gates: int
    adapted: int
    lowest: int
    moe_layers: int
    n_experts: int
    top_k: int
    hidden: int
    vocabulary: int
    active: int
    kept: tuple[int, ...]
    scores: int
    compiled: int
    entangled: str

    @property
    def weights(self) -> int:
        """Bytes of the whole model in memory, gates apart."""
        return self.outside + sum(self.layers)


def shape_of(checkpoint: Checkpoint, dtype: torch.dtype, device: str = "cpu") -> Shape:
    """From config.json and the headers alone; where no header is here (`Headers.absent`) files are taken to hold `dtype`.

    Raises FamilyError for a model that remoe cannot tune.
    """
    model: Any = meta_model(checkpoint, dtype)
    gates = find_gates(model)
    config, n_experts = model.config.get_text_config(), gates[0].n_experts
    place = re.compile(rf"(?:^|\.){gates[0].family.stack}\.(\d+)\.")
    learning = {name for gate in gates for name in gate.names}
    of_experts = {id(p) for gate in gates for p in gate.experts.parameters()}
    layers: dict[int, dict[str, Tensor]] = {}  # -1: outside
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in learning:
            layers.setdefault(_layer(place, name), {})[name] = tensor
    every = range(max(layers) + 1)
    experts = {
        i: sum(
            t.numel() for t in layers[i].values() if id(t) in of_experts or (t.ndim == 3 and t.shape[0] == n_experts)
        )
        for i in every
    }
    memory = {i: sum(tensor.nbytes for tensor in layers[i].values()) for i in layers}
    flat = [tensor for i in every for name, tensor in layers[i].items() if ATTENTION in name and tensor.ndim == 2]
    met = sum(t.numel() for i in every for t in layers[i].values()) - sum(experts.values())
    stored = _stored(model, checkpoint, place, learning, memory, experts, dtype)
    return Shape(
        model=checkpoint.id,
        dtype=dtype,
        layers=tuple(memory[i] for i in every),
        stored=tuple(stored[i] for i in every),
        outside=memory[-1],
        stored_outside=stored[-1],
        experts=sum(experts.values()) * dtype.itemsize,
        parameters=sum(p.numel() for p in model.parameters()),
        gates=sum(p.numel() for gate in gates for p in gate.parameters.values()),
        adapted=sum(sum(tensor.shape) for tensor in flat),
        lowest=gates[0].layer,
        moe_layers=len(gates),
        n_experts=n_experts,
        top_k=gates[0].top_k,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        active=met + sum(experts.values()) * gates[0].top_k // n_experts + config.vocab_size * config.hidden_size,
        kept=tuple(_kept(layers[i], [gate for gate in gates if gate.layer == i], config, dtype) for i in every),
        scores=_scores(config, dtype, device),
        entangled=gates[0].family.entangled,
        compiled=_COMPILED * (device == "cpu" and dtype.itemsize < 4),
    )


def _stored(
    model: Any,
    checkpoint: Checkpoint,
    place: re.Pattern,
    learning: set[str],
    memory: dict[int, int],
    experts: dict[int, int],
    dtype: torch.dtype,
) -> dict[int, int]:
    """Bytes of each layer in the files, scales included; -1: outside."""
    if not checkpoint.tensors:
        method = quant_method(checkpoint.config)
        lighter = dtype.itemsize - BYTES[method] if method else 0.0
        return {i: size - round(experts.get(i, 0) * lighter) for i, size in memory.items()}
    stored, known, places = dict.fromkeys(memory, 0), set(model.state_dict()) - learning, weights(checkpoint)
    for disk, (name, _) in renamed(model, checkpoint).items():
        if name in known:
            info = places[disk]
            stored[_layer(place, name)] += info.nbytes + (info.scales.nbytes if info.scales else 0)
    return stored


def _scores(config: Any, dtype: torch.dtype, device: str) -> int:
    """Bytes for each pair of tokens: none where a fused kernel runs, which on a CPU wants values as wide as keys."""
    if config._attn_implementation == "eager":
        return _SCORES * config.num_attention_heads * dtype.itemsize
    apart = getattr(config, "qk_nope_head_dim", None), getattr(config, "v_head_dim", None)
    if device == "cpu" and None not in apart and apart[0] + config.qk_rope_head_dim != apart[1]:
        return 4 * config.num_attention_heads
    return 0


def _layer(place: re.Pattern, name: str) -> int:
    """-1: outside the layers."""
    found = place.search(name)
    return int(found[1]) if found else -1


def _kept(tensors: "dict[str, Tensor]", gates: list[Gate], config: Any, dtype: torch.dtype) -> int:
    """Bytes a token that autograd keeps of one frozen layer: of each projection about its output (and of a pair of them
    their product), of each norm its input in fp32, of the experts what the up-projection puts out, of those that keep more all that they compute; counted from above."""
    flat = sum(tensor.shape[0] for name, tensor in tensors.items() if tensor.ndim == 2)
    kept = dtype.itemsize * flat * 3 // 2 + _NORM_BYTES * config.hidden_size
    frozen = bool(gates) and can_be_frozen(gates, dtype)
    for gate in gates:
        copies = gate.n_experts if gate.family.read is scattered else gate.top_k  # of each token
        sizes = [p.shape[1:].numel() // config.hidden_size for p in gate.experts.parameters() if p.ndim == 3]
        inner = sizes[0] if frozen else config.hidden_size + sum(sizes)
        kept += dtype.itemsize * copies * inner + _ROUTER_BYTES * gate.n_experts
    return kept
