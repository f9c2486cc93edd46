"""Downloads and uploads with the real huggingface_hub, in processes of their own, against the loopback Hub."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_client import Client
from loopback_hub import Account, Fault, LoopbackHub
from safetensors.numpy import save

from remoe_cli import demo
from remoe_cli.errors import HubError, UsageError
from remoe_cli.hub.resolve import fetch_config, resolve, split
from remoe_cli.hub.upload import push_folder

TOKEN = "hf_a-secret-of-this-test"
SHARDS = {f"model-0000{i}-of-00002.safetensors": save({f"w{i}": np.full((4, 64), i, np.float32)}) for i in (1, 2)}
INDEX = json.dumps({"metadata": {}, "weight_map": {f"w{i}": name for i, name in enumerate(SHARDS, 1)}}).encode()
NEEDED = {
    "config.json": b'{"model_type": "deepseek_v2"}',
    "tokenizer.json": b"{}",
    "tokenizer.model": b"sentencepiece",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": INDEX,
    **SHARDS,
}
USELESS = {
    "pytorch_model.bin": b"pickle",
    "model.Q4.gguf": b"GGUF",
    "consolidated.safetensors": save({"again": np.zeros(3, np.float32)}),
    "original/model.safetensors": save({"again": np.zeros(3, np.float32)}),
    "README.md": b"# a card",
}


@pytest.fixture
def hub():
    with LoopbackHub() as server:
        server.accounts[TOKEN] = Account("ada", granted=("org/gated-open",))
        yield server


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def ask(hub, home, *calls, **env):
    """What each call returned (a dataclass as its fields) or the error's words."""
    return ask_and_listen(hub, home, *calls, **env)[0]


def ask_and_listen(hub, home, *calls, token=None, **env):
    """The same, and stderr. The token never stands on either stream."""
    client = Client(hub, home, token, **env)
    try:
        return [client(call) for call in calls], client.stderr()
    finally:
        client.close()


def fetched(hub):
    return {entry.rsplit("/", 1)[1] for entry in hub.log if entry.startswith("GET") and "/resolve/" in entry}


# Download


def test_only_the_models_own_files_come_and_the_commit_is_pinned(hub, home):
    sha = hub.add("model", "org/moe", NEEDED | USELESS)
    (got,), stderr = ask_and_listen(hub, home, "resolve('org/moe')")
    assert (got["commit"], got["id"]) == (sha, "org/moe")
    assert Path(got["folder"]) == home / "hub/models--org--moe/snapshots" / sha
    assert {p.name: p.read_bytes() for p in Path(got["folder"]).rglob("*") if p.is_file()} == NEEDED
    assert fetched(hub) == set(NEEDED)
    assert f"Downloading org/moe@{sha[:8]}: 2 weight files" in stderr
    assert re.search(r"(?m)^download .* GB  eta \d+:\d\d  .* MB/s$", stderr), "a log shows how far it is"


def test_a_single_weight_file_needs_no_index(hub, home):
    hub.add("model", "org/one", {"config.json": b"{}", "model.safetensors": SHARDS["model-00001-of-00002.safetensors"]})
    (got,) = ask(hub, home, "sorted(resolve('org/one').tensors)")
    assert got == ["w1"]


def test_a_revision_is_a_branch_or_a_commit(hub, home):
    old = hub.add("model", "org/moe", {"config.json": b'{"v": 1}'})
    branch = hub.add("model", "org/moe", {"config.json": b'{"v": 2}'}, branch="refs/pr/1")
    new = hub.add("model", "org/moe", {"config.json": b'{"v": 3}'})
    names = ("org/moe", f"org/moe@{old}", "org/moe@refs/pr/1")
    got = ask(hub, home, *(f"fetch_config({name!r})" for name in names))
    assert [(g["commit"], g["config"]["v"], g["id"]) for g in got] == [
        (new, 3, "org/moe"),
        (old, 1, "org/moe"),
        (branch, 2, "org/moe"),
    ]


def test_the_config_alone_can_be_looked_at_first(hub, home):
    hub.add("model", "org/moe", NEEDED)
    (got,) = ask(hub, home, "fetch_config('org/moe')")
    assert got["config"] == {"model_type": "deepseek_v2"}
    assert fetched(hub) == {"config.json"}


def test_what_is_cached_is_not_fetched_again(hub, home):
    hub.add("model", "org/moe", NEEDED)
    ask(hub, home, "resolve('org/moe')")
    hub.log.clear()
    (got,), stderr = ask_and_listen(hub, home, "resolve('org/moe')")
    assert "error" not in got and fetched(hub) == set() and "Downloading" not in stderr


