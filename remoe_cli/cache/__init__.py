"""C expert slots a layer, who leaves them, and the counts. No torch here."""

from remoe_cli.cache.ahead import scores_ahead
from remoe_cli.cache.counts import Replay
from remoe_cli.cache.expert_cache import ExpertCache, Refined, Step
from remoe_cli.cache.policies import choose, live_policies, POLICIES
from remoe_cli.cache.policy import Policy
from remoe_cli.cache.replay import replay

__all__ = [
    "POLICIES",
    "ExpertCache",
    "Policy",
    "Refined",
    "Replay",
    "Step",
    "choose",
    "live_policies",
    "replay",
    "scores_ahead",
]
