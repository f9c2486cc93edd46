"""What is held out, in which order the rest is trained on, and what a load of texts says about itself."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import jsonl, load, text, trained_on
from tiny_tokenizers import byte_level
from transformers import PreTrainedTokenizerFast

from remoe_cli import demo
from remoe_cli import recipe as recipes
from remoe_cli.errors import DataError, RecipeError
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.measure.requests import cut_requests
from remoe_cli.train.data import load_documents, load_tokenizer

# Hold-out, order, laziness


@given(rows=st.integers(2, 60), wanted=st.integers(1, 80), seed=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_held_out_rows_are_the_last_and_never_trained_on(tmp_path_factory, rows, wanted, seed):
    path = jsonl(tmp_path_factory.mktemp("rows") / "a.jsonl", [{"text": f"row {i}"} for i in range(rows)])
    got = load(path, heldout_samples=wanted, seed=seed)
    held = max(1, min(wanted, rows // 10))
    assert {text(ids) for ids in got.heldout} == {f"<s>row {i}</s>" for i in range(rows - held, rows)}
    assert sorted(trained_on(got)) == sorted(f"<s>row {i}</s>" for i in range(rows - held))


def test_a_seed_draws_the_order_and_the_sample_but_not_the_hold_out(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"row {i}"} for i in range(50)])
    one, same, other = (load(path, seed=seed, train_samples=20, heldout_samples=5) for seed in (1, 1, 2))
    assert list(one.train) == list(one.train) == list(same.train) != list(other.train)
    assert len(one.train) == 20 and one.heldout == other.heldout and len(one.heldout) == 5


def test_a_copy_of_a_held_out_row_is_not_trained_on(tmp_path):
    rows = [{"text": f"row {i % 20}"} for i in range(30)]
    got = load(jsonl(tmp_path / "a.jsonl", rows), heldout_samples=3)
    held = {tuple(ids) for ids in got.heldout}
    assert len(held) == 3 and not held & {tuple(document.ids) for document in got.train}
    with pytest.raises(DataError, match="no text to train on"):
        load(jsonl(tmp_path / "a.jsonl", [{"text": "same"}] * 30))


class Counting(PreTrainedTokenizerFast):
    texts = 0

    def __call__(self, *args, **kwargs):
        type(self).texts += 1
        return super().__call__(*args, **kwargs)


def test_rows_are_tokenised_when_they_are_asked_for(tmp_path):
    tokenizer = Counting(tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>")
    got = load(jsonl(tmp_path / "a.jsonl", [{"text": f"row {i}"} for i in range(5000)]), tokenizer, heldout_samples=10)
    assert Counting.texts < 30
    before = Counting.texts
    assert next(got.train.numbered(4000))[0] == 4000 and Counting.texts == before + 1
    assert len(list(got.train)) == len(got.train) == 4990


def test_texts_go_on_from_any_place_of_their_order_without_tokenising_what_lies_before(tmp_path):
    rows = [{"text": f"row {i}" if i % 3 else " "} for i in range(40)]  # some say nothing, and keep their places
    got = load(jsonl(tmp_path / "a.jsonl", rows), heldout_samples=4)
    whole = list(got.train.numbered())
    assert 0 < len(whole) < len(got.train) == 36 and [document for _, document in whole] == list(got.train)
    for start in range(38):
        assert list(got.train.numbered(start)) == [(place, found) for place, found in whole if place >= start]


# What a load says about itself


def test_a_local_source_is_shown_by_name_and_pinned_by_its_whole_path(tmp_path, monkeypatch):
    jsonl(tmp_path / "a.jsonl", [{"text": f"row {i}", "domain": "rows"} for i in range(20)])
    monkeypatch.chdir(tmp_path)
    got = load("a.jsonl")
    assert got.source == "a.jsonl" and got.pinned == str(tmp_path / "a.jsonl") and got.domains == ["rows", "rows"]
    monkeypatch.chdir("/")
    again = load(got.pinned)
    assert again.heldout_sha256 == got.heldout_sha256 and len(got.heldout_sha256) == 64
    assert load(tmp_path).source == tmp_path.name


def test_the_digest_changes_with_the_held_out_text_only(tmp_path):
    rows = [{"text": f"row {i}"} for i in range(20)]
    digest = load(jsonl(tmp_path / "a.jsonl", rows)).heldout_sha256
    assert load(jsonl(tmp_path / "b.jsonl", [{"text": "new"}, *rows[1:]])).heldout_sha256 == digest
    assert load(jsonl(tmp_path / "a.jsonl", [*rows[:-1], {"text": "new"}])).heldout_sha256 != digest


def test_streaming_of_local_texts_is_said_to_do_nothing(tmp_path):
    got = load(jsonl(tmp_path / "a.jsonl", [{"text": f"row {i}"} for i in range(20)]), streaming=True)
    assert "data.streaming is for data sets on the Hub: these texts are read whole" in got.notes
    assert got.notes[-1] == "rows to train on: 18; held out: 2"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_samples=0", "data.train_samples is at least 1, not 0"),
        ("data.heldout_samples=-1", "data.heldout_samples is at least 1, not -1"),
        ("data.labels=both", "data.labels is one of all, answers, not 'both'"),
        ("data.format=html", "data.format is one of prefix, chat, raw, not 'html'"),
        ("data.streaming=3", "data.streaming takes true or false"),
    ],
)
def test_recipe_keys_that_cannot_be_are_refused(override, message):
    with pytest.raises(RecipeError) as error:
        recipes.load("remoe", "demo", [override])
    assert message in error.value.message


# The demo's corpus


def test_demo_reads_the_standard_library():
    got = load("demo", heldout_samples=12, format="raw")
    assert len(got.heldout) == len(got.domains) == 12 and set(got.domains) == {"code", "prose"}
    assert len(got.train) > 300 and got.source.startswith("demo (corpus ") and got.pinned == "demo"
    first = next(iter(got.train)).ids
    assert first[0] == 0 and first[-1] == 1 and first not in got.heldout


def test_one_domain_of_the_demo_trains_and_holds_out_that_domain_only():
    whole = load("demo", format="raw")
    parts = {name: load(f"demo:{name}", format="raw") for name in ("code", "prose")}
    for name, part in parts.items():
        assert set(part.domains) == {name} and part.pinned == f"demo:{name}"
        of_it = [ids for ids, domain in zip(whole.heldout, whole.domains, strict=True) if domain == name]
        assert sorted(part.heldout) == sorted(of_it)
    assert sum(len(part.train) for part in parts.values()) == len(whole.train)
    with pytest.raises(
        DataError, match=r"no part demo:poems of the demo's texts; allowed: demo, demo:code, demo:prose"
    ):
        load("demo:poems")


# Published data, with no option at all


PUBLISHED = {
    "gsm8k/train.jsonl": (7473, "question as user, answer as assistant", "User: Natalia sold clips to 48"),
    "mtbench/dummy_conversation.json": (500, "conversations as turns", "User: Who are you?\nAssistant: I am Vicuna"),
    "mtbench/question.jsonl": (80, "turns as user, without answers", "User: Compose an engaging travel blog post"),
    "humaneval/HumanEval.jsonl.gz": (164, "prompt and canonical_solution joined as plain text", "from typing import"),
    "ifeval/input_data.jsonl": (540, "prompt as user, without answers", "User: Write a 300+ word summary"),
    "mmlu_stem/test.jsonl": (3018, "question as user, answer as assistant", "User: Based on the characteristic"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_data_is_read_with_no_option(shared, name):
    """As `remoe finetune demo --data FILE` does it, up to the requests that `remoe eval` will decode."""
    rows, how, begins = PUBLISHED[name]
    recipe, tokenizer = recipes.load("remoe", "demo"), load_tokenizer(Checkpoint(demo.PATH, "demo"))
    got = load_documents(replace(recipe.data, source=str(shared(f"data/{name}"))), tokenizer, seed=recipe.train.seed)
    assert got.notes[0] == f"{name.split('/')[1]}: {rows:,} rows, {how}"
    said = trained_on(got, tokenizer)
    assert 0.8 * rows < len(said) + len(got.heldout) <= rows and any(f"<|bos|>{begins}" in words for words in said)
    wanted = recipe.evaluate
    assert len(cut_requests(got.heldout, wanted.requests, wanted.prompt_tokens, wanted.new_tokens + 1).prompts_RP) > 0


def test_published_texts_and_folders_are_read_with_no_option(shared):
    play = load(shared("data/tinyshakespeare/input.txt"))
    assert text(play.heldout[0]).endswith("Whiles thou art waking.</s>") and len(trained_on(play)) == 1
    questions = load(shared("data/gsm8k"))
    assert questions.notes[0] == (
        "gsm8k: 7,473 rows, question as user, answer as assistant; from: train.jsonl; held out: test.jsonl; "
        "not read: LICENSE, SOURCE.txt"
    )
    assert len(questions.train) == 7473 and len(questions.heldout) == 1000
    assert load(shared("data/tinyshakespeare")).heldout_sha256 == play.heldout_sha256
    with pytest.raises(DataError, match=r"question\.jsonl, line 1: no field 'conversations' as in the rows before"):
        load(shared("data/mtbench"))
