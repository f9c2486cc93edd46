"""remoe eval: draws, intervals, domains, and what it refuses. One tiny run, trained once, copied for each test."""

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import tiny_tokenizers
from commands import make_model, make_run, refused

from remoe_cli.hub.resolve import resolve
from remoe_cli.measure.domains import held_out
from remoe_cli.measure.requests import cut_requests
from remoe_cli.measure.sample import Sample
from remoe_cli.recipe import load, override
from remoe_cli.report.regressions import regressions
from remoe_cli.train.data import load_tokenizer

QUIET = ("--cache", "2,4", "--no-measure")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model, texts and a run of 2 steps."""
    folder = tmp_path_factory.mktemp("made")
    make_run(folder)
    return folder


@pytest.fixture
def run(made, remoe):
    """In the working folder, so that a test may change it."""
    return Path(shutil.copytree(made / "run", "run"))


def report_of(ran) -> dict:
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


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


def test_a_control_on_other_texts_is_named(remoe, run, made):
    shutil.copytree(run, "control")
    facts = json.loads(Path("control/run.json").read_text())
    Path("control/run.json").write_text(json.dumps({**facts, "data": "demo"}))
    report = report_of(remoe("eval", run, *QUIET, "--control", "control", "--json"))
    assert [arm["name"] for arm in report["arms"]] == ["base", "remoe (control)", "remoe (tuned)"]
    assert any("control was trained on other texts" in note for note in report["notes"])


# ---- domains


def test_domains_beside_the_text_that_was_trained_on(remoe, run):
    said = [(f"what is {i}?", f"it is {i} times brown. " * 20) for i in range(30)]
    turns = [[{"from": "human", "value": asked}, {"from": "gpt", "value": answer}] for asked, answer in said]
    chat = write_rows(Path("chat.jsonl"), [{"conversations": one} for one in turns])
    poems = write_rows(Path("poems.jsonl"), [{"text": f"{i} over the lazy dog " * 30} for i in range(12)])
    ran = remoe("eval", run, *QUIET, "--domain", f"talk={chat}", "--domain", poems, "--control", run)
    assert ran.code != 0  # the control is the run itself
    report = report_of(remoe("eval", run, *QUIET, "--domain", f"talk={chat}", "--domain", poems, "--json"))
    own, talk, other = report["domains"]
    assert [d["name"] for d in report["domains"]] == [own["name"], "talk", "poems.jsonl"]
    assert [d["trained"] for d in report["domains"]] == [True, False, False]
    for key in ("text", "decode", "draws"):
        assert [arm[key] for arm in own["arms"]] == [arm[key] for arm in report["arms"]]
    for domain in (talk, other):
        base, tuned = domain["arms"]
        assert (base["role"], tuned["role"]) == ("base", "tuned")
        assert {cell["policy"] for cell in tuned["cache"]} == {"lru"}
        assert {cell["capacity"] for cell in tuned["cache"]} == {2, 4}
        assert tuned["text"]["perplexity_change_95"] and tuned["decode"]["forced"]["requests"] == 3
    assert talk["arms"][0]["text"]["perplexity"] != own["arms"][0]["text"]["perplexity"]
    shown = remoe("eval", run, *QUIET, "--domain", f"talk={chat}").out
    assert "talk (not trained on)" in shown and "(trained on)" in shown
    assert list(report["domains"][0]["arms"][0]) == [
        "name",
        "role",
        "text",
        "decode",
        "cache",
        "draws",
        "spread",
    ]


def test_a_domain_that_cannot_be_used(remoe, run):
    short = write_rows(Path("short.jsonl"), [{"text": f"{i}"} for i in range(20)])
    refused(remoe("eval", run, *QUIET, "--domain", short), "domain short.jsonl", "the longest has")
    refused(remoe("eval", run, *QUIET, "--domain", "absent.jsonl"), "absent.jsonl")
    twice = [
        option
        for name in "ab"
        for option in ("--domain", write_rows(Path(f"{name}.jsonl"), [{"text": f"fox {i} " * 30} for i in range(12)]))
    ]
    refused(remoe("eval", run, *QUIET, "--domain", f"x={twice[1]}", "--domain", f"x={twice[3]}"), "'x'")
    assert not (run / "report.json").exists()


def test_plain_text_beside_a_run_on_chats(tmp_path):
    """The run's chat template and its answer labels are nothing for a domain of plain text."""
    turns = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}. " * 40}] for i in range(30)]
    chats = write_rows(tmp_path / "chats.jsonl", [{"messages": one} for one in turns])
    plain = write_rows(tmp_path / "plain.jsonl", [{"text": f"{i} over the lazy dog " * 30} for i in range(12)])
    settings = ["data.format=chat", "data.labels=answers", "evaluate.rows=2", "evaluate.requests=2"]
    settings += ["evaluate.prompt_tokens=8", "evaluate.new_tokens=8", "train.sequence=32", f"data.source={chats}"]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    texts = held_out(load("remoe", "demo", settings), tiny_tokenizers.wrapped(template=template), 1, [f"plain={plain}"])
    assert [(domain.name, domain.trained) for domain in texts.domains] == [("chats.jsonl", True), ("plain", False)]
    assert len(texts.domains[1].sample.documents) == 12, "of a source that nothing was trained on every row is unseen"


@pytest.mark.parametrize(
    ("source", "trained"), [("demo", {"code", "prose"}), ("demo:code", {"code"}), ("demo:prose", {"prose"})]
)
def test_the_demo_shows_both_its_domains(source, trained):
    recipe = load("remoe", "demo", [f"data.source={source}", "evaluate.requests=4", "evaluate.rows=4"])
    _, sample, found, notes = held_out(recipe, load_tokenizer(resolve("demo")), 1)
    assert [domain.name for domain in found] == ["code", "prose"] and not any("domain" in note for note in notes)
    assert {domain.name for domain in found if domain.trained} == trained
    if source != "demo":
        assert [domain.sample is sample for domain in found] == [domain.trained for domain in found]
    texts = [{tuple(ids) for ids in domain.sample.documents} for domain in found]
    assert not texts[0] & texts[1]


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
