"""STEP: as ST-MoE, but as wide as it has proved right: a rank is loaded while experts of that rank were mostly asked for."""

from __future__ import annotations

import numpy as np

from remoe_cli.cache.prefetch.base import AHEAD, Kind, MOST, Parameter, Seen, Shape
from remoe_cli.cache.prefetch.st_moe import Request, StMoe


class Step(StMoe):
    def __init__(self, shape: Shape, most: int, ahead: int, threshold: float) -> None:
        super().__init__(shape, most, ahead)
        self._threshold = threshold
        self._right, self._told = np.zeros((2, shape.n_layers, min(most, shape.n_experts)))

    def start(self) -> Request:
        return super().start() + [None] * self.shape.n_layers  # and what each layer was last foreseen to choose

    def see(self, request: Request, layer: int, seen: Seen) -> None:
        n_layers = self.shape.n_layers
        own, told = request[:n_layers], request[n_layers + layer]
        super().see(own, layer, seen)
        request[:n_layers] = own
        if told is not None:
            self._told[layer, : len(told)] += 1
            self._right[layer, : len(told)] += (told[:, None] == seen.experts).any(1)
            request[n_layers + layer] = None

    def foresee(self, request: Request, layer: int) -> list[int]:
        n_layers = self.shape.n_layers
        ranked = super().foresee(request[:n_layers], layer)
        request[n_layers + layer] = np.array(ranked, int)
        below = self._right[layer, : len(ranked)] < self._threshold * self._told[layer, : len(ranked)]
        return ranked[: int(below.argmax()) if below.any() else len(ranked)]


KIND = Kind(
    title="as st_moe, but no further down its ranking than ranks were asked for in a THRESHOLD share of steps so far",
    source="STEP; its paper was not found: the width that adapts is ours",
    make=Step,
    parameters=(MOST, AHEAD, Parameter("THRESHOLD", 0.5, 0, 1)),
)
