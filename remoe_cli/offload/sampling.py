"""How the next token is chosen from the logits: the likeliest, or one drawn with transformers' own warpers.

Shape letters: B rows, V entries of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


@dataclass(frozen=True)
class Sampling:
    """temperature: above 0. top_p: 0 < top_p <= 1, the least number of tokens whose probabilities reach it. top_k: the k
    likeliest, 0 for all. seed: of the draws of one request."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


def chooser(sampling: Sampling | None, device: torch.device | str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from logits_BV to the chosen ids_B1; None: the likeliest.

    Each chooser draws from its own generator, so that the same seed, logits and device give the same tokens.
    """
    if sampling is None:
        return lambda logits_BV: logits_BV.argmax(-1, keepdim=True)
    generator = torch.Generator(device).manual_seed(sampling.seed)
    warp = _warpers(sampling)

    def draw(logits_BV: torch.Tensor) -> torch.Tensor:
        # the warpers take the ids so far, which none of these three looks at
        warped_BV = warp(torch.empty(len(logits_BV), 0, dtype=torch.long, device=logits_BV.device), logits_BV.float())
        return torch.multinomial(warped_BV.softmax(-1), 1, generator=generator)

    return draw


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """In the order of transformers' generate()."""
    warpers = LogitsProcessorList()
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers
