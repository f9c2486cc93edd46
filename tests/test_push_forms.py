"""Forms beside a pushed delta: a PEFT adapter or GGUFs go to the Hub with it, and come back with it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import demo_gguf
import pytest
import tiny_models
from commands import refused, Remoe
from huggingface_hub import ModelCard
from loopback_hub import Account, LoopbackHub
from test_delta import make_delta
from test_push import BASE, make_run, TOKEN

from remoe_cli import gguf
from remoe_cli.delta import Delta, peft_adapter
from remoe_cli.errors import UsageError
from remoe_cli.hub.checkpoint import Checkpoint

ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
SCRIPT = """
import contextlib, io, json, os, sys
from remoe_cli.__main__ import main
for line in sys.stdin:
    folder, *arguments = json.loads(line)
    os.chdir(folder)
    sys.argv, code = ["remoe", *arguments], 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
PLAIN = {"gates.safetensors", "remoe.json", "recipe.yaml", "README.md"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.make("deepseek_v2", tmp_path_factory.mktemp("secret-place") / "tiny-moe")


@pytest.fixture(scope="module")
def hub(base):
    with LoopbackHub() as server:
        server.add("model", BASE, {path.name: path.read_bytes() for path in base.iterdir()})
        server.accounts[TOKEN] = Account("me")
        yield server


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def process(hub, tmp_path_factory):
    """remoe in one process of its own, with the Hub in its environment: imports are slow."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**clean, **hub.environment(tmp_path_factory.mktemp("home"), TOKEN), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, **pipes) as started:
        yield started
        started.stdin.close()


@pytest.fixture
def remoe(process, work):
    def ran(*arguments) -> tuple[int, str, str]:
        process.stdin.write(json.dumps([str(work), *map(str, arguments)]) + "\n")
        process.stdin.flush()
        code, out, err = json.loads(process.stdout.readline())
        assert "Traceback" not in err and "hf_" not in out + err, err
        return code, out, err

    return ran


@pytest.fixture
def run(hub, base, work):
    return make_run(base, hub.repos["model", BASE].refs["main"])


@pytest.fixture
def tuned(run, base, work) -> Path:
    plain = demo_gguf.write(Checkpoint.open(base), work / "plain.gguf")
    gguf.patch_copy(Delta.load(run.delta), plain, work / "tuned.gguf")
    return work / "tuned.gguf"


def test_an_adapter_goes_and_comes_back_with_its_delta(hub, remoe, run, base, work):
    code, out, err = remoe("push", "a-run", "me/with-adapter", "--as", "peft")
    assert code == 0 and "Pushed to" in out, err
    files = hub.files("model", "me/with-adapter")
    assert set(files) == PLAIN | ADAPTER | {".gitattributes"}
    config, commit = json.loads(files["adapter_config.json"]), hub.repos["model", BASE].refs["main"]
    assert (config["base_model_name_or_path"], config["revision"]) == (BASE, commit)
    alone = peft_adapter(Delta.load(run.delta), Checkpoint.open(base), work / "alone")
    assert files["adapter_model.safetensors"] == (alone / "adapter_model.safetensors").read_bytes()
    card = ModelCard(files["README.md"].decode())
    assert "peft" in card.data.tags and f"from_pretrained('{BASE}', revision='{commit}'" in card.text
    assert "PeftModel.from_pretrained(model, 'me/with-adapter')" in card.text and "llama" not in card.text
    assert "Unchanged" in remoe("push", "a-run", "me/with-adapter", "--as", "peft")[1]

    code, out, err = remoe("pull", "me/with-adapter", "--as", "peft", "--json")
    assert code == 0 and set(json.loads(out)["form_files"]) == ADAPTER, err
    pulled = {path.name: path.read_bytes() for path in (work / "with-adapter").iterdir()}
    assert pulled == {name: content for name, content in files.items() if name != ".gitattributes"}
    code, out, err = remoe("push", "a-run", "me/with-adapter")
    assert code == 0 and set(hub.files("model", "me/with-adapter")) == PLAIN | {".gitattributes"}, err
    code, _, err = remoe("pull", "me/with-adapter", "--as", "peft", "--out", "again")
    assert code == 1 and "holds no adapter_config.json" in err and not (work / "again").exists()


def test_what_was_not_asked_for_is_not_fetched(hub, remoe, run, work):
    assert remoe("push", "a-run", "me/both", "--as", "peft")[0] == 0
    hub.log.clear()
    code, _, err = remoe("pull", "me/both", "--out", "bare")
    assert code == 0 and {path.name for path in (work / "bare").iterdir()} == PLAIN, err
    code, _, err = remoe("apply", "me/both", BASE, "--as", "overlay", "--out", "over")
    assert code == 0 and (work / "over/config.json").is_file(), err
    assert hub.log and not [line for line in hub.log if "adapter_" in line]


def test_a_gguf_goes_and_comes_back_with_its_delta(hub, remoe, run, base, tuned, work):
    code, out, err = remoe("push", "a-run", "me/with-gguf", "--as", "gguf", "--gguf", tuned)
    assert code == 0 and "tuned.gguf" in out, err
    files = hub.files("model", "me/with-gguf")
    assert set(files) == PLAIN | {"tuned.gguf", ".gitattributes"} and files["tuned.gguf"] == tuned.read_bytes()
    card = ModelCard(files["README.md"].decode())
    assert "gguf" in card.data.tags and "llama-cli -m tuned.gguf" in card.text and "FROM ./tuned.gguf" in card.text
    code, out, err = remoe("pull", "me/with-gguf", "--as", "gguf")
    assert code == 0 and "With it: tuned.gguf" in out and "Downloading me/with-gguf@" in err, err
    assert (work / "with-gguf/tuned.gguf").read_bytes() == tuned.read_bytes()
    assert not (work / "with-gguf/tuned.gguf").is_symlink()

    code, _, err = remoe("push", "a-run", "me/with-gguf")
    assert code == 0 and "tuned.gguf" in hub.files("model", "me/with-gguf"), "a large file was removed unasked"
    other = make_delta(Checkpoint.open(base), size=0.2)
    replace(other, base=BASE, commit=hub.repos["model", BASE].refs["main"]).save(run.delta)
    assert remoe("push", "a-run", "me/with-gguf")[0] == 0
    code, _, err = remoe("pull", "me/with-gguf", "--as", "gguf", "--out", "stale")
    assert code == 1 and "tuned.gguf" in err and not (work / "stale").exists(), err


def test_all_parts_of_a_split_gguf_go(hub, remoe, run, base, work):
    first = demo_gguf.write(Checkpoint.open(base), work / "plain.gguf", parts=3)
    gguf.patch_copy(Delta.load(run.delta), first, work / "tuned")
    second = sorted((work / "tuned").iterdir())[1]
    code, _, err = remoe("push", "a-run", "me/split", "--as", "gguf", "--gguf", second, "--as", "peft")
    assert code == 0, err
    files = hub.files("model", "me/split")
    assert {name for name in files if name.endswith(".gguf")} == {p.name for p in (work / "tuned").iterdir()}
    assert set(files) >= ADAPTER and files["README.md"].decode().count("llama-cli -m") == 1
    code, _, err = remoe("pull", "me/split", "--as", "gguf")
    assert code == 0, err
    for part in (work / "tuned").iterdir():
        assert (work / "split" / part.name).read_bytes() == part.read_bytes()


def test_a_folder_takes_forms_too_and_names_no_folder_of_this_machine(base, tuned, work, capsys, monkeypatch):
    make_run(base, name="runs/local")
    tuned.rename(work / "my model.gguf")
    ran = Remoe(capsys, monkeypatch)(
        "push", "local", "--as", "peft", "--as", "gguf", "--gguf", "my model.gguf", "--to", "out"
    )
    assert ran.code == 0, ran.err
    assert {path.name for path in Path("out").iterdir()} == PLAIN | ADAPTER | {"my model.gguf"}
    for path in Path("out").iterdir():
        assert not path.is_symlink() and b"secret-place" not in path.read_bytes(), path.name
    assert json.loads(Path("out/adapter_config.json").read_text())["base_model_name_or_path"] == "tiny-moe"


def test_a_dry_run_copies_no_gguf(base, tuned, work, capsys, monkeypatch):
    make_run(base, name="runs/local")
    before = sorted(work.rglob("*"))
    ran = Remoe(capsys, monkeypatch)(
        "push", "local", "--as", "gguf", "--gguf", tuned, "--to", "out", "--dry-run", "--json"
    )
    assert ran.code == 0 and json.loads(ran.out)["files"]["tuned.gguf"] == tuned.stat().st_size
    assert sorted(work.rglob("*")) == before


def test_a_gguf_with_the_bases_gates_is_refused_with_the_command_that_patches_it(
    base, tuned, work, capsys, monkeypatch
):
    make_run(base, name="runs/local")
    ran = Remoe(capsys, monkeypatch)("push", "local", "--as", "gguf", "--gguf", "plain.gguf", "--to", "out")
    refused(
        ran, "holds the base's gates, not the tuned ones", "remoe apply runs/local plain.gguf --out plain-tuned.gguf"
    )
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--as", "overlay"], "beside a delta goes peft or gguf, not overlay"), (["--as", "gguf"], "--gguf FILE, a GGUF with"),
     (["--gguf", "x.gguf"], "--gguf FILE, a GGUF with"), (["--as", "peft", "--gguf", "x.gguf"], "go together")],
    ids=str,
)  # fmt: skip
def test_forms_that_cannot_be_pushed_are_wrong_usage(base, work, capsys, monkeypatch, arguments, words):
    make_run(base)
    ran = Remoe(capsys, monkeypatch)("push", "a-run", *arguments, "--to", "out")
    refused(ran, words)
    assert ran.code == UsageError.exit_code and not Path("out").exists()


def test_a_pull_names_the_forms_there_are(work, capsys, monkeypatch):
    ran = Remoe(capsys, monkeypatch)("pull", "me/x", "--as", "copy")
    refused(ran, "beside a delta lies peft or gguf, not copy")
    assert ran.code == UsageError.exit_code


def test_an_adapter_of_other_gates_is_not_pulled(hub, remoe, run, base, work):
    assert remoe("push", "a-run", "me/swapped", "--as", "peft")[0] == 0
    files = dict(hub.files("model", "me/swapped"))
    gates = {name: gate + 1 for name, gate in Delta.load(run.delta).tensors.items()}
    other = Delta.of(Checkpoint.open(base), gates, "remoe", {})
    adapter = peft_adapter(other, Checkpoint.open(base), work / "other") / "adapter_model.safetensors"
    hub.add("model", "me/swapped", {**files, adapter.name: adapter.read_bytes()})
    code, _, err = remoe("pull", "me/swapped", "--as", "peft")
    assert code == 1 and "the adapter in me/swapped does not hold the gates" in err and not (work / "swapped").exists()
