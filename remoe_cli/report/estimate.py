"""Time per token from loads, a link and a compute time: an estimate, never a measurement. No torch, no clock."""

from __future__ import annotations

from typing import NamedTuple

from remoe_cli.errors import UsageError
from remoe_cli.sizes import parse_milliseconds, parse_rate, parse_size

LABEL = "estimate, not measured"


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
    rate, compute_ms = parse_rate(link), parse_milliseconds(compute)
    if rate is None or compute_ms is None:
        raise UsageError(
            f"--estimate takes a link in bytes a second (B is bytes: kB/s to TB/s, kiB/s to TiB/s) and a compute time (us, "
            f"ms, s), not {text!r}.",
            f"{command} --estimate 4GB/s,45ms",
        )
    return Estimate(rate, compute_ms)


def parse_bytes(text: str, command: str = "remoe replay FILE --cache 8") -> int:
    """ "17.3MB", "16.5MiB" or a whole number of bytes. command: what is to be tried with a good size. Raises UsageError for
    anything else, or less than a byte."""
    size = parse_size(text)
    if size is None:
        raise UsageError(
            f"--expert-bytes takes a size of at least 1 byte (B is bytes), such as 17301504 or 17.3MB, not {text!r}.",
            f"{command} --expert-bytes 17.3MB",
        )
    return size
