"""remoe eval: draws, intervals, regressions, and what it refuses. One tiny run, trained once, copied for each test."""

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
from commands import make_model, refused, report_of, texts_of, write_rows

from remoe_cli import memory
from remoe_cli.delta import Delta
from remoe_cli.hub.resolve import resolve
from remoe_cli.measure.requests import cut_requests
from remoe_cli.measure.sample import Sample
from remoe_cli.recipe import load, override
from remoe_cli.report.regressions import regressions
from remoe_cli.report.renderers.markdown import markdown
from remoe_cli.report.renderers.terminal import terminal
from remoe_cli.report.rows import cell
from remoe_cli.sizes import show_size

QUIET = ("--cache", "2,4", "--no-measure")


# ---- draws


def test_the_first_draw_is_what_one_seed_takes_and_the_pooled_figures_are_of_all(remoe, run):
    one = report_of(remoe("eval", run, *QUIET, "--json"))
    three = report_of(remoe("eval", run, *QUIET, "--seeds", 3, "--json"))
    assert (one["conditions"]["draws"], three["conditions"]["draws"]) == (1, 3)
    assert three["conditions"]["requests"] == 3 * one["conditions"]["requests"] == 9
    for before, after in zip(one["arms"], three["arms"], strict=True):
        first, *others = after["draws"]
        assert len(others) == 2 and all(other["perplexity"] != first["perplexity"] for other in others)
        (alone,) = before["draws"]
        for key, value in alone.items():
            assert first[key] == pytest.approx(value, rel=1e-5), key
        assert before["spread"] is None and after["spread"]["perplexity"] > 0
        assert after["decode"]["forced"]["requests"] == 9
        hits = [cell["hit_ratio"] for cell in after["cache"] if (cell["trace"], cell["policy"]) == ("forced", "lru")]
        for at in range(2):
            mean = sum(draw["lru_hit_ratio"][at] for draw in after["draws"]) / 3
            assert hits[at] == pytest.approx(mean), "draws have equally many accesses"


def test_fewer_draws_where_the_texts_run_out(remoe, run):
    report = report_of(remoe("eval", run, *QUIET, "--seeds", 1000, "--json"))
    assert 1 < report["conditions"]["draws"] < 1000
    assert any("of 1000 draws" in note for note in report["notes"])


def test_a_note_says_where_the_texts_hold_fewer_requests_than_asked(remoe, run):
    short = write_rows(Path("short.jsonl"), texts_of("few", 4))
    asked = ("--set", "evaluate.requests=500")
    report = report_of(remoe("eval", run, *QUIET, *asked, "--domain", short, "--json"))
    requests = report["conditions"]["requests"]
    assert 1 < requests < 500 and f"the held-out texts hold {requests} of 500 requests" in report["notes"]
    of_domain = report["domains"][1]["arms"][0]["decode"]["forced"]["requests"]
    assert f"domain short: its texts hold {of_domain} of 500 requests" in report["notes"]
    assert len([note for note in report["notes"] if "of 500" in note]) == 2
    assert not any("requests" in note for note in report_of(remoe("eval", run, *QUIET, "--json"))["notes"])


def test_draws_are_disjoint():
    documents = [list(range(start, start + 100)) for start in (1000, 2000, 3000)]
    recipe = override(load("remoe", "demo"), ["evaluate.requests=3", "evaluate.rows=2", "train.sequence=20"])
    recipe = override(recipe, ["evaluate.prompt_tokens=5", "evaluate.new_tokens=4"])
    sample = Sample.of(documents, recipe, 4)
    seen = [tuple(row) for row in sample.requests.prompts_RP.tolist()]
    assert sample.draws == 4 and len(set(seen)) == len(seen) == 12
    assert Sample.of(documents, recipe, 1).requests.prompts_RP.tolist() == sample.requests.prompts_RP[:3].tolist()
    assert Sample.of(documents, recipe, 9).draws == 7  # 300 tokens hold 15 rows, two a draw


