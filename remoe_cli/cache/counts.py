"""What a replay counts."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

import numpy as np

from remoe_cli.cache.schedule import Schedule
from remoe_cli.routing import RoutingTrace


@dataclass(frozen=True, eq=False)
class Replay:
    """Counts of one replay, in experts, summed over layers; unique accounting (one request a step and expert).

    tokens: decode tokens served. accesses = hits + misses. misses are demand loads, proactive are loads ahead of need.
    evictions: experts that left the cache. prefill_*: what prompts asked of the cache, where they go through it; no other
    count includes it. request_*: [R] int64, the same counts of each request; request_loads: [R, L]
    int64, misses + proactive. token_misses: [T] int32, of each decode token. slots: over all layers (bytes, of a pool in
    bytes); staging: experts that must fit beside them, in one buffer that the layers share. prefetch_bytes: what a prefetcher
    remembers or was trained to, in the end.
    Defined in docs/replay.md.
    """

    tokens: int
    accesses: int
    hits: int
    misses: int
    evictions: int
    proactive: int
    prefill_accesses: int
    prefill_misses: int
    request_tokens: np.ndarray
    request_accesses: np.ndarray
    request_hits: np.ndarray
    request_misses: np.ndarray
    request_proactive: np.ndarray
    request_loads: np.ndarray
    token_misses: np.ndarray
    slots: int
    staging: int
    prefetch_bytes: int = 0

    @property
    def hit_ratio(self) -> float:
        """uHR, the ratio of sums over all requests and layers."""
        return self.hits / self.accesses

    @property
    def loads(self) -> int:
        return self.misses + self.proactive


class Counts:
    """The sums over units, which end at different times."""

    def __init__(self, trace: RoutingTrace, plan: Schedule) -> None:
        self._trace, self._plan = trace, plan
        self._lock = Lock()
        self._misses_N = np.zeros(plan.n_tokens, np.int32)
        self._accesses_N: np.ndarray | None = None  # None: K a token and layer
        self._loads_RL = np.zeros((trace.n_requests, trace.n_layers), np.int64)
        self._proactive_R = np.zeros(trace.n_requests, np.int64)
        self._misses_R = np.zeros(trace.n_requests, np.int64)
        self._evictions = 0

    def add(
        self, layers: slice, runs: np.ndarray, missed, request_misses, evictions: int, request_ahead, lengths
    ) -> None:
        """What came of the runs of one cache over `layers`. missed [tokens, layers]; request_misses,
        request_ahead [R, layers]: loads on demand and ahead of need; lengths: [tokens, layers] accesses, or None where each is K."""
        tokens = slice(runs[0], runs[-1])
        with self._lock:
            for column in range(missed.shape[1]):
                self._misses_N[tokens] += missed[:, column]
            if lengths is not None:
                if self._accesses_N is None:
                    self._accesses_N = np.zeros(self._plan.n_tokens, np.int64)
                self._accesses_N[tokens] += lengths.sum(axis=1)
            self._loads_RL[:, layers] += request_misses + request_ahead
            self._misses_R += request_misses.sum(axis=1)
            self._proactive_R += request_ahead.sum(axis=1)
            self._evictions += evictions

    def replay(self, slots: int, staging: int, prefetch_bytes: int = 0) -> Replay:
        trace, plan = self._trace, self._plan
        decoded = [~trace.prefill[low:high] for low, high in zip(trace.borders, trace.borders[1:])]
        tokens = np.array([np.count_nonzero(one) for one in decoded], np.int64)
        rows = plan.counted(plan.tokens_N) if len(plan.tokens_N) else plan.tokens_N
        accesses, misses_N = tokens * trace.n_layers * trace.top_k, plan.counted(self._misses_N)
        total = plan.n_tokens * trace.n_layers * trace.top_k
        if self._accesses_N is not None:
            total = int(self._accesses_N.sum())
            counted = plan.counted(self._accesses_N), plan.counted(plan.owner_N)
            accesses = np.bincount(counted[1], counted[0], trace.n_requests).astype(np.int64)
        return Replay(
            tokens=int(tokens.sum()),
            accesses=int(accesses.sum()),
            hits=int((accesses - self._misses_R).sum()),
            misses=int(self._misses_R.sum()),
            evictions=self._evictions,
            proactive=int(self._proactive_R.sum()),
            prefill_accesses=total - int(accesses.sum()),
            prefill_misses=int(self._misses_N.sum(dtype=np.int64) - self._misses_R.sum()),
            request_tokens=tokens,
            request_accesses=accesses,
            request_hits=accesses - self._misses_R,
            request_misses=self._misses_R,
            request_proactive=self._proactive_R,
            request_loads=self._loads_RL,
            token_misses=misses_N if not len(rows) else misses_N[np.argsort(rows, kind="stable")],
            slots=slots,
            staging=staging,
            prefetch_bytes=prefetch_bytes,
        )
