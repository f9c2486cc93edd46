"""remoe push and remoe pull as a user runs them, against a real HTTP Hub, and what a pushed folder holds."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import yaml
from commands import Remoe
from huggingface_hub import ModelCard, ModelCardData
from loopback_hub import Account, LoopbackHub
from test_delta import make_delta

from remoe_cli import run as runs
from remoe_cli.delta import Delta
from remoe_cli.errors import RunError, UsageError
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.hub.upload import default_name
from remoe_cli.push import assemble
from remoe_cli.recipe import load

BASE, TOKEN = "org/tiny-moe", "hf_secret-of-this-test"
CARD = b"---\nlicense: other\nlicense_name: tiny-1.0\nlicense_link: https://example.org/tiny\n---\n# tiny"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tiny_models.make("mixtral", tmp_path_factory.mktemp("secret-place") / "tiny-moe")
    (folder / "README.md").write_bytes(CARD)
    return folder


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_run(base: Path, commit: str | None = None, data: str = "demo", name: str = "runs/a-run") -> runs.Run:
    """A finished run as finetune leaves it. commit: the base is BASE on the Hub, else the local folder."""
    recipe = load("remoe", "mixtral", [f"data.source={json.dumps(data)}"])
    run = runs.create(str(base), recipe, Path(name))
    delta = make_delta(Checkpoint.open(base))
    delta = replace(delta, base=BASE if commit else str(base), commit=commit)
    delta.save(run.delta)
    pinned = str(Path(data).resolve()) if Path(data).exists() else data
    run.note(base=delta.base, commit=commit, status="finished", steps=7, data=pinned)
    return run


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_bytes().decode(errors="replace") for path in folder.iterdir()}


def test_a_pushed_folder_names_no_folder_of_this_machine(base, work):
    (work / "private/texts").mkdir(parents=True)
    (work / "private/texts/mine.jsonl").write_text("{}")
    run = make_run(base, data="private/texts/mine.jsonl")
    report = {
        "run": str(run.folder.resolve()),
        "base": {"id": str(base)},
        "notes": [f"read {work}/private/texts/mine.jsonl"],
    }
    run.report.write_text(json.dumps(report))
    with pytest.raises(RunError, match=r"report\.json is damaged, or of another version"):
        assemble(run, work / "nowhere")
    run.report.unlink()
    (work / "out").mkdir()
    assemble(run, work / "out")
    for text in contents(work / "out").values():
        for secret in (str(base.parent), str(work), "private/", "runs/", str(Path.home()) + "/"):
            assert secret not in text
    assert Delta.load(work / "out").base == "tiny-moe"
    assert yaml.safe_load((work / "out/recipe.yaml").read_text())["data"]["source"] == "mine.jsonl"
    card = ModelCard.load(work / "out/README.md").data
    assert card.base_model is None and card.license_name == "tiny-1.0"


def test_a_data_set_of_the_hub_keeps_its_name(base, work):
    run = make_run(base, "a" * 40, data="teknium/OpenHermes-2.5")
    (work / "out").mkdir()
    assemble(run, work / "out")
    assert yaml.safe_load((work / "out/recipe.yaml").read_text())["data"]["source"] == "teknium/OpenHermes-2.5"


def test_a_local_base_of_two_parts_is_no_hub_id(base, work):
    (work / "models").mkdir()
    (work / "models/tiny").symlink_to(base)
    run = make_run(Path("models/tiny"))
    (work / "out").mkdir()
    assemble(run, work / "out")
    card = (work / "out/README.md").read_text()
    assert "base_model" not in card and "models/tiny" not in card


@pytest.mark.parametrize(
    ("base_name", "name"),
    [("DeepSeek-V2-Lite", "DeepSeek-V2-Lite-remoe"), ("my model (v2)!", "my-model-v2-remoe"), ("..", "model-remoe"),
     ("a--b..c", "a-b.c-remoe"), ("x" * 200, "x" * 80 + "-remoe"), ("größe", "gr-e-remoe"), ("", "model-remoe")],
)  # fmt: skip
def test_the_default_name_is_one_that_the_hub_takes(base_name, name):
    from huggingface_hub.utils import validate_repo_id

    assert default_name(base_name) == name
    validate_repo_id(f"me/{name}")


@pytest.mark.parametrize("more", [["me/x"], ["--private"], ["--create-pr"], ["--revision", "b"]], ids=str)
def test_a_folder_and_the_hub_are_two_things(base, work, capsys, monkeypatch, more):
    make_run(base)
    ran = Remoe(capsys, monkeypatch)("push", "a-run", *more, "--to", "out")
    assert ran.code == UsageError.exit_code and "--to writes a folder" in ran.err and not Path("out").exists()


def test_a_dry_run_to_a_folder_writes_nothing(base, work, capsys, monkeypatch):
    make_run(base)
    before = sorted(work.rglob("*"))
    ran = Remoe(capsys, monkeypatch)("push", "--to", "out", "--dry-run")
    assert ran.code == 0 and "nothing was written to out" in ran.out and sorted(work.rglob("*")) == before


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [("recipe.yaml", None, "recipe.yaml"), ("recipe.yaml", "- a", "recipe.yaml"), ("report.json", "[]", "report.json is damaged"),
     ("report.json", "{}", "report.json is damaged"), ("report.json", "[" * 100_000, "report.json is damaged"),
     ("delta/remoe.json", "{}", "damaged delta"), ("delta/remoe.json", "[]", "damaged delta"),
     ("delta/gates.safetensors", "short", "damaged delta"), ("run.json", "{", "run.json is missing or damaged")],
)  # fmt: skip
def test_a_damaged_run_is_told_in_one_line(base, work, capsys, monkeypatch, file, content, words):
    run = make_run(base)
    if content is None:
        (run.folder / file).unlink()
    else:
        (run.folder / file).write_text(content)
    ran = Remoe(capsys, monkeypatch)("push", "a-run", "--to", "out")
    assert ran.code in (1, 2) and words in ran.err and ran.err.count("\n") == 1 and not Path("out").exists()


# Against the Hub


@pytest.fixture(scope="module")
def hub(base):
    with LoopbackHub() as server:
        server.add("model", BASE, {path.name: path.read_bytes() for path in base.iterdir()})
        server.accounts |= {TOKEN: Account("me"), "hf_other": Account("other")}
        yield server


@pytest.fixture
def remoe(hub, tmp_path, work):
    def run(*arguments, token: str | None = TOKEN, **env) -> tuple[int, str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment = {**clean, **hub.environment(tmp_path / "home", token), "OMP_NUM_THREADS": "1", **env}
        command = [sys.executable, "-m", "remoe_cli", *map(str, arguments)]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in done.stderr and "hf_" not in done.stdout + done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


def test_push_pull_and_apply(hub, remoe, base, work):
    commit = hub.repos["model", BASE].refs["main"]
    make_run(base, commit)
    code, out, err = remoe("push", "a-run")
    assert code == 0 and "Pushed to" in out, err
    card = ModelCard(hub.files("model", "me/tiny-moe-remoe")["README.md"].decode())
    assert isinstance(card.data, ModelCardData)
    assert (card.data.base_model, card.data.license, card.data.license_name) == (BASE, "other", "tiny-1.0")
    assert card.data.to_dict()["base_model_relation"] == "adapter" and card.data.library_name == "remoe"
    assert f"{BASE}@{commit}" in card.text and "7 of " in card.text and "https://example.org/tiny" in card.text

    code, out, err = remoe("pull", "me/tiny-moe-remoe")
    assert code == 0 and f"Base {BASE}@{commit}" in out and "remoe apply tiny-moe-remoe" in out, err
    pulled = {path.name: path.read_bytes() for path in (work / "tiny-moe-remoe").iterdir()}
    assert pulled == {n: data for n, data in hub.files("model", "me/tiny-moe-remoe").items() if n != ".gitattributes"}
    code, out, err = remoe("pull", "me/tiny-moe-remoe")
    assert code == 1 and "not an empty folder" in err
    code, out, err = remoe("apply", "me/tiny-moe-remoe", BASE, "--out", "patched", HF_HUB_DISABLE_XET="0")
    assert code == 0 and (work / "patched/config.json").is_file(), err


def test_push_to_a_branch_and_as_a_pull_request_makes_no_second(hub, remoe, base):
    make_run(base, hub.repos["model", BASE].refs["main"])
    code, out, err = remoe("push", "a-run", "me/branched", "--revision", "v2", HF_HUB_DISABLE_XET="0")
    assert code == 0 and "/me/branched/tree/v2" in out and "xet" not in err.lower(), err
    repo = hub.repos["model", "me/branched"]
    assert "remoe.json" in repo.commits[repo.refs["v2"]] and "remoe.json" not in repo.commits[repo.refs["main"]]
    assert "Unchanged" in remoe("push", "a-run", "me/branched", "--revision", "v2")[1]

    hub.add("model", "other/theirs", {"README.md": b""})
    code, out, err = remoe("push", "a-run", "other/theirs")
    assert code == 1 and "remoe push RUN other/theirs --create-pr" in err
    code, out, err = remoe("push", "a-run", "other/theirs", "--create-pr")
    assert code == 0 and "/other/theirs/discussions/1" in out, err
    code, out, err = remoe("push", "a-run", "other/theirs", "--create-pr")
    assert "Unchanged, already at" in out and "discussions/1" in out
    assert len(hub.repos["model", "other/theirs"].requests) == 1
    from huggingface_hub import HfApi

    HfApi(hub.url, token="hf_other").merge_pull_request("other/theirs", 1)
    code, out, err = remoe("push", "a-run", "other/theirs", "--create-pr")
    assert "Unchanged" in out and len(hub.repos["model", "other/theirs"].requests) == 1


def test_what_is_no_delta_is_not_downloaded(hub, remoe, work):
    hub.log.clear()
    code, _, err = remoe("pull", BASE)
    assert code == 1 and "holds no remoe.json" in err and not (work / "tiny-moe").exists()
    assert not [entry for entry in hub.log if "/resolve/" in entry]
    (work / "here").mkdir()
    assert "is here already" in remoe("pull", "here")[2]


def test_the_licence_is_left_out_and_said_so_where_it_is_not_known(base, work):
    bare = shutil.copytree(base, work / "bare", ignore=shutil.ignore_patterns("README.md"))
    (work / "out").mkdir()
    assemble(make_run(bare), work / "out")
    card = (work / "out/README.md").read_text()
    assert "license" not in card and "The licence of bare could not be read" in card
