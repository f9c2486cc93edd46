"""A text that goes on from request to request, and what is told of each new token of it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from remoe_cli.families.loader import kept_cache
from remoe_cli.offload.decoded import Loads

if TYPE_CHECKING:
    from remoe_cli.offload.block import ExpertBlock
    from remoe_cli.offload.ledger import Ledger

_GO_ON = (DynamicLayer, DynamicSlidingWindowLayer)  # others keep states that only one token at a time goes on from


class Token(NamedTuple):
    """A new token, and what the decode steps before it did: hits, misses, and bytes loaded."""

    id: int
    hits: int
    misses: int
    nbytes: int


Told = Callable[[Token], bool]  # true ends the request with this token


def token_of(
    chosen_B1: torch.Tensor,
    blocks: "Sequence[ExpertBlock]",
    before: Sequence[tuple[int, int, int, int]],
    ledger: "Ledger",
) -> Token:
    """before: `cache_counts` of each layer when decoding began."""
    now = [block.cache_counts() for block in blocks]
    hits, misses = (sum(b[i] - a[i] for a, b in zip(before, now, strict=True)) for i in range(2))
    return Token(int(chosen_B1), hits, misses, ledger.decode.bytes)


def cut(loads: Loads, steps: int) -> None:
    """After so many decode steps, where more were planned: what a policy loaded for one more is counted with the last."""
    if steps:
        loads[steps - 1] += [load for ahead in loads[steps:] for load in ahead]
    del loads[steps:]


class Past:
    """The tokens whose keys and values the attention cache holds. Of a model whose layers keep something else none are held:
    its requests begin anew."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._cache: dict[str, Any] = {}

    def rest(self, ids: Sequence[int]) -> list[int]:
        """What of a text is to be fed, at least its last token. Tokens held that are not the text's beginning are let go,
        or all of them where the attention cache gives none back."""
        same = next((n for n, (a, b) in enumerate(zip(self.ids, ids)) if a != b), min(len(self.ids), len(ids)))
        same = min(same, len(ids) - 1)
        if same < len(self.ids):
            self._drop(len(self.ids) - same)
        return list(ids[len(self.ids) :])

    def take(self) -> dict[str, Any]:
        """The attention cache as a keyword of the model; it is held again once `keep` is called."""
        taken, self._cache, self.ids = self._cache, {}, []
        return taken

    def keep(self, ids: Sequence[int], out: Any) -> None:
        """ids: all that went in, of which `out` is the last output."""
        kept = kept_cache(out)
        (cache,) = kept.values()
        if type(cache) is DynamicCache and all(type(layer) in _GO_ON for layer in cache.layers):
            self.ids, self._cache = list(ids), kept

    def _drop(self, n_tokens: int) -> None:
        (cache,) = self._cache.values()
        try:
            cache.crop(-n_tokens)
            del self.ids[-n_tokens:]
        except (RuntimeError, ValueError):  # past a window, what was before it is gone
            self.take()
