"""What the compiled replay works on."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from remoe_cli.cache.policy import Memory, N_REGISTERS


def frozen(array: np.ndarray) -> np.ndarray:
    """A read-only view. What kernels only read is handed to them so, that a mapped file and an array of one's own have one
    type and are compiled for once."""
    view = array.view()
    view.flags.writeable = False
    return view


@cache
def halves_as_floats() -> np.ndarray:
    """[65536] float32: the value of each float16, by its bits; numba has no float16 on a CPU."""
    return frozen(np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32))


def arrays(n_ids: int, n_layers: int, n_experts: int, constants: list[float], fit: Any) -> Memory:
    """A fresh Memory of arrays; the kernel itself resets it."""
    last, count, stamp, state, link = (np.zeros(n_ids + 1, np.int64) for _ in range(5))
    now, reg = np.array([0, 0, n_layers, n_experts], np.int64), np.zeros(N_REGISTERS, np.int64)
    known = np.append(np.asarray(fit, np.float64), 0.0)
    return Memory(
        last,
        count,
        stamp,
        state,
        link,
        np.zeros(n_ids + 1),
        np.zeros(n_ids + 1),
        known,
        now,
        reg,
        np.array(constants, np.float64),
    )
