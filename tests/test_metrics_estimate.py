"""The time estimate: hand values, and what is refused."""

from __future__ import annotations

import pytest

from remoe_cli.errors import UsageError
from remoe_cli.report.estimate import Estimate, parse_bytes, parse_estimate


@pytest.mark.parametrize(
    ("text", "link", "compute_ms"),
    [
        ("4GB/s,45ms", 4e9, 45),
        (" 1.5 GiB/s , .5s ", 1.5 * 2**30, 500),
        ("900kB/s,0ms", 9e5, 0),
        ("900KiB/s,0ms", 900 * 1024, 0),
        ("2TiB/s,30us", 2 * 2**40, 0.03),
        ("7B/s,1ms", 7, 1),
    ],
)
def test_estimates_are_read(text, link, compute_ms):
    assert parse_estimate(text) == pytest.approx((link, compute_ms))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4GB/s",
        "4GB,45ms",
        "45ms,4GB/s",
        "0GB/s,1ms",
        "-1GB/s,1ms",
        "4GB/s,45",
        "nan/s,1ms",
        "4Gb/s",
        "4Gb/s,45ms",
        "4gb/s,45ms",
        "4GiB,45ms",
        "4GB/s,1ms,2ms",
    ],
)
def test_what_is_no_estimate_is_refused(text):
    with pytest.raises(UsageError, match="takes a link") as refused:
        parse_estimate(text)
    assert "--estimate 4GB/s,45ms" in refused.value.hint


def test_tpot_by_hand():
    """100 loads of 17.3 MB over 4 GB/s are 432.5 ms."""
    assert Estimate(4e9, 45).tpot_ms(100 * 17.3e6) == pytest.approx(477.5)
    assert Estimate(4e9, 45).tpot_ms(0) == 45


@pytest.mark.parametrize(
    ("text", "size"),
    [("17301504", 17_301_504), ("16.5MiB", 17_301_504), ("17.3MB", 17_300_000), ("1 B", 1), ("17.0", 17)],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "0", "0.4", "-5", "MB", "17.3Mb/s", "17Mb", "17b", "17mb", "17.3", "17.3 B", "17.5B", "0.0001kB", "1e6"],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="--expert-bytes"):
        parse_bytes(text)
