"""What `remoe replay` says beside the rows of its table: the best, reasons, names, notes; and rules that go together."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from test_replay_command import cells_of, EXPERTS, LAYERS, random_trace, result, TOP_K

from remoe_cli.cache import replay
from remoe_cli.routing import RoutingTrace, write


@pytest.fixture
def file(tmp_path) -> Path:
    write(random_trace(), tmp_path / "one.trace")
    return tmp_path / "one.trace"


def test_the_table_is_as_wide_as_the_terminal(remoe, file, monkeypatch):
    quick = ("replay", file, "--cache", "2,3,4,5,6", "--policy", "all", "--figures")
    for words, most in ((quick, 80), (quick, 100), (quick[:-1], 60)):
        monkeypatch.setenv("COLUMNS", str(most))
        ran = remoe(*words)
        widest = [line for line in ran.out.splitlines() if len(line) > most and not line.startswith("  remoe ")]
        assert ran.code == 0 and not widest
    monkeypatch.setenv("COLUMNS", "250")
    titles = [line for line in remoe(*quick[:-1]).out.splitlines() if line.strip().startswith("C = 2")]
    assert "C = 6" in titles[0]  # all sizes side by side, prose still narrow enough to read
    assert max(len(line) for line in remoe(*quick[:-1]).out.splitlines() if line.startswith("hit %: ")) <= 118


def test_the_best_that_a_decoder_can_run(remoe, file):
    quick = ("replay", file, "--cache", "3,5", "--policy", "lru,lfu,random,hindsight,belady")
    got = result(remoe(*quick, "--json"))
    table = remoe(*quick).out
    for one in got["best"]:
        rows = [cell for cell in got["cells"] if cell["capacity"] == one["capacity"]]
        live = [cell for cell in rows if cell["policy"] in ("lru", "lfu", "random")]
        assert one["loads_a_token"] == min(cell["loads_a_token"] for cell in live)
        assert one["loads_a_token"] > min(cell["loads_a_token"] for cell in rows)  # Belady's, which none can run
        assert any(one.items() <= cell.items() for cell in live)
        assert (
            f"C = {one['capacity']}: {one['policy']} {one['admission']}, {one['loads_a_token']:.1f}, gap "
            in " ".join(table.split())
        )
    assert [one["capacity"] for one in got["best"]] == [3, 5]
    only = result(remoe("replay", file, "--cache", "3", "--policy", "belady", "--json"))
    assert only["best"] == []


def test_best_goes_by_bytes_where_layers_differ(remoe, tmp_path):
    """Two policies whose order in loads and in bytes differ: found among seeds of `random`, so that it is never a tie."""
    write(random_trace(provenance={"expert_bytes": [1, 10_000_000, 1]}), tmp_path / "sized.trace")
    names = ",".join(f"random:{seed}" for seed in range(12))
    got = result(remoe("replay", "sized.trace", "--cache", "4", "--policy", names, "--admission", "forced", "--json"))
    least = {name: min(cell[name] for cell in got["cells"]) for name in ("mb_a_token", "loads_a_token")}
    (best,) = got["best"]
    assert best["mb_a_token"] == least["mb_a_token"] and best["loads_a_token"] > least["loads_a_token"]


def test_loads_ahead_of_need_are_told(remoe, file):
    told = "What hindsight loads ahead of need counts in loads and gap, not in hit %"
    assert told in " ".join(remoe("replay", file, "--cache", "4", "--policy", "lru,hindsight").out.split())
    assert "ahead of need" not in remoe("replay", file, "--cache", "4", "--policy", "lru").out


def test_a_gap_that_is_none_says_why(remoe, file, tmp_path):
    ran = remoe("replay", file, "--cache", f"4,{EXPERTS}", "--policy", "lru", "--equal", "slots")
    assert f"gap n/a at C = {EXPERTS}: LRU loads no more than Belady with bypass." in ran.out
    got = result(
        remoe("replay", file, "--cache", f"4,{EXPERTS}", "--policy", "lru,belady", "--equal", "slots", "--json")
    )
    narrow, wide = got["references"]
    assert narrow["reason"] is None and wide["reason"] and wide["lru"] == wide["belady_bypass"]
    cells = cells_of(got)
    assert narrow["lru"] == cells["lru", "forced", 4]["loads_a_token"]
    assert narrow["belady_bypass"] == cells["belady", "bypass", 4]["loads_a_token"]
    write(random_trace(layers=1), tmp_path / "small.trace")
    out = " ".join(remoe("replay", "small.trace", "--cache", "2,4", "--policy", "lru").out.split())
    assert "gap n/a at C = 2: bypass needs a staging buffer of 2 experts" in out


def test_a_bypass_pool_that_cycles_is_explained(remoe, tmp_path):
    """All tokens ask for the same experts: LRU in fewer slots than these hits nothing, and that is no error."""
    experts = np.tile(np.arange(TOP_K), (30, LAYERS, 1))
    write(RoutingTrace(experts, np.array([0, 30]), np.zeros(30, bool), EXPERTS), tmp_path / "same.trace")
    ran = remoe("replay", "same.trace", "--cache", "2,4", "--policy", "lru,lfru", "--pool")
    assert (
        "At C = 2 that leaves less than the experts of one token" in ran.out
        and "hits near 0 are no error" in " ".join(ran.out.split())
    )
    row = next(line for line in ran.out.splitlines() if line.split()[:2] == ["lru", "bypass"])
    assert row.split()[2] == "0.0"
    ran = remoe("replay", "same.trace", "--cache", "4", "--policy", "lru,lfru", "--pool")
    assert "no error" not in ran.out


def test_what_is_missing_comes_with_its_command(remoe, tmp_path):
    made = {"kind": "forced", "model": "org/model", "revision": "abc", "data": "my texts.jsonl", "seed": 3,
            "prompt_tokens": 3, "new_tokens": 9}  # fmt: skip
    write(random_trace(provenance=made), tmp_path / "one.trace")
    out = remoe("replay", "one.trace", "--cache", "4").out
    same = "remoe trace org/model@abc --prompts 'my texts.jsonl' --requests 3 --prompt-tokens 3 --new-tokens 9"
    assert (
        f"  {same} --seed 3 --probabilities -o one-full.trace && remoe replay one-full.trace --cache 4"
        in out.splitlines()
    )
    assert (
        f"  {same} --seed 4 -o one-fit.trace && remoe replay one.trace --cache 4 --fit one-fit.trace"
        in out.splitlines()
    )
    (tmp_path / "one-fit.trace").write_text("taken")
    assert "-o one-fit-2.trace" in remoe("replay", "one.trace", "--cache", "4").out
    write(random_trace(provenance={"kind": "imported", "model": "x.gguf"}), tmp_path / "foreign.trace")
    out = " ".join(remoe("replay", "foreign.trace", "--cache", "4").out.split())
    assert "remoe trace --probabilities records them, the tool that this one comes from did not." in out


def test_a_trace_without_prompts_says_so(remoe, tmp_path):
    write(random_trace(prompt=0), tmp_path / "text.trace")
    out = remoe("replay", "text.trace", "--cache", "4", "--policy", "lru").out
    assert "36 decode tokens, no prompt." in out and " 0 of prompt" not in out


def test_arms_of_the_same_stem_are_told_apart(remoe, tmp_path):
    for seed in (1, 2):
        (tmp_path / f"s{seed}").mkdir()
        write(random_trace(seed=seed), tmp_path / f"s{seed}" / "t.trace")
    quick = ("--cache", "4", "--policy", "lru", "--admission", "forced")

    def names(*words):
        ran = remoe("replay", *words, *quick)
        rows = [line.split()[2] for line in ran.out.splitlines() if line.startswith("lru ")]
        assert all(any(line.startswith(f"{name}:") for line in ran.out.splitlines()) for name in rows)
        return rows

    assert names("s2/t.trace", "--against", "s1/t.trace") == ["s1/t.trace", "s2/t.trace"]
    (tmp_path / "s1" / "t.bin").write_bytes((tmp_path / "s1" / "t.trace").read_bytes())
    assert names("s2/t.trace", "--against", "s1/t.bin") == ["t.bin", "t.trace"]
    got = result(remoe("replay", "s1/t.trace", "--against", "s1/t.trace", *quick, "--json"))
    assert [arm["name"] for arm in got["arms"]] == ["t (base)", "t (trace)"]


# ---- rules that go together


def test_carry_is_one_cache_for_all_requests(remoe, file):
    """--warm carry and --reset never are the same cache, so they read the same and count the same."""
    quick = ("replay", file, "--cache", "3", "--policy", "lru", "--admission", "forced")
    carry, never = (remoe(*quick, *rule).out for rule in (("--warm", "carry"), ("--reset", "never")))
    assert carry == never and "Simulated: one cache for all requests, cold at the first; step atomic" in carry
    assert "a fresh" not in carry
    assert "Simulated: a fresh, cold cache for each request; step" in remoe(*quick).out
    got = result(remoe(*quick, "--warm", "carry", "--json"))
    assert (got["rules"]["warm"], got["rules"]["reset"]) == ("carry", "never")
    assert got["figures"]["trace"]["lru_hit_ratio"][2] == got["cells"][0]["hit_ratio"]  # the curve's cache lives on too


def test_more_sessions_than_requests_are_as_many(remoe, file):
    quick = ("replay", file, "--cache", "3", "--policy", "lru", "--warm", "carry")
    ran = remoe(*quick, "--sessions", "400000")
    assert ran.code == 0 and "3 sessions take turns" in " ".join(ran.out.split())
    assert re.search(
        r"hit % of single sessions in the shared cache, lru forced: C = 3: [\d.]+ to [\d.]+\.",
        " ".join(ran.out.split()),
    )
    assert "--sessions 400000: the trace has 3 requests, so all take turns." in ran.err
    assert remoe(*quick, "--sessions", "3").out == ran.out


def test_a_fit_that_nothing_uses(remoe, file, tmp_path):
    write(random_trace(seed=4), tmp_path / "other.trace")
    quick = ("replay", file, "--cache", "4", "--policy")
    ran = remoe(*quick, "lru", "--fit", "other.trace")
    assert ran.code == 0 and "--fit other.trace is not used" in ran.err and "static fitted" not in ran.out
    ran = remoe(*quick, "lru,static", "--fit", "other.trace")
    assert "static fitted on other.trace" in ran.out.replace("\n", " ") and "--fit" not in ran.err


def test_a_fit_on_the_trace_itself_is_hindsight(remoe, file, tmp_path):
    (tmp_path / "copy.trace").write_bytes(file.read_bytes())
    for option, policy in (("--fit", "static"), ("--budgets", "lru")):
        ran = remoe("replay", file, "--cache", "4", "--policy", policy, option, "copy.trace")
        assert f"{option} copy.trace is the very trace that is replayed, so it is fitted in hindsight." in ran.err


def test_traces_of_other_texts_are_told(remoe, tmp_path):
    made = {"kind": "forced", "model": "m", "data_sha256": "a", "seed": 0, "delta": None}
    for name, change in (
        ("base", {}), ("tuned", {"delta": "run"}), ("greedy", {"kind": "greedy"}), ("loose", {"kind": "greedy", "delta": "run"}),
        ("other", {"data_sha256": "b", "seed": 1}),
    ):  # fmt: skip
        write(random_trace(provenance={**made, **change}), tmp_path / f"{name}.trace")
    write(random_trace(lengths=(5, 6, 7)), tmp_path / "short.trace")

    def said(own, base):
        ran = remoe("replay", f"{own}.trace", "--against", f"{base}.trace", "--cache", "4", "--policy", "lru")
        assert ran.code == 0
        return [line for line in ran.err.splitlines() if line.startswith("--against")]

    assert said("tuned", "base") == []
    assert "differ in kind (forced, greedy): other tokens" in said("greedy", "base")[0]
    assert "differ in texts, seed (0, 1): other tokens" in said("other", "base")[0]
    assert "in its own words" in said("loose", "greedy")[0]
    assert "differ in lengths of requests" in said("short", "base")[0]


def test_kernels_are_compiled_before_anything_is_timed(remoe, file, monkeypatch):
    """What a first cell takes decides the first ETA, so compiling must not be in it."""
    from remoe_cli import replay as verb

    order = []
    monkeypatch.setattr(verb, "prepare", lambda policy: order.append(policy) or 1.5)
    monkeypatch.setattr(verb, "run", lambda *given, **options: order.append("run") or replay(*given, **options))
    ran = remoe("replay", file, "--cache", "4", "--policy", "lru,lfu")
    assert [*dict.fromkeys(order)] == ["lru", "lfu", "belady", "run"]
    assert "Compiling replay kernels, once 1/3" in ran.err and "Compiled 3 replay kernels in 4.5 s" in ran.err


def test_given_bytes_size_a_pool_in_bytes(remoe, tmp_path):
    foreign = random_trace(provenance={"accounting": {"pool": "bytes"}, "expert_bytes": [10, 1000, 10]})
    write(foreign, tmp_path / "foreign.trace")
    quick = ("replay", "foreign.trace", "--cache", "5", "--policy", "lru", "--admission", "forced", "--json")
    (cell,) = result(remoe(*quick, "--expert-bytes", "100"))["cells"]
    (pooled,) = result(remoe(*quick, "--pool"))["cells"]
    assert cell["misses"] == pooled["misses"] != result(remoe(*quick))["cells"][0]["misses"]  # as many of one size
