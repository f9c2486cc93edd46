"""report.html and remoe report: what pictures show, in a real browser; several runs side by side; what is refused."""

import copy
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from browser import chromium, faults
from commands import refused, report_of

from remoe_cli.cache import replay
from remoe_cli.report import charts, drawn
from remoe_cli.report.stored import beside, to_json
from remoe_cli.report.verdict import verdict
from remoe_cli.routing import RoutingTrace


@pytest.fixture(scope="module")
def evaluated(made, tmp_path_factory):
    """A run with a report, measured too; tests leave it as it is."""
    from remoe_cli.evaluate import evaluate

    folder = Path(shutil.copytree(made / "run", tmp_path_factory.mktemp("evaluated") / "run"))
    evaluate(str(folder), [2, 4])
    return folder


@pytest.fixture
def report(evaluated):
    return json.loads((evaluated / "report.json").read_text())


# ---- what the pictures show


def trace(rows, borders, n_experts=8):
    """rows: the experts of each token, in one layer."""
    experts = np.array(rows)[:, None, :]
    return RoutingTrace(
        experts=experts, borders=np.array(borders), prefill=np.zeros(len(rows), bool), n_experts=n_experts
    )


def test_what_is_drawn_by_hand():
    found = drawn.drawn(trace([[0, 1], [1, 2], [0, 3], [1, 2]], [0, 3, 4]))
    assert found["uses"] == [[2, 3, 2, 1, 0, 0, 0, 0]]
    assert found["ribbon"] == {"layer": 0, "starts": [0, 3], "experts": [[0, 1], [1, 2], [0, 3], [1, 2]]}
    # expert 1 comes back after one token, expert 0 after two; the second request begins anew
    assert found["reuse"] == {"up_to": [1, 2], "share": [1 / 8, 1 / 8], "first": 6 / 8}
    assert charts.kept_and_fresh(found["ribbon"]["experts"], [0, 3]) == (
        [(1, 1)], [(0, 0), (0, 1), (1, 2), (2, 0), (2, 3), (3, 1), (3, 2)],
    )  # fmt: skip


def test_curves_are_what_replay_counts():
    rng = np.random.default_rng(0)
    given = trace([rng.choice(8, 2, replace=False) for _ in range(60)], [0, 20, 60])
    curve = drawn.curve(given)
    assert curve["capacity"] == [2, 3, 4, 5, 6, 7, 8]
    for policy in ("lru", "belady"):
        assert curve[policy] == [replay(given, policy, size).hit_ratio for size in curve["capacity"]]
    assert all(a <= b for a, b in zip(curve["lru"], curve["belady"]))


def test_reuse_of_a_trace_in_which_nothing_comes_back():
    assert drawn.reuse(trace([[0, 1], [2, 3]], [0, 2])) == {"up_to": [1], "share": [0.0], "first": 1.0}


def test_times_are_thinned_by_rank_and_keep_a_tokens_parts_together():
    whole = [float(n) for n in range(1000, 0, -1)]
    found = drawn.token_times([n / 2 for n in whole], [n / 4 for n in whole], whole)
    assert len(found["whole"]) == 100 and (found["whole"][0], found["whole"][-1]) == (1e3, 1e6)
    assert found["whole"] == sorted(found["whole"]) and [2 * n for n in found["wait"]] == found["whole"]
    assert drawn.token_times([], [], []) == {"wait": [], "experts": [], "whole": []}


