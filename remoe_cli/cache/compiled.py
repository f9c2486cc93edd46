"""numba, with the compiled code kept on disk where there is a folder for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable, keep: bool = True) -> Any:
    """`function` in machine code, without the GIL. Kept next to its file or in the user's cache folder (or in
    NUMBA_CACHE_DIR); where none can be written, it is compiled anew in each process."""
    if keep:
        try:
            return numba.njit(function, nogil=True, cache=True)
        except RuntimeError:  # numba finds no folder to write to
            pass
    return numba.njit(function, nogil=True)
