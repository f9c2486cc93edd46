"""RoutingTrace: the K experts that each token used in each MoE layer.

Shape letters: T tokens, L MoE layers, E routed experts, K experts a token, R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

MOST_EXPERTS = np.iinfo(np.int16).max
FLOATS = ("weights", "probabilities", "temporal", "spatio", "guess", "guess_shared", "hidden")
_BLOCK = 1 << 12  # tokens that are checked at once: a mapped file is never in memory as a whole


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Routing of R requests, one after the other.

    experts: [T, L, K] int16, each token's distinct experts, in descending routing weight as the router gave them (an
    imported trace: as its file lists them; its provenance says so).
    borders: [R + 1] int64, request r is tokens borders[r]:borders[r + 1].
    prefill: [T] bool, True where the token belongs to the prompt; in each request these come first.
    n_experts: routed experts a layer (E).
    weights: [T, L, K] float16, the routing weights of `experts`, or None.
    provenance: where it came from, as docs/trace-format.md lists it (model, revision, delta, data, seed, ...).
    probabilities: [T, L, E] float16, the router's probabilities over all routed experts, or None.
    temporal, spatio: [T, L, E] float16, the probabilities that the heads beside layer l's gate gave at token t, or None:
    temporal those of token t + 1 in layer l, spatio those of layer l + 1 (the last layer's: of token t + 1 in the first).
    guess, guess_shared: [T, L, E] float16, the probabilities that the gate of layer l + 1 gives for the input of layer l's gate, alone
    and with the shared experts' output added (the last layer's: 0), or None.
    hidden: [T, L, H] float16, the input of layer l's gate, or None.

    Raises ValueError for arrays that contradict this. Arrays of another integer or float type are converted; those of the
    types named here are kept as they are, mapped files included.
    """

    experts: np.ndarray
    borders: np.ndarray
    prefill: np.ndarray
    n_experts: int
    weights: np.ndarray | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    probabilities: np.ndarray | None = None
    temporal: np.ndarray | None = None
    spatio: np.ndarray | None = None
    guess: np.ndarray | None = None
    guess_shared: np.ndarray | None = None
    hidden: np.ndarray | None = None

    def __post_init__(self) -> None:
        experts, borders, prefill = np.asarray(self.experts), np.asarray(self.borders), np.asarray(self.prefill)
        _check_experts(experts, self.n_experts)
        if borders.ndim != 1 or not _is_integer(borders) or len(borders) < 1:
            raise ValueError(f"borders: want [R + 1] integers, got {borders.dtype} {list(borders.shape)}")
        if borders[0] != 0 or borders[-1] != len(experts) or (np.diff(borders) < 0).any():
            raise ValueError(f"borders: want rising positions from 0 to {len(experts)}, got {_brief(borders)}")
        if prefill.shape != experts.shape[:1] or prefill.dtype != np.bool_:
            raise ValueError(f"prefill: want [{len(experts)}] bool, got {prefill.dtype} {list(prefill.shape)}")
        resumed = np.flatnonzero(~prefill[:-1] & prefill[1:]) + 1
        if not np.isin(resumed, borders).all():
            raise ValueError("prefill: a prompt token follows a decoded token of the same request")
        object.__setattr__(self, "experts", experts.astype(np.int16, copy=False))
        object.__setattr__(self, "borders", borders.astype(np.int64, copy=False))
        object.__setattr__(self, "prefill", prefill)
        every = (*experts.shape[:2], self.n_experts)
        for name in FLOATS:
            if getattr(self, name) is not None:
                array = np.asarray(getattr(self, name))
                own = (*experts.shape[:2], *array.shape[2:][:1])  # as wide as the model is
                shape = {"weights": experts.shape, "hidden": own}.get(name, every)
                object.__setattr__(self, name, _floats(name, array, shape))

    @property
    def n_tokens(self) -> int:
        return self.experts.shape[0]

    @property
    def n_layers(self) -> int:
        return self.experts.shape[1]

    @property
    def top_k(self) -> int:
        return self.experts.shape[2]

    @property
    def n_requests(self) -> int:
        return len(self.borders) - 1

    def decode(self) -> RoutingTrace:
        """The same requests without their prefill tokens; a request that was all prefill stays, empty."""
        kept = ~self.prefill
        if kept.all():
            return self  # nothing is copied
        before = np.concatenate([[0], np.cumsum(kept)])
        floats: dict[str, Any] = {name: array[kept] for name in FLOATS if (array := getattr(self, name)) is not None}
        return replace(
            self, experts=self.experts[kept], borders=before[self.borders], prefill=self.prefill[kept], **floats
        )

    def uses(self) -> np.ndarray:
        """[L, E] int64, how many tokens used each expert."""
        counts = np.zeros(self.n_layers * self.n_experts, dtype=np.int64)
        offsets = np.arange(self.n_layers)[:, None] * self.n_experts
        for start in range(0, self.n_tokens, _BLOCK):
            flat = (self.experts[start : start + _BLOCK] + offsets).ravel()
            counts += np.bincount(flat, minlength=len(counts))
        return counts.reshape(self.n_layers, self.n_experts)

    @staticmethod
    def concat(traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """The requests of all traces, in order. Raises ValueError for no trace, or traces of different models.

        Provenance: the traces' own where they agree, else {"parts": [one a trace]}.
        """
        if not traces:
            raise ValueError("concat: no trace given")
        shapes = {(trace.n_layers, trace.top_k, trace.n_experts) for trace in traces}
        if len(shapes) > 1:
            raise ValueError(f"concat: traces differ in (layers, top_k, experts): {sorted(shapes)}")
        floats: dict[str, np.ndarray] = {}
        for name in FLOATS:
            arrays = [array for trace in traces if (array := getattr(trace, name)) is not None]
            if len(arrays) not in (0, len(traces)):
                raise ValueError(f"concat: some traces have {name} and some have none")
            if arrays:
                floats[name] = np.concatenate(arrays)
        lengths = np.concatenate([np.diff(trace.borders) for trace in traces])
        parts = [trace.provenance for trace in traces]
        return RoutingTrace(
            experts=np.concatenate([trace.experts for trace in traces]),
            borders=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            prefill=np.concatenate([trace.prefill for trace in traces]),
            n_experts=traces[0].n_experts,
            provenance=parts[0] if all(part == parts[0] for part in parts) else {"parts": parts},
            **floats,
        )


def _check_experts(experts: np.ndarray, n_experts: int) -> None:
    if experts.ndim != 3 or not _is_integer(experts) or 0 in experts.shape[1:]:
        raise ValueError(f"experts: want [T, L, K] integers, got {experts.dtype} {list(experts.shape)}")
    if not experts.shape[2] <= n_experts <= MOST_EXPERTS:
        raise ValueError(f"n_experts: want top_k {experts.shape[2]} to {MOST_EXPERTS}, got {n_experts}")
    if experts.size and not 0 <= experts.min() <= experts.max() < n_experts:
        raise ValueError(f"experts: want ids 0 to {n_experts - 1}, got {experts.min()} to {experts.max()}")
    for start in range(0, len(experts), _BLOCK):
        columns_KTL = np.ascontiguousarray(np.moveaxis(experts[start : start + _BLOCK], -1, 0))
        for lag in range(1, len(columns_KTL)):
            twice = columns_KTL[lag:] == columns_KTL[:-lag]
            if twice.any():
                token, layer = np.argwhere(twice.any(axis=0))[0]
                raise ValueError(f"experts: token {start + token} names an expert twice in layer {layer}")


def _floats(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.ndim != 3 or array.shape != shape or array.dtype.kind != "f":
        raise ValueError(f"{name}: want floats {list(shape)}, got {array.dtype} {list(array.shape)}")
    return array.astype(np.float16, copy=False)


def _is_integer(array: np.ndarray) -> bool:
    return array.dtype.kind in "iu"


def _brief(values: np.ndarray) -> str:
    return np.array2string(values, threshold=8)
