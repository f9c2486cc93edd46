"""What every source of texts comes to: rows to train on, in a drawn order, and rows held out."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from remoe_cli.errors import DataError
from remoe_cli.recipe import Data
from remoe_cli.train.rows import Row, Shape

HELD_OUT_SPLITS = ("heldout", "test", "validation", "valid", "dev")
ANOTHER = 'the same command with --data FILE.jsonl (one object a line: {"text": ...}), or --data demo'
_HELD_OUT_AT_MOST = 10  # one row in ten, of a source too small for the recipe's number


class Drawn(NamedTuple):
    """train: the rows from a place of their order on; total: how many they are (where `streamed`: at most). heldout: in
    an order that no seed changes."""

    train: Callable[[int], Iterator[Row]]
    total: int
    heldout: Sequence[Row]
    streamed: bool = False


class Source(NamedTuple):
    """name: for display. pinned: the data.source that reads the same again, from any folder. sha256: over all rows; ""
    where `pinned` names a commit."""

    name: str
    pinned: str
    shape: Shape
    rows: Drawn
    notes: list[str]
    sha256: str = ""


def draw(name: str, rows: Sequence[Row], heldout: Sequence[Row] | None, data: Data, seed: int | None) -> Drawn:
    """From rows that can be read in any order. Where none are held out by themselves the last ones are:
    data.heldout_samples, at most a tenth, at least one. Raises DataError when there is one row only.

    seed None: all rows as they lie, those that are held out by themselves before the others, and none is held out here."""
    count = len(rows)
    if seed is None:
        parts = (heldout or (), rows)
        return Drawn(lambda start: islice(chain(*parts), start, None), sum(map(len, parts)), ())
    if heldout is None:
        if count < 2:
            raise DataError(f"{name} holds one document only, so none can be held out.", ANOTHER)
        count -= max(1, min(data.heldout_samples, count // _HELD_OUT_AT_MOST))
    order = _shuffled(count, seed)[: data.train_samples]
    last, first = (rows, count) if heldout is None else (heldout, 0)
    # shuffled, so that the first of them are of all kinds; by a fixed seed, so that runs can be compared
    held = [last[first + i] for i in _shuffled(len(last) - first, 0)[: data.heldout_samples]]
    return Drawn(lambda start: (rows[i] for i in order[start:]), len(order), held)


def _shuffled(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
