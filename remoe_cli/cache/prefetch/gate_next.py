"""Gate next: the gate of the layer after, asked with this layer's hidden state."""

from __future__ import annotations

import numpy as np

from remoe_cli.cache.prefetch.base import best, Kind, MOST, Prefetcher, Seen, Shape


class GateNext(Prefetcher):
    """What a layer's gate is asked for is recorded with the layer before it; the first layer has none before it."""

    field = "guess"

    def __init__(self, shape: Shape, most: int) -> None:
        super().__init__(shape)
        self.most = most

    def start(self) -> list[np.ndarray | None]:
        return [None] * self.shape.n_layers

    def see(self, request: list, layer: int, seen: Seen) -> None:
        request[layer] = getattr(seen, self.field)

    def foresee(self, request: list, layer: int) -> list[int]:
        return best(request[layer - 1].astype(np.float64), self.most) if layer else []


KIND = Kind(
    title="the MOST experts that the next layer's gate would choose for this layer's hidden state",
    source="Mixtral-offloading, arXiv 2312.17238",
    make=GateNext,
    parameters=(MOST,),
    needs=("guess",),
)