# ---- intervals and regressions


def test_changes_carry_paired_intervals(remoe, run):
    ran = remoe("eval", run, *QUIET)
    report = json.loads((run / "report.json").read_text())
    base, tuned = report["arms"]
    assert base["text"]["perplexity_change"] is None
    for part, key in [(tuned["text"], "perplexity_change"), (tuned["decode"]["forced"], "eor_change")]:
        low, high = part[f"{key}_95"]
        assert low <= part[key] <= high
        assert f"[{low:+.3f}, {high:+.3f}]" in ran.out or f"[{100 * low:+.2f}, {100 * high:+.2f}]" in ran.out


def test_a_perplexity_that_is_not_finite_is_a_regression(remoe, run):
    report = report_of(remoe("eval", run, *QUIET, "--json"))
    assert regressions(report, 1000) == []
    for arm in (0, 1):
        broken = copy.deepcopy(report)
        broken["arms"][arm]["text"]["perplexity"] = None
        assert "not finite" in regressions(broken, 1000)[0]


def test_more_misses_are_a_regression_at_their_cache_size(remoe, run):
    report = report_of(remoe("eval", run, *QUIET, "--json"))
    base, tuned = (cell(arm, 4) for arm in report["arms"])
    base["misses"], tuned["misses"] = 1000, 1021
    assert regressions(report, 100) == []
    report["arms"][1]["text"]["perplexity"] = report["arms"][0]["text"]["perplexity"]
    cell(report["arms"][1], 2)["misses"] = cell(report["arms"][0], 2)["misses"]
    assert regressions(report, 2) == ["LRU misses at C = 4: 1,000 -> 1,021"]
    assert regressions(report, 2.2) == []


def test_a_regression_is_told_by_the_exit_code(remoe, run, made):
    """Gates tuned, then untuned: a delta on the patched base that brings the former gates back."""
    assert remoe("apply", run, made / "model", "--out", "patched").code == 0
    tuned = Delta.load(run / "delta")
    former = {name: resolve(str(made / "model")).read(name) for name in tuned.tensors}
    shutil.rmtree(run / "delta")
    Delta.of(resolve("patched"), former, "remoe", {}).save(run / "delta")
    options = ("--base", "patched", "--fail-on-regress")
    worse = remoe("eval", run, *QUIET, *options, 1)
    assert worse.code == 3 and "Regressed: perplexity" in worse.err
    assert json.loads((run / "report.json").read_text())["arms"][1]["text"]["perplexity_change"] > 0.01
    assert remoe("eval", run, *QUIET, *options, 1000).code == 0


@pytest.mark.parametrize("percent", ["nan", "inf", "-inf", "-0.1"])
def test_a_regression_is_a_percentage(remoe, run, percent):
    ran = remoe("eval", run, *QUIET, "--fail-on-regress", percent)
    refused(ran, "--fail-on-regress")
    assert ran.code == 2 and not (run / "report.json").exists()


def test_perplexity_that_counts_other_tokens_than_were_learned_says_so(remoe, run):
    words = "perplexity counts all tokens"
    assert not any(words in note for note in report_of(remoe("eval", run, *QUIET, "--json"))["notes"])
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("labels: all", "labels: answers"))
    assert any(words in note for note in report_of(remoe("eval", run, *QUIET, "--json"))["notes"])


def test_without_measuring_no_second_model_is_loaded(remoe, run, monkeypatch):
    full = report_of(remoe("eval", run, "--cache", "2", "--json"))
    monkeypatch.setattr("remoe_cli.offload.decoder.load_without_experts", lambda *_: pytest.fail("it was loaded"))
    thin = report_of(remoe("eval", run, "--cache", "2", "--no-measure", "--json"))
    assert thin["base"] == full["base"] and thin["base"]["expert_bytes"] > 0


