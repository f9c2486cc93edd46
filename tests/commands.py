"""Running remoe's command line in this process: fast, and with the same exit codes and streams."""

import json
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_models
import tiny_tokenizers

from remoe_cli.__main__ import main

QUICK = [
    "--set", "train.sequence=32", "--set", "train.micro_batch=2", "--set", "train.accumulation=2", "--set", "train.lr=0.02",
    "--set", "evaluate.rows=4", "--set", "evaluate.requests=3", "--set", "evaluate.prompt_tokens=4",
    "--set", "evaluate.new_tokens=6", "--set", "evaluate.measured=2", "--set", "objective.window_tokens=4",
]  # fmt: skip


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Remoe:
    def __init__(self, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: object) -> Ran:
        self._monkeypatch.setattr(sys, "argv", ["remoe", *map(str, arguments)])
        self._capsys.readouterr()
        code, interrupt = 0, signal.getsignal(signal.SIGINT)
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            signal.signal(signal.SIGINT, interrupt)
        return Ran(code, *self._capsys.readouterr())


def make_model(folder: Path, model_type: str = "deepseek_v2", **settings) -> Path:
    tiny_models.make(model_type, folder, vocab_size=400, **settings)
    tiny_tokenizers.wrapped().save_pretrained(folder)
    return folder


def make_texts(path: Path, rows: int = 40) -> Path:
    lines = [
        json.dumps({"text": f"row {i}: " + "the quick brown fox jumps over the lazy dog. " * 4}) for i in range(rows)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def refused(ran, *words: str) -> None:
    assert ran.code != 0
    lines = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and ran.err.splitlines()[-1] == lines[0], ran.err
    assert "Try: " in lines[0] and lines[0].split("Try: ")[1].strip()
    assert "Traceback" not in ran.err and not ran.out.strip()
    for word in words:
        assert word in lines[0], lines[0]


def report_of(ran) -> dict:
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def texts_of(words: str, rows: int) -> list[dict]:
    """Rows that differ from one another, long enough to be cut into requests."""
    return [{"text": f"{words} {i} " + "over the lazy dog " * 20} for i in range(rows)]


def make_run(folder: Path, steps: int = 2) -> Path:
    """folder/model, folder/texts.jsonl and folder/run, which tuned that model's gates on those texts."""
    from remoe_cli.finetune import Asked, finetune

    model, texts = make_model(folder / "model"), make_texts(folder / "texts.jsonl", rows=120)
    return finetune(str(model), Asked("remoe", str(texts), steps, tuple(QUICK[1::2])), out=folder / "run").run.folder
