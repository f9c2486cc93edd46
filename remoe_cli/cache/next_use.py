"""What an oracle foresees of a replay: for each access the place of the next one."""

from __future__ import annotations

import numpy as np

from remoe_cli.cache.compiled import compiled


@compiled
def next_use(
    experts: np.ndarray,
    tokens: np.ndarray,
    backwards: bool,
    ids: np.ndarray,
    offsets: np.ndarray,
    runs: np.ndarray,
    uncounted: np.ndarray,
    first_layer: int,
    layers: int,
    n_experts: int,
    ahead: np.ndarray,
) -> None:
    """Fills ahead [accesses], in service order: the place of the next access of the same id in the same run; after all
    places where there is none, or where it does not count: then it costs nothing to be loaded there once more. The other
    arguments are the kernel's."""
    top_k = experts.shape[2]
    end = len(ahead)
    access = end
    upcoming = np.empty(layers * n_experts, np.int32)
    for run in range(len(runs) - 2, -1, -1):
        for expert in range(len(upcoming)):
            upcoming[expert] = end + expert
        for token in range(runs[run + 1] - 1, runs[run] - 1, -1):
            row = tokens[token] if len(tokens) > 0 else token
            for layer in range(layers - 1, -1, -1):
                low, high = 0, top_k
                if len(offsets) > 0:
                    low, high = offsets[token * layers + layer], offsets[token * layers + layer + 1]
                for at in range(high - 1, low - 1, -1):
                    if len(offsets) > 0:
                        expert = layer * n_experts + ids[at]
                    else:
                        expert = (
                            layer * n_experts + experts[row, first_layer + layer, top_k - 1 - at if backwards else at]
                        )
                    access -= 1
                    ahead[access] = upcoming[expert]
                    counts = len(uncounted) == 0 or not uncounted[token]
                    upcoming[expert] = access if counts else end + expert
