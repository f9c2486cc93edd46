"""Which tokens of a trace a replay serves, in which order, and where the cache starts anew."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from remoe_cli.errors import CacheError
from remoe_cli.routing import RoutingTrace

WARMS = ("cold", "prefill", "carry", "batch")
HINT = "remoe replay TRACE --cache 8"


class Schedule(NamedTuple):
    """N tokens to serve. tokens_N: int32, their rows in the trace, -1 for a prompt that is served as one batch; empty where
    they are all rows in order. owner_N: int32, their requests. uncounted_N: bool, or empty where all count. runs: borders
    of the stretches that each start with a fresh cache."""

    n_tokens: int
    tokens_N: np.ndarray
    owner_N: np.ndarray
    uncounted_N: np.ndarray
    runs: np.ndarray

    def counted(self, values_N: np.ndarray) -> np.ndarray:
        """Those of the counted tokens."""
        return values_N[~self.uncounted_N] if len(self.uncounted_N) else values_N


def schedule(trace: RoutingTrace, warm: str, reset: str, sessions: int) -> Schedule:
    """warm, reset, sessions: as replay takes them. Raises CacheError for what does not go together."""
    fresh = reset == "request" and warm != "carry"
    if sessions < 1 or (sessions > 1 and (fresh or warm not in ("cold", "carry"))):
        raise CacheError(
            f"{sessions} sessions: from 1; more than 1 take turns in one cache for all requests, so they go with --warm carry "
            "(or --reset never, and cold)",
            f"{HINT} --warm carry --sessions 4",
        )
    if trace.prefill.all():
        raise CacheError(
            "the trace holds no decoded token, so there is nothing to count", "remoe trace MODEL -o t.trace"
        )
    owner = np.repeat(np.arange(trace.n_requests, dtype=np.int32), np.diff(trace.borders))
    prompts = trace.prefill.any()
    tokens, uncounted = np.empty(0, np.int32), np.empty(0, bool)
    if prompts and warm != "prefill":
        tokens = np.flatnonzero(~trace.prefill).astype(np.int32)
        owner = owner[tokens]
    elif prompts:
        uncounted = trace.prefill
    if sessions > 1:
        order = _by_turns(owner, sessions)
        tokens = tokens[order] if len(tokens) else order.astype(np.int32)
        owner = owner[order]
    if prompts and warm == "batch":
        asking = np.unique(np.searchsorted(trace.borders, np.flatnonzero(trace.prefill), side="right") - 1)
        at = np.searchsorted(owner, asking)
        tokens, owner = np.insert(tokens, at, -1), np.insert(owner, at, asking.astype(np.int32))
        uncounted = tokens < 0
    borders = np.searchsorted(owner, np.arange(trace.n_requests + 1)) if fresh else np.array([0, len(owner)])
    return Schedule(len(owner), tokens, owner, uncounted, np.unique(borders).astype(np.int64))


def _by_turns(owner_N: np.ndarray, sessions: int) -> np.ndarray:
    """An order in which the tokens of `sessions` requests at a time take turns."""
    starts = np.searchsorted(owner_N, owner_N)
    turn = np.arange(len(owner_N)) - starts
    return np.lexsort((owner_N, turn, owner_N // sessions))


class Steps(NamedTuple):
    """What a cache of some layers is asked, where tokens do not ask for K experts each: step token * layers + layer is
    offsets[step] : offsets[step + 1] of ids (int16) and weights (float16)."""

    ids: np.ndarray
    weights: np.ndarray
    offsets: np.ndarray


def batches(trace: RoutingTrace, plan: Schedule, layers: slice, backwards: bool) -> Steps:
    """Where prompts are served as one step a layer: its distinct experts, in the order of their last mention and with its
    weight."""
    steps: list[dict[int, float]] = []
    turn = slice(None, None, -1 if backwards else 1)
    for row, request in zip(plan.tokens_N.tolist(), plan.owner_N.tolist()):
        stretch = slice(trace.borders[request], trace.borders[request + 1])
        rows = np.arange(stretch.start, stretch.stop)[trace.prefill[stretch]] if row < 0 else np.array([row])
        asked = trace.experts[rows, layers][..., turn]
        worth = np.zeros(asked.shape) if trace.weights is None else trace.weights[rows, layers][..., turn]
        for layer in range(asked.shape[1]):
            last: dict[int, float] = {}
            for expert, value in zip(asked[:, layer].ravel()[::-1].tolist(), worth[:, layer].ravel()[::-1].tolist()):
                last.setdefault(expert, value)
            steps.append(dict(reversed(last.items())))
    ids = np.array([expert for step in steps for expert in step], np.int16)
    weights = np.array([value for step in steps for value in step.values()], np.float16)
    return Steps(ids, weights, np.cumsum([0, *map(len, steps)]))
