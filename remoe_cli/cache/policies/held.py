"""Held: an expert that was missed passes through; what stays is what a prefetcher brought in."""

from __future__ import annotations

from remoe_cli.cache.policies.lru import key
from remoe_cli.cache.policy import Policy

POLICY = Policy(
    title="a miss never stays: what is resident came in ahead of need; of these the one touched longest ago leaves",
    key=key,
    admits=False,
    source="fixed sets, as of Temporally Extended MoE (arXiv 2604.20156); alone it holds nothing",
)
