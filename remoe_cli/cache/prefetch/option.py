"""Temporal options: each layer holds a set of experts, and exchanges it when that is worth what the exchange costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remoe_cli.cache.prefetch.base import best, Kind, MOST, Parameter, Prefetcher, Seen, Shape

DECAY = 0.9


@dataclass
class Request:
    """worth: [L, E], a running mean of what a token asks for, in shares of it; sets: [L], the experts that each layer holds."""

    worth: np.ndarray
    sets: list[list[int]]


class Option(Prefetcher):
    ahead = 1

    def __init__(self, shape: Shape, most: int, cost: float) -> None:
        super().__init__(shape)
        self.most, self._cost = most, cost
        self.ahead = shape.n_layers  # a layer's own choice decides on its own set

    def start(self) -> Request:
        n_layers, n_experts, _ = self.shape
        return Request(np.zeros((n_layers, n_experts)), [[] for _ in range(n_layers)])

    def see(self, request: Request, layer: int, seen: Seen) -> None:
        worth_E = request.worth[layer]
        worth_E *= DECAY
        if seen.probabilities is not None:
            worth_E += (1 - DECAY) * seen.probabilities
        else:
            worth_E[seen.experts] += (1 - DECAY) / len(seen.experts)
        other = best(worth_E, self.most)
        strangers = {*other} - {*request.sets[layer]}
        gain = worth_E[other].sum() - worth_E[request.sets[layer]].sum()
        if strangers and round(gain - self._cost * len(strangers), 9) > 0:
            request.sets[layer] = other

    def foresee(self, request: Request, layer: int) -> list[int]:
        return request.sets[layer]

    @property
    def held_bytes(self) -> int:
        return 4 * self.shape.n_layers * self.shape.n_experts


KIND = Kind(
    title="a set of MOST experts a layer, exchanged when the share of routing that it gains is above COST for each newcomer",
    source="Temporally Extended MoE, arXiv 2604.20156, with a running mean in place of the trained controller",
    make=Option,
    parameters=(MOST, Parameter("COST", 0.02, 0, 1)),
    may_use=("probabilities",),
)
