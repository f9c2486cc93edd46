"""How far routing concentrates on few experts, layer by layer. numpy only.

q = the share that an expert has of its layer's accesses. Defined in docs/report.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from remoe_cli.routing import RoutingTrace

HEAD = 8  # the experts whose mass is summed


class Concentration(NamedTuple):
    """[L] each, or None where the trace has no token. max_frequency: the greatest q; top_8_mass: the sum of the 8 greatest;
    entropy: H(q) / ln E, 1 where experts are used alike (None for a single expert); effective_experts: exp(H)."""

    max_frequency: np.ndarray | None
    top_8_mass: np.ndarray | None
    entropy: np.ndarray | None
    effective_experts: np.ndarray | None


def concentration(uses_LE: np.ndarray) -> Concentration:
    """uses_LE: how many tokens used each expert (`RoutingTrace.uses`)."""
    totals_L1 = uses_LE.sum(axis=1, keepdims=True)
    if not totals_L1.all():
        return Concentration(None, None, None, None)
    q_LE = uses_LE / totals_L1
    nats_L = -(q_LE * np.log(q_LE, out=np.zeros_like(q_LE), where=q_LE > 0)).sum(axis=1)
    n_experts = uses_LE.shape[1]
    return Concentration(
        max_frequency=q_LE.max(axis=1),
        top_8_mass=np.sort(q_LE, axis=1)[:, -HEAD:].sum(axis=1),
        entropy=nats_L / np.log(n_experts) if n_experts > 1 else None,
        effective_experts=np.exp(nats_L),
    )


def concentration_figures(trace: RoutingTrace) -> dict[str, Any]:
    """As report.json has them: of each figure its mean over layers, and one value a layer."""
    found = concentration(trace.uses())._asdict()
    return {
        **{name: None if by_layer is None else float(by_layer.mean()) for name, by_layer in found.items()},
        "layers": {name: None if by_layer is None else by_layer.tolist() for name, by_layer in found.items()},
    }


def against_uniform(uses_LE: np.ndarray) -> np.ndarray:
    """[L, E], q E: 1 where an expert is used as often as any; NaN in a layer without a use."""
    totals_L1 = uses_LE.sum(axis=1, keepdims=True).astype(np.float64)
    return np.divide(uses_LE * uses_LE.shape[1], totals_L1, out=np.full(uses_LE.shape, np.nan), where=totals_L1 > 0)
