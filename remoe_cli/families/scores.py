"""How a router scores its experts: the one place that turns logits into P, differentiable, for every family.

A family's *score* s >= 0 is what it weighs an expert by: e^z with a softmax, sigmoid(z) with a sigmoid. P is s, normalised to
sum 1 over the routed experts; where a family takes the softmax of the chosen K alone, P is the softmax of all, of which
those are shares. Everything that reads P (objectives, heads, traces, policies, rerouting) reads it from here.

Which K run is the router's own doing (groups, biases, ties) and never computed again; `ranking` says what it ranks by.

Shape letters: N tokens, E routed experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Score:
    """log: logits [N, E] -> log s, at least fp32 but for a softmax, whose log s are the logits themselves. biased: what a
    selection bias is added to: "score" (s; with a softmax P) or "logit"."""

    name: str
    log: Callable[[torch.Tensor], torch.Tensor]
    biased: str = "score"

    def log_probabilities(self, logits_NE: torch.Tensor) -> torch.Tensor:
        """log P [N, E], at least fp32, without its underflow to log 0."""
        log_NE = self.log(logits_NE)
        return log_NE.log_softmax(-1, dtype=_precise(log_NE))

    def probabilities(self, logits_NE: torch.Tensor) -> torch.Tensor:
        """P [N, E] in fp32: over the routed experts, shared ones left out (ReMoE, section 3)."""
        return self.log(logits_NE).float().softmax(-1)

    def ranking(self, logits_NE: torch.Tensor, bias_E: torch.Tensor | None = None) -> torch.Tensor:
        """[N, E] fp32: the K largest of these are chosen, but for groups. bias: the selection bias, where there is one."""
        if bias_E is None:
            return logits_NE.float()
        if self.biased == "logit":
            return logits_NE.float() + bias_E.float()
        log_NE = self.log(logits_NE).float()
        return (log_NE.softmax(-1) if self is SOFTMAX else log_NE.exp()) + bias_E.float()


def _precise(tensor: torch.Tensor) -> torch.dtype:
    import torch

    return torch.promote_types(tensor.dtype, torch.float32)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits


def _log_sigmoid(logits: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional as F

    return F.logsigmoid(logits.to(_precise(logits)))


def _log_sqrt_softplus(logits: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional as F

    return F.softplus(logits.to(_precise(logits))).log() / 2


SOFTMAX = Score("softmax", _log_softmax)
SIGMOID = Score("sigmoid", _log_sigmoid)
BIASED_LOGITS = Score("sigmoid", _log_sigmoid, "logit")
SQRT_SOFTPLUS = Score("sqrtsoftplus", _log_sqrt_softplus)


def probabilities(logits_NE: torch.Tensor, score: Score = SOFTMAX) -> torch.Tensor:
    """P [N, E] in fp32, as `Score.probabilities`."""
    return score.probabilities(logits_NE)
