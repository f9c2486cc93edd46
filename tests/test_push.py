"""remoe push and remoe pull as a user runs them, against a real HTTP Hub, and what a pushed folder holds."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
import yaml
from commands import make_model, make_texts, QUICK, refused, Remoe
from huggingface_hub import ModelCard, ModelCardData
from loopback_hub import Account, Fault, LoopbackHub
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
    recipe = load("remoe", "mixtral")
    recipe = replace(recipe, data=replace(recipe.data, source=data))
    run = runs.create(str(base), recipe, Path(name))
    delta = make_delta(Checkpoint.open(base))
    delta = replace(delta, base=BASE if commit else str(base), commit=commit)
    delta.save(run.delta)
    pinned = str(Path(data).resolve()) if Path(data).exists() else data
    run.note(base=delta.base, commit=commit, status="finished", steps=7, data=pinned)
    return run


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_bytes().decode(errors="replace") for path in folder.iterdir()}


def test_a_pushed_folder_names_no_folder_of_this_machine(work, capsys, monkeypatch):
    """All that remoe itself writes, from odd paths: spaces, other letters, double slashes, a symbolic link."""
    remoe = Remoe(capsys, monkeypatch)
    make_model(work / "sécr et/store/tiny")
    (work / "sécr et/models").mkdir()
    (work / "sécr et/models/my moe").symlink_to(work / "sécr et/store/tiny")
    (work / "sécr et/texts").mkdir()
    make_texts(work / "sécr et/texts/mine.jsonl", rows=120)
    make_texts(work / "sécr et/texts/other.jsonl", rows=120)
    data = ("--data", f"{work}//sécr et/texts//mine.jsonl")
    made = remoe("finetune", "./sécr et//models/my moe", *data, "--steps", 1, "--out", "sécr et//rüns/a run", *QUICK)
    assert made.code == 0, made.err
    other = ("--base", "./sécr et/store//tiny", "--domain", "sécr et//texts/other.jsonl")
    evaluated = remoe("eval", "./sécr et/rüns//a run", "--cache", 2, *other)
    assert evaluated.code == 0, evaluated.err
    assert "sécr et" in Path("sécr et/rüns/a run/report.json").read_text().encode().decode("unicode-escape")
    assert remoe("push", "sécr et/rüns/a run", "--to", "out").code == 0
    files = {path.name: path.read_bytes().decode(errors="replace") for path in Path("out").iterdir()}
    assert set(files) == {"gates.safetensors", "remoe.json", "recipe.yaml", "report.json", "headline.png", "README.md"}
    report = json.loads(files["report.json"])
    files |= {"report.json": repr(report), "recipe.yaml": repr(recipe := yaml.safe_load(files["recipe.yaml"]))}
    for name, text in files.items():
        for secret in ("cr et", "models/", "store", "texts/", "rüns", str(work), str(Path.home()) + "/"):
            assert secret not in text, name
    assert (Delta.load(Path("out")).base, report["base"]["id"], report["run"]) == ("my moe", "my moe", "a run")
    assert recipe["data"]["source"] == "mine.jsonl"


@pytest.mark.parametrize(
    ("base_name", "source", "shown"),
    [("./sécr et/my moe/", "self:sécr et/mine.jsonl", ("my moe", "self:mine.jsonl")),
     ("sécr et//my moe", "./sécr et//mine.jsonl", ("my moe", "mine.jsonl")),
     ("{work}//sécr et/my moe", "{work}//sécr et/mine.jsonl", ("my moe", "mine.jsonl")),
     ("deepseek-ai/Moe", "deepseek-ai/some-dataset", ("Moe", "deepseek-ai/some-dataset")),
     ("deepseek-ai/Moe", "self:deepseek-ai/some-dataset:part@main", ("Moe", "self:deepseek-ai/some-dataset:part@main")),
     ("demo", "demo:code", ("demo", "demo:code")), (".", ".", ("{name}", "{name}"))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "not pinned"])
def test_only_what_is_a_path_is_shortened(base, work, base_name, source, shown, pinned):
    (work / "sécr et").mkdir()
    (work / "sécr et/mine.jsonl").write_text("{}")
    base_name, source = (text.format(work=work) for text in (base_name, source))
    run = make_run(base, data=source)
    replace(Delta.load(run.delta), base=base_name).save(run.delta)
    found = Path(source.removeprefix("self:"))
    run.note(base=str(Path(base_name).resolve()))
    run.note(data=(str(found.resolve()) if found.exists() else str(found)) if pinned else None)
    (work / "out").mkdir()
    assemble(run, work / "out")
    recipe = yaml.safe_load((work / "out/recipe.yaml").read_text())
    base_shown, texts = (text.format(name=work.name) for text in shown)
    if source == "." and not pinned:
        texts = "local"
    assert (Delta.load(work / "out").base, recipe["data"]["source"]) == (base_shown, texts)
    for text in contents(work / "out").values():
        assert "cr et" not in text and str(work) not in text


def test_a_report_of_another_version_is_told(base, work):
    run = make_run(base)
    run.report.write_text(json.dumps({"run": "runs/a-run", "base": {"id": str(base)}, "notes": []}))
    (work / "out").mkdir()
    with pytest.raises(RunError, match=r"report\.json is damaged, or of another version"):
        assemble(run, work / "out")


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
     ("delta/remoe.json", "{}", "damaged delta"), ("delta/remoe.json", "[]", "remoe.json is damaged"),
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
    run = make_run(base, commit)
    replace(Delta.load(run.delta), heads={"model.layers.0.mlp.gate.temporal": torch.ones(8, 32)}).save(run.delta)
    code, out, err = remoe("push", "a-run")
    assert code == 0 and "Pushed to" in out, err
    card = ModelCard(hub.files("model", "me/tiny-moe-remoe")["README.md"].decode())
    assert isinstance(card.data, ModelCardData)
    assert (card.data.base_model, card.data.license, card.data.license_name) == (BASE, "other", "tiny-1.0")
    assert card.data.to_dict()["base_model_relation"] == "adapter" and card.data.library_name == "remoe"
    assert "`heads.safetensors` holds heads" in card.text and "in the model is unchanged" in card.text
    assert f"{BASE}@{commit}" in card.text and "7 of " in card.text and "https://example.org/tiny" in card.text

    code, out, err = remoe("pull", "me/tiny-moe-remoe")
    assert code == 0 and f"Base {BASE}@{commit}" in out and "remoe apply tiny-moe-remoe" in out, err
    pulled = {path.name: path.read_bytes() for path in (work / "tiny-moe-remoe").iterdir()}
    assert pulled == {n: data for n, data in hub.files("model", "me/tiny-moe-remoe").items() if n != ".gitattributes"}
    assert pulled["heads.safetensors"] == (run.delta / "heads.safetensors").read_bytes()
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


def test_the_next_command_of_a_push_can_be_run(hub, remoe, base, work):
    """With the base known, from a branch and from a pull request as well."""
    commit = hub.repos["model", BASE].refs["main"]
    make_run(base, commit)
    hub.add("model", "other/next", {"README.md": b""})
    for number, (more, name) in enumerate(
        [(["me/next"], "me/next"), (["me/next", "--revision", "v2"], "me/next@v2"),
         (["other/next", "--create-pr"], "other/next@refs/pr/1")]
    ):  # fmt: skip
        code, out, err = remoe("push", "a-run", *more)
        assert code == 0 and "Pushed to" in out and err == "", err
        command = out.strip().rpartition("Next: remoe ")[2]
        assert command == f"apply {name} {BASE}@{commit} --out DIR"
        code, _, err = remoe(*shlex.split(command.replace("DIR", f"patched-{number}")))
        assert code == 0 and (work / f"patched-{number}/config.json").is_file(), err


def test_the_next_command_names_a_local_base_by_its_path(base, work, capsys, monkeypatch):
    (work / "my models").mkdir()
    (work / "my models/tiny").symlink_to(base)
    run = make_run(Path("my models/tiny"))
    run.note(base=str(base))
    remoe = Remoe(capsys, monkeypatch)
    ran = remoe("push", "--to", "a folder")
    command = ran.out.strip().rpartition("Next: remoe ")[2]
    assert command == f"apply 'a folder' {shlex.quote(str(base))} --out DIR"
    assert remoe(*shlex.split(command)).code == 0


def test_a_dry_run_says_so_to_scripts_and_needs_no_token(remoe, base):
    make_run(base)
    for more in (["me/x"], [], ["--to", "out"]):
        code, out, err = remoe("push", "a-run", *more, "--dry-run", "--json", token=None)
        assert code == 0 and json.loads(out)["dry_run"] is True and json.loads(out)["new"] is False, err
    code, out, _ = remoe("push", "a-run", "--to", "out", "--json", token=None)
    assert json.loads(out)["dry_run"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["a/b/c"], "a repository is user/name"), (["bad name/x"], "a repository is user/name"), ([""], "a repository is"),
     (["me/x", "--revision", ""], "--revision is a branch"), (["me/x", "--revision", "a b"], "--revision is a branch")],
    ids=str,
)  # fmt: skip
def test_a_name_that_cannot_be_is_wrong_usage(base, work, capsys, monkeypatch, arguments, words):
    make_run(base)
    ran = Remoe(capsys, monkeypatch)("push", "a-run", *arguments)
    refused(ran, words)
    assert ran.code == UsageError.exit_code and "DeepSeek" not in ran.err


def test_a_folder_that_cannot_be_made_is_the_one_that_was_named(base, work, capsys, monkeypatch):
    make_run(base)
    ran = Remoe(capsys, monkeypatch)("push", "a-run", "--to", "/proc/zz/delta")
    refused(ran, "the folder /proc/zz/delta cannot be written", "with another folder")
    assert "--out" not in ran.err


def test_the_demos_licence_is_on_its_card(base, work):
    run = make_run(base)
    replace(Delta.load(run.delta), base="demo").save(run.delta)
    (work / "out").mkdir()
    assemble(run, work / "out")
    assert ModelCard.load(work / "out/README.md").data.license == "apache-2.0"


def test_a_licence_that_another_time_may_give_is_noted(hub, remoe, base):
    make_run(base, hub.repos["model", BASE].refs["main"])
    hub.faults = [Fault(f"GET /api/models/{BASE}", 503)]
    code, _, err = remoe("push", "a-run", "me/unlicensed")
    hub.faults = []
    assert code == 0 and f"Note: the licence of {BASE} could not be read" in err
    assert b"could not be read" in hub.files("model", "me/unlicensed")["README.md"]
    code, out, err = remoe("push", "a-run", "me/unlicensed")
    assert code == 0 and "Pushed to" in out and err == ""
    assert b"license_name: tiny-1.0" in hub.files("model", "me/unlicensed")["README.md"]


def test_the_card_says_that_the_base_wrote_its_own_texts(base, work):
    (work / "out").mkdir()
    assemble(make_run(base, data="self:demo"), work / "out")
    assert "- Trained on what the base wrote after prompts from demo for " in (work / "out/README.md").read_text()


def test_the_licence_is_left_out_and_said_so_where_it_is_not_known(base, work):
    bare = shutil.copytree(base, work / "bare", ignore=shutil.ignore_patterns("README.md"))
    (work / "out").mkdir()
    assemble(make_run(bare), work / "out")
    card = (work / "out/README.md").read_text()
    assert "license" not in card and "The licence of bare could not be read" in card