def test_a_cached_model_serves_without_the_hub(hub, home):
    sha = hub.add("model", "org/moe", NEEDED)
    ask(hub, home, "resolve('org/moe')")
    (offline,) = ask(hub, home, "resolve('org/moe')", HF_HUB_OFFLINE="1")
    (down,) = ask(hub, home, "resolve('org/moe')", HF_ENDPOINT="http://127.0.0.1:9")
    hub.faults = [Fault(".", 503)]
    (failing,) = ask(hub, home, "resolve('org/moe')")
    assert [answer.get("commit") for answer in (offline, down, failing)] == [sha] * 3


def test_every_failure_has_its_own_words_and_next_command(hub, home):
    hub.add("model", "org/moe", NEEDED)
    hub.add("model", "org/half", NEEDED)
    hub.add("model", "org/bin", {"config.json": b"{}", "pytorch_model.bin": b"x", "tf_model.h5": b"x"})
    hub.add("model", "org/empty", {"config.json": b"{}"})
    hub.add("model", "org/gguf", {"a.gguf": b"GGUF"})
    hub.add("model", "org/limited", NEEDED)
    for name in ("gated", "gated-open", "closed"):
        hub.add("model", f"org/{name}", NEEDED)
    hub.repos["model", "org/gated"].gated = hub.repos["model", "org/gated-open"].gated = True
    hub.repos["model", "org/closed"].private = True
    hub.faults = [
        Fault("/limited", 429),
        Fault("/api/models/org/down", 503),
        Fault("/half/resolve/.*00002-of", 521),  # a status that the client does not retry for half a minute
    ]
    ask(hub, home, f"hf_hub_download('org/half', {next(iter(SHARDS))!r})")
    names = ("none", "closed", "gated", "moe@v9", "down", "half", "bin", "empty", "gguf", "limited")
    without = ask(hub, home, *(f"resolve('org/{name}')" for name in names))
    with_token = ask(hub, home, *(f"resolve('org/{n}')" for n in ("none", "gated", "gated-open")), token=TOKEN)
    bad_token = ask(hub, home, "resolve('org/moe')", token="hf_wrong")
    offline = ask(hub, home, "resolve('org/moe')", "resolve('org/half')", HF_HUB_OFFLINE="1")
    nowhere = ask(hub, home, "resolve('org/moe')", HF_ENDPOINT="http://127.0.0.1:9")
    assert with_token.pop()["id"] == "org/gated-open"

    expected = [
        ("no folder ./org/none, and there is no public model org/none", "hf auth login"),
        ("no folder ./org/closed, and there is no public model org/closed", "hf auth login"),
        ("org/gated is gated, and no token is set", "then: hf auth login"),
        ("org/moe has no revision 'v9'", "/commits/main"),
        ("failed with status 503", "in a few minutes"),
        ("failed with status 521", "in a few minutes"),
        ("only pytorch_model.bin; remoe reads safetensors only", "org/bin@REVISION"),
        ("no weights at all", "save_pretrained"),
        ("has no config.json", "/org/gguf"),
        ("limits the rate", "in a few minutes"),
        ("no model org/none on", "check the name"),
        ("account of your token may not read it", "accept its terms"),
        ("does not accept the token in HF_TOKEN", "unset HF_TOKEN && hf auth login"),
        ("HF_HUB_OFFLINE is set and model org/moe is not in the cache", "HF_HUB_OFFLINE=0 hf download org/moe"),
        ("holds 1 of 2 weight files of org/half", "HF_HUB_OFFLINE=0 hf download org/half"),
        ("cannot reach http://127.0.0.1:9", "once the network is up"),
    ]
    answers = [*without, *with_token, *bad_token, *offline, *nowhere]
    assert len(answers) == len(expected)
    for answer, (message, hint) in zip(answers, expected, strict=True):
        assert answer["error"] == "HubError"
        assert message in answer["message"] and "\n" not in answer["message"], answer
        assert hint in answer["hint"], answer
    assert len({answer["message"] for answer in answers}) == len(answers)


def test_a_cut_connection_is_resumed_and_nothing_partial_keeps_its_name(hub, home):
    big = save({"w": np.arange(300_000, dtype=np.float32)})
    sha = hub.add("model", "org/moe", {"config.json": b"{}", "model.safetensors": big})
    hub.faults = [Fault("GET .*model.safetensors", keep=1000, times=1)]
    (got,) = ask(hub, home, "resolve('org/moe')")
    assert got["commit"] == sha and (Path(got["folder"]) / "model.safetensors").read_bytes() == big
    assert not list(home.rglob("*.incomplete"))


def test_a_damaged_cached_file_is_named(hub, home):
    hub.add("model", "org/moe", NEEDED)
    (got,) = ask(hub, home, "resolve('org/moe')")
    shard = Path(got["folder"]) / next(iter(SHARDS))
    os.truncate(shard.resolve(), 50)
    (again,) = ask(hub, home, "resolve('org/moe')")
    assert "is damaged: it holds 50 bytes" in again["message"] and "--force-download" in again["hint"]


