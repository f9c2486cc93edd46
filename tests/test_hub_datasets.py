"""Data sets from the Hub with the real `datasets`, whole and streamed, in processes of their own, against the loopback Hub."""

import gzip
import io
import json
import os
import subprocess
import sys

import pyarrow
import pytest
from loopback_hub import Account, Fault, LoopbackHub
from pyarrow import parquet
from tiny_tokenizers import wrapped

TOKENIZER = wrapped()


SCRIPT = """
import json, sys
from remoe_cli.errors import RemoeError
from remoe_cli.recipe import Data
from remoe_cli.train.data import load_documents
from transformers import PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[1], bos_token="<s>", eos_token="</s>")
options = json.loads(sys.argv[2])
for source in sys.argv[3:]:
    try:
        got = load_documents(Data(source=source, **options), tokenizer, seed=0)
        starts = (0, 5, 12, 17, 1000)
        train, *rest = [[tokenizer.decode(doc.ids) for _, doc in got.train.numbered(start)] for start in starts]
        heldout = [tokenizer.decode(ids) for ids in got.heldout]
        found = {"train": train, "heldout": heldout, "source": got.source, "pinned": got.pinned, "notes": got.notes}
        print(json.dumps({**found, "goes_on": rest == [train[start:] for start in starts[1:]]}))
    except RemoeError as error:
        print(json.dumps({"error": type(error).__name__, "message": error.message, "hint": error.hint}))
"""


@pytest.fixture(scope="module")
def hub():
    turns = [[{"from": "human", "value": f"question {i}"}, {"from": "gpt", "value": f"answer {i}"}] for i in range(50)]
    rows = [{"custom_instruction": None, "conversations": turn, "source": "airoboros", "id": None} for turn in turns]
    split = {f"{n}.jsonl": "".join(f'{{"text": "{n} {i}"}}\n' for i in range(8)).encode() for n in ("train", "test")}
    parts = "configs:\n- config_name: easy\n  data_files: train.jsonl\n- config_name: hard\n  data_files: test.jsonl\n"
    card = f"---\n{parts}---\n".encode()
    with LoopbackHub() as server:
        hermes = {"README.md": b"---\nlanguage:\n- en\n---\n", "openhermes2_5.json": json.dumps(rows).encode()}
        server.add("dataset", "teknium/OpenHermes-2.5", hermes)
        server.add("dataset", "org/split", split)
        server.add("dataset", "org/parts", {"README.md": card, **split})
        quiz = [{"question": f"{i}?", "choices": {"label": ["A", "B"], "text": ["x", "y"]}} for i in range(8)]
        keys = {"train": "A", "validation": "B", "test": ""}
        lines = {n: "".join(json.dumps({**one, "answerKey": key}) + "\n" for one in quiz) for n, key in keys.items()}
        server.add("dataset", "org/quiz", {f"{n}.jsonl": text.encode() for n, text in lines.items()})
        server.add("dataset", "org/failing", {"train.jsonl": split["train.jsonl"]})
        server.faults = [Fault("failing/resolve/.*jsonl", 521)]  # a status that the client does not retry
        server.add("dataset", "org/ids", {"train.jsonl": b'{"id": 1}\n{"id": 2}\n'})
        server.add("dataset", "org/nothing", {"README.md": b"# nothing yet"})
        server.add("dataset", "org/gated", split)
        server.repos["dataset", "org/gated"].gated = True
        yield server


