"""The figures of a trace that no policy changes."""

from __future__ import annotations

import numpy as np
import pytest
from test_metrics_locality import trace

from remoe_cli.report import locality
from remoe_cli.report.trace_figures import trace_figures


def test_figures_by_hand():
    """0 after one token twice and after 3; every other access is its expert's first."""
    routing = trace([[[0]], [[0]], [[1]], [[2]], [[3]], [[0]], [[0]]], [0, 7], 4)
    got = trace_figures(routing, np.array([0, 2, 2, 2, 3]))
    assert got["eor"] == {"1": 2 / 6, "2": 0, "4": 1 / 3, "8": None, "16": None, "32": None, "64": None}
    assert got["eor_95"] is None  # one request
    assert got["reuse"]["first"] == 4 / 7
    assert got["reuse"]["within"] == {"1": 2 / 7, "2": 2 / 7, **dict.fromkeys(("4", "8", "16", "32", "64"), 3 / 7)}
    assert got["reuse"]["histogram"] == [
        {"from": 1, "to": 1, "accesses": 2},
        {"from": 2, "to": 2, "accesses": 0},
        {"from": 3, "to": 4, "accesses": 1},
    ]
    assert got["working_set"]["2"] == {"mean": 5 / 3, "p95": 2, "most": 2}
    assert got["working_set"]["8"] is None
    assert got["working_set"]["request"] == {"mean": 4, "p95": 4, "most": 4}
    assert got["lru_hit_ratio"] == [2 / 7, 2 / 7, 2 / 7, 3 / 7]
    assert got["parallel_load"] == {"2": pytest.approx(5 / 3.5), "4": pytest.approx(4 / 1.75), "8": None}


def test_the_histogram_holds_every_reuse():
    rng = np.random.default_rng(0)
    rows = np.array([[rng.permutation(12)[:2] for _ in range(3)] for _ in range(90)])
    routing = trace(rows, [0, 40, 90], 12)
    histogram = trace_figures(routing, np.zeros(13, dtype=int))["reuse"]["histogram"]
    assert all(one["to"] + 1 == after["from"] for one, after in zip(histogram, histogram[1:]))
    assert sum(one["accesses"] for one in histogram) == locality.reuse(routing).counts.sum() > 0


def test_the_interval_of_eor_is_over_requests():
    routing = trace([[[0]], [[0]], [[1]], [[2]], [[3]]], [0, 2, 5], 4)  # overlaps 1 of 1 and 0 of 2
    assert trace_figures(routing, np.zeros(5, dtype=int))["eor_95"] == (0, 1)
