"""Local files and folders: every form and shape, what of a folder is taken, and what is refused in which words."""

import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet
from texts import jsonl, load, text, trained_on

from remoe_cli.errors import DataError
from remoe_cli.train.files import SEPARATOR

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
        {"input": "hi there", "output": "good day"},
        {"problem": "hi there", "solution": "good day"},
    ],
)  # fmt: skip
def test_every_shape_of_conversation_reads_alike(tmp_path, row):
    other = json.loads(json.dumps(row).replace("good day", "good night"))
    got = load(jsonl(tmp_path / "a.jsonl", [other, row]))
    assert text(got.heldout[0]) == "<s>User: hi there\nAssistant: good day</s>"
    assert trained_on(got) == ["<s>User: hi there\nAssistant: good night</s>"]


@pytest.mark.parametrize("row", [{"text": "hi  there"}, {"content": "hi  there", "language": "c"}])
def test_text_stays_as_it_is(tmp_path, row):
    for format in ("prefix", "raw"):
        got = load(jsonl(tmp_path / "a.jsonl", [{**row, next(iter(row)): "other"}, row]), format=format)
        assert text(got.heldout[0]) == "<s>hi  there</s>"


def test_instructions_keep_their_input_and_system(tmp_path):
    row = {"instruction": "add", "input": "1 2", "output": "3", "system_prompt": "be brief"}
    got = load(jsonl(tmp_path / "a.jsonl", [{**row, "output": "4"}, row]))
    assert text(got.heldout[0]) == "<s>System: be brief\nUser: add\n\n1 2\nAssistant: 3</s>"


@pytest.mark.parametrize(
    ("row", "said", "how"),
    [
        ({"question": "a?", "choices": ["x", "y"], "answer": 1}, "User: a?\nA. x\nB. y\nAssistant: B. y", "question as user, answer as assistant"),
        ({"question": "a?", "choices": ["x", "y"], "answer": "B"}, "User: a?\nA. x\nB. y\nAssistant: B", "question as user, answer as assistant"),
        ({"question": "a?", "choices": {"label": ["P", "Q"], "text": ["x", "y"]}, "answerKey": "Q"}, "User: a?\nP. x\nQ. y\nAssistant: Q", "question as user, answerKey as assistant"),
        ({"turns": ["one", "two"]}, "User: one\nUser: two", "turns as user, without answers"),
        ({"prompt": "write", "key": 3}, "User: write", "prompt as user, without answers"),
        ({"prompt": "def f():\n", "canonical_solution": "    pass\n"}, "def f():\n    pass\n", "prompt and canonical_solution joined as plain text"),
        ({"messages": [{"role": "user", "content": "hi"}], "text": "x"}, "User: hi", "messages as turns"),
    ],
)  # fmt: skip
def test_what_fields_are_taken_as_is_said(tmp_path, row, said, how):
    first = json.loads(json.dumps(row).replace(said.split()[-1], "other"))
    got = load(jsonl(tmp_path / "a.jsonl", [first, row]))
    assert text(got.heldout[0]) == f"<s>{said}</s>" and f"a.jsonl: 2 rows, {how}" in got.notes


