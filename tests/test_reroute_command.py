"""remoe reroute: what it prints and reports, and every mistake as one line."""

import json
import shlex
from pathlib import Path

import pytest
from commands import make_run, refused

SIZE = ["--rows", 4, "--tokens", 32]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("reroute"))


def test_the_report(remoe, model, texts):
    ran = remoe("reroute", model, "--prompts", texts, "--cache", 3, "--strength", "0,.4,.4", *SIZE, "--json")
    assert ran.code == 0, ran.err
    done = json.loads(ran.out)
    stock, off, strong = done["strengths"]
    assert [row["strength"] for row in done["strengths"]] == [None, 0, 0.4]
    assert (done["keep"], done["capacity"], done["method"], done["rows"], done["tokens"]) == (
        1,
        3,
        "cache-prior",
        4,
        128,
    )
    assert (stock["perplexity_change"], stock["misses_change"], stock["changed"]) == (None, None, 0)
    for key in ("perplexity", "loss", "eor", "hits", "misses", "evictions"):
        assert off[key] == stock[key], key
    assert off["perplexity_change"] == off["misses_change"] == 0 and off["perplexity_change_95"] == [0, 0]
    assert strong["perplexity"] != stock["perplexity"] and strong["changed"] > 0
    assert strong["misses"] < stock["misses"] and strong["mb_a_token"] < stock["mb_a_token"]
    for row in done["strengths"]:
        assert row["counts_match"] and row["simulated"] == {key: row[key] for key in ("hits", "misses", "evictions")}
        assert row["hits"] + row["misses"] == 128 * 2 * 2  # two layers, top-2
        assert row["hit_ratio"] == row["hits"] / (row["hits"] + row["misses"])
        assert row["mb_a_token"] == pytest.approx(row["misses"] * done["expert_bytes"] / 128 / 1e6)


@pytest.mark.parametrize(
    ("method", "policy", "strengths"), [("max-rank", "lfu", [3, 4, 8]), ("threshold", "decayed:0.9", [0.5, 0.7, 0.9])]
)
def test_the_table_with_each_methods_own_strengths(remoe, model, texts, monkeypatch, method, policy, strengths):
    monkeypatch.setenv("COLUMNS", "400")
    options = ["--method", method, "--policy", policy, "--admission", "bypass", *SIZE]
    ran = remoe("reroute", model, "--prompts", texts, "--cache", 2, *options)
    assert ran.code == 0, ran.err
    head, stock, *rows = ran.out.splitlines()[:5]
    assert head.split()[:3] == ["strength", "perplexity", "change"] and stock.split()[:3] == ["as", "it", "is"]
    assert [float(row.split()[0]) for row in rows] == strengths
    assert "evictions are equal in every row" in ran.out and "DIFFER" not in ran.out
    assert all(row.split()[-1] == row.split()[-2] for row in (stock, *rows))
    assert f"{method} (" in ran.out and f"C = 2, {policy}, bypass" in ran.out and "cold cache each" in ran.out


def test_a_model_without_a_finite_figure_is_shown_all_the_same(remoe, model, texts, monkeypatch):
    from remoe_cli.measure import rerouted

    sums = rerouted.row_sums
    monkeypatch.setattr(rerouted, "row_sums", lambda *given: [(float("nan"), *rest) for _, *rest in sums(*given)])
    options = ["--prompts", texts, "--cache", 3, "--strength", 0.2, *SIZE]
    assert json.loads(remoe("reroute", model, *options, "--json").out)["strengths"][1]["perplexity_change"] is None
    assert "n/a" in remoe("reroute", model, *options).out


def test_a_delta_is_rerouted(remoe, run):
    options = ["--prompts", run.parent / "texts.jsonl", "--cache", 3, "--strength", ".2", *SIZE, "--json"]
    base, tuned, named = (
        json.loads(remoe("reroute", run.parent / "model", *options, *delta).out)
        for delta in ([], ["--delta", run], ["--delta", run / "delta"])
    )
    assert [row["perplexity"] for row in tuned["strengths"]] == [row["perplexity"] for row in named["strengths"]]
    assert base["strengths"][0]["perplexity"] != tuned["strengths"][0]["perplexity"]


def test_the_demo_has_texts_of_its_own(remoe):
    ran = remoe(
        "reroute",
        "demo",
        "--cache",
        99,
        "--method",
        "max-rank",
        "--strength",
        12,
        "--rows",
        2,
        "--tokens",
        40,
        "--json",
    )
    assert ran.code == 0, ran.err
    assert "--cache 99 is taken as 64" in ran.err and "holds all 64 experts" in ran.err
    done = json.loads(ran.out)
    assert done["capacity"] == 64
    assert done["data"].startswith("demo (corpus") and done["top_k"] == 6 and done["keep"] == 2
    assert done["strengths"][0]["evictions"] == 0


def test_fewer_rows_than_asked_for_are_said(remoe, model, texts):
    short = Path("short.jsonl")
    short.write_text("".join(texts.read_text().splitlines(keepends=True)[:3]))
    ran = remoe(
        "reroute", model, "--prompts", short, "--cache", 3, "--strength", 0, "--rows", 50, "--tokens", 64, "--json"
    )
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)["rows"]
    assert rows < 50 and f"{rows} of 50 rows" in ran.err


