"""Hindsight: static, fitted on the very trace that it serves; no fixed set of experts hits more."""

from __future__ import annotations

from remoe_cli.cache.policies.static import key
from remoe_cli.cache.policy import Policy

POLICY = Policy(
    title="static, fitted on the very trace that it serves",
    key=key,
    needs=("future", "fit"),
    preload=True,
    source="static column of cacheable-by-design, arXiv 2608.18261",
)
