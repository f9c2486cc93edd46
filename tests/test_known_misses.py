"""Recorded LRU curves as a guide to other models: the file's own shapes exactly, others by hand; the script makes what is stored."""

import json
import runpy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remoe_cli.report.known_misses import ANY, EXACT, FAMILY, Known, known, PATH
from remoe_cli.routing.imports import read_foreign

ROW = {"model": "m", "experts": 4, "top_k": 1, "hits": {"1": 0.4, "2": 0.6, "3": 0.8, "4": 1.0}}
RECORDED = [
    row for row in json.loads(PATH.read_text())["rows"] if len(row["hits"]) > 4
]  # not the four points of a paper
LITE = ("deepseek_v2", 2048, 64, 26)


def test_of_its_own_shape_a_trace_tells_what_was_counted():
    lite = known(*LITE)
    assert lite.of == EXACT and {row["model"] for row in lite.rows} == {"deepseek-ai/DeepSeek-V2-Lite"}
    # 331,317 of 1,282,632 accesses on one text, .3187 in the paper; at 12 slots the paper's .4519 is the most
    assert lite.hits(6, 64, 6) == (pytest.approx(331_317 / 1_282_632, abs=5e-5), pytest.approx(0.3187, abs=1e-9))
    assert lite.hits(12, 64, 6)[1] == pytest.approx(0.4519, abs=1e-9)
    least, most = lite.hits(16, 64, 6)
    assert 0.48 < least <= most < 0.5, "the paper says nothing of 16 slots"
    assert lite.gains[0]["misses"]["6"] == round((1 - 0.3687) / (1 - 0.3187) - 1, 4) == -0.0734


@pytest.mark.parametrize(
    ("capacity", "experts", "top_k", "hit"),
    [
        (2, 8, 2, 0.25 + 0.15),  # as on 1 of 4 slots, .15 above chance
        (5, 8, 2, 0.625 + 0.7 - 0.625),  # half way from K to E, as on 2.5 of 4
        (8, 8, 2, 1.0),
        (1, 10, 1, 0.1 + 0.9 / 0.75 * 0.15),  # chance leaves more room
        (3, 3, 3, 1.0),  # all of them each token
    ],
)
def test_another_shape_by_hand(capacity, experts, top_k, hit):
    assert Known([ROW], ANY, []).hits(capacity, experts, top_k) == (pytest.approx(hit), pytest.approx(hit))


def test_a_curve_serves_only_where_it_was_measured():
    short = {**ROW, "hits": {"1": 0.5, "2": 0.9}}
    assert Known([ROW, short], FAMILY, []).hits(2, 4, 1) == (0.6, 0.9)
    assert Known([ROW, short], FAMILY, []).hits(3, 4, 1) == (0.8, 0.8)


def test_the_nearest_model_speaks():
    assert known("deepseek_v2", 2048, 64, 7).of == FAMILY, "another number of layers"
    assert {row["model"] for row in known("deepseek_v2", 5120, 160, 59).rows} == {"deepseek-ai/DeepSeek-V2-Lite"}
    assert known("deepseek_v2", 128, 64, 5).of == EXACT
    assert {row["model"] for row in known("deepseek_v2", 128, 64, 5).rows} == {"demo"}
    assert {row["model"] for row in known("qwen3_moe", 4096, 128, 94).rows} == {"Qwen/Qwen3-30B-A3B"}
    strange = known("mixtral", 4096, 8, 32)
    assert strange.of == ANY and len({row["model"] for row in strange.rows}) == 4
    assert "demo" not in {one["model"] for one in (*strange.rows, *strange.gains)}


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(RECORDED), st.integers(1, 12), st.integers(2, 300))
def test_hits_are_shares_and_never_fall_with_the_cache(row, top_k, n_experts):
    one, top_k = Known([row], FAMILY, []), min(top_k, n_experts - 1)
    steps = sorted({*range(top_k, n_experts + 1, 1 + n_experts // 20), n_experts})
    hits = [one.hits(capacity, n_experts, top_k)[0] for capacity in steps]
    assert all(0 <= hit <= 1 for hit in hits)
    assert all(low <= high + 1e-9 for low, high in zip(hits, hits[1:]))


def test_the_stored_curves_are_those_of_the_traces(shared):
    script = runpy.run_path(str(Path(__file__).parent.parent / "docs/make_known_misses.py"))
    stored = json.loads(PATH.read_text())["rows"]
    assert len(script["ROWS"]) + 2 == len(stored)
    for row, held in zip(script["ROWS"], stored):
        if row.file.startswith("esft/") or row.file.endswith(".gz"):
            assert script["_curve"](row, read_foreign(shared(f"data/traces/{row.file}"))) == held