def test_with_both_raw_takes_the_text_and_prefix_the_turns_and_says_so(tmp_path):
    rows = [{"text": f"text {i}", "messages": [{"role": "user", "content": f"turn {i}"}]} for i in range(2)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    raw, prefix = load(path, format="raw"), load(path, format="prefix")
    assert text(raw.heldout[0]) == "<s>text 1</s>" and "a.jsonl: 2 rows, text as plain text" in raw.notes
    assert text(prefix.heldout[0]) == "<s>User: turn 1</s>" and "a.jsonl: 2 rows, messages as turns" in prefix.notes


# Local files


def test_a_txt_is_cut_at_its_separators(tmp_path):
    path = tmp_path / "a.txt"
    mark = SEPARATOR
    path.write_bytes(f"one\r\nfirst\r\n{mark}\r\nIt says {mark} here\n{mark}  \n\n{mark}\n三".encode())
    got = load(path)
    assert text(got.heldout[0]) == "<s>三</s>"
    assert sorted(trained_on(got)) == [
        "<s>It says <|endoftext|> here</s>",
        "<s>one\nfirst</s>",
    ]
    assert any("3 documents, cut at lines that hold only <|endoftext|>" in note for note in got.notes)


def test_a_byte_order_mark_blank_lines_and_empty_rows_do_no_harm(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": ""}\n{"text": null}\n{"text": "two"}')
    got = load(path)
    assert trained_on(got) == ["<s>one</s>"] and text(got.heldout[0]) == "<s>two</s>"


QUESTIONS = [{"question": f"say {i}", "answer": f'{i},\n"it is" {i}'} for i in range(12)]


def as_csv(rows, comma):
    quoted = [[value.replace('"', '""') for value in row.values()] for row in rows]
    return f"question{comma}answer\n" + "".join(f'"{asked}"{comma}"{said}"\n' for asked, said in quoted)


LINES = "".join(json.dumps(row) + "\n" for row in QUESTIONS)
FORMS = {
    "a.json": json.dumps(QUESTIONS, indent=1),
    "b.json": json.dumps({"version": "1", "data": QUESTIONS}),
    "lines.json": LINES,
    "a.csv": as_csv(QUESTIONS, ","),
    "a.tsv": as_csv(QUESTIONS, "\t"),
    "a.jsonl.gz": LINES,
    "a.json.gz": json.dumps(QUESTIONS),
    "a.csv.gz": as_csv(QUESTIONS, ","),
    "a.parquet": None,
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_holds_the_same_rows(tmp_path, name):
    plain, path = load(jsonl(tmp_path / "plain.jsonl", QUESTIONS)), tmp_path / name
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(QUESTIONS), path, row_group_size=5)
    else:
        content = FORMS[name].encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    got = load(path)
    assert trained_on(got) == trained_on(plain) and got.heldout == plain.heldout
    assert got.source == name and got.notes[0] == f"{name}: 12 rows, question as user, answer as assistant"


def test_a_compressed_text(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(f"one\n{SEPARATOR}\ntwo".encode()))
    assert trained_on(load(path)) == ["<s>one</s>"]


def test_a_row_far_longer_than_any_sequence_is_read_whole(tmp_path):
    long = {"text": "over long " * 50_000}
    got = load(jsonl(tmp_path / "a.jsonl", [long, {"text": "short"}]))
    assert trained_on(got) == [f"<s>{long['text']}</s>"]


# Folders


def folder(path, **files):
    path.mkdir()
    for name, words in files.items():
        rows = [{"text": f"{words} {i}"} for i in range(3)]
        target = path / name.replace("__", ".").replace("_of_", "-of-")
        target.write_text(words if target.suffix == ".txt" else "".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_beside_tables_texts_are_no_data_and_splits_are_honoured(tmp_path):
    path = folder(
        tmp_path / "set",
        train__jsonl="a",
        train_of_2__jsonl="b",
        test__jsonl="c",
        validation__jsonl="d",
        notes__txt="e",
    )
    (path / "LICENSE").write_text("all rights")
    (path / ".hidden.jsonl").write_text("not JSON")
    (path / "deeper").mkdir()
    got = load(path)
    assert sorted(trained_on(got)) == [f"<s>{word} {i}</s>" for word in "ab" for i in range(3)]
    assert sorted(text(ids) for ids in got.heldout) == [f"<s>c {i}</s>" for i in range(3)]
    assert got.notes[0] == (
        "set: 6 rows, text as plain text; from: train-of-2.jsonl, train.jsonl; held out: test.jsonl; "
        "not read: LICENSE, notes.txt, validation.jsonl"
    )
    assert got.source == "set" and got.pinned == str(path)


def test_files_without_split_names_are_all_read(tmp_path):
    got = load(folder(tmp_path / "set", one__jsonl="a", two__jsonl="b", words__txt="c"), heldout_samples=1)
    assert len(trained_on(got)) == 5 and text(got.heldout[0]) == "<s>b 2</s>"
    got = load(folder(tmp_path / "only", test__jsonl="a"))  # a test split alone is data like any other
    assert len(trained_on(got)) == 2 and len(got.heldout) == 1


def test_a_folder_of_texts_leaves_out_what_is_about_them(tmp_path):
    path = folder(tmp_path / "set", book__txt="a book", other__txt="another", SOURCE__txt="where from", ReadMe__txt="x")
    got = load(path)
    assert trained_on(got) == ["<s>a book</s>"] and text(got.heldout[0]) == "<s>another</s>"
    assert got.notes[0].endswith("from: book.txt, other.txt; not read: ReadMe.txt, SOURCE.txt")


def test_a_folder_of_one_text_gives_its_last_tenth(tmp_path):
    got = load(folder(tmp_path / "set", book__txt="a line\n" * 20, LICENSE__txt="x"))
    assert trained_on(got)[0].count("line") + text(got.heldout[0]).count("line") == 20


def test_a_folder_without_data_or_of_two_shapes_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"empty holds no data file \(\.jsonl, ") as error:
        load(folder(tmp_path / "empty", README__txt="a"))
    assert error.value.hint == f"ls {tmp_path / 'empty'}"
    path = folder(tmp_path / "set", a__jsonl="a")
    jsonl(path / "b.jsonl", [{"prompt": "x"}])
    with pytest.raises(
        DataError, match=r"b.jsonl, line 1: no field 'text' as in the rows before \(fields: prompt\)"
    ) as error:
        load(path)
    assert error.value.hint == f"--data {path / 'b.jsonl'}"


# What is refused


BAD_FILES = {
    "empty.jsonl": (b"", "is empty", "--data"),
    "blank.txt": (b" \n\n", "is empty", "--data"),
    "one.jsonl": (b'{"text": "a"}\n', "holds one document only", "--data"),
    "one.txt": (b"a book\n", "holds one document only", "a line that holds only <|endoftext|>"),
    "fields.jsonl": (b'{"id": 1, "body": "a"}\n', "no text in its fields (id, body)", "sed -n 1p"),
    "later.jsonl": (
        b'{"text": "a"}\n{"body": "b"}\n',
        "line 2: no field 'text' as in the rows before (fields: body)",
        "sed -n 2p",
    ),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', "line 2: not valid JSON", "sed -n 2p"),
    "list.jsonl": (b'["a"]\n', "line 1: not a JSON object", "sed -n 1p"),
    "number.jsonl": (b'{"text": 3}\n', "line 1: the field 'text' holds int, not text", "sed -n 1p"),
    "turns.jsonl": (b'{"messages": "hi"}\n', "line 1: the field 'messages' holds no list", "sed -n 1p"),
    "roles.jsonl": (b'{"messages": [{"text": "hi"}]}\n', "line 1: a turn of 'messages' has neither", "sed -n 1p"),
    "latin.jsonl": ('{"text": "a"}\n{"text": "é"}'.encode("latin1"), "not UTF-8: byte 0xe9 in line 2", "iconv -f"),
    "blank.jsonl": (b'{"text": ""}\n{"text": " "}\n', "can be used: empty", "--data"),
    "object.json": (b'{"a": 1}', "holds an object, not with one list of rows in it (fields: a)", "--data"),
    "two.json": (b'{"a": [], "b": []}', "not with one list of rows in it (fields: a, b)", "--data"),
    "none.json": (b"[]", "holds no row", "--data"),
    "word.json": (b'"word"', "holds no list of rows", "--data"),
    "broken.json": (b'[{"text": "a"},\n{"text": }]', "line 2: not valid JSON", "sed -n 2p"),
    "row.json": (b'[{"text": "a"}, 3]', "row 2: not a JSON object", "--data"),
    "head.csv": (b"text,id\n", "holds no row", "--data"),
    "quote.csv": (b'text,id\n"a" b,2\n', "is no table that can be read", "--data"),
    "broken.parquet": (b"PAR1", "is not a whole Parquet file", "--data"),
    "broken.jsonl.gz": (b'{"text": "a"}', "is damaged", "gzip -t"),
    "short.jsonl.gz": (gzip.compress(b'{"text": "a"}' * 99)[:30], "is damaged", "gzip -t"),
    "latin.txt.gz": (gzip.compress("é".encode("latin1")), "not UTF-8: byte 0xe9 in line 1", "zcat"),
    "line.jsonl.gz": (gzip.compress(b'{"text": "a"}\n3'), "line 2: not a JSON object", "zcat"),
    "a.jsonl.zst": (b"(\xb5/\xfd", "compressed with zstd", "zstd -d"),
    "model.safetensors": (b"text", "is no data file; remoe reads .jsonl, .json,", "--data"),
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