def ask(hub, home, *sources, before="", options=None, **env):
    """What load_documents makes of each source; options: fields of Data."""
    tokenizer_file = home.parent / "tokenizer.json"
    TOKENIZER.backend_tokenizer.save(str(tokenizer_file))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [
        sys.executable,
        "-c",
        before + SCRIPT,
        str(tokenizer_file),
        json.dumps({"heldout_samples": 5, **(options or {})}),
        *sources,
    ]
    environment = {**clean, **hub.environment(home), **env}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_openhermes_as_it_lies_on_the_hub_then_offline(hub, tmp_path):
    name = "teknium/OpenHermes-2.5"
    (got,) = ask(hub, tmp_path / "home", name)
    commit = hub.repos["dataset", name].refs["main"]
    assert got["source"] == f"{name}@{commit[:12]}"
    assert sorted(got["heldout"]) == [f"<s>User: question {i}\nAssistant: answer {i}</s>" for i in range(45, 50)]
    assert len(got["train"]) == 45 and not set(got["train"]) & set(got["heldout"])
    assert f"{name}: 50 rows, conversations as turns" in got["notes"]
    assert got["pinned"] == f"{name}@{commit}" and got["goes_on"]
    hub.log.clear()
    offline, missing = ask(hub, tmp_path / "home", name, "org/split", HF_HUB_OFFLINE="1")
    assert offline["train"] == got["train"] and offline["heldout"] == got["heldout"] and hub.log == []
    assert any("its cached copy is read" in note for note in offline["notes"])
    assert missing["error"] == "HubError" and "HF_HUB_OFFLINE is set" in missing["message"]
    assert missing["hint"] == "HF_HUB_OFFLINE=0 hf download org/split --repo-type dataset"


def test_splits_parts_and_what_is_refused(hub, tmp_path):
    commit = hub.repos["dataset", "org/split"].refs["main"]
    sources = ("org/split", "org/parts:hard", f"org/split@{commit}", "org/parts", "org/ids", "org/nothing", "org/gated")
    more = ("org/none", "org/split@v9", "org/failing")
    split, hard, pinned, *refused = ask(hub, tmp_path / "home", *sources, *more)
    assert sorted(split["train"]) == [f"<s>train {i}</s>" for i in range(8)] and len(split["heldout"]) == 5
    assert {words[:7] for words in split["heldout"]} == {"<s>test"} and pinned == split
    assert any("of its split test" in note for note in split["notes"])
    assert {words[:7] for words in hard["train"]} == {"<s>test"} and hard["source"].startswith("org/parts:hard@")
    (again,) = ask(hub, tmp_path / "home", hard["pinned"])
    assert again == hard and len(hard["pinned"]) == len("org/parts:hard@") + 40
    expected = [
        ("DataError", "org/parts has several parts: Config name is missing", "--data org/parts:PART"),
        ("DataError", "org/ids has no text in its fields (id)", "--data"),
        ("DataError", "org/nothing cannot be read", "--data"),
        ("HubError", "dataset org/gated is gated", "/datasets/org/gated"),
        ("DataError", "no file ./org/none, and there is no public dataset org/none", "hf auth login"),
        ("HubError", "dataset org/split has no revision 'v9'", "/datasets/org/split/commits/main"),
        ("HubError", "failed with status 521", "in a few minutes"),
    ]
    for answer, (kind, message, hint) in zip(refused, expected, strict=True):
        assert answer["error"] == kind and message in answer["message"] and hint in answer["hint"], answer


def test_a_published_test_split_without_answers_is_passed_over(hub, tmp_path):
    (got,) = ask(hub, tmp_path / "home", "org/quiz")
    assert any("of its split validation" in note for note in got["notes"])
    assert len(got["train"]) == 8 and {words.split()[-1] for words in got["heldout"]} == {"B</s>"}
    assert "<s>User: 0?\nA. x\nB. y\nAssistant: A</s>" in got["train"]


def test_a_token_that_the_server_quotes_is_cut_out(tmp_path):
    token = "hf_" + "secret" * 20
    with LoopbackHub() as hub:
        hub.accounts[token] = Account("ada")
        hub.add("dataset", "org/x", {"train.jsonl": b'{"text": "a"}\n'})
        hub.faults = [Fault("GET .*x/resolve/.*jsonl", 418, message="no: {token} may not")]
        (got,) = ask(hub, tmp_path / "home", "org/x", HF_TOKEN=token)
    assert "error" in got and "Bearer *** may not" in got["message"], got
    assert "secret" not in json.dumps(got)


