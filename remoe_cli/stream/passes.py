"""Layer-major passes: every batch goes through a decoder layer before the next layer is needed, so that its weights come once.

The model's own forward is run twice a batch without its layers: once with layers that keep what they are called with and hand
their input on, once with a last layer that puts the real hidden states in their place, for the final norm and the head. Between
the two each layer is called as it would have been.

Shape letters: B rows, T slots, D hidden size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, ExitStack, nullcontext, suppress
from itertools import islice
from typing import Any, NamedTuple, Protocol, TYPE_CHECKING, TypeVar

import torch
from torch import nn, Tensor

from remoe_cli.errors import FamilyError
from remoe_cli.families import Gate, RouterTap
from remoe_cli.families.base import decoder_layers
from remoe_cli.families.tap import Routed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WAVE = 200_000_000  # bytes
Kept = TypeVar("Kept")


class _Recorded(Exception):
    """The last layer was called."""


class Layers(Protocol):
    """A model whose decoder layers may lie elsewhere. layer: its weights are on the device while open, those of `ahead` are
    fetched meanwhile, in this order; bare: layers may be called for nothing while open."""

    model: "PreTrainedModel"
    layers: Sequence[nn.Module]

    def layer(self, index: int, ahead: Sequence[int] = ()) -> AbstractContextManager[object]: ...

    def bare(self) -> AbstractContextManager[object]: ...


class Resident:
    """Layers that are always there."""

    def __init__(self, model: "PreTrainedModel", gates: Sequence[Gate]) -> None:
        self.model, self.layers = model, decoder_layers(model, gates)

    def layer(self, index: int, ahead: Sequence[int] = ()) -> AbstractContextManager[object]:
        return nullcontext()

    def bare(self) -> AbstractContextManager[object]:
        return nullcontext()


class Call(NamedTuple):
    """What a layer was called with beside its hidden states, which come first."""

    args: tuple
    kwargs: dict[str, Any]

    def to(self, device: torch.device, moved: dict[int, Tensor] | None = None) -> "Call":
        """moved: id -> what was moved before; layers share masks and positions."""
        from torch.utils._pytree import tree_map

        known: dict[int, Tensor] = {} if moved is None else moved

        def move(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            if id(one) not in known:
                known[id(one)] = on_host(one) if device.type == "cpu" else one.to(device, non_blocking=True)
            return known[id(one)]

        return Call(*tree_map(move, tuple(self)))


class Begun(NamedTuple):
    """A batch before its first layer. start: the first layer's input; calls: one a layer."""

    inputs: dict[str, Any]
    start: Tensor
    calls: list[Call]

    def started(self) -> "Begun":
        """The same once its first layer's input is in other hands."""
        return self._replace(start=self.start.new_empty(0))


def require_streamable(gates: Sequence[Gate]) -> None:
    """Raises FamilyError where a layer needs more of another layer than its output."""
    family = gates[0].family
    if family.entangled:
        raise FamilyError(
            f"{family.model_type}: {family.entangled}, so layers can't pass through memory one by one.",
            "the same command with --stream off",
        )


@torch.no_grad()
def begin(layers: Layers, inputs: dict[str, Any], keep: torch.device | str) -> Begun:
    """Everything before the first layer. keep: where to hold what layers are called with."""
    seen: list[tuple[Tensor, Call]] = []

    def recorder(index: int) -> Callable:
        def record(*args: Any, **kwargs: Any) -> Tensor:
            hidden = args[0] if args else kwargs.pop("hidden_states")
            seen.append((hidden, Call(args[1:], kwargs)))
            if index == len(layers.layers) - 1:
                raise _Recorded  # no head for nothing
            return hidden

        return record

    with _replaced(layers, recorder), suppress(_Recorded):
        layers.model(**inputs)
    if any(hidden is not seen[0][0] for hidden, _ in seen) or len(seen) != len(layers.layers):
        raise FamilyError(
            f"{layers.model.config.model_type}: the model computes between its layers, so they can't pass one by one.",
            "the same command with --stream off",
        )
    keep = torch.device(keep)
    moved: dict[int, Tensor] = {}
    calls = [call if keep == layers.model.device else call.to(keep, moved) for _, call in seen]
    return Begun(inputs, seen[0][0], calls)