def test_a_control_on_other_texts_is_named(remoe, run, made):
    shutil.copytree(run, "control")
    facts = json.loads(Path("control/run.json").read_text())
    Path("control/run.json").write_text(json.dumps({**facts, "data": "demo"}))
    report = report_of(remoe("eval", run, *QUIET, "--control", "control", "--json"))
    assert [arm["name"] for arm in report["arms"]] == ["base", "remoe (control)", "remoe (tuned)"]
    assert any("control was trained on other texts" in note for note in report["notes"])


# ---- the timed decoder


def test_how_the_timed_decoder_reads(remoe, run):
    options = ("--ram", "1MB", "--guess", 1, "--throttle", "20MB/s", "--readers", 1, "--floor")
    ran = remoe("eval", run, "--cache", "1,2,4", *options, "--json")
    report = report_of(ran)
    c = report["conditions"]
    assert c["io"] in ("direct", "buffered")
    others = dict(c["offload"])
    in_force = others.pop("ram")
    assert 2 * 8 * report["base"]["expert_bytes"] < in_force < 10**6, "of 1 MB what all experts take"
    assert others == {
        "readers": 1, "io": "direct", "guess": 1, "throttle": 2e7, "warm": "cold", "heavy": None, "in_place": False, "reroute": None, "pack": None,
    }  # fmt: skip
    for arm in report["arms"]:
        below, *measured = arm["measured"]
        assert below == {"capacity": 1, "skipped": "needs C >= 2"}
        for row in measured:
            assert row["counts_match"] is True and row["exact"] is True
            assert row["reads"] == row["misses"] - row["guessed"] + row["guesses"] and row["guesses"] > 0
            assert row["bytes"] == row["reads"] * report["base"]["expert_bytes"] and row["ram_loads"] > 0
            assert sum(row["split_ms"].values()) == pytest.approx(row["itl_ms"]["mean"])
            assert row["limit"]["by"] in ("throttle", "compute") and row["floor"]["share"] > 0
    shown = markdown(report)
    for words in (
        "wait / experts / rest", "limited by", "loads alone", f"io {c['io']}, readers 1, RAM tier {show_size(in_force)}, guess 1, throttle 20 MB/s;",
    ):  # fmt: skip
        assert words in shown


def test_counts_that_differ_from_the_simulators_are_told(remoe, run, monkeypatch):
    from remoe_cli.offload import OffloadedDecoder

    decode = OffloadedDecoder.decode

    def one_read_more(self, *args, **options):
        done = decode(self, *args, **options)
        done.counts.decode.reads += 1
        return done

    monkeypatch.setattr(OffloadedDecoder, "decode", one_read_more)
    report = report_of(remoe("eval", run, "--cache", "2", "--json"))
    assert [row["counts_match"] for arm in report["arms"] for row in arm["measured"]] == [False, False]
    assert "NO" in terminal(report)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--ram", "much", "--seeds", 2, "--set", "evaluate.rows=4"),
            ("--ram takes a size", "eval run --set evaluate.rows=4 --cache 2 --seeds 2 --ram 8GB"),
        ),
        (("--ram", "8B"), ("holds no expert", "eval run --cache 2")),
        (("--guess", -1), ("--guess is the number",)),
        (("--guess", 3), ("more than the 2 experts", "eval run --cache 2 --guess 2")),
        (("--throttle", "1GB"), ("--throttle takes bytes a second", "--cache 2 --throttle 1GB/s")),
        (("--throttle", "1GB/s,none"), ("remoe eval measures one --throttle",)),
        (("--readers", 0), ("--readers is 1 to 64",)),
        (("--io", "fast"), ("--io is direct or buffered",)),
        (("--pack", "nothing-here"), ("nothing-here",)),
        (("--floor", "--no-measure"), ("--floor is of the timed decoder", "--no-measure")),
        (("--ram", "1GB", "--no-measure"), ("--ram is of the timed decoder",)),
    ],
)
def test_options_of_the_timed_decoder_that_are_refused(remoe, run, options, words, monkeypatch):
    monkeypatch.setattr("remoe_cli.evaluate.measure_resident", lambda *_: pytest.fail("it was measured first"))
    refused(remoe("eval", run, "--cache", 2, *options), *words)
    assert not (run / "report.json").exists()


