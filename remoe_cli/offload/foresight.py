"""A prefetcher in a running decoder: as layers choose, what it lists comes into the caches of those that follow."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from remoe_cli.cache.prefetch import Prefetcher, Watch

if TYPE_CHECKING:
    from remoe_cli.offload.block import ExpertBlock


class Foresight:
    """One prefetcher for all requests of a decoder, and what it watches now. The loads run behind those that are needed now. What
    it lists for the layer that runs waits until the token is over, since that layer still computes."""

    def __init__(self, prefetcher: Prefetcher, blocks: "Sequence[ExpertBlock]") -> None:
        self._prefetcher, self._blocks = prefetcher, blocks
        self._own: list[tuple[int, list[int]]] = []

    def start(self) -> None:
        self._watch, self._own = Watch(self._prefetcher), []

    def passed(self, layer: int) -> None:
        target, experts = self._watch.passed(layer, next(self._blocks[layer].seen()))
        if target == layer:
            self._own.append((target, experts))
        else:
            self._blocks[target].bring(experts, later=target < layer)

    def token_over(self, *, first: bool) -> None:
        """A pass is over; the first one is the prompt's."""
        if first:
            self._own = self._watch.prompt([*zip(*(block.seen() for block in self._blocks))])
        for target, experts in self._own:
            self._blocks[target].bring(experts, later=True)
        self._own = []

    def end(self) -> None:
        self._watch.end()
