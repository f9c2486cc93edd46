"""Spatio: only what the layer before foresees is loaded to stay; an expert that was missed passes through."""

from __future__ import annotations

from remoe_cli.cache.policies.lru import key
from remoe_cli.cache.policy import Policy

POLICY = Policy(
    title="ahead of each step the PARAMETER best by the spatio head of the layer before come in; a miss never stays",
    key=key,
    needs=("spatio",),
    refines=("spatio",),
    parameter=6.0,
    allowed=(0.0, 1e6),
    whole=True,
    second=0.0,
    second_allowed=(0.0, 10.0),
    admits=False,
    source="CacheRouter, arXiv 2609.04895, spatio-only",
)