def test_a_cache_that_memory_cannot_hold_is_refused_before_anything_is_measured(remoe, run, monkeypatch):
    monkeypatch.setattr("remoe_cli.evaluate.measure_resident", lambda *_: pytest.fail("it was measured first"))
    monkeypatch.setattr(memory, "available", lambda: memory.Room(1000, "the machine"))
    options = ("--cache", "2,8", "--policy", "lru", "--guess", 1)
    refused(
        remoe("eval", run, *options), "8 slots a layer needs", f"eval {run} --cache 2 --policy lru --guess 1 where "
    )


def test_hints_keep_the_other_options(remoe, run):
    for options, words in (
        (("--cache", "2,99"), "eval run --cache 2,8 --no-measure"),
        (("--policy", "lfu"), "eval run --cache 2,4 --policy lru,lfu --no-measure"),
        (("--seeds", 0, "--domain", "demo", "--domain", "b=demo"), "eval run --domain demo --domain b=demo --cache 2,4 --seeds 3"),
    ):  # fmt: skip
        refused(remoe("eval", run, *QUIET, *options), words)


def test_all_experts_and_the_ram_tier_have_to_fit_for_the_exactness_check(remoe, run, monkeypatch):
    """Room for the slots that it has and some more, but not for all experts and the RAM tier beside them."""
    monkeypatch.setattr("remoe_cli.measure.offloaded._room", lambda _: memory.Room(450_000, "the machine"))
    for options, checked in (((), True), (("--ram", "1MB"), False)):
        report = report_of(remoe("eval", run, "--cache", "2", *options, "--json"))
        assert [row["exact"] for arm in report["arms"] for row in arm["measured"]] == [True if checked else None] * 2
        assert any("exactness not checked" in note for note in report["notes"]) is not checked


# ---- what else is refused, and what is not


def test_a_thinner_report_leaves_the_fuller_one(remoe, run):
    full = report_of(remoe("eval", run, "--cache", "2,4", "--no-measure", "--seeds", 2, "--json"))
    again = remoe("eval", run, "--cache", "2,4", "--no-measure", "--seeds", 2)
    assert "kept as" not in again.err and not list(run.glob("report-*.json"))
    full = json.loads((run / "report.json").read_text())
    thin = remoe("eval", run, "--cache", "2", "--no-measure")
    (kept,) = run.glob("report-*.json")
    assert str(kept) in thin.err and json.loads(kept.read_text()) == full
    assert json.loads((run / "report.json").read_text())["conditions"]["capacities"] == [2]
    (run / "report.json").write_text("{")
    assert remoe("eval", run, "--cache", "2", "--no-measure").code == 0


def test_the_base_moved(remoe, run, made, tmp_path):
    facts = json.loads((run / "run.json").read_text())
    gone = tmp_path / "gone"
    (run / "run.json").write_text(json.dumps({**facts, "base": str(gone)}))
    refused(remoe("eval", run, *QUIET), str(gone), "--base")
    report = report_of(remoe("eval", run, *QUIET, "--base", made / "model", "--json"))
    assert len(report["arms"]) == 2 and "the base was read from model" in report["notes"]
    other = make_model(tmp_path / "other", seed=5)
    refused(remoe("eval", run, *QUIET, "--base", other), "another revision")
    assert remoe("apply", run, made / "model", "--out", "patched").code == 0
    refused(remoe("eval", run, *QUIET, "--base", "patched"), "tuned gates")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_that_cannot_be_written(remoe, run):
    run.chmod(0o555)
    refused(remoe("eval", run, *QUIET), "cannot be written", "cp -r")


