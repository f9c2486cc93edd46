"""Heads: linear routers beside the gates, which say what will be asked for and never what executes (CacheRouter, arXiv
2609.04895). The *temporal* head of a layer speaks of its next token, the *spatio* head of the next MoE layer; the last
layer's speaks of the first layer at the next token.

Shape letters: N tokens, D hidden size, E routed experts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remoe_cli.families.base import Gate
from remoe_cli.families.scores import Score, SOFTMAX

if TYPE_CHECKING:
    import torch

KINDS = ("temporal", "spatio")


@dataclass
class Heads:
    """Of each kind one [E, D] fp32 tensor (fp64 for fp64 models) a MoE layer, in layer order; None where there is none."""

    temporal: list[torch.Tensor] | None = None
    spatio: list[torch.Tensor] | None = None

    @classmethod
    def of_gates(cls, gates: Sequence[Gate], kinds: Collection[str]) -> Heads:
        """The published start, as copies: temporal = the layer's gate, spatio = the next layer's, of the last layer the
        first's. A gate's bias is not taken."""
        own = [gate.weight for gate in gates]
        start = {"temporal": own, "spatio": [*own[1:], *own[:1]]}
        return cls(**{kind: [_copy(weight) for weight in start[kind]] for kind in kinds})

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that are there."""
        return tuple(kind for kind in KINDS if getattr(self, kind) is not None)

    def to(self, device: torch.device | str) -> Heads:
        return Heads(**{kind: [weight.to(device) for weight in getattr(self, kind)] for kind in self.kinds})

    def probabilities(self, kind: str, layer: int, hidden_ND: torch.Tensor, score: Score = SOFTMAX) -> torch.Tensor:
        """[N, E] in the head's own precision. layer: index among the MoE layers; hidden: the gate's own input; score: how
        the gate beside it scores."""
        weight = getattr(self, kind)[layer]
        return score.log(hidden_ND.to(weight.dtype) @ weight.T).softmax(-1)


def _copy(weight: torch.Tensor) -> torch.Tensor:
    import torch

    from remoe_cli.families.spread import whole

    return whole(weight).to(torch.promote_types(weight.dtype, torch.float32), copy=True)