def on_host(tensor: Tensor) -> Tensor:
    """In host memory; what comes from a GPU is pinned, and whoever reads it back does so in the same stream."""
    if tensor.device.type != "cuda":
        return tensor
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return kept.copy_(tensor, non_blocking=True)


def run(layer: nn.Module, hidden: Tensor, call: Call) -> Tensor:
    """One layer on one batch, as its model calls it."""
    call = call if call_device(call) in (None, hidden.device) else call.to(hidden.device)
    return layer(hidden, *call.args, **call.kwargs)


def call_device(call: Call) -> torch.device | None:
    """Of the first tensor in it, None without any."""
    from torch.utils._pytree import tree_leaves

    return next((one.device for one in tree_leaves(tuple(call)) if isinstance(one, Tensor)), None)


def finish(layers: Layers, begun: Begun, hidden: Tensor) -> Tensor:
    """Logits [B, T, V] from the last layer's output; gradients flow into `hidden`."""
    last = len(layers.layers) - 1

    def passing(index: int) -> Callable:
        def hand_on(*args: Any, **kwargs: Any) -> Tensor:
            return hidden if index == last else (args[0] if args else kwargs["hidden_states"])

        return hand_on

    with _replaced(layers, passing):
        return layers.model(**begun.inputs).logits


def tapped(gates: Sequence[Gate], index: int) -> RouterTap:
    """Of the gates in one decoder layer, maybe none."""
    return RouterTap([gate for gate in gates if gate.layer == index])


@torch.no_grad()
def forward(
    layers: Layers, gates: Sequence[Gate], inputs: Sequence[dict[str, Any]], keep: Callable[[Routed], Kept]
) -> Iterator[tuple[Tensor, list[Kept]]]:
    """Logits [B, T, V] of each batch, and what is kept of each of its routers; the logits of one batch at a time."""
    begun = [begin(layers, one, layers.model.device) for one in inputs]
    hidden = [one.start for one in begun]
    begun = [one.started() for one in begun]
    kept: list[list[Kept]] = [[] for _ in begun]
    count = len(layers.layers)
    for index in range(count):
        with layers.layer(index, range(index + 1, count)):
            for b, one in enumerate(begun):
                with tapped(gates, index) as tap:
                    hidden[b] = run(layers.layers[index], hidden[b], one.calls[index])
                    kept[b] += map(keep, tap.take())
    for b, one in enumerate(begun):
        yield finish(layers, one, hidden[b]), kept[b]


@torch.no_grad()
def passed(
    model: nn.Module,
    gates: Sequence[Gate],
    inputs: Iterable[dict[str, Any]],
    keep: Callable[[Routed], Kept],
    layers: Layers | None = None,
) -> Iterator[tuple[Tensor, list[Kept]]]:
    """As `forward`, for any number of batches: without `layers` one after the other, else in waves, for each of which every
    layer comes once."""
    if layers is None:
        for one in inputs:
            with RouterTap(list(gates)) as tap:
                yield model(**one).logits, [keep(routed) for routed in tap.take()]
        return
    rest = iter(inputs)
    while first := next(rest, None):
        others = islice(rest, _wave(layers, first["input_ids"]) - 1)
        yield from forward(layers, gates, [first, *others], keep)


def _wave(layers: Layers, ids_BT: Tensor) -> int:
    """How many such batches may be on their way at once: their hidden states take WAVE bytes where the model is; masks and
    choices come on top."""
    hidden_size = layers.model.config.get_text_config().hidden_size
    return max(1, WAVE // (ids_BT.numel() * hidden_size * layers.model.dtype.itemsize))


@contextmanager
def _replaced(layers: Layers, forward_of: Callable[[int], Callable]) -> Iterator[None]:
    """Each layer's forward is `forward_of(its index)` while open."""
    with ExitStack() as stack:
        stack.enter_context(layers.bare())
        for index, layer in enumerate(layers.layers):
            stack.callback(layer.__dict__.pop, "forward", None)
            layer.__dict__["forward"] = forward_of(index)
        yield