def test_a_small_damaged_cached_file_is_fetched_again(hub, home):
    hub.add("model", "org/moe", NEEDED)
    client = Client(hub, home)
    folder = Path(client("resolve('org/moe')")["folder"])
    for name in ("config.json", "tokenizer.json"):
        (folder / name).resolve().write_bytes(b"{broken")
    assert client("resolve('org/moe')")["config"] == {"model_type": "deepseek_v2"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == NEEDED
    client.close()


def test_a_model_larger_than_the_disk_is_refused_before_the_first_byte(hub, home):
    hub.add("model", "org/moe", NEEDED)
    hub.sizes[next(iter(SHARDS))] = 10**18
    (got,) = ask(hub, home, "resolve('org/moe')")
    assert "needs 1000000000.0 GB more" in got["message"] and "HF_HOME=" in got["hint"]
    assert not fetched(hub) & set(SHARDS)


def test_a_cache_that_cannot_be_written(hub, tmp_path):
    hub.add("model", "org/moe", NEEDED)
    (tmp_path / "file").write_text("in the way")
    (got,) = ask(hub, tmp_path / "file", "resolve('org/moe')")
    assert got["error"] == "HubError" and "cannot be written" in got["message"] and "HF_HOME=" in got["hint"]


def test_a_missing_shard_on_the_hub_is_named(hub, home):
    hub.add("model", "org/moe", {name: data for name, data in NEEDED.items() if "00002-of" not in name})
    (got,) = ask(hub, home, "resolve('org/moe')")
    assert got["error"] == "CheckpointError" and "model-00002-of-00002.safetensors" in got["message"]


def test_a_small_repository_comes_whole(hub, home):
    files = {"gates.safetensors": b"x" * 100, "remoe.json": b"{}", "README.md": b"# card"}
    sha = hub.add("model", "ada/delta", files)
    ((folder, commit),) = ask(
        hub, home, "fetch_repository('ada/delta', ('remoe.json', 'gates.safetensors'), ('README.md',))"
    )
    assert commit == sha and {p.name: p.read_bytes() for p in Path(folder).iterdir()} == files


# Local


def test_a_local_folder_needs_no_hub(tmp_path):
    for name, data in NEEDED.items():
        (tmp_path / name).write_bytes(data)
    found = fetch_config(str(tmp_path))
    assert found.config == {"model_type": "deepseek_v2"} and found.commit is None
    checkpoint = resolve(str(tmp_path))
    assert checkpoint.folder == tmp_path and checkpoint.id == str(tmp_path) and set(checkpoint.tensors) == {"w1", "w2"}
    assert resolve(found) == checkpoint


def test_a_folder_without_a_config_and_a_file_are_named(tmp_path):
    from remoe_cli.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        resolve(str(tmp_path))
    with pytest.raises(HubError, match="is a file; a model is a folder"):
        resolve(str(tmp_path / "config.json"))


@pytest.mark.parametrize("name", ["./nowhere", "/no/such", "a/b/c", "org/", "org/na me", "org/x@", "org/..", "a--b/c"])
def test_what_can_only_be_a_path_is_not_asked_of_the_hub(name):
    with pytest.raises(HubError, match="there is no folder"):
        resolve(name)


def test_ids_split_at_the_revision():
    assert split("org/name") == ("org/name", None)
    assert split("org/name@refs/pr/3") == ("org/name", "refs/pr/3")
    assert split("gpt2@main") == ("gpt2", "main")


@pytest.mark.skipif(not (demo.PATH / "config.json").is_file(), reason="the demo checkpoint is not made yet")
def test_demo_is_the_embedded_checkpoint():
    found = fetch_config("demo")
    assert (found.id, found.commit, found.folder) == ("demo", None, demo.PATH)
    assert found.config["model_type"] == "deepseek_v2"


# Upload


@pytest.fixture
def delta(tmp_path):
    folder = tmp_path / "delta"
    (folder / "sub").mkdir(parents=True)
    (folder / "gates.safetensors").write_bytes(save({"gate": np.ones((8, 16), np.float32)}))
    (folder / "README.md").write_text("---\nlibrary_name: remoe\n---\n# card")
    (folder / "sub" / "report.json").write_text("{}")
    (folder / ".scratch").write_text("not to be pushed")
    return folder


def push(folder, *args, **options):
    named = {**options, "base_name": "DeepSeek-V2-Lite", "message": "gates"}
    shown = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in named.items())])
    return f"push_folder(Path({str(folder)!r}), {shown})"


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
        push_folder(tmp_path / "none", "ada/x", base_name="b", message="m")
    with pytest.raises(UsageError, match="names a branch"):
        push_folder(delta, "ada/x@main", base_name="b", message="m")


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
