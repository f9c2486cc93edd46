"""Texts to token ids: formats, one BOS and one EOS, hold-out, clean refusals."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, metaspace, wrapped
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from remoe_cli.errors import CheckpointError, DataError
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.recipe import Data
from remoe_cli.train.data import load_documents, load_tokenizer, SEPARATOR
from remoe_cli.train.rows import Turn
from remoe_cli.train.tokens import check, Encoder

WITH_BOS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
ENDS_TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
USER_FIRST = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + WITH_BOS
TALK = [Turn("user", "hi there"), Turn("assistant", "good day")]


TOKENIZER = wrapped()


def text(ids, tokenizer=TOKENIZER):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def load(source, tokenizer=TOKENIZER, seed=0, **data):
    return load_documents(Data(source=str(source), **data), tokenizer, seed=seed)


# Formats


def test_prefix_is_a_transcript_with_one_bos_and_one_eos():
    encode = Encoder(TOKENIZER, "prefix")
    assert text(encode([Turn("system", "be brief"), *TALK])) == (
        "<s>System: be brief\nUser: hi there\nAssistant: good day</s>"
    )
    assert text(encode("plain  text\n")) == "<s>plain  text\n</s>"
    assert encode([]) == encode("  \n") == []


def test_raw_joins_the_turns_without_roles():
    assert text(Encoder(TOKENIZER, "raw")(TALK)) == "<s>hi there\n\ngood day</s>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (WITH_BOS, "<s>[user] hi there\n[assistant] good day\n</s>"),
        (WITH_BOS.replace("{{ bos_token }}", ""), "<s>[user] hi there\n[assistant] good day\n</s>"),
        (ENDS_TURNS, "<s>[user] hi there</s>\n[assistant] good day</s>"),
    ],
)
def test_a_template_that_writes_bos_or_eos_gets_no_second(template, expected):
    assert text(Encoder(wrapped(template=template), "chat")(TALK)) == expected


def test_a_tokenizer_that_adds_no_bos_gets_none():
    plain = wrapped(bos=False)
    assert text(Encoder(plain, "prefix")(TALK), plain) == "User: hi there\nAssistant: good day</s>"
    qwen = wrapped(bos=False, bos_token=None, template=ENDS_TURNS)
    assert text(Encoder(qwen, "chat")(TALK), qwen) == "[user] hi there</s>\n[assistant] good day</s>"


def test_a_tokenizer_without_eos_is_noted(tmp_path):
    tokenizer = wrapped(eos_token=None)
    got = load(jsonl(tmp_path / "a.jsonl", [{"text": f"row {i}"} for i in range(4)]), tokenizer)
    assert text(got.heldout[0], tokenizer) == "<s>row 3"
    assert any("no end-of-text token" in note for note in got.notes)


def test_bos_and_eos_that_the_tokenizer_or_the_text_has_already():
    both = byte_level()
    both.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    for tokenizer in (TOKENIZER, wrapped(both, bos=False)):
        assert text(Encoder(tokenizer, "raw")("<s>hello</s>")) == "<s>hello</s>"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_conversation_survives_between_one_bos_and_one_eos(said):
    turns = [Turn(("user", "assistant")[i % 2], words) for i, words in enumerate(said)]
    ids = Encoder(TOKENIZER, "prefix")(turns)
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


# Shapes of rows


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "good day"}]},
        {"conversations": [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "good day"}], "id": 7},
        {"conversation": [{"role": "User", "content": "hi there"}, {"role": "model", "content": "good day"}]},
        {"prompt": "hi there", "completion": "good day"},
        {"prompt": "hi there", "response": "good day", "text": "not this"},
        {"instruction": "hi there", "input": "", "output": "good day"},
        {"question": "hi there", "answer": "good day"},
        {"prompt": [{"role": "user", "content": "hi there"}], "completion": [{"from": "gpt", "value": "good day"}]},
        {"messages": [{"role": "user", "content": [{"text": "hi there"}]}, {"from": "gpt", "value": "good day"}]},
        {"conversations": {"from": ["human", "gpt"], "value": ["hi there", "good day"]}},
    ],
)  # fmt: skip
def test_every_shape_of_conversation_reads_alike(tmp_path, row):
    other = json.loads(json.dumps(row).replace("good day", "good night"))
    got = load(jsonl(tmp_path / "a.jsonl", [other, row]))
    assert text(got.heldout[0]) == "<s>User: hi there\nAssistant: good day</s>"
    assert [text(ids) for ids in got.train] == ["<s>User: hi there\nAssistant: good night</s>"]


@pytest.mark.parametrize("row", [{"text": "hi  there"}, {"content": "hi  there", "language": "c"}])
def test_text_stays_as_it_is(tmp_path, row):
    for format in ("prefix", "raw"):
        got = load(jsonl(tmp_path / "a.jsonl", [{**row, next(iter(row)): "other"}, row]), format=format)
        assert text(got.heldout[0]) == "<s>hi  there</s>"


def test_instructions_keep_their_input_and_system(tmp_path):
    row = {"instruction": "add", "input": "1 2", "output": "3", "system_prompt": "be brief"}
    got = load(jsonl(tmp_path / "a.jsonl", [{**row, "output": "4"}, row]))
    assert text(got.heldout[0]) == "<s>System: be brief\nUser: add\n\n1 2\nAssistant: 3</s>"


def test_with_both_raw_takes_the_text_and_prefix_the_turns_and_says_so(tmp_path):
    rows = [{"text": f"text {i}", "messages": [{"role": "user", "content": f"turn {i}"}]} for i in range(2)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    raw, prefix = load(path, format="raw"), load(path, format="prefix")
    assert text(raw.heldout[0]) == "<s>text 1</s>" and "a.jsonl: the field text of 2 rows" in raw.notes
    assert text(prefix.heldout[0]) == "<s>User: turn 1</s>" and "a.jsonl: the field messages of 2 rows" in prefix.notes


# Hold-out, order, laziness


@given(rows=st.integers(2, 60), wanted=st.integers(1, 80), seed=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_held_out_rows_are_the_last_and_never_trained_on(tmp_path_factory, rows, wanted, seed):
    path = jsonl(tmp_path_factory.mktemp("rows") / "a.jsonl", [{"text": f"row {i}"} for i in range(rows)])
    got = load(path, heldout_samples=wanted, seed=seed)
    held = max(1, min(wanted, rows // 10))
    assert {text(ids) for ids in got.heldout} == {f"<s>row {i}</s>" for i in range(rows - held, rows)}
    assert sorted(text(ids) for ids in got.train) == sorted(f"<s>row {i}</s>" for i in range(rows - held))


def test_a_seed_draws_the_order_and_the_sample_but_not_the_hold_out(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"row {i}"} for i in range(50)])
    one, same, other = (load(path, seed=seed, train_samples=20, heldout_samples=3) for seed in (1, 1, 2))
    assert list(one.train) == list(one.train) == list(same.train) != list(other.train)
    assert len(one.train) == 20 and one.heldout == other.heldout and len(one.heldout) == 3


def test_a_copy_of_a_held_out_row_is_not_trained_on(tmp_path):
    rows = [{"text": f"row {i % 20}"} for i in range(30)]
    got = load(jsonl(tmp_path / "a.jsonl", rows), heldout_samples=3)
    held = {tuple(ids) for ids in got.heldout}
    assert len(held) == 3 and not held & {tuple(ids) for ids in got.train}
    with pytest.raises(DataError, match="no text to train on"):
        load(jsonl(tmp_path / "a.jsonl", [{"text": "same"}] * 30))


def test_rows_are_tokenised_when_they_are_asked_for(tmp_path):
    class Counting(PreTrainedTokenizerFast):
        texts = 0

        def __call__(self, *args, **kwargs):
            type(self).texts += 1
            return super().__call__(*args, **kwargs)

    tokenizer = Counting(tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>")
    got = load(jsonl(tmp_path / "a.jsonl", [{"text": f"row {i}"} for i in range(5000)]), tokenizer, heldout_samples=10)
    assert Counting.texts < 30
    assert len(list(got.train)) == len(got.train) == 4990


# Local files


def test_a_txt_is_cut_at_its_separators(tmp_path):
    path = tmp_path / "a.txt"
    mark = SEPARATOR
    path.write_bytes(f"one\r\nfirst\r\n{mark}\r\nIt says {mark} here\n{mark}  \n\n{mark}\n三".encode())
    got = load(path)
    assert text(got.heldout[0]) == "<s>三</s>"
    assert sorted(text(ids) for ids in got.train) == ["<s>It says <|endoftext|> here</s>", "<s>one\nfirst</s>"]
    assert any("3 documents, cut at lines that hold only <|endoftext|>" in note for note in got.notes)


def test_a_byte_order_mark_blank_lines_and_empty_rows_do_no_harm(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": ""}\n{"text": null}\n{"text": "two"}')
    got = load(path)
    assert [text(ids) for ids in got.train] == ["<s>one</s>"] and text(got.heldout[0]) == "<s>two</s>"


BAD_FILES = {
    "empty.jsonl": (b"", "is empty", "--data"),
    "blank.txt": (b" \n\n", "is empty", "--data"),
    "one.jsonl": (b'{"text": "a"}\n', "holds one document only", "--data"),
    "one.txt": (b"a book\n", "holds one document only", "a line that holds only <|endoftext|>"),
    "fields.jsonl": (b'{"id": 1, "body": "a"}\n', "no text in its fields (id, body)", "sed -n 1p"),
    "later.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', "line 2: no field 'text' (fields: body)", "sed -n 2p"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', "line 2: not valid JSON", "sed -n 2p"),
    "list.jsonl": (b'["a"]\n', "line 1: not a JSON object", "sed -n 1p"),
    "number.jsonl": (b'{"text": 3}\n', "line 1: the field 'text' holds int, not text", "sed -n 1p"),
    "turns.jsonl": (b'{"messages": "hi"}\n', "line 1: the field 'messages' holds no list", "sed -n 1p"),
    "roles.jsonl": (b'{"messages": [{"text": "hi"}]}\n', "line 1: a turn of 'messages' has neither", "sed -n 1p"),
    "latin.jsonl": ('{"text": "a"}\n{"text": "é"}'.encode("latin1"), "not UTF-8: byte 0xe9 in line 2", "iconv -f"),
    "blank.jsonl": (b'{"text": ""}\n{"text": " "}\n', "can be used: empty", "--data"),
    "array.json": (b'[{"text": "a"}]', "is no .jsonl or .txt file", "jq -c"),
    "table.parquet": (b"PAR1", "is no .jsonl or .txt file", "--data"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_by_name(tmp_path, name):
    content, message, hint = BAD_FILES[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        load(path)
    assert message in error.value.message and name in error.value.message and hint in error.value.hint


@pytest.mark.parametrize("name", ["none.jsonl", "./org/name", "org/name.txt", "/no/where", "a b"])
def test_a_missing_file_is_not_asked_of_the_hub(name):
    with pytest.raises(DataError, match="there is no file") as error:
        load(name)
    assert error.value.hint.startswith("ls ")


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
    with pytest.raises(CheckpointError, match="no tokenizer that transformers can load"):
        load_tokenizer(Checkpoint(tmp_path, "org/x"))


# The demo's corpus


def test_demo_reads_the_standard_library():
    got = load("demo", heldout_samples=12, format="raw")
    assert len(got.heldout) == len(got.domains) == 12 and set(got.domains) == {"code", "prose"}
    assert len(got.train) > 300 and got.source.startswith("demo (corpus ")
    first = next(iter(got.train))
    assert first[0] == 0 and first[-1] == 1 and first not in got.heldout


def test_a_text_of_one_document_gives_its_last_tenth(tmp_path):
    path = tmp_path / "book.txt"
    lines = [f"line {i} of the book" for i in range(100)]
    path.write_text("\n".join(lines) + "\n")
    tokenizer = wrapped()
    documents = load_documents(Data(source=str(path), format="raw"), tokenizer, seed=0)
    (train,), (held,) = list(documents.train), documents.heldout
    said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in (train, held)]
    assert "\n".join(part.strip("\n") for part in said) == "\n".join(lines)
    assert 8 <= said[1].count("line") <= 11
    assert any("one document" in note for note in documents.notes)
