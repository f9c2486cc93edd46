"""What a prefetcher is: it watches what routers choose, and says which experts a step to come will ask for.

It sees routing alone, never a cache, so one list serves every cache size: `listed` makes the lists of a trace, the decoder asks for
them one by one, both through the same object.

Shape letters: L MoE layers, E routed experts, K experts a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from remoe_cli.cache.prefetch.predictor import Predictor

MOST_AHEAD = 3


class Shape(NamedTuple):
    n_layers: int
    n_experts: int
    top_k: int


class Seen(NamedTuple):
    """What one router did for one token. experts: [K], the heaviest first; probabilities, guess, guess_shared: [E], hidden: [H], as
    a trace holds them, float16, or None."""

    experts: np.ndarray
    probabilities: np.ndarray | None = None
    guess: np.ndarray | None = None
    guess_shared: np.ndarray | None = None
    hidden: np.ndarray | None = None


SEEN = Seen._fields[1:]


class Prefetcher:
    """Serves requests of one model, several at a time. What it learns lives on from request to request; what `start` returns is
    one request's.

    most: experts that it lists for a step, at most. ahead: layers between what it has seen and the step that it lists for: those of
    layer l are listed once layer l - ahead has chosen, in the first layers after the last ones of the token before.
    """

    most = 0
    ahead = 1

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def start(self) -> Any:
        """A new request."""
        raise NotImplementedError

    def see(self, request: Any, layer: int, seen: Seen) -> None:
        """What the router of a layer did for the request's next token."""
        raise NotImplementedError

    def foresee(self, request: Any, layer: int) -> list[int]:
        """The experts of the layer's next step, best first; asked for once a step, right after layer - ahead was seen."""
        raise NotImplementedError

    def end(self, request: Any) -> None:
        """The request is over."""

    @property
    def held_bytes(self) -> int:
        """Of its tables or parameters, as they are now."""
        return 0


class Parameter(NamedTuple):
    name: str
    default: float
    low: float
    high: float
    whole: bool = False


MOST = Parameter("MOST", 6, 0, 1e6, whole=True)
AHEAD = Parameter("AHEAD", 1, 1, MOST_AHEAD, whole=True)


@dataclass(frozen=True)
class Kind:
    """title: one line, for docs and tables. source: the paper that it is from. make(shape, *parameters) -> Prefetcher; trained: it
    takes a predictor too. needs: what a trace must offer, of SEEN; may_use: what it reads where it is there. parameters: of
    POLICY+NAME:FIRST:SECOND, in that order."""

    title: str
    source: str
    make: Callable[..., Prefetcher]
    parameters: tuple[Parameter, ...] = (MOST, AHEAD)
    needs: tuple[str, ...] = ()
    may_use: tuple[str, ...] = ()
    trained: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        return (*self.needs, *self.may_use)


class Wanted(NamedTuple):
    """A prefetcher as it was asked for."""

    name: str
    kind: Kind
    values: tuple[float, ...]

    @property
    def word(self) -> str:
        return ":".join([self.name, *(f"{value:g}" for value in self.values)])

    def make(self, shape: Shape, predictor: Predictor | None = None) -> Prefetcher:
        numbers = [int(v) if p.whole else v for p, v in zip(self.kind.parameters, self.values, strict=True)]
        return self.kind.make(shape, *numbers, predictor) if self.kind.trained else self.kind.make(shape, *numbers)

    def value(self, name: str) -> int:
        """Of a whole parameter, 1 where there is none."""
        return next((int(v) for p, v in zip(self.kind.parameters, self.values, strict=True) if p.name == name), 1)


class Watch:
    """One request, as a prefetcher follows it."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher, self._state = prefetcher, prefetcher.start()

    def prompt(self, tokens: Sequence[Sequence[Seen]]) -> list[tuple[int, list[int]]]:
        """All tokens of the prompt, a Seen for each layer; what it lists for the first layers of the token to come, by layer."""
        n_layers, ahead = self._prefetcher.shape.n_layers, self._prefetcher.ahead
        found = []
        for place, token in enumerate(tokens, 1):
            for layer, seen in enumerate(token):
                self._prefetcher.see(self._state, layer, seen)
                if place == len(tokens) and layer + ahead >= n_layers:
                    found.append(
                        (layer + ahead - n_layers, self._prefetcher.foresee(self._state, layer + ahead - n_layers))
                    )
        return found

    def passed(self, layer: int, seen: Seen) -> tuple[int, list[int]]:
        """A layer has chosen: the layer that can be foreseen now, and its experts, best first."""
        self._prefetcher.see(self._state, layer, seen)
        target = (layer + self._prefetcher.ahead) % self._prefetcher.shape.n_layers
        return target, self._prefetcher.foresee(self._state, target)

    def end(self) -> None:
        self._prefetcher.end(self._state)


def best(scores_E: np.ndarray, most: int) -> list[int]:
    """At most `most` experts of a score above 0, the highest first; of those equal to nine digits the lower id."""
    order = np.argsort(-np.round(scores_E, 9), kind="stable")[:most]
    return order[scores_E[order] > 0].tolist()
