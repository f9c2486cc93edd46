"""Replay of a RoutingTrace through one ExpertCache a layer: hits and loads without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remoe_cli.cache.expert_cache import ExpertCache
from remoe_cli.cache.policies import make_policy, needs_future
from remoe_cli.errors import CacheError
from remoe_cli.routing import RoutingTrace

HINT = "remoe eval --cache 6"


@dataclass(frozen=True, eq=False)
class Replay:
    """Counts of one replay, in experts, summed over layers; unique accounting (one request a step and expert).

    tokens: decode tokens served. accesses = hits + misses. misses are demand loads, proactive are loads ahead of need.
    evictions: experts that left the cache. request_*: [R] int64, the same counts of each request.
    Source: objectives-and-metrics.md, section 4.
    """

    tokens: int
    accesses: int
    hits: int
    misses: int
    evictions: int
    proactive: int
    request_tokens: np.ndarray
    request_accesses: np.ndarray
    request_hits: np.ndarray
    request_misses: np.ndarray

    @property
    def hit_ratio(self) -> float:
        """uHR, the ratio of sums over all requests and layers."""
        return self.hits / self.accesses


def replay(
    trace: RoutingTrace,
    policy: str,
    capacity: int,
    *,
    admission: str = "forced",
    step: str = "atomic",
    reset: str = "request",
    touch_order: str = "weight",
) -> Replay:
    """Replays the decode tokens of a trace, from a cold start.

    capacity: slots a layer. admission: "forced" | "bypass", see ExpertCache.
    step: "atomic": a token's experts are one step, protected until it is over; "sequential": each is a step of its
    own, without protection. reset: "request": a fresh cache each request; "never": one cache over the whole trace.
    touch_order: "weight": the reverse of the recorded order, so that the heaviest expert ends most recent; "listed":
    as recorded, for traces of others.

    Raises CacheError for an unknown option, a capacity below 1, or a trace without a decode token.
    """
    for given, allowed in (
        (step, ("atomic", "sequential")),
        (reset, ("request", "never")),
        (touch_order, ("weight", "listed")),
    ):
        if given not in allowed:
            raise CacheError(f"no replay option {given!r}: {' or '.join(allowed)}", HINT)
    decoded = trace.decode()
    if decoded.n_tokens == 0:
        raise CacheError("the trace holds no decoded token, so there is nothing to count", HINT)
    experts = decoded.experts if touch_order == "listed" else decoded.experts[..., ::-1]
    width = 1 if step == "sequential" else decoded.top_k
    starts = (decoded.borders * (decoded.top_k // width)).tolist()
    counts = np.zeros((decoded.n_requests, 3), dtype=np.int64)
    oracle = needs_future(policy)
    for layer in range(decoded.n_layers):
        rows = experts[:, layer].reshape(-1, width).tolist()
        cache = None
        for request, (start, stop) in enumerate(zip(starts, starts[1:])):
            if cache is None or reset == "request":
                future = (rows[start:stop] if reset == "request" else rows) if oracle else None
                cache = ExpertCache(capacity, make_policy(policy, future), admission)
            counts[request] += _serve(cache, rows[start:stop])
    request_tokens = np.diff(decoded.borders)
    hits, misses, evictions = (int(total) for total in counts.sum(axis=0))
    return Replay(
        tokens=decoded.n_tokens,
        accesses=hits + misses,
        hits=hits,
        misses=misses,
        evictions=evictions,
        proactive=0,
        request_tokens=request_tokens,
        request_accesses=counts[:, 0] + counts[:, 1],
        request_hits=counts[:, 0],
        request_misses=counts[:, 1],
    )


def _serve(cache: ExpertCache, steps: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """The hits, misses and evictions that these steps add."""
    hits, misses, evictions = cache.hits, cache.misses, cache.evictions
    step = cache.step
    for touched in steps:
        step(touched)
    return cache.hits - hits, cache.misses - misses, cache.evictions - evictions
