"""Domains: other kinds of text beside the run's own, and that no text that was trained on is among them."""

import json
from pathlib import Path

import pytest
import tiny_tokenizers
from commands import refused, report_of, texts_of, write_rows

from remoe_cli.errors import DataError
from remoe_cli.hub.resolve import resolve
from remoe_cli.measure.domains import default_name, held_out, is_part
from remoe_cli.recipe import Data, load
from remoe_cli.train.data import Documents, load_documents, load_tokenizer

QUIET = ("--cache", "2,4", "--no-measure")


def test_domains_beside_the_text_that_was_trained_on(remoe, run):
    said = [(f"what is {i}?", f"it is {i} times brown. " * 20) for i in range(30)]
    turns = [[{"from": "human", "value": asked}, {"from": "gpt", "value": answer}] for asked, answer in said]
    chat = write_rows(Path("chat.jsonl"), [{"conversations": one} for one in turns])
    poems = write_rows(Path("poems.jsonl"), [{"text": f"{i} over the lazy dog " * 30} for i in range(12)])
    ran = remoe("eval", run, *QUIET, "--domain", f"talk={chat}", "--domain", poems, "--control", run)
    assert ran.code != 0  # the control is the run itself
    report = report_of(remoe("eval", run, *QUIET, "--domain", f"talk={chat}", "--domain", poems, "--json"))
    own, talk, other = report["domains"]
    assert [d["name"] for d in report["domains"]] == ["texts", "talk", "poems"]
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
    refused(remoe("eval", run, *QUIET, "--domain", short), "domain short:", "the longest has")
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
    assert [(domain.name, domain.trained) for domain in texts.domains] == [("chats", True), ("plain", False)]
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


def found_domains(source: Path, *asked: str):
    settings = ["evaluate.rows=2", "evaluate.requests=2", "evaluate.prompt_tokens=8", "evaluate.new_tokens=8"]
    recipe = load("remoe", "demo", [*settings, "train.sequence=32", f"data.source={source}"])
    return held_out(recipe, tiny_tokenizers.wrapped(), 1, asked)


def test_no_domain_holds_a_text_that_was_trained_on(tmp_path):
    fold = tmp_path / "fold"
    fold.mkdir()
    train = write_rows(fold / "train.jsonl", texts_of("seen", 30))
    test = write_rows(fold / "test.jsonl", texts_of("held", 10))
    copied = write_rows(tmp_path / "copied.jsonl", texts_of("seen", 30))
    mixed = write_rows(tmp_path / "mixed.jsonl", [*texts_of("seen", 7), *texts_of("new", 13)])
    other = write_rows(tmp_path / "other.jsonl", texts_of("new", 20))
    for option in (f"all={train}", str(copied)):
        with pytest.raises(DataError, match="all of its texts were trained on"):
            found_domains(fold, option)

    texts = found_domains(fold, str(mixed), f"again={test}", str(other))
    assert [(d.name, d.trained) for d in texts.domains] == [
        ("fold", True), ("mixed", True), ("again", True), ("other", False),
    ]  # fmt: skip
    assert "domain mixed: 7 of its texts were trained on and are left out" in texts.notes
    assert not any("domain other" in note or "domain again" in note for note in texts.notes)
    trained = {tuple(document.ids) for document in texts.documents.train}
    assert len(trained) == 30
    for domain, count in zip(texts.domains, (10, 13, 10, 20), strict=True):
        assert len(domain.sample.documents) == count and not {*map(tuple, domain.sample.documents)} & trained


@pytest.mark.parametrize(
    ("own", "other", "same"),
    [
        ("org/name@1", "org/name@2", True), ("org/name:a@1", "org/name:a@2", True), ("org/name:a@1", "org/name:b@1", False),
        ("org/name:a@1", "org/name@1", True), ("demo:code", "demo", True), ("demo", "demo:code", True),
        ("/a@1/x.jsonl", "/a@2/x.jsonl", False), ("org/name@1", "org/names@1", False),
    ],
)  # fmt: skip
def test_a_source_is_the_same_at_every_commit(own, other, same):
    assert is_part(own, other) is same


def test_what_a_run_on_its_own_text_took_prompts_from_was_trained_on(remoe, run, made):
    texts = made / "texts.jsonl"
    recipe = (run / "recipe.yaml").read_text()
    assert f"source: {texts}" in recipe
    (run / "recipe.yaml").write_text(recipe.replace(f"source: {texts}", f"source: self:{texts}"))
    rows = [json.loads(line) for line in texts.read_text().splitlines()]
    copied = write_rows(Path("copied.jsonl"), rows)
    (domain,) = report_of(remoe("eval", run, *QUIET, "--domain", copied, "--json"))["domains"][1:]
    assert domain["trained"]
    held = load_documents(Data(source=str(texts)), load_tokenizer(resolve(str(made / "model"))), seed=0).heldout
    assert domain["arms"][0]["decode"]["forced"]["requests"] == 3 and len(held) < len(rows)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("HumanEval.jsonl.gz", "HumanEval"), ("gsm8k/test.jsonl", "gsm8k"), ("gsm8k/Train.jsonl.gz", "gsm8k"),
        ("my.notes.txt", "my.notes"), ("folder/heldout.csv", "folder"), ("folder", "folder"), ("a/tests.json", "tests"),
    ],
)  # fmt: skip
def test_a_file_names_its_domain(file, name):
    pinned = f"/somewhere/{file}"
    assert default_name(Documents(None, [], Path(pinned).name, pinned=pinned)) == name  # type: ignore[arg-type]


def test_a_data_set_names_its_domain_without_its_commit():
    pinned = "org/name:part@0123456789abcdef"
    assert default_name(Documents(None, [], "org/name:part@0123456789ab", pinned=pinned)) == "org/name:part"  # type: ignore[arg-type]
