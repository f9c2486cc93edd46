"""The commands that README and docs show, and a place where they run: every name that they use is there.

A command is a line of a code block that begins with `remoe`. One with brackets or dots shows a form, not a command; of it, and of
what stands in running text, only names of commands and options are looked at.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from commands import make_texts, QUICK, Ran

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "remoe_cli" / "demo" / "checkpoint"
OUTPUTS = ("--out", "-o", "--to")
# What makes a command short, after what it says itself. Two steps of 4 rows with 32 tokens, few and short requests.
SHORT = {
    "finetune": ["--steps", "2", *QUICK, "--set", "data.format=prefix"],  # the demo has no chat template
    "sweep": ["--steps", "2", *QUICK, "--set", "data.format=prefix"],
    "eval": QUICK[QUICK.index("evaluate.rows=4") - 1 : QUICK.index("evaluate.measured=2") + 1],
    "trace": ["--requests", "2", "--prompt-tokens", "4", "--new-tokens", "6"],
    "reroute": ["--rows", "2"],
    "decode": ["--tokens", "4"],
    "generate": ["--tokens", "4"],
    "chat": ["--tokens", "4", "--cache", "8", "--template", "raw"],  # the demo has no chat template
    "pack": ["--force"],  # an expert of the demo lies in one place already
}
# words that stand for any of their kind
MEANT = {"RECIPE": "no-trust", "/data/models": "."}
SUMS = [
    {"question": f"What is {n} and {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(1, 41)
]  # GSM8K's shape
TYPED = "Hello\n/stats\n/quit\n"  # on stdin
WORKER = """
import contextlib, io, json, os, signal, sys, threading, time
from pathlib import Path
from remoe_cli.__main__ import main

def stop_when(path):  # as Ctrl-C would, once the run has made a step
    while not (path.exists() and path.read_text().strip()):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

for line in sys.__stdin__:
    asked = json.loads(line)
    os.chdir(asked["cwd"])
    sys.argv, out, err, code = ["remoe", *asked["words"]], io.StringIO(), io.StringIO(), 0
    sys.stdin = io.TextIOWrapper(io.BytesIO(asked["typed"].encode()))
    if asked["stop"]:
        threading.Thread(target=stop_when, args=(Path(asked["stop"]),), daemon=True).start()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            code, _ = -1, print("NOT CAUGHT", repr(error), file=err)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=sys.__stdout__, flush=True)
"""


class Command(NamedTuple):
    page: str
    text: str

    @property
    def is_form(self) -> bool:
        return bool(re.search(r"[\[\]()|]|\.\.\.", re.sub(r'"[^"]*"', "", self.text)))

    @property
    def words(self) -> list[str]:
        """After `remoe`, without what a shell would take for itself."""
        return shlex.split(self.text.partition(" > ")[0])[1:]

    @property
    def output(self) -> str | None:
        return self.text.partition(" > ")[2] or None


def pages() -> list[Path]:
    generated = (ROOT / "docs" / "commands").glob("*.md")
    docs = sorted({*(ROOT / "docs").glob("**/*.md")} - {*generated, ROOT / "docs" / "commands.md"})
    return [ROOT / "README.md", *docs, ROOT / "recipes" / "demo" / "README.md", ROOT / "benchmarks" / "README.md"]


def commands(page: Path) -> list[Command]:
    """In the order of the page."""
    return [Command(page.relative_to(ROOT).as_posix(), line) for line in _lines(page.read_text())]


def mentions(page: Path) -> list[str]:
    """Every `remoe ...` of the page's running text."""
    return re.findall(r"`(remoe [^`]+)`", page.read_text())


def _lines(text: str) -> Iterator[str]:
    fenced, before, kept = False, "", ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        code = line.strip().removeprefix("$ ")
        if (fenced or line.startswith("    ")) and (kept or re.match(r"remoe [a-z]", code)):
            kept += code.removesuffix("\\")
            if not code.endswith("\\"):
                yield re.sub(r"\s+#\s.*", "", kept)
                kept = ""
        before = line
    assert not kept, before


class Worker:
    """One process with remoe in it, which runs commands one after another."""

    def __init__(self, environment: dict[str, str]) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "REMOE_"))}
        kept = {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env={**clean, **kept, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, folder: Path, *words: str, stop: str = "") -> Ran:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"cwd": str(folder), "words": words, "stop": stop, "typed": TYPED}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"remoe {' '.join(words)}: the process is gone"
        return Ran(*json.loads(answer))

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(60)


def stock(worker: Worker, shop: Path) -> None:
    """Everything that a documented command names, made once by remoe itself from the demo."""
    shop.mkdir()
    make_texts(shop / "texts.jsonl", rows=120)
    for name in ("MODEL", "BASE", "path/to/model"):
        (shop / name).parent.mkdir(exist_ok=True, parents=True)
        (shop / name).symlink_to(DEMO)
    for name, more in {
        "runs/control": ["--recipe", "ce-only"],
        "runs/x": [],
        "st": ["--recipe", "heads-only", "--set", "objective.name=coverage-spatio-temporal"],
    }.items():
        _done(worker(shop, "finetune", "demo", "--out", name, *more, *SHORT["finetune"]))
    for name, run in {
        "my-delta": "runs/x",
        "A": "runs/x",
        "B": "runs/control",
        "C": "runs/x",
        "DELTA": "runs/x",
    }.items():
        _done(worker(shop, "push", run, "--to", name))
    for name, delta in {
        "base": [],
        "tuned": ["--delta", "st"],
        "t": ["--delta", "st"],
        "other": ["--delta", "st"],
    }.items():
        _done(worker(shop, "trace", "demo", "--probabilities", *delta, "-o", f"{name}.trace", *SHORT["trace"]))
    _done(worker(shop, "eval", "runs/x", "--cache", "8", *SHORT["eval"]))
    for name in ("RUN_A", "RUN_B", "RUN_C"):
        shutil.copytree(shop / "runs/x", shop / name)
    shutil.copytree(shop / "st", shop / "RUN")
    (shop / "data/gsm8k").mkdir(parents=True)
    for split in ("train", "test"):
        (shop / f"data/gsm8k/{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in SUMS))


def _done(ran: Ran) -> None:
    assert ran.code == 0, ran.err


def provide(shop: Path, folder: Path, words: list[str]) -> None:
    """Puts what the words name into the folder, where the page has not made it itself; and takes away what they are to make."""
    if words[0] in ("eval", "push", "report") and not (folder / "runs").exists():
        words = [*words, "runs/x"]  # the latest run
    for before, word in zip(["", *words], words, strict=False):
        word = word.partition("=")[2] if "=" in word and (shop / word.partition("=")[2]).is_file() else word
        place = folder / word
        if before in OUTPUTS and place.exists() and "--resume" not in words:
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        elif before not in OUTPUTS and word and (shop / word).exists() and not os.path.lexists(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            if (shop / word).is_symlink() or (shop / word).is_file():
                shutil.copy(shop / word, place, follow_symlinks=False)
                if place.name == "test.jsonl":  # a task's worked examples lie beside its items
                    shutil.copy(shop / word.replace("test.jsonl", "train.jsonl"), place.parent)
            else:
                shutil.copytree(shop / word, place)


def shortened(words: list[str]) -> list[str]:
    if words[:2] == ["trace", "import"] or "--resume" in words:
        return words
    few = ["--limit", "1"] if "--tasks" in words else []
    return [*(MEANT.get(word, word) for word in words), *SHORT.get(words[0], []), *few]
