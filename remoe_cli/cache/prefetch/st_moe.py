"""ST-MoE: experts that went along with those of an earlier layer, and those of the token before; two tables, learned on the way."""

from __future__ import annotations

import numpy as np

from remoe_cli.cache.prefetch.base import best, Kind, Prefetcher, Seen, Shape

Request = list  # [L] of [K]: what each layer chose last, None before


class StMoe(Prefetcher):
    def __init__(self, shape: Shape, most: int, ahead: int) -> None:
        super().__init__(shape)
        self.most, self.ahead = most, ahead
        n_layers, n_experts, _ = shape
        self._together = np.zeros((n_layers, n_experts, n_experts))  # [target layer, source expert, target expert]
        self._sources = np.zeros((n_layers, n_experts))
        self._stayed, self._passed = np.zeros((2, n_layers, n_experts))

    def start(self) -> Request:
        return [None] * self.shape.n_layers

    def see(self, request: Request, layer: int, seen: Seen) -> None:
        experts, before, source = seen.experts, request[layer], request[layer - self.ahead]
        if source is not None:
            self._together[layer, source[:, None], experts] += 1
            self._sources[layer, source] += 1
        if before is not None:
            self._passed[layer, before] += 1
            self._stayed[layer, experts[(experts[:, None] == before).any(1)]] += 1
        request[layer] = experts

    def foresee(self, request: Request, layer: int) -> list[int]:
        return best(self._scores(request, layer), self.most)

    def _scores(self, request: Request, layer: int) -> np.ndarray:
        """[E]: how often an expert went along with one of the source's, the mean over these; and of the token before, how often it
        stayed for the next one."""
        source, before = request[layer - self.ahead], request[layer]
        seen = np.maximum(self._sources[layer, source], 1)
        scores_E = (self._together[layer, source] / seen[:, None]).sum(0) / len(source)
        if before is not None:
            scores_E[before] += self._stayed[layer, before] / np.maximum(self._passed[layer, before], 1)
        return scores_E

    @property
    def held_bytes(self) -> int:
        return 4 * sum(one.size for one in (self._together, self._sources, self._stayed, self._passed))


KIND = Kind(
    title="MOST experts by co-activation AHEAD layers before and by the token before, two tables that learn on the way",
    source="ST-MoE, arXiv 2606.15453",
    make=StMoe,
)
