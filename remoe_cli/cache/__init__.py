"""C expert slots a layer, who leaves them, and the counts. No torch here."""

from remoe_cli.cache.expert_cache import ExpertCache, Step
from remoe_cli.cache.policies import CachePolicy, make_policy, POLICIES
from remoe_cli.cache.replay import Replay, replay

__all__ = ["POLICIES", "CachePolicy", "ExpertCache", "Replay", "Step", "make_policy", "replay"]