def test_without_the_package_datasets_the_error_names_it(hub, tmp_path):
    (got,) = ask(hub, tmp_path / "home", "org/split", before="import sys; sys.modules['datasets'] = None\n")
    assert got["error"] == "DataError" and "needs the package `datasets`" in got["message"]
    assert got["hint"] == "pip install datasets"


# Streams

SMALL_BLOCKS = "import remoe_cli.train.hub_data\nremoe_cli.train.hub_data.BLOCK = 8\n"
STREAM = {"streaming": True, "train_samples": 40}


def as_parquet(rows):
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=20)
    return sink.getvalue()


def as_jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def streams():
    rows = [{"question": f"question {i}", "answer": f"answer {i}"} for i in range(60)]
    held = [{"question": f"held {i}", "answer": f"answer {i}"} for i in range(9)]
    with LoopbackHub() as server:
        server.add("dataset", "org/lines", {"rows.jsonl": as_jsonl(rows)})
        server.add("dataset", "org/packed", {"rows.jsonl.gz": gzip.compress(as_jsonl(rows))})
        server.add("dataset", "org/table", {"data/train-00000-of-00001.parquet": as_parquet(rows)})
        server.add("dataset", "org/split", {"train.parquet": as_parquet(rows), "test.parquet": as_parquet(held)})
        server.add("dataset", "org/cut", {"rows.jsonl": as_jsonl(rows)})
        server.add("dataset", "org/down", {"rows.jsonl": as_jsonl(rows)})
        server.add("dataset", "org/few", {"rows.jsonl": as_jsonl(rows[:5])})
        yield server


def said(kind, numbers):
    return [f"<s>User: {kind} {i}\nAssistant: answer {i}</s>" for i in numbers]


def test_a_stream_holds_out_its_first_rows_and_shuffles_the_next_in_blocks(streams, tmp_path):
    home = tmp_path / "home"
    names = ["org/lines", "org/packed", "org/table"]
    answers = ask(streams, home, *names, before=SMALL_BLOCKS, options=STREAM)
    for name, got in zip(names, answers, strict=True):
        assert got["heldout"] == said("question", range(5))
        assert got["goes_on"] and len(got["train"]) == 40
        for block in range(5):
            expected = said("question", range(5 + 8 * block, 13 + 8 * block))
            found = got["train"][8 * block : 8 * block + 8]
            assert found != expected and sorted(found) == sorted(expected)
        assert (
            got["notes"][0] == f"{name}: streamed, question as user, answer as assistant; shuffled in blocks of 8 rows"
        )
        assert "rows to train on: up to 40; held out: 5" in got["notes"]
        assert got["pinned"] == f"{name}@{streams.repos['dataset', name].refs['main']}"
    assert answers[0]["train"] == answers[1]["train"] == answers[2]["train"]
    (whole,) = ask(streams, home, "org/lines", options={"streaming": False})
    assert sorted(whole["heldout"]) == said("question", range(55, 60))  # not streamed: the last ones


def test_a_stream_honours_a_held_out_split_and_leaves_no_file(streams, tmp_path):
    home = tmp_path / "home"
    (got,) = ask(streams, home, "org/split", options={**STREAM, "train_samples": 500})
    assert got["heldout"] == said("held", range(5))
    assert sorted(got["train"]) == sorted(said("question", range(60))) and got["goes_on"]
    stored = [path for path in home.rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert stored == []


def test_a_stream_survives_a_cut_and_names_a_server_that_fails(streams, tmp_path):
    streams.faults = [Fault("GET .*cut/resolve/.*jsonl", keep=300, times=1), Fault("down/resolve/.*jsonl", 521)]
    cut, down, few = ask(streams, tmp_path / "home", "org/cut", "org/down", "org/few", options=STREAM)
    assert streams.faults[0].times == 0  # it did happen
    assert cut["heldout"] == said("question", range(5)) and len(cut["train"]) == 40 and cut["goes_on"]
    assert down["error"] == "HubError" and "failed with status 521" in down["message"]
    assert few["error"] == "DataError" and "has no text to train on" in few["message"]
