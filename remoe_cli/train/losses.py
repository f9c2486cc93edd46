"""A step's loss from its parts: what each term is made of, and its share of the weighted sum.

Shape letters: B rows, T slots, V vocabulary.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from remoe_cli.objectives.remoe import cross_entropy, distillation, Segments

ANCHORS = ("ce", "distillation", "trust")  # the terms that hold the model where it is; all others are for locality
Terms = Mapping[str, Callable[[], Tensor]]


def text_terms(
    logits_BTV: Tensor, base_BTV: Tensor | None, ids_BT: Tensor, segments: Segments, learned_BT: Tensor | None
) -> dict[str, Callable[[], Tensor]]:
    """Sums over a micro-batch. base: the teacher's logits, None without one."""
    found = {"ce": lambda: cross_entropy(logits_BTV, ids_BT, segments, learned_BT)}
    if base_BTV is not None:
        found["distillation"] = lambda: distillation(logits_BTV, base_BTV, segments, learned_BT)
    return found


def weighed(
    terms: Terms, weights: Mapping[str, float], scales: Mapping[str, float]
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The weighted sum of a micro-batch's terms (None where no scale is above 0), and each one's share of its mean over the
    step. weights: by which a term's sum over the step is divided; scales: of the mean in the loss; a term of scale 0 is
    only reported."""
    loss: Tensor | None = None
    shares = {}
    for name, scale in scales.items():
        if name not in terms:
            continue
        with torch.set_grad_enabled(scale != 0):
            value = terms[name]() / (weights[name] or 1.0)  # nothing to average: the sum is 0 too
            if scale:
                loss = scale * value if loss is None else loss + scale * value
        shares[name] = value.detach().double()
    return loss, shares