def test_what_cannot_be_rerouted(remoe, model, texts):
    for options, words in (
        (["--cache", 0], "--cache is at least 1"),
        (["--cache", 3, "--admission", "free"], "forced or bypass"),
        (["--cache", 3, "--method", "prior"], "cache-prior, max-rank, threshold"),
        (["--cache", 3, "--strength", "a"], "--strength takes numbers"),
        (["--cache", 3, "--strength", ""], "--strength takes numbers"),
        (["--cache", 3, "--strength", "-1"], "at least 0"),
        (["--cache", 3, "--strength", "nan"], "at least 0"),
        (["--cache", 3, "--method", "threshold", "--strength", "2"], "0 to 1"),
        (["--cache", 3, "--method", "max-rank", "--strength", "2.5"], "whole number"),
        (["--cache", 3, "--method", "max-rank", "--strength", "1"], "2 (the experts a token) to 8"),
        (["--cache", 3, "--method", "max-rank", "--strength", "4,9"], "2 (the experts a token) to 8"),
        (["--cache", 3, "--keep", 3], "--keep is 0 to the 2"),
        (["--cache", 3, "--keep", -1], "--keep is 0"),
        (["--cache", 3, "--policy", "belady"], "what only a replay has"),
        (["--cache", 3, "--policy", "lrru"], "did you mean"),
        (["--cache", 3, "--rows", 0], "--rows is at least 1"),
        (["--cache", 3, "--tokens", 1], "--tokens is 2 to 256"),
        (["--cache", 3, "--tokens", 257], "--tokens is 2 to 256"),
        (["--cache", 3, "--device", "tpu"], "--device is cpu"),
        (["--cache", 3, "--delta", "nothing-here"], "nothing-here"),
    ):
        refused(remoe("reroute", model, "--prompts", texts, *options), words)
    refused(remoe("reroute", model, "--cache", 3), "name the texts", "--prompts")
    refused(remoe("reroute", model, "--cache", 3, "--prompts", "no-such.jsonl"), "no-such.jsonl")


def test_the_next_command_of_each_mistake_runs(remoe, model, texts):
    """Each Try line is run as it stands, with all else that was asked for."""
    Path("notes.md").write_text("# notes")
    Path("bare.jsonl").write_text('{"text": ""}\n' * 9)
    good = ["--prompts", texts, "--cache", 3, *SIZE]
    for options, asked in (
        (["--prompts", texts, "--cache", 0, *SIZE], {"capacity": 8}),
        ([*good, "--method", "foo", "--keep", 0], {"method": "cache-prior", "keep": 0}),
        ([*good, "--admission", "free", "--policy", "lfu"], {"policy": "lfu", "admission": "forced"}),
        ([*good, "--policy", "belady", "--admission", "bypass"], {"policy": "lru", "admission": "bypass"}),
        ([*good, "--policy", "all"], {"policy": "lru"}),
        ([*good, "--policy", "lru,lfu"], {"policy": "lru"}),
        ([*good, "--strength", "a", "--method", "threshold"], {"method": "threshold"}),
        ([*good, "--strength", "-1"], {"method": "cache-prior"}),
        ([*good, "--method", "max-rank", "--strength", "99"], {"method": "max-rank"}),
        ([*good, "--keep", 3, "--strength", "0,.5"], {"keep": 1}),
        ([*good[:-2], "--tokens", 9999], {"rows": 4}),
        ([*good[:4], "--rows", 0, "--tokens", 32], {"row_tokens": 32}),
        ([*good, "--device", "tpu"], {"device": "cpu"}),
        (["--cache", 3, *SIZE], {"rows": 4}),
        (["--cache", 3, *SIZE, "--prompts", "notes.md"], {"rows": 4}),
        (["--cache", 3, *SIZE, "--prompts", "bare.jsonl"], {"rows": 4}),
    ):
        ran = remoe("reroute", model, *options)
        refused(ran)
        hint = shlex.split(ran.err.splitlines()[-1].partition("Try: ")[2])
        assert hint[:3] == ["remoe", "reroute", str(model)], ran.err
        assert "--data" not in ran.err, ran.err
        again = remoe(*hint[1:], "--json")
        assert again.code == 0, (hint, again.err)
        done = json.loads(again.out)
        expected = {"capacity": 3, "row_tokens": 32, **asked}
        expected |= {"row_tokens": done["row_tokens"]} if "--tokens" not in hint else {}
        assert {key: done[key] for key in expected} == expected


def test_one_row_has_no_interval(remoe, model, texts):
    options = ["--prompts", texts, "--cache", 3, "--strength", ".4", "--rows", 1, "--tokens", 16]
    done = json.loads(remoe("reroute", model, *options, "--json").out)
    assert (done["rows"], done["requests"]) == (1, 1)
    for row in done["strengths"]:
        assert {row[key] for key in row if key.endswith("_95")} == {None}
    shown = remoe("reroute", model, *options).out
    stock, strong = shown.splitlines()[1:3]
    assert "n/a" in strong and "n/a" not in stock
    assert "in 1 document," in " ".join(shown.split()) and "one row gives none (n/a)" in " ".join(shown.split())
    two = json.loads(remoe("reroute", model, *options[:-4], *SIZE, "--json").out)["strengths"][1]
    assert all(two[key] is not None for key in two if key.endswith("_95") and key != "eor_change_95")


@pytest.mark.parametrize("columns", [80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(remoe, model, texts, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    ran = remoe("reroute", "demo", "--cache", 12, "--strength", ".2,.5", "--rows", 2, "--tokens", 64)
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= columns
    head, *_ = (line.split() for line in lines)
    assert ("simulated" in head) == (columns > 110)
    assert sum(line.split()[:1] == ["strength"] for line in lines) == 1 + (columns < 110)
    text = " ".join(ran.out.split())
    for word in ("95 %: bootstrap", "EOR: share", "hit: share", "simulated: misses", "changed: share"):
        assert word in text
