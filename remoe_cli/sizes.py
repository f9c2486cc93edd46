"""Sizes, rates and times as people write them: 17.3MB, 1GB/s, 45ms. B is bytes."""

import re
from collections.abc import Mapping

MOST = float(2**53)  # whole numbers up to here are exact as floats
_BYTES = {
    "B": 1.0,
    **{f"{prefix}B": 1000.0**power for prefix, power in zip("kKMGT", (1, 1, 2, 3, 4))},
    **{f"{prefix}iB": 1024.0**power for prefix, power in zip("kKMGT", (1, 1, 2, 3, 4))},
}
_MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def parse_size(text: str) -> int | None:
    """ "17.3MB", "16.5MiB" or a whole number of bytes, as bytes; None for anything else, or less than a byte."""
    size = _amount(text, {"": 1, **_BYTES})
    plain = re.fullmatch(r"[^a-zA-Z]*B?\s*", text)
    return None if size is None or size < 1 or (plain and size % 1) else round(size)


def parse_rate(text: str) -> float | None:
    """ "4GB/s" as bytes a second; None for anything else, or 0."""
    amount = text.strip()
    return (_amount(amount.removesuffix("/s"), _BYTES) or None) if amount.endswith("/s") else None


def parse_milliseconds(text: str) -> float | None:
    """ "45ms", "30us" or "1s"; None for anything else."""
    return _amount(text, _MILLISECONDS)


def show_size(size: float) -> str:
    """Bytes for a person, 3 figures, decimal units."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB" if size < 1000 else f"{size:,.0f} GB"


def _amount(words: str, units: Mapping[str, float]) -> float | None:
    """A number with a unit; None where it is not one."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)", words.strip())
    if found is None or found[2] not in units:
        return None
    amount = float(found[1]) * units[found[2]]
    return amount if amount <= MOST else None
