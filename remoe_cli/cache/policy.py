"""What a cache policy is: plain functions over a Memory, one source for the live cache and for compiled replay.

The live ExpertCache runs them as they stand, over lists; replay compiles them, over arrays. So they are module-level
functions of numbers and loops only: no closures, no strings, no sets, no exceptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

SCORES = ("probabilities", "temporal", "spatio")  # of all experts: the router's and the heads' softmax
NEEDS = ("future", "weights", *SCORES, "fit")
N_REGISTERS = 8


class Memory(NamedTuple):
    """What one cache remembers. Arrays over experts are indexed by id and one longer than there are ids, so that the last
    place can be a sentinel. An id is the expert's number; in a pool, layer * experts a layer + that number.

    last: clock of the last touch, unique and rising, 0 for never; the engine sets it after `touch`. Read only.
    count, stamp, state, link: int64, score: float64: the policy's own, 0 after a reset.
    head: float64, what the temporal head gave each expert at the last step of its layer; 0 without one. Read only.
    fit: float64, how often the fitted trace used each id; 0 without one. Read only.
    now: int64 [4], read only: tokens served before this one since the reset (one access at a time: accesses // layers),
    this step's layer, layers in this cache (1 without a pool), experts a layer.
    reg: int64 [8], the policy's own registers, 0 after a reset.
    table: float64, what `Policy.table` returned. Read only.
    """

    last: Any
    count: Any
    stamp: Any
    state: Any
    link: Any
    score: Any
    head: Any
    fit: Any
    now: Any
    reg: Any
    table: Any


def touch(m: Memory, expert: int, hit: bool, value: float) -> None:
    pass


def key(m: Memory, expert: int) -> float:
    return 0.0


def victim(m: Memory, slots: Sequence[int], held: int, first: int) -> int:
    return -1


def observe(m: Memory, scores: Sequence[float], start: int) -> None:
    pass


def leave(m: Memory, expert: int) -> None:
    pass


def start(m: Memory, capacity: int) -> None:
    pass


def table(*parameters: float) -> list[float]:
    return [*parameters]


@dataclass(frozen=True)
class Policy:
    """Who leaves. A cache calls, once a step: `observe`, then `touch` for each expert of the step in touch order, then, until
    the contents fit, `key` of every expert that may leave or else `victim`, and `leave` for the one that left.

    title: one line, for docs and tables. source: the paper or code it is from.
    key(m, expert): the lowest leaves; of equals the one touched longest ago, then the lowest id. Or, in its place,
    victim(m, slots, held, first): which of slots[:held] leaves; an expert with m.last > first is protected; -1 if all are.
    touch(m, expert, hit, value): value is the routing weight where `needs` names "weights", the position of the next
    use where it names "future", else 0.
    observe(m, scores, start): only where `needs` names "probabilities": scores [E] of this step's layer, expert i is id
    start + i. leave(m, expert): it was resident (or came in this step) and is gone. start(m, capacity): after a reset;
    capacity in slots (of a cache in bytes, as many as surely fit).
    table(parameter): constants, made once in plain Python; without one, the parameters alone. A policy with a second parameter
    gets both.
    needs: what a trace must offer, of NEEDS; a policy that needs "future" can't serve a running decoder.
    parameter: the default of NAME:PARAMETER, None where it takes none; allowed: its closed range; whole:
    whether only whole numbers are. second, second_allowed: the same of NAME:PARAMETER:SECOND.
    grid: parameters that `remoe replay --tune` tries.
    refines: the scores, of SCORES, whose sum a cache is refined by before each step (`scores_ahead`, `ExpertCache.refine`);
    the parameter then is R, how many candidates, and the second one the margin.
    admits: whether misses may stay. Where they may not, they pass through staging, so it goes with bypass.
    preload: the experts of highest `fit` are resident from the start, each a proactive load.
    fill: with warm="prefill" free slots are filled by the top of the first observed scores, free of charge.
    """

    title: str
    source: str
    key: Callable[..., float] | None = None
    victim: Callable[..., int] | None = None
    touch: Callable[..., None] = touch
    observe: Callable[..., None] = observe
    leave: Callable[..., None] = leave
    start: Callable[..., None] = start
    table: Callable[..., list[float]] = table
    needs: tuple[str, ...] = ()
    parameter: float | None = None
    allowed: tuple[float, float] = (-math.inf, math.inf)
    whole: bool = False
    grid: tuple[float, ...] = ()
    second: float | None = None
    second_allowed: tuple[float, float] = (-math.inf, math.inf)
    refines: tuple[str, ...] = ()
    admits: bool = True
    preload: bool = False
    fill: bool = False

    def __post_init__(self) -> None:
        if (self.key is None) == (self.victim is None):
            raise ValueError(f"policy {self.title!r}: want either key or victim")
        if not {*self.needs} <= {*NEEDS}:
            raise ValueError(f"policy {self.title!r}: needs {self.needs}, allowed are {NEEDS}")
        if not {*self.refines} <= {*self.needs} & {*SCORES}:
            raise ValueError(f"policy {self.title!r}: refines by {self.refines}, of which it needs {self.needs}")
        if not all(self.allowed[0] <= one <= self.allowed[1] for one in self.grid):
            raise ValueError(f"policy {self.title!r}: its grid leaves what is allowed")
        if self.refines and (self.leave is not leave or self.key is None):
            raise ValueError(f"policy {self.title!r}: refines, so it has a key and no hook for who left")


def memory(n_ids: int, n_layers: int, n_experts: int, constants: Sequence[float], fit: Sequence[float]) -> Memory:
    """A fresh Memory of plain lists."""
    size = n_ids + 1
    last, count, stamp, state, link = ([0] * size for _ in range(5))
    now, reg = [0, 0, n_layers, n_experts], [0] * N_REGISTERS
    score, head = [0.0] * size, [0.0] * size
    return Memory(last, count, stamp, state, link, score, head, [*fit, 0.0], now, reg, [*constants])
