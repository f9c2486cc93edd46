"""Every command that README and docs show runs, on the demo; Hub names against the loopback Hub."""

import gzip
import json
import re
import shutil

import pytest
from demo_gguf import write_gates
from documented import commands, DEMO, mentions, pages, provide, ROOT, SHORT, shortened, stock, SUMS, Worker
from hub_client import TOKEN
from loopback_hub import Account, LoopbackHub
from typer.main import get_command

from remoe_cli.cli import app
from remoe_cli.hub.checkpoint import Checkpoint

# Shown, but not run here: page and beginning of the command -> why
NOT_RUN: dict[tuple[str, str], str] = {
    ("docs/tasks.md", "remoe eval --tasks gsm8k,mmlu"): "data sets of the Hub; tests/test_tasks_hub.py has one",
    (
        "docs/extending.md",
        "remoe replay t.trace --cache 8 --policy capped_lfu",
    ): "tests/test_policies_by_hand.py makes the policy",
    ("docs/apply.md", "remoe apply --undo FILE.gguf"): "what it undoes is a form; docs/gguf.md runs both",
    ("docs/extending.md", "remoe decode demo --cache 8 --policy capped_lfu"): "the same",
}
PAGES = [page for page in pages() if commands(page)]
HUB_MODEL, HUB_DATA = "deepseek-ai/DeepSeek-V2-Lite", "teknium/OpenHermes-2.5"

GSM8K_CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""
ROUTES = """# route_trace v1
# model=/data/x/Tiny.gguf arch=tiny n_layer=2 n_expert=5 n_expert_used=2
# layer=1 expert_bytes=300 dense_bytes=1
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,1,0,4,0.75,0,300
0,0,0,1,1,0,0.25,0,300
0,1,1,1,0,3,0.75,0,300
0,1,1,1,1,0,0.25,0,300
"""


@pytest.fixture(scope="module")
def hub():
    talk = [{"from": "human", "value": "What is a fox?"}, {"from": "gpt", "value": "A quick brown animal. " * 8}]
    rows = "".join(
        json.dumps({"conversations": [{**talk[0], "value": f"Row {i}?"}, talk[1]]}) + "\n" for i in range(200)
    )
    with LoopbackHub() as server:
        server.accounts[TOKEN] = Account("you")
        server.add("model", HUB_MODEL, {path.name: path.read_bytes() for path in DEMO.iterdir()})
        server.add("model", "Qwen/Qwen3-30B-A3B", server.files("model", HUB_MODEL))
        server.add("dataset", HUB_DATA, {"openhermes2_5.json": rows.encode()})
        sums = "".join(json.dumps(one) + "\n" for one in SUMS).encode()
        taught = "".join(
            json.dumps({**one, "question": f"Ada asks: {one['question']}"}) + "\n" for one in SUMS
        ).encode()
        server.add("dataset", "openai/gsm8k", {"README.md": GSM8K_CARD, "train.jsonl": taught, "test.jsonl": sums})
        yield server


@pytest.fixture(scope="module")
def worker(hub, tmp_path_factory):
    process = Worker(hub.environment(tmp_path_factory.mktemp("home"), TOKEN))
    yield process
    process.close()


@pytest.fixture(scope="module")
def shop(worker, hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("documented") / "shop"
    stock(worker, folder)
    for name in ("base.gguf", "model-Q4_K_M.gguf"):
        write_gates(Checkpoint.open(DEMO), folder / name)
    (folder / "qwen.route.csv.gz").write_bytes(gzip.compress(ROUTES.encode()))
    hub.add("model", "user/delta", {path.name: path.read_bytes() for path in (folder / "DELTA").iterdir()})
    hub.add("model", "you/your-delta", hub.files("model", "user/delta"))
    return folder


def why_not(command) -> str | None:
    return next(
        (why for (page, start), why in NOT_RUN.items() if command.page == page and command.text.startswith(start)), None
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_run_one_after_another(page, worker, shop, tmp_path):
    wanted = [command for command in commands(page) if not command.is_form and not why_not(command)]
    if any("--resume" in command.words for command in wanted):
        unfinished(worker, tmp_path, "DIR")
        unfinished(worker, tmp_path, "runs/unfinished")
    for command in wanted:
        provide(shop, tmp_path, command.words)
        ran = worker(tmp_path, *shortened(command.words))
        assert ran.code == 0, f"{command.page}: {command.text}\n{ran.err}"
        shown = labels(output_shown(page, command))
        assert len(shown - labels(ran.out)) <= len(shown) / 10, shown - labels(ran.out)
        if command.output:
            (tmp_path / command.output).write_text(ran.out)
    shutil.rmtree(tmp_path)


def output_shown(page, command) -> str:
    """What the quickstart shows below a command."""
    shown = re.search(rf"^    {re.escape(command.text)}\n\n```text\n(.*?)```", page.read_text(), re.M | re.S)
    return shown[1] if shown else ""


def labels(text: str) -> set[str]:
    """What each row of a table is called."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {row[0] for row in rows if len(row) > 1 and re.search("[a-z]", row[0])}


def unfinished(worker, folder, name) -> None:
    """A run that Ctrl-C ended after its first steps."""
    words = ["finetune", "demo", "--out", name, *SHORT["finetune"], "--steps", "40"]
    ran = worker(folder, *words, stop=str(folder / name / "metrics.jsonl"))
    assert ran.code == 130, ran.err


def test_options_and_commands_that_are_mentioned_exist():
    known = {}
    for name, command in get_command(app).commands.items():
        for part, inner in [("", command), *getattr(command, "commands", {}).items()]:
            known[f"{name} {part}".strip()] = {o for p in inner.params for o in [*p.opts, *p.secondary_opts]} | {
                "--help"
            }
    known["trace"] |= known["trace record"]
    everywhere = {option for parameter in get_command(app).params for option in parameter.opts}
    wrong = []
    for page in pages():
        for text in [command.text for command in commands(page)] + mentions(page):
            words = text.split()
            name = " ".join(words[1:3]) if " ".join(words[1:3]) in known else words[1].rstrip(".,;:")
            if not re.fullmatch(r"[a-z]+( [a-z]+)?", name):
                continue  # `remoe --help` and the like
            options = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", re.sub(r'"[^"]*"', "", text))
            wrong += [f"{page.name}: {text}: {o}" for o in options if o not in known.get(name, set()) | everywhere]
            wrong += [f"{page.name}: {text}"] if name not in known else []
    assert not wrong, "\n".join(wrong)


def test_what_is_not_run_is_still_shown():
    shown = [command for page in pages() for command in commands(page)]
    for page, start in NOT_RUN:
        assert any(command.page == page and command.text.startswith(start) for command in shown), start


def test_most_pages_show_commands():
    assert len(PAGES) > 12 and sum(len(commands(page)) for page in PAGES) > 50
