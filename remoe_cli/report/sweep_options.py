"""The options of `remoe sweep` as they were given, checked, and what they come to."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from remoe_cli.cache import choose
from remoe_cli.cache.expert_cache import ADMISSIONS
from remoe_cli.errors import CacheError, UsageError
from remoe_cli.recipe import limit_of

STEERED = "limit"  # the weight that --max-ppl finds
AGAIN = "remoe sweep demo --weights 0.5,1,2 --cache 8,12"
_NUMBER = re.compile(r"(\d{1,9}(\.\d*)?|\.\d+)([eE][+-]?\d)?")


@dataclass(frozen=True)
class Asked:
    """weights: factors of the recipe's own locality terms, or "limit". ahead: candidates R of loads ahead, for each of which
    the policies that load ahead are added. bonuses: of rerouting, beside 0, which is always there. control: whether cross
    entropy alone is trained too. rows: of held-out text; None: as the recipe says."""

    recipes: Sequence[str] = ("remoe",)
    weights: Sequence[str] = ("1",)
    capacities: Sequence[int] = (12,)
    policies: Sequence[str] = ("lru",)
    ahead: Sequence[int] = ()
    bonuses: Sequence[float] = ()
    admission: str = "forced"
    max_ppl: str | None = None
    data: str | None = None
    steps: int | None = None
    overrides: Sequence[str] = ()
    control: bool = True
    rows: int | None = None

    @property
    def limit(self) -> float | None:
        """As a relative change of perplexity."""
        return None if self.max_ppl is None else limit_of(self.max_ppl)

    @property
    def every_policy(self) -> list[str]:
        """LRU first, which the others are compared with; R > 0 of the policies that load ahead, with and without heads."""
        ahead = [f"{name}:{r}" for r in self.ahead if r for name in ("gate_ahead", "spatio_temporal")]
        return list(dict.fromkeys(["lru", *self.policies, *ahead]))

    @property
    def places(self) -> list[tuple[int, str, str]]:
        """(capacity, policy, admission) of every cell; forced LRU of each capacity is among them."""
        forms = ADMISSIONS if self.admission == "both" else (self.admission,)
        capacities = sorted({*self.capacities})
        wanted = [(c, policy, form) for c in capacities for policy in self.every_policy for form in forms]
        return list(dict.fromkeys([*((c, "lru", "forced") for c in capacities), *wanted]))

    def check(self) -> None:
        """Raises UsageError, RecipeError or CacheError."""
        if not self.weights or not self.capacities:
            raise UsageError("--weights and --cache take at least one number.", AGAIN)
        for weight in self.weights:
            if weight != STEERED and not _NUMBER.fullmatch(weight):
                raise UsageError(f"--weights takes numbers of at least 0 and `{STEERED}`, not {weight!r}.", AGAIN)
        if STEERED in self.weights and self.max_ppl is None:
            raise UsageError(
                f"the weight `{STEERED}` is steered to --max-ppl, which is not given.", f"{AGAIN} --max-ppl +1%"
            )
        if min(self.capacities) < 1:
            raise CacheError(f"a cache needs at least 1 slot a layer, not {min(self.capacities)}.", AGAIN)
        if self.admission not in (*ADMISSIONS, "both"):
            raise UsageError(f"--admission is {', '.join(ADMISSIONS)} or both, not {self.admission!r}.", AGAIN)
        if self.ahead and min(self.ahead) < 0:
            raise UsageError(f"--ahead takes numbers of at least 0, not {min(self.ahead)}.", f"{AGAIN} --ahead 0,8")
        for bonus in self.bonuses:
            if not 0 <= bonus < math.inf:
                raise UsageError(f"--bonus takes numbers of at least 0, not {bonus:g}.", f"{AGAIN} --bonus .1,.2")
        if self.rows is not None and self.rows < 1:
            raise UsageError(f"--rows is at least 1, not {self.rows}.", AGAIN)
        for policy in self.every_policy:
            if "fit" in choose(policy).policy.needs and "future" not in choose(policy).policy.needs:
                raise UsageError(f"policy {policy} is fitted on another trace, which remoe sweep has not.", AGAIN)
