"""How many slots each layer gets."""

from __future__ import annotations

import numpy as np

from remoe_cli.cache.curve import lru_curve
from remoe_cli.errors import CacheError
from remoe_cli.routing import RoutingTrace


def equal_memory(capacity: int, n_layers: int, top_k: int, admission: str) -> list[int]:
    """Slots of each layer so that slots and staging together are capacity * n_layers experts.

    With bypass an expert that is not kept passes through a staging buffer; the layers run one after the other and share
    one of top_k experts, as the offloaded decoder does. Its experts are taken evenly over the layers. Forced admission
    stages only what a cache smaller than top_k can't hold, which counts too. Raises CacheError where a layer would be left
    without a slot.
    """
    if admission == "forced":
        return [capacity] * n_layers
    total = capacity * n_layers + max(0, top_k - capacity) - top_k
    if total < n_layers:
        raise CacheError(
            f"bypass needs a staging buffer of {top_k} experts, which leaves {total} slots for {n_layers} layers at "
            f"--cache {capacity}",
            f"remoe replay TRACE --cache {top_k}",
        )
    borders = np.arange(n_layers + 1) * total // n_layers
    return np.diff(borders).tolist()


def fit_budgets(
    trace: RoutingTrace, total: int, *, touch_order: str = "weight", reset: str = "request", least: int = 1
) -> list[int]:
    """Slots of each layer that sum to `total` and give LRU the most hits on this trace; exact, by dynamic programming.

    least: slots that every layer gets; a live decoder needs the experts a token. Raises CacheError where total is below
    least * layers; more than all experts is cut to all.
    """
    curve_LC = lru_curve(trace, reset=reset, touch_order=touch_order)
    n_layers, most = curve_LC.shape[0], curve_LC.shape[1] - 1
    total, least = min(total, n_layers * most), min(least, most)
    spare = total - least * n_layers
    if spare < 0:
        raise CacheError(
            f"{total} slots for {n_layers} layers are less than the {least} that each needs",
            "remoe replay TRACE --cache 8",
        )
    gain_LC = curve_LC[:, least:]
    best = np.zeros(1, np.int64)
    choices = []
    for gains in gain_LC:
        size = min(spare + 1, len(best) + len(gains) - 1)
        reached = np.full(size, -1, np.int64)
        choice = np.zeros(size, np.int64)
        for extra, gain in enumerate(gains[:size]):
            part = best[: size - extra] + gain
            window = slice(extra, extra + len(part))
            better = part > reached[window]
            reached[window][better] = part[better]
            choice[window][better] = extra
        best = reached
        choices.append(choice)
    budgets = []
    for choice in reversed(choices):
        budgets.append(least + int(choice[spare]))
        spare -= int(choice[spare])
    return budgets[::-1]
