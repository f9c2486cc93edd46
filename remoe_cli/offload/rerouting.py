"""Rerouting of a running decoder: one layer's choices, token by token, bent towards what its cache holds (cache/reroute.py).

Shape letters: N tokens of a pass, E routed experts, K experts a token.
"""

from collections.abc import Set

import numpy as np

from remoe_cli.cache.reroute import rank, reroute, Rule


class Bend:
    """renormalised: whether the router scales its K weights to one sum. `start()` before each request."""

    def __init__(self, rule: Rule, *, renormalised: bool) -> None:
        self._rule, self._renormalised = rule, renormalised
        self.start()

    def start(self) -> None:
        self._ranges, self._tokens = 0.0, 0

    def choose(
        self,
        logits_NE: np.ndarray,
        logs_NE: np.ndarray,
        probabilities_NE: np.ndarray,
        experts_NK: np.ndarray,
        weights_NK: np.ndarray,
        resident: Set[int] | None,
    ) -> tuple[list[int], np.ndarray] | None:
        """The token's experts in recorded order and their weights [K] float32; None where the router's own stay. experts,
        weights: its own, in recorded order. logits: what the router ranks by; logs: of its scores. resident: None for a prompt, whose tokens only count towards the mean range."""
        logits_NE = logits_NE.astype(np.float32)
        ranges_N = logits_NE.max(axis=1) - logits_NE.min(axis=1)
        self._ranges = float(np.cumsum([self._ranges, *ranges_N.tolist()], dtype=np.float64)[-1])
        self._tokens += len(ranges_N)
        if resident is None:
            return None
        return reroute(
            self._rule, resident, rank(logits_NE, experts_NK)[0].tolist(), logits_NE[0], probabilities_NE[0].astype(np.float32),
            experts_NK[0], weights_NK[0].astype(np.float32), self._ranges / self._tokens, renormalised=self._renormalised,
            logs_E=logs_NE[0].astype(np.float32),
        )  # fmt: skip
