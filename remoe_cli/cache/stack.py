"""The compiled LRU stack of one layer."""

from __future__ import annotations

import numpy as np

from remoe_cli.cache.compiled import compiled


@compiled
def depths(
    experts: np.ndarray,
    tokens: np.ndarray,
    backwards: bool,
    sequential: bool,
    runs: np.ndarray,
    layer: int,
    n_experts: int,
    seen: np.ndarray,
) -> None:
    """Adds to seen[d] the accesses found at depth d of the stack before their step (0 = touched last), and to seen[E]
    those not found. Arguments as the kernel's.

    The stack is an array, oldest first. A step walks down from the top until it has found all its experts, closes the
    gaps, and puts them on top.
    """
    top_k = experts.shape[2]
    parts = top_k if sequential else 1
    width = 1 if sequential else top_k
    stack = np.empty(n_experts, experts.dtype)
    asked = np.empty(n_experts, np.int64)
    touched = np.empty(width, experts.dtype)
    for run in range(len(runs) - 1):
        asked[:] = -1
        held = 0
        for token in range(runs[run], runs[run + 1]):
            row = tokens[token] if len(tokens) > 0 else token
            for part in range(parts):
                step = token * parts + part
                missing = 0
                for at in range(width):
                    place = part + at
                    expert = experts[row, layer, top_k - 1 - place if backwards else place]
                    touched[at] = expert
                    if asked[expert] >= 0:
                        missing += 1
                    asked[expert] = step
                seen[n_experts] += width - missing
                place = held
                while missing > 0:
                    place -= 1
                    if asked[stack[place]] == step:
                        seen[held - 1 - place] += 1
                        missing -= 1
                kept = place
                for other in range(place, held):
                    if asked[stack[other]] != step:
                        stack[kept] = stack[other]
                        kept += 1
                for at in range(width):
                    stack[kept] = touched[at]
                    kept += 1
                held = kept
