"""Uploads with the real huggingface_hub, in processes of their own, against the loopback Hub."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_client import TOKEN
from loopback_hub import Account, Fault, LoopbackHub
from safetensors.numpy import save
from test_hub import ask, ask_and_listen, NEEDED

from remoe_cli.errors import UsageError
from remoe_cli.hub.upload import push_folder, target_of


@pytest.fixture
def delta(tmp_path):
    folder = tmp_path / "delta"
    (folder / "sub").mkdir(parents=True)
    (folder / "gates.safetensors").write_bytes(save({"gate": np.ones((8, 16), np.float32)}))
    (folder / "README.md").write_text("---\nlibrary_name: remoe\n---\n# card")
    (folder / "sub" / "report.json").write_text("{}")
    (folder / ".scratch").write_text("not to be pushed")
    return folder


def push(folder, repo=None, **options):
    target = f"target_of({repo!r}, 'DeepSeek-V2-Lite', {options.get('dry_run', False)})"
    shown = ", ".join(f"{name}={value!r}" for name, value in {**options, "message": "gates"}.items())
    return f"push_folder(Path({str(folder)!r}), {target}, {shown})"


def test_push_makes_one_commit_and_a_second_of_the_same_makes_none(hub, home, delta):
    first, second = ask(hub, home, push(delta, "ada/moe"), push(delta, "ada/moe"), token=TOKEN)
    repo = hub.repos["model", "ada/moe"]
    assert first["new"] and not second["new"] and first["commit"] == second["commit"] == repo.refs["main"]
    assert first["url"] == f"{hub.url}/ada/moe" and len(repo.commits) == 2  # the Hub's own first one, and ours
    pushed = {name: data for name, data in hub.files("model", "ada/moe").items() if name != ".gitattributes"}
    names = ["README.md", "gates.safetensors", "sub/report.json"]
    assert pushed == {name: (delta / name).read_bytes() for name in names} and first["files"] == names
    (delta / "sub" / "report.json").write_text('{"changed": true}')
    (third,) = ask(hub, home, push(delta, "ada/moe"), token=TOKEN)
    assert third["new"] and len(repo.commits) == 3
    assert hub.files("model", "ada/moe")["sub/report.json"] == b'{"changed": true}'


def test_the_default_name_is_the_bases_under_the_tokens_account(hub, home, delta):
    (got,) = ask(hub, home, push(delta), token=TOKEN)
    assert got["repo"] == "ada/DeepSeek-V2-Lite-remoe" and got["url"].endswith("/ada/DeepSeek-V2-Lite-remoe")
    assert ("model", "ada/DeepSeek-V2-Lite-remoe") in hub.repos


def test_private_is_private_from_the_start_and_never_lands_in_public(hub, home, delta):
    hub.add("model", "ada/open", {"README.md": b""})
    calls = [push(delta, name, private=True) for name in ("ada/x", "ada/open")]
    made, refused = ask(hub, home, *calls, token=TOKEN)
    assert made["new"] and hub.repos["model", "ada/x"].private
    assert refused["error"] == "HubError" and "is public" in refused["message"] and "--private" in refused["hint"]
    assert set(hub.files("model", "ada/open")) == {"README.md"}


def test_no_token_means_no_request(hub, home, delta):
    refused, dry = ask(hub, home, push(delta), push(delta, "ada/x", dry_run=True))
    assert refused["error"] == "HubError" and "no Hugging Face token is set" in refused["message"]
    assert "hf auth login" in refused["hint"] and "HF_TOKEN" in refused["hint"]
    assert dry["repo"] == "ada/x" and dry["commit"] is None and len(dry["files"]) == 3
    assert hub.log == []


def test_a_dry_run_asks_who_and_writes_nothing(hub, home, delta):
    (dry,) = ask(hub, home, push(delta, dry_run=True), token=TOKEN)
    assert dry["repo"] == "ada/DeepSeek-V2-Lite-remoe" and not dry["new"]
    assert hub.log == ["GET /api/whoami-v2"] and hub.repos == {}


def test_each_refusal_of_a_push_has_its_own_words(hub, home, delta):
    hub.add("model", "org/theirs", {"README.md": b""})
    hub.accounts["hf_reader"] = Account("bob", write=False)
    hub.faults = [Fault("POST /api/repos/create", 500, times=1)]
    failing, theirs = ask(hub, home, push(delta, "ada/x"), push(delta, "org/theirs"), token=TOKEN)
    (reader,) = ask(hub, home, push(delta), token="hf_reader")
    (unknown,) = ask(hub, home, push(delta), token="hf_unknown")
    expected = [
        ("failed with status 500", "in a few minutes"),
        ("do not have write access to org/theirs", "hf auth login"),
        ("may not make bob/DeepSeek-V2-Lite-remoe (You do not have the rights to create", "remoe push RUN YOU/NAME"),
        ("does not accept the token in HF_TOKEN", "unset HF_TOKEN"),
    ]
    for answer, (message, hint) in zip((failing, theirs, reader, unknown), expected, strict=True):
        assert answer["error"] == "HubError" and message in answer["message"] and hint in answer["hint"], answer


def test_an_empty_folder_or_a_revision_is_not_pushed(tmp_path, delta):
    with pytest.raises(UsageError, match="nothing to push"):
        push_folder(tmp_path / "none", "ada/x", message="m")
    with pytest.raises(UsageError, match="names a branch"):
        target_of("ada/x@main", "b")


@pytest.mark.parametrize("name", ["", "a/b/c", "bad name/x", "ada/", "/x", "ada/a--b", "ada/a..b", "größe/x", "./x"])
def test_a_repository_to_push_to_is_user_and_name(name):
    with pytest.raises(UsageError, match="a repository is user/name"):
        target_of(name, "b")


@pytest.mark.parametrize("branch", ["", " ", "a b", "a\nb", "a..b", "a\x7f", "a~1"])
def test_a_branch_that_cannot_be_is_refused_before_anything_is_made(hub, home, delta, branch):
    (got,) = ask(hub, home, push(delta, "ada/x", revision=branch), token=TOKEN)
    assert got["error"] == "UsageError" and "--revision is a branch" in got["message"]
    assert hub.log == [] and hub.repos == {}


def test_a_refused_private_push_makes_no_branch(hub, home, delta):
    hub.add("model", "ada/open", {"README.md": b""})
    (got,) = ask(hub, home, push(delta, "ada/open", private=True, revision="exp"), token=TOKEN)
    assert "is public" in got["message"] and set(hub.repos["model", "ada/open"].refs) == {"main"}


def test_the_first_push_to_a_new_branch_is_new_also_with_the_content_of_main(hub, home, delta):
    calls = [push(delta, "ada/x"), push(delta, "ada/x", revision="v2"), push(delta, "ada/x", revision="v2")]
    main, first, second = ask(hub, home, *calls, token=TOKEN)
    assert (main["new"], first["new"], second["new"]) == (True, True, False)
    assert first["commit"] == main["commit"] == hub.repos["model", "ada/x"].refs["v2"]
    assert (main["revision"], first["revision"]) == (None, "v2")


def test_a_former_deltas_report_goes_with_it(hub, home, delta):
    (delta / "report.json").write_text('{"of": "the former gates"}')
    hub.add("model", "ada/x", {"notes.md": b"the user's own"})
    ask(hub, home, push(delta, "ada/x"), token=TOKEN)
    assert {"report.json", "notes.md"} <= set(hub.files("model", "ada/x"))
    (delta / "report.json").unlink()
    gone, again = ask(hub, home, push(delta, "ada/x"), push(delta, "ada/x"), token=TOKEN)
    assert gone["new"] and not again["new"]
    files = hub.files("model", "ada/x")
    assert "report.json" not in files and {"notes.md", "sub/report.json"} <= set(files)


def test_a_push_shows_no_bars_but_says_what_is_large(hub, home, delta):
    edit = f"Path({str(delta / 'README.md')!r}).write_text('# another card')"
    calls = [push(delta, "ada/small"), edit, push(delta, "ada/small")]  # the second time the gates are there already
    (*_, second), stderr = ask_and_listen(hub, home, *calls, token=TOKEN)
    assert second["new"] and stderr == ""
    with open(delta / "gates.safetensors", "ab") as stream:
        stream.truncate(60_000_000)
    _, stderr = ask_and_listen(hub, home, push(delta, "ada/large"), token=TOKEN)
    assert stderr == "Uploading 60 MB to ada/large\n"


# The server by itself, as the end-to-end tests start it


def test_the_server_runs_from_a_folder_and_keeps_what_is_pushed(tmp_path, delta):
    model = tmp_path / "root/models/org/moe"
    model.mkdir(parents=True)
    for name, data in NEEDED.items():
        (model / name).write_bytes(data)
    command = [sys.executable, str(Path(__file__).with_name("loopback_hub.py")), "--root", str(tmp_path / "root")]
    with subprocess.Popen([*command, "--account", f"ada:{TOKEN}"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            calls = ["resolve('org/moe')", push(delta, "ada/x")]
            got, pushed = ask(LoopbackHub(), tmp_path / "home", *calls, token=TOKEN, HF_ENDPOINT=url)
        finally:
            server.terminate()
    assert len(got["commit"]) == 40 and pushed["new"]
    kept = tmp_path / "root/models/ada/x/gates.safetensors"
    assert kept.read_bytes() == (delta / "gates.safetensors").read_bytes()
