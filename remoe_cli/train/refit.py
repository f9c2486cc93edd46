"""Refitting selection biases: tuned gates shift the loads that a family's selection bias was fitted for; this gives them back.

A router chooses the K experts with the largest s_te + b_e (s: scores of token t, b: the bias). Let f_e be the share of
tokens that expert e had in the base, on the same texts. With the other biases as they are, token t chooses e exactly if
b_e > m_te = theta_te - s_te, where theta_te is what e has to beat: the best that was not chosen if e was, else the worst
that was. So the bias that gives e its old share is the f_e-quantile of its margins m_te, in closed form. All experts move half of
the way there at once, and again until loads fit; a shift common to all experts changes nothing and is taken out. Where
the family limits groups, m says too little; there follow steps along the lacking share, ever smaller. Loads are counted by the
router itself, groups and ties included; of all rounds the best is kept, so no layer ends worse than it was.

Scores are those of the tuned model with its old biases: what an earlier layer's new bias does to later layers is left out.

Shape letters: N tokens, E routed experts, K experts a token, D hidden size.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TYPE_CHECKING

import torch
from torch import Tensor

from remoe_cli.console import note
from remoe_cli.errors import FamilyError
from remoe_cli.families import Gate
from remoe_cli.objectives.remoe import Segments
from remoe_cli.stream.passes import Layers, passed
from remoe_cli.train.packing import Batch, model_inputs
from remoe_cli.train.trainer import Trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 4096  # whose hidden states are kept, of every MoE layer
_ROUNDS, _STEPS = 60, 120


class Refit(NamedTuple):
    """biases: in-memory name -> bias in its own shape and dtype. before, after: largest difference of an expert's share of tokens
    from the base's, over all layers, with the old biases and the new."""

    biases: dict[str, Tensor]
    before: float
    after: float


@torch.no_grad()
def refit(
    model: "PreTrainedModel",
    gates: Sequence[Gate],
    base: Mapping[str, Tensor],
    tuned: Mapping[str, Tensor],
    batches: Iterable[Batch],
    layers: Layers | None = None,
) -> Refit:
    """New biases for gates that select with one. base, tuned: in-memory name -> gate; batches: texts, read up to TOKENS; layers: the
    model's where they don't stay in memory. Leaves the tuned gates and the new biases in the model."""
    kept, tokens = [], 0
    for batch in batches:
        kept.append(batch)
        tokens += int((batch.document_BT >= 0).sum())
        if tokens >= TOKENS:
            break
    _put(gates, base)
    target_LE = [
        _loads(choice_NK, gate.n_experts) for gate, (_, _, choice_NK) in zip(gates, _routed(model, gates, kept, layers))
    ]
    _put(gates, tuned)
    biases, before, after = {}, 0.0, 0.0
    for gate, (hidden_ND, logits_NE, _), target_E in zip(gates, _routed(model, gates, kept, layers), target_LE):
        (found,) = gate.biases.values()
        old, new = balance(gate, hidden_ND, logits_NE, target_E)
        biases[gate.bias] = found.detach().cpu().clone()
        before, after = max(before, old), max(after, new)
    return Refit(biases, before, after)


def require_biases(gates: Sequence[Gate]) -> None:
    """Raises FamilyError where a family selects without a bias."""
    if not all(gate.bias for gate in gates):
        raise FamilyError(
            f"{gates[0].family.model_type} selects its experts without a bias: there is none to refit.",
            "the same command with --set train.refit_bias=false",
        )


def refitted(
    model: "PreTrainedModel",
    gates: Sequence[Gate],
    base: Mapping[str, Tensor],
    trained: Trained,
    batches: Iterable[Batch],
    layers: Layers | None = None,
) -> dict[str, Tensor]:
    """The new biases of a run, and a note of what they do."""
    found = refit(model, gates, base, trained.gates, batches, layers)
    trained.notes.append(
        f"selection biases refitted: an expert's share of tokens is off by at most {found.after:.4f}, {found.before:.4f} before"
    )
    note(f"Note: {trained.notes[-1]}")
    return found.biases


