"""Downloads with the real huggingface_hub, in processes of their own, against the loopback Hub."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hub_client import Client, TOKEN
from loopback_hub import Fault
from safetensors.numpy import save

from remoe_cli import demo
from remoe_cli.errors import HubError
from remoe_cli.hub.resolve import fetch_config, resolve, split

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


def test_a_mirror_that_tells_no_sizes_still_serves(hub, home):
    sha = hub.add("model", "org/moe", NEEDED)
    hub.sizes = dict.fromkeys(NEEDED)
    (got, again), stderr = ask_and_listen(hub, home, "resolve('org/moe')", "resolve('org/moe')")
    assert got.get("commit") == again.get("commit") == sha, (got, again)
    assert {p.name: p.read_bytes() for p in Path(got["folder"]).iterdir()} == NEEDED
    assert "2 weight files, of unknown size, to" in stderr


def test_without_sizes_the_hash_still_tells(hub, home):
    hub.add("model", "org/moe", NEEDED)
    hub.sizes = dict.fromkeys(NEEDED)
    hub.faults = [Fault("GET .*00001-of.*", corrupt=True)]
    (got,) = ask(hub, home, "resolve('org/moe')")
    assert "another content than the Hub announces" in got["message"]


def test_a_delta_of_which_the_cache_lacks_the_gates(hub, home):
    hub.add("model", "ada/delta", {"gates.safetensors": b"x", "remoe.json": b"{}"})
    call = "fetch_repository('ada/delta', ('remoe.json', 'gates.safetensors'))"
    (folder, _), *_ = ask(hub, home, call)
    (Path(folder) / "gates.safetensors").unlink()
    (offline,) = ask(hub, home, call, HF_HUB_OFFLINE="1")
    (down,) = ask(hub, home, call, HF_ENDPOINT="http://127.0.0.1:9")
    assert "HF_HUB_OFFLINE is set and the cache" in offline["message"]
    assert offline["hint"] == "HF_HUB_OFFLINE=0 hf download ada/delta"
    for answer in (offline, down):
        assert "lacks gates.safetensors of ada/delta" in answer["message"]


def test_a_delta_that_is_nowhere_is_called_a_delta(hub, home):
    calls = [f"fetch_repository({name!r}, ('remoe.json',))" for name in ("org/nope", "a/b/c")]
    absent, no_id = ask(hub, home, *calls)
    assert "there is no public delta org/nope on" in absent["message"]
    assert "Hub id of a delta" in no_id["hint"]


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