def test_a_runs_losses(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert drawn.training(path) is None
    path.write_text(
        "".join(json.dumps({"step": n, "loss": 9.0 - n, "ce": n, "lr": 1, "text": "x"}) + "\n" for n in range(500))
    )
    found = drawn.training(path)
    assert list(found) == ["step", "loss", "ce"] and len(found["step"]) == 200 and found["step"][-1] == 499
    path.write_text('{"step": 1, "lo')
    assert drawn.training(path) is None


# ---- the verdict


def told(report, change, ends, price=0.017, price_ends=(0.011, 0.023), before=(20.0, 20.0), after=(19.0, 19.0)):
    report = copy.deepcopy(report)
    tuned = report["arms"][-1]
    for one in tuned["cache"]:
        one |= {"misses_change": change, "misses_change_95": ends}
    tuned["text"] |= {"perplexity_change": price, "perplexity_change_95": price_ends}
    for arm, times in zip((report["arms"][0], tuned), (before, after)):
        arm["measured"] = [
            {
                "capacity": 2,
                "policy": "lru",
                "skipped": None,
                "tpot_ms": {"p50": times[0]},
                "requests_ms": list(times),
                "limit": {"by": "storage"},
            }
        ]
    return verdict(report)


def test_the_verdict_says_what_the_intervals_allow(report):
    gain = told(report, -0.279, [-0.291, -0.267], after=(10.0, 9.0))
    assert gain == (
        "With 2 of 8 experts a layer in memory (LRU), remoe loads 27.9 % fewer experts than the base (95 %: 26.7 to 29.1) "
        "at +1.7 % perplexity; a token takes 10 ms instead of 20."
    )
    assert "loads 3.0 % more experts than the base" in told(report, 0.03, [0.01, 0.05])
    none = told(report, -0.01, [-0.03, 0.01], price_ends=(-0.01, 0.03))
    assert (
        "as many experts as the base, within the error" in none and "at the same perplexity, within the error" in none
    )
    unclear = told(report, -0.2, [-0.3, -0.1], after=(10.0, 21.0))
    assert "the time of a token is not clearly another (10 ms, base 20)" in unclear, "the requests do not agree"


def test_the_verdict_is_of_a_cache_that_a_decoder_can_have(report):
    report["conditions"]["capacities"] = [1, 2, 4]
    for one in [one for arm in report["arms"] for one in list(arm["cache"])]:
        if one["capacity"] == 2:
            report["arms"][0]["cache"].append({**one, "capacity": 1})
    assert verdict(report).startswith("With 2 of 8 experts a layer")


# ---- the page


def test_the_page_is_whole_and_fits_in_a_browser(remoe, evaluated, tmp_path):
    _, said, _ = remoe("report", evaluated, "--out", tmp_path / "page.html")
    page = tmp_path / "page.html"
    text = page.read_text()
    assert (
        not re.findall(r"(?:src|href)=\"(?!#|data:)[^\"]*\"", text) and "<script" not in text and "@import" not in text
    )
    titles = re.findall(r"<h3>(.*?)</h3>", text)
    assert len(titles) == 7 and text.count("<svg") == 7, titles
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len({*ids})
    assert {*re.findall(r"url\(#([^)]+)\)", text)} <= {*ids}
    assert said.rstrip().splitlines()[-1] in re.sub(r"\s+", " ", text)
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    with chromium() as browser:
        for width in (360, 1280):
            for scheme in ("light", "dark"):
                assert faults(browser, page, width, scheme) == []


def test_names_are_text_not_markup(remoe, report, tmp_path):
    report["arms"][-1]["name"] = "<b>&"
    report["notes"].append("<script>alert(1)</script>")
    Path("report.json").write_text(to_json(report))
    remoe("report", "report.json")
    assert "<script" not in Path("report.html").read_text() and "&lt;b&gt;&amp;" in Path("report.html").read_text()


def test_a_report_of_an_older_version_is_shown_without_what_it_lacks(remoe, report):
    for arm in report["arms"]:
        del arm["routing"], arm["training"]
        arm["measured"] = []
    Path("report.json").write_text(to_json(report))
    remoe("report", "report.json")
    assert re.findall(r"<h3>(.*?)</h3>", Path("report.html").read_text()) == ["What it costs, what it saves"]
    assert Path("headline.png").is_file()


def test_eval_writes_page_and_picture(remoe, run):
    _, said, notes = remoe("eval", run, "--cache", "2", "--no-measure")
    assert (run / "report.html").is_file() and (run / "headline.png").is_file() and "report.html" in notes
    assert said.rstrip().splitlines()[-1].startswith("With 2 of 8 experts")
    remoe("push", run, "--to", "pushed")
    assert (Path("pushed") / "headline.png").read_bytes() == (run / "headline.png").read_bytes()
    assert "(headline.png)" in (Path("pushed") / "README.md").read_text()


def test_reports_are_written_in_lines_a_person_can_read(report):
    text = to_json(report)
    assert json.loads(text) == report
    assert '"experts": [[' not in text and re.search(r'"uses": \[\n +\[[\d,]+\],?\n', text)
    odd = {"a": ["x  y", 1, None], "b": [[1, 2], [-3.5e-7, None]], "c": [], "d": [1e300]}
    assert json.loads(to_json(odd)) == odd


def test_tasks_are_on_the_page(remoe, report):
    tuned = {"name": "remoe", "score": 0.49, "change": -0.01, "change_95": [-0.03, 0.01], "p": 0.6, "test": "mcnemar"}
    metric = {
        "metric": "exact_match",
        "filter": "strict-match",
        "n": 100,
        "arms": [{"name": "base", "score": 0.5}, tuned],
    }
    report["tasks"] = [{"task": "gsm8k", "metrics": [metric]}]
    Path("report.json").write_text(to_json(report))
    remoe("report", "report.json")
    text = Path("report.html").read_text()
    assert "<h2>Tasks, score in %</h2>" in text and '<td data-arm="base">50.0' in text
    with chromium() as browser:
        assert faults(browser, Path("report.html").resolve(), 360, "light") == []


# ---- several runs


def test_runs_side_by_side(remoe, run, evaluated):
    shutil.copytree(evaluated, "second")
    other = json.loads(Path("second/report.json").read_text())
    other["conditions"]["seed"] = 7
    Path("second/report.json").write_text(json.dumps(other))
    shown = report_of(remoe("report", evaluated, "second", "--json"))
    assert [arm["name"] for arm in shown["arms"]] == ["base", f"remoe ({evaluated})", "remoe (second)"]
    assert any("seed 0 and 7" in note for note in shown["notes"]) and Path("report.html").is_file()


def test_only_what_all_reports_have_is_compared(report):
    other = copy.deepcopy(report)
    other["conditions"]["capacities"] = [4]
    for arm in other["arms"]:
        arm["cache"] = [one for one in arm["cache"] if one["capacity"] == 4 and one["policy"] != "lfu"]
    shown = beside([report, other], ["a", "b"])
    assert shown["conditions"]["capacities"] == [4]
    assert {(one["capacity"], one["policy"]) for arm in shown["arms"] for one in arm["cache"]} == {
        (4, "lru"), (4, "fifo"), (4, "belady"),
    }  # fmt: skip


def test_what_is_no_report_is_refused(remoe, run, report):
    refused(remoe("report"), "there is no evaluated run in", "Try: remoe eval --cache 6")
    refused(remoe("report", run), "that run was not evaluated yet", f"Try: remoe eval {run}")
    refused(remoe("report", "nothing"), "nothing is not a run folder")
    refused(remoe("report", run, "--out", "page.pdf"), "the page is an .html file", "--out page.html")
    (run / "report.json").write_text("{")
    refused(remoe("report", run), "is damaged, or of another version of remoe")
    Path("a.json").write_text(json.dumps(report))
    report["base"]["id"] = "another"
    Path("b.json").write_text(json.dumps(report))
    refused(remoe("report", "a.json", "b.json"), "b.json of another: compare runs of one base")
    report["base"]["id"] = json.loads(Path("a.json").read_text())["base"]["id"]
    report["conditions"]["capacities"] = [8]
    for one in [one for arm in report["arms"] for one in arm["cache"]]:
        one["capacity"] += 4
    Path("b.json").write_text(json.dumps(report))
    refused(
        remoe("report", "a.json", "b.json"),
        "a.json and b.json have no cache size in common",
        "remoe eval RUN --cache 2,4",
    )
    assert not Path("report.html").exists()
