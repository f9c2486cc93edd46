"""Data sets from the Hub with the real `datasets`, in processes of their own, against the loopback Hub."""

import json
import os
import subprocess
import sys

import pytest
from loopback_hub import Fault, LoopbackHub
from tiny_tokenizers import wrapped

TOKENIZER = wrapped()


SCRIPT = """
import json, sys
from remoe_cli.errors import RemoeError
from remoe_cli.recipe import Data
from remoe_cli.train.data import load_documents
from transformers import PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[1], bos_token="<s>", eos_token="</s>")
for source in sys.argv[2:]:
    try:
        got = load_documents(Data(source=source, heldout_samples=5), tokenizer, seed=0)
        train, heldout = ([tokenizer.decode(ids) for ids in part] for part in (got.train, got.heldout))
        print(json.dumps({"train": train, "heldout": heldout, "source": got.source, "notes": got.notes}))
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
        server.add("dataset", "org/failing", {"train.jsonl": split["train.jsonl"]})
        server.faults = [Fault("failing/resolve/.*jsonl", 521)]  # a status that the client does not retry
        server.add("dataset", "org/ids", {"train.jsonl": b'{"id": 1}\n{"id": 2}\n'})
        server.add("dataset", "org/nothing", {"README.md": b"# nothing yet"})
        server.add("dataset", "org/gated", split)
        server.repos["dataset", "org/gated"].gated = True
        yield server


def ask(hub, home, *sources, before="", **env):
    tokenizer_file = home.parent / "tokenizer.json"
    TOKENIZER.backend_tokenizer.save(str(tokenizer_file))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-c", before + SCRIPT, str(tokenizer_file), *sources]
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
    assert f"{name}: the field conversations of 50 rows" in got["notes"]
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


def test_without_the_package_datasets_the_error_names_it(hub, tmp_path):
    (got,) = ask(hub, tmp_path / "home", "org/split", before="import sys; sys.modules['datasets'] = None\n")
    assert got["error"] == "DataError" and "needs the package `datasets`" in got["message"]
    assert got["hint"] == "pip install datasets"
