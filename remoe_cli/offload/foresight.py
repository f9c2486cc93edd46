"""A prefetcher in a running decoder: as layers choose, what it lists comes into the caches of those that follow."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from remoe_cli.cache import choose
from remoe_cli.cache.prefetch import Prefetcher, Shape, Watch
from remoe_cli.cache.prefetch.predictor import Predictor
from remoe_cli.errors import CacheError

if TYPE_CHECKING:
    from remoe_cli.offload.block import ExpertBlock
    from remoe_cli.offload.decoder import OffloadedDecoder

_TRAIN = "remoe predictor train t.trace -o p.npz"


class Foresight:
    """One prefetcher for all requests of a decoder, and what it watches now. The loads run behind those that are needed now. What
    it lists for the layer that runs waits until the token is over, since that layer still computes."""

    def __init__(self, prefetcher: Prefetcher, blocks: "Sequence[ExpertBlock]") -> None:
        self._prefetcher, self._blocks = prefetcher, blocks
        self._own: list[tuple[int, list[int]]] = []

    @classmethod
    def of(
        cls, decoder: "OffloadedDecoder", blocks: "Sequence[ExpertBlock]", predictor: Predictor | None
    ) -> "Foresight | None":
        """What the decoder's policy asks for. Raises CacheError for a predictor that is not for this model."""
        prefetch = choose(decoder.policy).prefetch
        if prefetch is None:
            return None
        if prefetch.kind.trained:
            if predictor is None:
                raise CacheError(f"{decoder.policy} needs a trained predictor.", _TRAIN)
            shape = decoder.n_layers, decoder.n_experts, decoder.gates[0].weight.shape[-1]
            why = predictor.misfit(prefetch.value("AHEAD"), *shape, decoder.checkpoint.id, decoder.checkpoint.commit)
            if why is not None:
                raise CacheError(f"{why}.", _TRAIN)
        return cls(prefetch.make(Shape(decoder.n_layers, decoder.n_experts, decoder.top_k), predictor), blocks)

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
