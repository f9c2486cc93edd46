"""Spatio-temporal: before each step the experts that router and both heads foresee are loaded; then temporal."""

from __future__ import annotations

from remoe_cli.cache.policies.retention import observe
from remoe_cli.cache.policies.temporal import key
from remoe_cli.cache.policy import Policy

POLICY = Policy(
    title="temporal, and ahead of each step the PARAMETER best by router and both heads come in",
    key=key,
    observe=observe,
    needs=("probabilities", "temporal", "spatio"),
    refines=("probabilities", "temporal", "spatio"),
    parameter=6.0,
    allowed=(0.0, 1e6),
    whole=True,
    second=0.0,
    second_allowed=(0.0, 10.0),
    fill=True,
    source="CacheRouter, arXiv 2609.04895, Algorithms 2 and 1",
)
