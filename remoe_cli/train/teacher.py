"""The base as a teacher: its own next-token distribution, for recipes that hold the model to that instead of to the text."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TYPE_CHECKING

import torch
from torch import Tensor

from remoe_cli.families import Gate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Teacher:
    """Runs the model as it was before training: only what trains is kept twice, and put in its place for one pass."""

    def __init__(self, model: "PreTrainedModel", trained: dict[str, Tensor]) -> None:
        self._model, self._trained = model, list(trained.values())
        self._place = {name: i for i, name in enumerate(trained)}
        self._base = [parameter.detach().clone() for parameter in self._trained]

    @torch.no_grad()
    def logits(self, inputs: dict[str, Any]) -> Tensor:
        """[B, T, V] of the base, for the model's own inputs. Not to be called between a forward and its backward pass."""
        with self._base_at(range(len(self._trained))):
            return self._model(**inputs).logits

    def as_base(self, gates: Sequence[Gate], layer: int) -> AbstractContextManager[None]:
        """This decoder layer's gates are the base's while open."""
        names = (name for gate in gates if gate.layer == layer for name in gate.names)
        return self._base_at([self._place[name] for name in names if name in self._place])

    @contextmanager
    def _base_at(self, places: Sequence[int]) -> Iterator[None]:
        now = [self._trained[i].detach().clone() for i in places]
        with torch.no_grad():
            try:
                for i in places:
                    self._trained[i].copy_(self._base[i])
                yield
            finally:
                for i, value in zip(places, now, strict=True):
                    self._trained[i].copy_(value)
