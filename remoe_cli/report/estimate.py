"""Time per token from loads, a link and a compute time: an estimate, never a measurement. No torch, no clock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from remoe_cli.errors import UsageError

LABEL = "estimate, not measured"
_BYTES = {
    "B": 1.0,
    **{f"{prefix}B": 1000.0**power for prefix, power in zip("kKMGT", (1, 1, 2, 3, 4))},
    **{f"{prefix}iB": 1024.0**power for prefix, power in zip("kKMGT", (1, 1, 2, 3, 4))},
}
MOST = float(2**53)  # whole numbers up to here are exact as floats
_MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


class Estimate(NamedTuple):
    """link: bytes a second over which experts are loaded. compute_ms: time of a token that loads nothing."""

    link: float
    compute_ms: float

    def tpot_ms(self, loaded_bytes: float) -> float:
        """Of a token that loads so many bytes; loading and computing do not overlap."""
        return self.compute_ms + 1e3 * loaded_bytes / self.link


def parse_estimate(text: str, command: str = "remoe replay FILE --cache 8") -> Estimate:
    """ "4GB/s,45ms" as an Estimate. command: what is to be tried with a good one. Raises UsageError for anything else."""
    link, _, compute = text.partition(",")
    rate = _amount(link.strip().removesuffix("/s"), _BYTES) if link.strip().endswith("/s") else None
    compute_ms = _amount(compute, _MILLISECONDS)
    if not rate or compute_ms is None:
        raise UsageError(
            f"--estimate takes a link in bytes a second (B is bytes: kB/s to TB/s, kiB/s to TiB/s) and a compute time (us, "
            f"ms, s), not {text!r}.",
            f"{command} --estimate 4GB/s,45ms",
        )
    return Estimate(rate, compute_ms)


def parse_bytes(text: str, command: str = "remoe replay FILE --cache 8") -> int:
    """ "17.3MB", "16.5MiB" or a whole number of bytes. command: what is to be tried with a good size. Raises UsageError for
    anything else, or less than a byte."""
    size = _amount(text, {"": 1, **_BYTES})
    plain = re.fullmatch(r"[^a-zA-Z]*B?\s*", text)
    if size is None or size < 1 or (plain and size % 1):
        raise UsageError(
            f"--expert-bytes takes a size of at least 1 byte (B is bytes), such as 17301504 or 17.3MB, not {text!r}.",
            f"{command} --expert-bytes 17.3MB",
        )
    return round(size)


def _amount(words: str, units: Mapping[str, float]) -> float | None:
    """A number with a unit; None where it is not one."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)", words.strip())
    if found is None or found[2] not in units:
        return None
    amount = float(found[1]) * units[found[2]]
    return amount if amount <= MOST else None
