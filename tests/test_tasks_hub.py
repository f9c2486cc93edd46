"""lm-eval's tasks with items of the Hub: the real `datasets` in a process of its own, against the loopback Hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub

pytest.importorskip("lm_eval")

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from answering import Answering, loaded, scores
from remoe_cli.errors import DataError
tasks = loaded(tasks="commonsense_qa", few_shot=1)
tasks.ask("base", Answering(lambda task, doc: "ABCDE".index(doc["answerKey"])))
tasks.ask("remoe", Answering(lambda task, doc: 1))
found, _ = scores(tasks)["commonsense_qa", "acc", "none"]
try:
    loaded(tasks="commonsense_qa,gsm8k")
except DataError as error:
    print(json.dumps([found, error.message, error.hint]))
"""


def test_items_of_the_hub(tmp_path):
    labels = [*"ABCDE"]
    rows = [
        {"question": f"{n}?", "choices": {"label": labels, "text": list("vwxyz")}, "answerKey": labels[n % 5]}
        for n in range(10)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with LoopbackHub() as hub:
        hub.add("dataset", "tau/commonsense_qa", {"train.jsonl": lines, "validation.jsonl": lines})
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)], env={**clean, **hub.environment(tmp_path, None)},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, message, hint = json.loads(done.stdout)
    assert found == [1, 0.2]
    assert "the items of gsm8k cannot be loaded" in message and "openai/gsm8k" in message
    assert hint == "remoe eval --tasks commonsense_qa,gsm8k=FILE.jsonl"
