"""The base as a teacher: its own next-token distribution, for recipes that hold the model to that instead of to the text."""

from typing import Any, TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Teacher:
    """Runs the model as it was before training: only what trains is kept twice, and put in its place for one pass."""

    def __init__(self, model: "PreTrainedModel", trained: dict[str, Tensor]) -> None:
        self._model, self._trained = model, list(trained.values())
        self._base = [parameter.detach().clone() for parameter in self._trained]

    @torch.no_grad()
    def logits(self, inputs: dict[str, Any]) -> Tensor:
        """[B, T, V] of the base, for the model's own inputs. Not to be called between a forward and its backward pass."""
        now = [parameter.detach().clone() for parameter in self._trained]
        try:
            self._put(self._base)
            return self._model(**inputs).logits
        finally:
            self._put(now)

    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._trained, values, strict=True):
            parameter.copy_(value)
