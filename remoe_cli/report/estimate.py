"""Time per token from loads, a link and a compute time: an estimate, never a measurement. No torch, no clock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from remoe_cli.errors import UsageError

LABEL = "estimate, not measured"
_BYTES = {
    "b": 1.0,
    **{f"{prefix}b": 1000.0**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024.0**power for power, prefix in enumerate("kmgt", 1)},
}
_MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


class Estimate(NamedTuple):
    """link: bytes a second over which experts are loaded. compute_ms: time of a token that loads nothing."""

    link: float
    compute_ms: float

    def tpot_ms(self, loaded_bytes: float) -> float:
        """Of a token that loads so many bytes; loading and computing do not overlap."""
        return self.compute_ms + 1e3 * loaded_bytes / self.link


def parse_estimate(text: str) -> Estimate:
    """ "4GB/s,45ms" as an Estimate. Raises UsageError for anything else."""
    link, _, compute = text.partition(",")
    rate = _amount(link.strip().removesuffix("/s"), _BYTES) if link.strip().endswith("/s") else None
    compute_ms = _amount(compute, _MILLISECONDS)
    if not rate or compute_ms is None:
        raise UsageError(
            f"--estimate takes a link in bytes a second (kB/s to TB/s, kiB/s to TiB/s) and a compute time (us, ms, s), "
            f"not {text!r}.",
            "remoe replay FILE --cache 8 --estimate 4GB/s,45ms",
        )
    return Estimate(rate, compute_ms)


def parse_bytes(text: str) -> int:
    """ "17.3MB", "16.5MiB" or a plain number of bytes. Raises UsageError for anything else, or less than a byte."""
    size = _amount(text, {"": 1, **_BYTES})
    if size is None or size < 1:
        raise UsageError(
            f"--expert-bytes takes a size of at least 1 byte, such as 17301504 or 17.3MB, not {text!r}.",
            "the same command with --expert-bytes 17.3MB",
        )
    return round(size)


def _amount(words: str, units: Mapping[str, float]) -> float | None:
    """A number with a unit; None where it is not one."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)", words.strip())
    if found is None or found[2].lower() not in units:
        return None
    return float(found[1]) * units[found[2].lower()]
