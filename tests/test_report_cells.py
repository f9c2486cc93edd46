"""The simulated cells of a report: what remoe replay says of the same trace, at the same memory."""

from __future__ import annotations

import pytest
from test_replay_command import random_trace, result

from remoe_cli.cache import replay
from remoe_cli.cache.budgets import equal_memory
from remoe_cli.report.cells import cache_cells, replays
from remoe_cli.routing import write

POLICIES = ["lru", "lfru", "hindsight", "belady"]


def test_cells_equal_those_of_remoe_replay(remoe, tmp_path):
    trace = random_trace()
    done = replays({"forced": trace}, [3, 4], POLICIES)
    cells = cache_cells(done, done, POLICIES, expert_bytes=1_000_000)
    write(trace, tmp_path / "one.trace")
    shown = result(
        remoe(
            "replay", "one.trace", "--cache", "3,4", "--policy", ",".join(POLICIES), "--expert-bytes", "1MB", "--json"
        )
    )["cells"]
    theirs = {(cell["policy"], cell["admission"], cell["capacity"]): cell for cell in shown}
    assert len(cells) == 2 * (len(POLICIES) + 1)
    for cell in cells:
        other = theirs[cell["policy"], cell["admission"], cell["capacity"]]
        for name in ("accesses", "hits", "misses", "evictions", "proactive", "gap_closed", "gap_closed_forced"):
            assert cell[name] == pytest.approx(other[name]), (cell["policy"], name)
        for name in ("mb_a_token", "mb_a_token_95", "hit_ratio_95"):
            assert cell[name] == pytest.approx(other[name]), (cell["policy"], name)


def test_bypass_keeps_a_slot_a_layer_where_staging_takes_more():
    trace = random_trace()
    done = replays({"forced": trace}, [1], ["lru", "belady"])
    slots = {admission: done["forced", 1, "belady", admission].slots for admission in ("forced", "bypass")}
    assert slots == {"forced": trace.n_layers, "bypass": trace.n_layers}
    with pytest.raises(Exception, match="staging buffer"):
        equal_memory(1, trace.n_layers, trace.top_k, "bypass")
    assert done["forced", 1, "belady", "bypass"].misses == replay(trace, "belady", 1, admission="bypass").misses
