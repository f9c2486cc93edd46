"""MoE-Infinity: how often a request used each expert so far; the past request most like it says what it will use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remoe_cli.cache.prefetch.base import best, Kind, Prefetcher, Seen, Shape

KEPT = 100  # past requests


@dataclass
class Request:
    """counts: [L, E] uses so far; likeness: [past requests, L] cosines with them, at `version` of the collection."""

    counts: np.ndarray
    likeness: np.ndarray
    version: int = -1


class MoeInfinity(Prefetcher):
    def __init__(self, shape: Shape, most: int, ahead: int) -> None:
        super().__init__(shape)
        self.most, self.ahead = most, ahead
        self._past = np.zeros((0, shape.n_layers, shape.n_experts))  # of unit length by layer
        self._nearest: list[int] = []  # how often each was the nearest one
        self._version = 0

    def start(self) -> Request:
        return Request(np.zeros((self.shape.n_layers, self.shape.n_experts)), np.zeros((0, 0)))

    def see(self, request: Request, layer: int, seen: Seen) -> None:
        request.counts[layer, seen.experts] += 1
        if request.version == self._version:
            own = request.counts[layer]
            request.likeness[:, layer] = self._past[:, layer] @ own / np.sqrt(own @ own)

    def foresee(self, request: Request, layer: int) -> list[int]:
        nearest = self._match(request)
        return best(request.counts[layer] if nearest is None else self._past[nearest, layer], self.most)

    def end(self, request: Request) -> None:
        place = len(self._past)
        if (nearest := self._match(request)) is not None:
            self._nearest[nearest] += 1
        length = np.sqrt((request.counts**2).sum(1, keepdims=True))
        unit = request.counts / np.maximum(length, 1)
        if place < KEPT:
            self._past = np.concatenate([self._past, unit[None]])
            self._nearest.append(0)
        else:
            place = int(np.argmin(self._nearest))
            self._past[place], self._nearest[place] = unit, 0
        self._version += 1

    def _match(self, request: Request) -> int | None:
        """The past request of the highest mean cosine over layers, of equals the first; None before one has ended."""
        if not len(self._past):
            return None
        if request.version != self._version:
            lengths = np.sqrt((request.counts**2).sum(1))
            products = np.einsum("mle,le->ml", self._past, request.counts)
            request.likeness, request.version = products / np.where(lengths > 0, lengths, 1), self._version
        return int(np.round(request.likeness.mean(1), 9).argmax())

    @property
    def held_bytes(self) -> int:
        return 4 * (len(self._past) + 1) * self.shape.n_layers * self.shape.n_experts


KIND = Kind(
    title="MOST experts that the past request most like this one used most, by a matrix of uses a request",
    source="MoE-Infinity, arXiv 2401.14361",
    make=MoeInfinity,
)
