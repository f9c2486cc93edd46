"""Does a decoder fit into memory: what it will take, before anything is loaded."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from remoe_cli import memory
from remoe_cli.errors import CacheError, command, MemoryShortError
from remoe_cli.families import top_k_of
from remoe_cli.families.experts import ExpertLayer
from remoe_cli.families.quantised import shape_of, weights
from remoe_cli.hub.checkpoint import Checkpoint, TensorInfo
from remoe_cli.sizes import show_size

WORKING_ROOM = 150_000_000  # bytes beside weights and experts: activations, attention cache, allocators
_MEGABYTE = 1_000_000


class _Need(NamedTuple):
    """Bytes. tokens: what requests take; dense: weights outside the experts; loading: the largest tensor as it is stored, which lies beside them while
    they are loaded and before there are slots."""

    tokens: int
    dense: int
    slots: int
    ram: int
    host: int
    loading: int

    @property
    def total(self) -> int:
        return self.dense + max(self.slots + self.ram + self.host + self.tokens, self.loading) + WORKING_ROOM


def decoder_bytes(dense: int, slots: int, loading: int, host: int = 0, tokens: int = 0) -> int:
    """Bytes that a decoder takes without a RAM tier or staging. dense, slots: bytes of the weights outside the experts and of
    all slots; loading: of the largest of those weights as it is stored; host: on the way to slots; tokens: of requests."""
    return _Need(tokens, dense, slots, 0, host, loading).total


def require(
    checkpoint: Checkpoint,
    layers: Sequence[ExpertLayer],
    dtype: torch.dtype,
    device: str,
    capacity: int,
    *,
    row_bytes: int,
    rows: Callable[[int], int],
    ram: int,
    top_k: int,
    host: int = 0,
    tokens: int = 0,
) -> None:
    """Raises MemoryShortError where memory does not hold a decoder, with what would fit: a smaller RAM tier, else fewer slots.

    capacity: slots a layer; row_bytes: of a slot; rows: capacity -> slots beside those of the layers; ram: bytes of the RAM
    tier; top_k: the smallest capacity; host: other bytes in host memory, on the way to slots; tokens: of the longest request,
    or of all those of a batch. On a GPU all but the RAM tier and `host` has to fit there.
    """
    rest = outside(checkpoint, layers)
    dense = sum(math.prod(shape_of(info)) for info in rest) * dtype.itemsize
    loading = max((info.nbytes for info in rest), default=0)
    context = request_bytes(checkpoint.config, dtype, tokens)
    cuda = device.startswith("cuda")

    def needs(slots_a_layer: int, ram: int, context: int = context) -> list[tuple[_Need, memory.Room]]:
        slots = (slots_a_layer * len(layers) + rows(slots_a_layer)) * row_bytes
        if cuda:
            return [(_Need(context, dense, slots, 0, 0, 0), on_device), (_Need(0, 0, 0, ram, host, loading), in_host)]
        return [(_Need(context, dense, slots, ram, host, loading), in_host)]

    def short(slots_a_layer: int, ram: int) -> tuple[_Need, memory.Room] | None:
        return next(((need, room) for need, room in needs(slots_a_layer, ram) if need.total > room.nbytes), None)

    in_host = memory.available()
    on_device = memory.gpu(device) if cuda else in_host
    lacking = short(capacity, ram)
    if lacking is None:
        return
    need, room = lacking
    parts = {
        "weights outside the experts": need.dense,
        "slots": need.slots,
        "RAM tier": need.ram,
        f"{tokens:,} tokens": need.tokens,
    }
    parts["working room"] = need.total - sum(parts.values())
    said = (
        f"{checkpoint.id} with {capacity} slots a layer needs {show_size(need.total)} "
        f"({', '.join(f'{name} {show_size(size)}' for name, size in parts.items() if size)}), "
        f"but {room.limit} has {show_size(room.nbytes)} left"
    )

    def tokens_beside(slots_a_layer: int) -> int:
        bare = needs(slots_a_layer, 0, 0)
        if any(need.total > room.nbytes for need, room in bare):
            return 0
        need, room = bare[0]
        held = dense + need.slots + need.host + WORKING_ROOM
        return (room.nbytes - held) // request_bytes(checkpoint.config, dtype, 1)

    def refusal(message: str, where: str = "", fit: int = 0, **changes: object) -> MemoryShortError:
        return MemoryShortError(message, command("decode", checkpoint.id, **changes) + where, changes, where, fit)

    if ram and short(capacity, 0) is None:
        need, room = needs(capacity, 0)[-1]
        left = (room.nbytes - need.total) // _MEGABYTE
        raise refusal(f"{said}.", cache=capacity, ram=f"{left}MB" if left * _MEGABYTE >= row_bytes else None)
    for fewer in range(capacity - 1, top_k - 1, -1):
        if short(fewer, 0) is None:
            raise refusal(f"{said}.", cache=fewer, ram=None)
    for slots_a_layer in (capacity, top_k):
        if (fit := tokens_beside(slots_a_layer)) > 1:  # one of a prompt, one new
            raise refusal(
                f"{said}; {fit:,} tokens would fit.",
                f" and {fit:,} tokens at most, of all prompts that are decoded together",
                cache=slots_a_layer,
                ram=None,
                fit=fit,
            )
    least = next(need for need, room in needs(top_k, 0) if need.total > room.nbytes)
    raise refusal(
        f"{said}; the least, {top_k} slots, needs {show_size(least.total)}.",
        f" where {show_size(least.total)} are free",
        cache=top_k,
        ram=None,
    )


def slots_within(
    checkpoint: Checkpoint, layers: Sequence[ExpertLayer], dtype: torch.dtype, nbytes: int, tokens: int
) -> int:
    """Slots a layer, E at most, that so many bytes hold beside the other weights and a request of so many tokens; may be too few."""
    outside_bytes = sum(math.prod(shape_of(info)) for info in outside(checkpoint, layers)) * dtype.itemsize
    slot = sum(math.prod(part.shape) for part in layers[0].parts) * dtype.itemsize
    left = nbytes - decoder_bytes(outside_bytes, 0, 0) - request_bytes(checkpoint.config, dtype, tokens)
    return max(0, min(layers[0].n_experts, left // (slot * len(layers))))


def request_bytes(config: dict[str, Any], dtype: torch.dtype, tokens: int) -> int:
    """The attention cache of so many tokens, and about what the widest layers hold of a prompt while it passes."""
    top_k, config = top_k_of(config), config.get("text_config") or config
    heads, hidden = (
        config.get("num_attention_heads") or config["n_heads"],
        config.get("hidden_size") or config["d_model"],
    )
    layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    if config.get("kv_lora_rank"):
        a_head = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        kept = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        a_head = config.get("head_dim") or hidden // heads
        kept = 2 * a_head * (config.get("num_key_value_heads") or heads)
    inner = [size for key, size in config.items() if key.endswith("intermediate_size") and isinstance(size, int)]
    passing = hidden * (2 * top_k + 8) + 4 * heads * a_head + 4 * max(inner, default=4 * hidden)
    return tokens * dtype.itemsize * (layers * kept + passing)


def require_more(model: str, device: torch.device, nbytes: int) -> None:
    """Raises CacheError where memory does not hold so many bytes of slots beside what is loaded."""
    room = memory.gpu(str(device)) if device.type == "cuda" else memory.available()
    if nbytes > room.nbytes:
        raise CacheError(
            f"{model}: these slots take {show_size(nbytes)} more, but {room.limit} has {show_size(room.nbytes)} left.",
            "the same command with fewer --cache",
        )


def outside(checkpoint: Checkpoint, layers: Sequence[ExpertLayer]) -> list[TensorInfo]:
    """The tensors that are no expert's. An expert's first byte is a tensor's, also where one tensor holds all experts."""
    experts = {piece[:2] for layer in layers for part in layer.parts for pieces in part.pieces for piece in pieces}
    return [info for info in weights(checkpoint).values() if info[:2] not in experts]
