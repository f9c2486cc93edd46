"""FineMoE: a store of past tokens, their hidden state and all layers' probabilities; those most like this token say what comes.

Shape letters: S tokens in the store, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remoe_cli.cache.prefetch.base import Kind, MOST, MOST_AHEAD, Parameter, Prefetcher, Seen, Shape

KEPT, CANDIDATES, MIXED = 1000, 64, 8
SURE, UNSURE = 0.05, 0.35  # probability that a list holds together


@dataclass
class Request:
    """Of the token at hand. maps: [L, E]; layers: how many of them are known; meaning: [H], its first hidden state, of unit length."""

    maps: np.ndarray
    layers: int = 0
    meaning: np.ndarray | None = None


class FineMoe(Prefetcher):
    def __init__(self, shape: Shape, most: int, ahead: int) -> None:
        super().__init__(shape)
        self.most, self.ahead = most, ahead
        self._meanings: list[np.ndarray] = []
        self._maps: list[np.ndarray] = []
        self._oldest = 0

    def start(self) -> Request:
        return Request(np.zeros((self.shape.n_layers, self.shape.n_experts)))

    def see(self, request: Request, layer: int, seen: Seen) -> None:
        assert seen.probabilities is not None and seen.hidden is not None
        if not layer:
            request.maps, request.meaning = np.zeros_like(request.maps), _unit(seen.hidden.astype(np.float64))
        request.maps[layer], request.layers = seen.probabilities, layer + 1
        if request.layers == self.shape.n_layers:
            self._keep(request)

    def _keep(self, request: Request) -> None:
        assert request.meaning is not None
        if len(self._maps) < KEPT:
            self._maps.append(request.maps)
            self._meanings.append(request.meaning)
            return
        self._maps[self._oldest], self._meanings[self._oldest] = request.maps, request.meaning
        self._oldest = (self._oldest + 1) % KEPT

    def foresee(self, request: Request, layer: int) -> list[int]:
        if not self._maps:
            return []
        known = slice(0, request.layers)
        alike_S = np.stack(self._meanings) @ request.meaning
        candidates = _first(alike_S, CANDIDATES)
        path = _unit(request.maps[known].ravel())
        paths = np.stack([_unit(self._maps[one][known].ravel()) for one in candidates])
        alike = alike_S[candidates] + paths @ path
        nearest = _first(alike, MIXED)
        shares = np.exp(alike[nearest])
        shares /= shares.sum()
        map_E = sum(share * self._maps[candidates[one]][layer] for share, one in zip(shares, nearest))
        confidence = min(1.0, max(0.0, float(shares @ alike[nearest]) / 2))
        return self._enough(np.asarray(map_E), SURE + (UNSURE - SURE) * (1 - confidence))

    def _enough(self, map_E: np.ndarray, threshold: float) -> list[int]:
        """The likeliest, until they hold the threshold together, but K at least."""
        order = _first(map_E, len(map_E))
        reached = np.round(np.cumsum(map_E[order]), 9) >= threshold
        enough = int(reached.argmax()) + 1 if reached.any() else len(order)
        return order[: min(self.most, max(enough, self.shape.top_k))].tolist()

    @property
    def held_bytes(self) -> int:
        return 4 * sum(one.size + own.size for one, own in zip(self._maps, self._meanings))


def _unit(vector: np.ndarray) -> np.ndarray:
    length = np.sqrt(vector @ vector)
    return vector / length if length > 0 else vector


def _first(scores: np.ndarray, most: int) -> np.ndarray:
    """Places of the highest, of those equal to nine digits the first."""
    return np.argsort(-np.round(scores, 9), kind="stable")[:most]


KIND = Kind(
    title="the likeliest experts of past tokens most like this one, at least K and at most MOST, AHEAD layers before",
    source="FineMoE, arXiv 2502.05370",
    make=FineMoe,
    parameters=(MOST, Parameter("AHEAD", 3, 1, MOST_AHEAD, whole=True)),
    needs=("probabilities", "hidden"),
)
