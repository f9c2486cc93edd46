"""Gate ahead: before each step the experts most probable for the token before are loaded; then retention."""

from __future__ import annotations

from remoe_cli.cache.policies.retention import key, observe
from remoe_cli.cache.policy import Policy

POLICY = Policy(
    title="retention, and ahead of each step the PARAMETER most probable experts of the token before come in",
    key=key,
    observe=observe,
    needs=("probabilities",),
    refines=("probabilities",),
    parameter=6.0,
    allowed=(0.0, 1e6),
    whole=True,
    second=0.0,
    second_allowed=(0.0, 10.0),
    fill=True,
    source="CacheRouter, arXiv 2609.04895, Algorithms 2 and 1 with s = the gate's own probabilities",
)
