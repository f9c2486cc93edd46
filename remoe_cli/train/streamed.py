"""The gradient of a step whose layers pass through memory one by one: the same sums as in one piece.

Forward without autograd; the loss on leaves: each batch's last hidden states, and what each gate (and head) put out; then the
layers in reverse, run again from the kept input of each batch, with those leaves' gradients as their outputs'. Every layer is
fetched once each way a step, and only one layer's activations of one micro-batch exist at a time.

Shape letters: L MoE layers, N tokens, D hidden size, E routed experts, T slots, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from remoe_cli.errors import UsageError
from remoe_cli.families import Gate, Heads
from remoe_cli.families.tap import Routed
from remoe_cli.objectives.remoe import overlap, Routing, Segments
from remoe_cli.stream.passes import begin, Begun, finish, Layers, on_host, require_streamable, run, tapped
from remoe_cli.train.losses import Terms, text_terms, weighed
from remoe_cli.train.masters import Masters
from remoe_cli.train.packing import Batch, model_inputs
from remoe_cli.train.scope import LAYERS_STAY, Scope
from remoe_cli.train.teacher import Teacher


@dataclass
class _Seen:
    """A micro-batch on its way. borders: decoder layer -> its input, on the host; routed, references: one a MoE layer, without
    graph; grads: of what its gate put out (logits, then heads)."""

    batch: Batch
    segments: Segments
    begun: Begun
    hidden: Tensor
    base: Tensor | None = None
    borders: dict[int, Tensor] = field(default_factory=dict)
    routed: list[Routed] = field(default_factory=list)
    references: list[Tensor] = field(default_factory=list)
    foreseen: list[dict[str, Tensor]] = field(default_factory=list)
    grad: Tensor | None = None
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)


class StreamedGradients:
    """What `gradients` of a resident run does between the weights and the clipping. scope, masters, teacher, base, terms: the
    loop's own. Raises UsageError for a scope that trains more than gates and heads, FamilyError as `require_streamable`."""

    def __init__(
        self,
        layers: Layers,
        gates: Sequence[Gate],
        scope: Scope,
        masters: Masters,
        teacher: Teacher | None,
        base: Sequence[tuple[Tensor, ...]],
    ) -> None:
        require_streamable(gates)
        self._layers, self._gates, self._scope, self._masters = layers, list(gates), scope, masters
        self._teacher, self._base = teacher, base
        self._number = {gate.layer: i for i, gate in enumerate(gates)}
        self._first = min(self._number)

    def run(
        self,
        micro: Sequence[Batch],
        segments: Sequence[Segments],
        weights: Mapping[str, float],
        scales: Mapping[str, float],
        terms_of: Any,
    ) -> Tensor:
        """Leaves the gradient in the masters; returns each term's mean over the step, in the order of scales, and EOR's.
        terms_of: (routing, segments) -> the objective's terms."""
        seen = self._forward(micro, segments)
        measured = torch.zeros(len(scales) + 1, dtype=torch.float64, device=self._layers.model.device)
        for one in seen:
            measured += self._losses(one, weights, scales, terms_of)
        if self._scope.moves_model:
            self._backward(seen)
        return measured

    @torch.no_grad()
    def _forward(self, micro: Sequence[Batch], segments: Sequence[Segments]) -> list[_Seen]:
        layers, count = self._layers, len(self._layers.layers)
        device = layers.model.device
        seen = []
        for batch, part in zip(micro, segments, strict=True):
            begun = begin(layers, model_inputs(layers.model, batch, part), "cpu")
            seen.append(
                _Seen(batch, part.to(device), begun.started(), begun.start, begun.start if self._teacher else None)
            )
        back = range(count - 1, self._first - 1, -1) if self._scope.moves_model else ()
        for index in range(count):
            with layers.layer(index, (*range(index + 1, count), *back)):
                for one in seen:
                    self._pass(index, one)
                if self._teacher and index >= self._first:
                    with self._teacher.as_base(self._gates, index):
                        for one in seen:
                            assert one.base is not None
                            one.base = run(layers.layers[index], one.base, one.begun.calls[index])
                elif self._teacher:
                    for one in seen:
                        one.base = one.hidden
        return seen

    def _pass(self, index: int, one: _Seen) -> None:
        if index >= self._first and self._scope.moves_model:
            one.borders[index] = on_host(one.hidden)
        with tapped(self._gates, index) as tap:
            one.hidden = run(self._layers.layers[index], one.hidden, one.begun.calls[index])
            found = tap.take()
        for routed in found:
            i = self._number[index]
            logits_NE = self._gates[i].logits(routed.hidden_ND, *self._base[i])
            one.references.append(routed.score.log_probabilities(logits_NE))
            one.foreseen.append(_foreseen(self._scope.heads, i, routed))
            one.routed.append(
                routed if not self._scope.moves_model else routed._replace(hidden_ND=_nothing(routed.hidden_ND))
            )

    def _losses(self, one: _Seen, weights: Mapping[str, float], scales: Mapping[str, float], terms_of: Any) -> Tensor:
        """Leaves the gradients of the batch's leaves; returns its share of each term and of EOR."""
        device, moves = self._layers.model.device, self._scope.moves_model
        learned = one.batch.learned_BT
        learned_BT = None if learned is None else learned.to(device)
        hidden = one.hidden.detach().requires_grad_(moves)
        with torch.set_grad_enabled(moves):
            logits_BTV = finish(self._layers, one.begun, hidden)
        base_BTV = None
        if one.base is not None:
            with torch.no_grad():
                base_BTV = finish(self._layers, one.begun, one.base)
        text = text_terms(logits_BTV, base_BTV, one.begun.inputs["input_ids"], one.segments, learned_BT)
        loss, shares = weighed(text, weights, scales)
        if loss is not None and loss.requires_grad:
            loss.backward()
        one.grad = hidden.grad
        del logits_BTV, base_BTV, text, loss
        leaves, routing = self._leaves(one)
        found: Terms = terms_of(routing, one.segments)
        loss, others = weighed(found, weights, scales)
        if loss is not None and loss.requires_grad:
            loss.backward()
        if not moves:  # the heads themselves were in that graph
            self._masters.accumulate()
        one.grads = [{kind: leaf.grad for kind, leaf in layer.items()} for layer in leaves]
        shares |= others
        eor = overlap(routing.choice_LNK, one.segments).double() / (weights["lag"] or 1.0)
        one.hidden, one.base, one.routed, one.references, one.foreseen = _nothing(one.hidden), None, [], [], []
        return torch.stack([*(shares[name] for name in scales), eor])

    def _leaves(self, one: _Seen) -> tuple[list[dict[str, Tensor]], Routing]:
        """Of each MoE layer what it put out, as leaves, and the routing made of them."""
        moves, heads = self._scope.moves_model, self._scope.heads
        leaves: list[dict[str, Tensor]] = []
        for i, routed in enumerate(one.routed):
            leaf = {"logits": routed.logits_NE.detach().requires_grad_(moves)}
            if moves:
                leaf |= {kind: found.detach().requires_grad_() for kind, found in one.foreseen[i].items()}
            else:
                leaf |= _foreseen(heads, i, routed)
            leaves.append(leaf)
        logp_LNE = torch.stack(
            [routed.score.log_probabilities(leaf["logits"]) for routed, leaf in zip(one.routed, leaves, strict=True)]
        )
        foreseen = {f"{kind}_LNE": torch.stack([leaf[kind] for leaf in leaves]) for kind in heads.kinds}
        choice_LNK = torch.stack([routed.choice_NK for routed in one.routed])
        return leaves, Routing(logp_LNE, torch.stack(one.references), choice_LNK, **foreseen)

    def _backward(self, seen: Sequence[_Seen]) -> None:
        layers, device = self._layers, self._layers.model.device
        count = len(layers.layers)
        for index in range(count - 1, self._first - 1, -1):
            with layers.layer(index, (*range(index - 1, self._first - 1, -1), *range(count))):
                for one in seen:
                    hidden = one.borders.pop(index).to(device, non_blocking=True).detach()
                    hidden.requires_grad_(index > self._first)
                    with tapped(self._gates, index) as tap:
                        out = run(layers.layers[index], hidden, one.begun.calls[index])
                        found = tap.take()
                    roots, grads = [out], [one.grad]
                    for routed in found:
                        i = self._number[index]
                        outputs = {"logits": routed.logits_NE, **_foreseen(self._scope.heads, i, routed)}
                        roots += outputs.values()
                        grads += [one.grads[i][kind] for kind in outputs]
                    counts = [(r, g) for r, g in zip(roots, grads, strict=True) if g is not None and r.requires_grad]
                    if counts:
                        torch.autograd.backward([root for root, _ in counts], [grad for _, grad in counts])
                        self._masters.accumulate()
                    one.grad = hidden.grad
                    del out, found, roots, grads, counts


def require_scope(scope: str) -> None:
    """Raises UsageError where more than gates and heads train."""
    if scope not in LAYERS_STAY:
        raise UsageError(
            f"train.scope {scope} trains weights that do not stay in memory; models that are streamed or spread over processes have "
            f"{', '.join(LAYERS_STAY)}.",
            "the same command with --stream off, in one process",
        )


def _foreseen(heads: Heads, i: int, routed: Routed) -> dict[str, Tensor]:
    return {kind: heads.probabilities(kind, i, routed.hidden_ND, routed.score) for kind in heads.kinds}


def _nothing(like: Tensor) -> Tensor:
    """An empty tensor of its own: a slice would keep all of `like`."""
    return like.new_empty(0, like.shape[-1])