@torch.no_grad()
def balance(gate: Gate, hidden_ND: Tensor, logits_NE: Tensor, target_E: Tensor) -> tuple[float, float]:
    """Sets the gate's bias so that each expert has its share of these tokens, target [E] (sum K); returns the largest
    difference of a share from its target, before and after."""
    bias_E = gate.selection_bias
    assert bias_E is not None
    score_NE = gate.score.ranking(logits_NE, torch.zeros_like(bias_E))
    start_E, n_tokens = bias_E.clone(), len(logits_NE)
    rank_E = (target_E * n_tokens).round().long().clamp(0, n_tokens)
    best_E = start_E
    errors: list[float] = []
    now_E = start_E.float()
    for turn in range(_ROUNDS + _STEPS):
        bias_E.copy_(now_E)
        choice_NK = gate.read(gate.family.call(gate, gate.router.forward, hidden_ND))[2]
        lacking_E = target_E - _loads(choice_NK, len(target_E))
        error = float(lacking_E.abs().max())
        if not errors or error < min(errors):
            best_E = bias_E.clone()
        errors.append(error)
        if error <= 0.5 / n_tokens:
            break
        if turn >= _ROUNDS:
            now_E = (best_E if turn == _ROUNDS else now_E) + score_NE.std() * 0.97 ** (turn - _ROUNDS) * lacking_E
            continue
        chosen_NE = torch.zeros_like(score_NE, dtype=torch.bool).scatter(1, choice_NK, True)
        ranked_NE = score_NE + now_E
        worst_in_N1 = ranked_NE.masked_fill(~chosen_NE, torch.inf).amin(-1, keepdim=True)
        best_out_N1 = ranked_NE.masked_fill(chosen_NE, -torch.inf).amax(-1, keepdim=True)
        margin_NE = torch.where(chosen_NE, best_out_N1, worst_in_N1) - score_NE
        moved_E = (now_E + _between(margin_NE.sort(0).values, rank_E)) / 2
        now_E = moved_E - (moved_E - start_E).mean()
    bias_E.copy_(best_E)
    return errors[0], min(errors)


def _between(margin_NE: Tensor, rank_E: Tensor) -> Tensor:
    """[E]: above the first `rank` of each column's ascending margins, below the others."""
    last = len(margin_NE) - 1
    below_E = margin_NE.gather(0, (rank_E - 1).clamp(0, last)[None])[0]
    above_E = margin_NE.gather(0, rank_E.clamp(0, last)[None])[0]
    middle_E = (below_E + above_E) / 2
    middle_E = torch.where(rank_E == 0, above_E - 1e-3, middle_E)
    return torch.where(rank_E == len(margin_NE), below_E + 1e-3, middle_E)


def _loads(choice_NK: Tensor, n_experts: int) -> Tensor:
    """[E], the share of tokens that chose each expert."""
    return choice_NK.flatten().bincount(minlength=n_experts).float() / len(choice_NK)


def _routed(
    model: "PreTrainedModel", gates: Sequence[Gate], batches: Sequence[Batch], layers: Layers | None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A layer: hidden [N, D], logits [N, E] and choice [N, K] of all tokens that are no padding."""
    parts: list[list[tuple[Tensor, ...]]] = [[] for _ in gates]
    inputs = (model_inputs(model, batch, Segments.of(batch.document_BT)) for batch in batches)
    done = passed(model, gates, inputs, lambda routed: routed, layers)
    for batch, (_, routed) in zip(batches, done, strict=True):
        real_N = (batch.document_BT >= 0).flatten().to(model.device)
        for layer, found in zip(parts, routed, strict=True):
            layer.append((found.hidden_ND[real_N], found.logits_NE[real_N], found.choice_NK[real_N]))
    return [tuple(torch.cat(part) for part in zip(*layer, strict=True)) for layer in parts]  # type: ignore[misc]


def _put(gates: Sequence[Gate], values: Mapping[str, Tensor]) -> None:
    for gate in gates:
        for name, parameter in gate.parameters.items():
            parameter.copy_(values[name])