def test_settings_of_how_to_evaluate(remoe, run):
    report = report_of(remoe("eval", run, *QUIET, "--set", "evaluate.requests=2", "--json"))
    assert report["conditions"]["requests"] == 2
    refused(remoe("eval", run, *QUIET, "--set", "train.lr=1"), "evaluate.", "train.lr")
    refused(remoe("eval", run, *QUIET, "--set", "evaluate.request=1"), "did you mean evaluate.requests")
    refused(remoe("eval", run, *QUIET, "--set", "evaluate.prompt_tokens=5000"), "evaluate.prompt_tokens")


def test_the_held_out_texts_changed(remoe, run, tmp_path):
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "heldout_sha256": "0" * 64}))
    refused(remoe("eval", run, *QUIET), "texts.jsonl", "remoe finetune")
    del facts["heldout_sha256"]
    (run / "run.json").write_text(json.dumps(facts))
    assert remoe("eval", run, *QUIET).code == 0, "a run of an older version names no digest"


def test_texts_are_found_from_any_folder(remoe, made, run, monkeypatch):
    recipe = (run / "recipe.yaml").read_text().replace(str(made / "texts.jsonl"), "texts.jsonl")
    (run / "recipe.yaml").write_text(recipe)
    (run / "run.json").write_text(
        json.dumps({**json.loads((run / "run.json").read_text()), "data": str(made / "texts.jsonl")})
    )
    where = run.resolve()
    monkeypatch.chdir("/")
    assert remoe("eval", where, *QUIET).code == 0


def test_options_as_people_write_them(remoe, run):
    ran = remoe("eval", run, "--cache", "4, 2", "--policy", "lru, belady", "--no-measure", "--json")
    conditions = report_of(ran)["conditions"]
    assert conditions["capacities"] == [2, 4] and conditions["policies"] == ["lru", "belady"]
    shown = remoe("eval", run, *QUIET)
    assert "Measured" not in shown.out and "measured" not in shown.out
    refused(remoe("eval", run, *QUIET, "--threads", 0), "--threads")
    refused(remoe("eval", run, *QUIET, "--seeds", 0), "--seeds")


def test_every_policy_without_a_fit_can_be_simulated(remoe, run):
    """Also those that read the routers' probabilities, which are then recorded; in each arm and kind of trace."""
    ran = remoe("eval", run, "--cache", "4", "--policy", "all", "--no-measure", "--json")
    report = report_of(ran)
    names = report["conditions"]["policies"]
    assert {"lru", "decayed", "retention", "gate", "hindsight", "belady"} <= {*names} and "static" not in names
    for arm in report["arms"]:
        cells = {(cell["policy"], cell["trace"]): cell for cell in arm["cache"] if cell["admission"] == "forced"}
        assert {(name, kind) for name in names for kind in ("forced", "greedy")} == {*cells}
        assert all(cells["belady", kind]["misses"] <= cells["decayed", kind]["misses"] for kind in ("forced", "greedy"))
        for one in cells.values():  # of loads, those ahead of need among them
            low, high = one["mb_a_token_95"]
            assert low - 1e-9 <= one["mb_a_token"] <= high + 1e-9
        assert cells["hindsight", "forced"]["proactive"] > 0 == cells["lru", "forced"]["proactive"]
    refused(remoe("eval", run, *QUIET, "--policy", "lru,static"), "fitted on another trace")
    refused(remoe("eval", run, *QUIET, "--policy", "lru,lfuu"), "did you mean lfu")


@pytest.mark.parametrize("longest", [1, 2, 3, 4, 10, 11])
def test_the_hint_for_short_texts_works(longest):
    documents = [list(range(longest)), [1]]
    with pytest.raises(Exception, match=f"the longest has {longest}") as error:
        cut_requests(documents, 4, 64, 65)
    if longest < 3:
        assert "longer texts" in error.value.hint
        return
    prompt, new = (int(part.split("=")[1]) for part in error.value.hint.split() if "=" in part)
    assert len(cut_requests(documents, 4, prompt, new + 1).prompts_RP) == 1
