"""Texts to token ids: formats, one BOS and one EOS, which tokens are learned, tokenizers that lose text."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import jsonl, load, text, TOKENIZER
from tiny_tokenizers import byte_level, metaspace, wrapped
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, Tokenizer
from transformers import AutoTokenizer

from remoe_cli import demo
from remoe_cli.errors import CheckpointError, DataError
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.train.encode import Encoder
from remoe_cli.train.packing import Document
from remoe_cli.train.rows import Turn
from remoe_cli.train.tokens import about_positions, check, check_vocabulary, load_tokenizer

WITH_BOS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
ENDS_TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
TRIMS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>{% endfor %}"
MARKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}Q: {{ m.content }}{% endif %}\n{% endfor %}"
)
USER_FIRST = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + WITH_BOS
TALK = [Turn("user", "hi there"), Turn("assistant", "good day")]


# Formats


def test_prefix_is_a_transcript_with_one_bos_and_one_eos():
    encode = Encoder(TOKENIZER, "prefix")
    assert text(encode([Turn("system", "be brief"), *TALK]).ids) == (
        "<s>System: be brief\nUser: hi there\nAssistant: good day</s>"
    )
    assert text(encode("plain  text\n").ids) == "<s>plain  text\n</s>"
    assert encode([]) == encode("  \n") == Document([])


def test_raw_joins_the_turns_without_roles():
    assert text(Encoder(TOKENIZER, "raw")(TALK).ids) == "<s>hi there\n\ngood day</s>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (WITH_BOS, "<s>[user] hi there\n[assistant] good day\n</s>"),
        (WITH_BOS.replace("{{ bos_token }}", ""), "<s>[user] hi there\n[assistant] good day\n</s>"),
        (ENDS_TURNS, "<s>[user] hi there</s>\n[assistant] good day</s>"),
    ],
)
def test_a_template_that_writes_bos_or_eos_gets_no_second(template, expected):
    assert text(Encoder(wrapped(template=template), "chat")(TALK).ids) == expected


def test_a_tokenizer_that_adds_no_bos_gets_none():
    plain = wrapped(bos=False)
    assert text(Encoder(plain, "prefix")(TALK).ids, plain) == "User: hi there\nAssistant: good day</s>"
    qwen = wrapped(bos=False, bos_token=None, template=ENDS_TURNS)
    assert text(Encoder(qwen, "chat")(TALK).ids, qwen) == "[user] hi there</s>\n[assistant] good day</s>"


def test_a_tokenizer_without_eos_is_noted(tmp_path):
    tokenizer = wrapped(eos_token=None)
    got = load(jsonl(tmp_path / "a.jsonl", [{"text": f"row {i}"} for i in range(4)]), tokenizer)
    assert text(got.heldout[0], tokenizer) == "<s>row 3"
    assert any("no end-of-text token" in note for note in got.notes)


def test_bos_and_eos_that_the_tokenizer_or_the_text_has_already():
    both = byte_level()
    both.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    for tokenizer in (TOKENIZER, wrapped(both, bos=False)):
        assert text(Encoder(tokenizer, "raw")("<s>hello</s>").ids) == "<s>hello</s>"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_conversation_survives_between_one_bos_and_one_eos(said):
    turns = [Turn(("user", "assistant")[i % 2], words) for i, words in enumerate(said)]
    ids = Encoder(TOKENIZER, "prefix")(turns).ids
    assert ids.count(0) == ids.count(1) == 1 and ids[0] == 0 and ids[-1] == 1
    names = ("User", "Assistant")
    assert text(ids[1:-1]) == "\n".join(f"{names[i % 2]}: {words}" for i, words in enumerate(said))


def test_chat_without_a_template_names_the_alternatives(tmp_path):
    with pytest.raises(DataError, match=r"no chat template; data\.format may be prefix or raw") as error:
        load(jsonl(tmp_path / "a.jsonl", [{"messages": []}] * 2), format="chat")
    assert "--set data.format=prefix" in error.value.hint


def test_chat_needs_turns(tmp_path):
    with pytest.raises(DataError, match="plain text"):
        load(jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 3), wrapped(template=WITH_BOS), format="chat")


def test_rows_that_the_template_refuses_are_left_out_and_counted(tmp_path):
    good = [{"messages": [{"role": "user", "content": f"row {i}"}]} for i in range(18)]
    bad = [{"messages": [{"role": "system", "content": "x"}]}] * 12
    path = jsonl(tmp_path / "a.jsonl", [*bad[:10], *good, *bad[10:]])
    got = load(path, wrapped(template=USER_FIRST), format="chat", heldout_samples=3)
    assert len(list(got.train)) == 17 and len(got.heldout) == 1
    reason = "2 of 3 held-out rows left out (the chat template refuses the turns (user first))"
    assert reason in got.notes
    with pytest.raises(DataError, match=r"no row of .* can be used: the chat template refuses"):
        load(jsonl(path, bad), wrapped(template=USER_FIRST), format="chat")


# Which tokens are learned


def learned(document, tokenizer=TOKENIZER):
    """The learned tokens as text, a bar between two stretches."""
    parts, before = [], False
    for id, flag in zip(document.ids, document.learned, strict=True):
        if flag:
            parts.append(text([id], tokenizer) if before else f"|{text([id], tokenizer)}")
        before = flag
    return "".join(parts)[1:]


TWICE = [Turn("system", "be brief"), *TALK, Turn("user", "good day"), Turn("assistant", " good day")]


@pytest.mark.parametrize(
    ("format", "template", "expected"),
    [
        ("prefix", None, "good day| good day</s>"),
        ("raw", None, "good day| good day</s>"),
        ("chat", WITH_BOS, "good day| good day\n</s>"),
        ("chat", ENDS_TURNS, "good day</s>| good day</s>"),
        ("chat", TRIMS, "good day</s>|good day</s>"),
        ("chat", MARKS, "good day</s>| good day</s>"),
    ],
)
def test_answers_are_learned_with_their_end_and_nothing_else(format, template, expected):
    tokenizer = wrapped(template=template)
    document = Encoder(tokenizer, format, "answers")(TWICE)
    assert learned(document, tokenizer) == expected
    whole = Encoder(tokenizer, format)(TWICE)
    assert whole == Document(document.ids) and not document.learned[0]


def test_a_token_that_holds_more_than_the_answer_is_learned():
    assert TOKENIZER.tokenize(": the quick") == [":", "Ġthe", "Ġquick"]
    document = Encoder(TOKENIZER, "prefix", "answers")([Turn("user", "the"), Turn("assistant", "the quick")])
    assert learned(document) == " the quick</s>"


def test_plain_text_is_learned_whole_and_a_talk_without_answers_not_at_all():
    encode = Encoder(TOKENIZER, "prefix", "answers")
    assert encode("plain text").learned is None
    assert not any(encode([Turn("user", "hi"), Turn("assistant", "  ")]).learned)
    assert encode([]) == Document([])


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=8)), min_size=1, max_size=5),
    st.sampled_from([byte_level, metaspace]),
)
@settings(max_examples=80, deadline=None)
def test_every_character_of_an_answer_is_learned_and_no_token_without_one(said, made):
    """Slow twin: mark the answers' characters, then look at every token's characters one by one."""
    tokenizer = _wrapped(made)
    turns = [Turn(role, words) for role, words in said]
    document = Encoder(tokenizer, "prefix", "answers")(turns)
    marked, whole = [], ""
    for role, words in said:
        head = ("\n" if whole else "") + f"{role.capitalize()}: "
        marked += [False] * len(head) + [role == "assistant" and words.strip() != ""] * len(words)
        whole += head + words
    offsets = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    inner = document.learned[1:-1]  # between BOS and EOS
    assert len(inner) == len(offsets)
    at_end = len(whole.rstrip())
    for flag, (begin, end) in zip(inner, offsets, strict=True):
        if end <= at_end:
            assert flag == any(marked[begin : max(end, begin + 1)]), (whole, begin, end)
    assert document.learned[-1] == (said[-1][0] == "assistant" and said[-1][1].strip() != "")


@cache
def _wrapped(made):
    return wrapped(made())


def test_answers_that_the_template_rewrites_are_left_out_and_said(tmp_path):
    upper = "{% for m in messages %}{{ m.content | upper }}\n{% endfor %}"
    twice = "{% for m in messages %}{{ m.content }}{{ m.content }}\n{% endfor %}"
    for template in (upper, twice):
        with pytest.raises(ValueError, match="rewrites the answers"):
            Encoder(wrapped(template=template), "chat", "answers")(TALK)
    path = jsonl(tmp_path / "a.jsonl", [{"question": "a", "answer": f"b{i}"} for i in range(9)])
    with pytest.raises(
        DataError, match=r"no text to train on beside its 1 held-out ones: the chat template rewrites the answers"
    ):
        load(path, wrapped(template=upper), format="chat", labels="answers")


def test_what_is_learned_is_said_and_nothing_learned_is_refused(tmp_path):
    rows = [{"question": "a", "answer": f"b{i}"} for i in range(9)]
    got = load(jsonl(tmp_path / "a.jsonl", rows), labels="answers")
    flags = [flag for document in got.train for flag in document.learned]
    assert 0 < sum(flags) < len(flags)
    assert f"answers only are learned: {sum(flags)} of the first {len(flags)} tokens" in got.notes
    assert got.heldout_sha256 == load(tmp_path / "a.jsonl").heldout_sha256
    got = load(jsonl(tmp_path / "b.jsonl", [{"text": f"b{i}"} for i in range(9)]), labels="answers")
    assert "plain text has no answers: all its tokens are learned" in got.notes
    with pytest.raises(DataError, match=r"no row of c.jsonl holds an answer") as error:
        load(jsonl(tmp_path / "c.jsonl", [{"prompt": f"b{i}"} for i in range(9)]), labels="answers")
    assert "--set data.labels=all" in error.value.hint


def test_a_tokenizer_without_offsets_cannot_tell_answers():
    class Slow:
        is_fast, name_or_path, chat_template = False, "org/slow", None

    with pytest.raises(DataError, match=r"org/slow does not say which characters") as error:
        Encoder(Slow(), "prefix", "answers")
    assert "--set data.labels=all" in error.value.hint


# The tokenizer itself


def test_what_a_tokenizer_may_and_may_not_lose():
    assert check(TOKENIZER) == []
    words = ["<unk>", "hello", "world", "two", "spaces", "one", "line", "and", "another"]
    split = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    notes = check(wrapped(split, bos=False, unk_token="<unk>"))
    assert len(notes) == 3 and "'two  spaces' as 'two spaces'" in notes[0] and "no token for parts" in notes[2]

    lost = byte_level()
    lost.normalizer = normalizers.Replace(" ", "")
    with pytest.raises(DataError, match="'hello world' into 'helloworld': it loses text") as error:
        check(wrapped(lost))
    assert error.value.hint.startswith("pip install -U")
    garbled = byte_level()
    garbled.decoder = decoders.Fuse()  # leaves the byte letters as they are: Ġ for a space
    with pytest.raises(DataError, match="it loses text"):
        check(wrapped(garbled))


def saved(folder, tokenizer, **config):
    wrapped(tokenizer, bos=False).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return Checkpoint(folder, "org/x")


def test_where_a_tokenizer_class_loses_text_its_json_is_taken_as_it_is(tmp_path):
    assert check(load_tokenizer(saved(tmp_path / "good", byte_level()))) == []
    wrong_class = saved(tmp_path / "fails", byte_level(), tokenizer_class="T5Tokenizer")
    with pytest.raises(TypeError):
        AutoTokenizer.from_pretrained(wrong_class.folder)
    assert check(load_tokenizer(wrong_class)) == []

    rebuilt = saved(tmp_path / "rebuilt", metaspace(), tokenizer_class="GPT2Tokenizer", unk_token="<unk>")
    with pytest.raises(DataError, match="loses text"):
        check(AutoTokenizer.from_pretrained(rebuilt.folder))
    assert text(load_tokenizer(rebuilt)("hello world")["input_ids"], load_tokenizer(rebuilt)) == "hello world"

    lost = byte_level()
    lost.normalizer = normalizers.Replace(" ", "")
    with pytest.raises(DataError, match="loses text"):
        load_tokenizer(saved(tmp_path / "lost", lost))


def test_a_checkpoint_without_a_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v2"}')
    with pytest.raises(CheckpointError, match="no tokenizer file"):
        load_tokenizer(Checkpoint(tmp_path, "org/x"))
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no tokenizer that transformers can load"):
        load_tokenizer(Checkpoint(tmp_path, "org/x"))


def test_ids_that_the_model_does_not_embed_are_refused():
    highest = max(TOKENIZER.get_vocab().values())
    check_vocabulary(TOKENIZER, highest + 1, "org/model")
    with pytest.raises(CheckpointError, match=rf"of org/model has ids up to {highest}, .* below {highest}\."):
        check_vocabulary(TOKENIZER, highest, "org/model")
    own = load_tokenizer(Checkpoint(demo.PATH, "demo"))
    check_vocabulary(own, json.loads((demo.PATH / "config.json").read_text())["vocab_size"], "demo")


def test_rows_longer_than_the_models_positions_are_noted():
    class Config:
        max_position_embeddings = 256

    assert about_positions(256, Config, "demo") is None and about_positions(9999, object(), "x") is None
    assert about_positions(257, Config, "demo") == (
        "train.sequence 257 is longer than the 256 positions that demo was made for"
    )
