"""ProMoE: a small network for each layer, trained on traces, that says from a hidden state what a later layer will choose."""

from __future__ import annotations

import numpy as np

from remoe_cli.cache.prefetch.base import best, Kind, Prefetcher, Seen, Shape
from remoe_cli.cache.prefetch.predictor import Predictor


class ProMoe(Prefetcher):
    def __init__(self, shape: Shape, most: int, ahead: int, predictor: Predictor) -> None:
        super().__init__(shape)
        self.most, self.ahead, self._predictor = most, ahead, predictor

    def start(self) -> list[np.ndarray | None]:
        return [None] * self.shape.n_layers

    def see(self, request: list, layer: int, seen: Seen) -> None:
        request[layer] = seen.hidden

    def foresee(self, request: list, layer: int) -> list[int]:
        return best(self._predictor.probabilities(layer, request[layer - self.ahead]), self.most)

    @property
    def held_bytes(self) -> int:
        return self._predictor.held_bytes


KIND = Kind(
    title="the MOST experts that a trained network tells from the hidden state AHEAD layers before",
    source="ProMoE, arXiv 2410.22134",
    make=ProMoe,
    needs=("hidden",),
    trained=True,
)
