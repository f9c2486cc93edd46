"""remoe plan --for decode: its memory is the decoder's own, its times the arithmetic of measured rates, from headers alone."""

import json
import shutil

import pytest
import tiny_models
import torch
from commands import refused, report_of
from hub_client import Client, TOKEN
from loopback_hub import Account, Fault, LoopbackHub

from remoe_cli import memory, plan_decode
from remoe_cli.errors import MemoryShortError
from remoe_cli.families.loader import experts_on_disk
from remoe_cli.hub.checkpoint import Checkpoint, INDEX
from remoe_cli.offload import budget, OffloadedDecoder
from remoe_cli.offload.layout import Layout
from remoe_cli.offload.settings import Settings
from remoe_cli.offload.tiers import host_bytes
from remoe_cli.plan_decode import Measured
from remoe_cli.report.known_misses import known
from remoe_cli.report.renderers.plan_decode import summary
from remoe_cli.sizes import show_size
from remoe_cli.train import rates

PLAN = "__import__('remoe_cli.plan_decode', fromlist=['x']).plan"
KNOWN = "__import__('remoe_cli.hub.known_deltas', fromlist=['x']).known_deltas"
LAYERS, MOE, EXPERTS, TOP_K = 3, 2, 8, 2  # of the tiny deepseek_v2
CARD = "---\ntags: [remoe]\nbase_model: {}\nbase_model_relation: adapter\n---\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(rates, "SECONDS", 0.02)
    monkeypatch.setattr(rates, "_STAND_IN", 2 * rates._READ)
    monkeypatch.setattr(rates, "_COPY", 1 << 20)
    monkeypatch.setattr(rates, "_PRODUCT", 1 << 16)


@pytest.fixture
def rated(monkeypatch):
    """A machine that reads 1 to 2 MB/s, goes through .5 to 1 GB of weights a second, 1 to 2 ms a layer, with 16 GB of memory."""
    monkeypatch.setattr(
        plan_decode, "_measure", lambda *_: Measured([1e6, 1.5e6, 2e6], "direct", None, [5e8, 1e9], [2e-3, 1e-3])
    )
    monkeypatch.setattr(memory, "available", lambda: memory.Room(16 * 10**9, "the machine"))


def planned(remoe, *arguments) -> dict:
    return report_of(remoe("plan", *arguments, "--for", "decode", "--json"))


def test_the_rows_are_arithmetic_of_the_rates(folders, remoe, rated):
    folder = folders("deepseek_v2", torch.bfloat16)
    found = planned(remoe, folder)
    checkpoint = Checkpoint.open(folder)
    one = sum(piece.nbytes for piece in experts_on_disk(checkpoint)[0].pieces(0))
    elsewhere = sum(info.nbytes for info in checkpoint.tensors.values()) - MOE * EXPERTS * one
    assert (found["expert_bytes"], found["outside_bytes"], found["dtype"]) == (one, elsewhere, "bfloat16")
    assert [row["capacity"] for row in found["rows"]] == [2, 4, 8] and found["memory"][0]["capacity"] == EXPERTS
    config, near = checkpoint.config, known("deepseek_v2", 32, EXPERTS, MOE)
    table = (
        config["vocab_size"] * config["hidden_size"] * 2
    )  # one row of it is read a token; the head's is another tensor
    for row in found["rows"]:
        least, most = near.hits(row["capacity"], EXPERTS, TOP_K)
        few, many = (MOE * TOP_K * (1 - hit) for hit in (most, least))
        rest, experts = (elsewhere - table) / 1e9 + LAYERS * 1e-3, MOE * TOP_K * one / 1e9  # twice that at the worst
        assert row["hit"] == [most, least] and row["misses_a_token"] == [few, many]
        assert row["mb_a_token"] == pytest.approx([few * one / 1e6, many * one / 1e6])
        times = [rest + max(experts, few * one / 2e6), 2 * (rest + experts) + many * one / 1e6]
        assert row["tpot_ms"] == pytest.approx([1e3 * time for time in times])
    assert found["next"] == f"remoe decode {folder} --cache 8" and found["refusal"] is None


def test_a_copy_to_the_device_bounds_the_loads(folders):
    found = plan_decode._row
    model = plan_decode._Model(_Shape(), 3, 2, 8, 2, 32, 0)
    slow, fast = (
        found(model, (0.5, 0.5), 2, "cpu", Measured([1e6, 2e6], "direct", link, [1e12], [0.0]))["tpot_ms"]
        for link in (5e5, None)
    )
    assert slow == pytest.approx([2 * 1e6 / 5e5 * 1e3] * 2, rel=1e-4)
    assert fast == pytest.approx([1e3, 2e3], rel=1e-4)


class _Shape(plan_decode.Shape):
    """Experts of 1 MB and nothing else."""

    def __new__(cls):
        return super().__new__(cls, 10**6, 0, torch.bfloat16, 10**6, 0, 0, 0)


@pytest.mark.parametrize("family", ["deepseek_v2", "mixtral"])
def test_the_memory_is_what_a_decoder_is_refused_below(folders, monkeypatch, rated, family):
    folder = folders(family, torch.bfloat16)
    rows = {row["capacity"]: row["memory"] for row in plan_decode.plan(str(folder), tokens=40)["rows"]}
    capacity = sorted(rows)[1]
    checkpoint = Checkpoint.open(folder)
    for room, fits in ((rows[capacity], True), (rows[capacity] - 1, False)):
        monkeypatch.setattr(memory, "available", lambda room=room: memory.Room(room, "the machine"))
        if fits:
            OffloadedDecoder(checkpoint, capacity, tokens=40).close()
        else:
            with pytest.raises(MemoryShortError):
                OffloadedDecoder(checkpoint, capacity, tokens=40)


def test_on_a_gpu_the_slots_lie_there(folders, monkeypatch, rated):
    """Without one: float32 weights become bfloat16, and what loads pass through is not on it."""
    folder = folders("mixtral")
    for name in ("pick_device", "device_name"):
        monkeypatch.setattr(plan_decode, name, lambda _: "cuda")
    monkeypatch.setattr(memory, "gpu", lambda _: memory.Room(10**9, "the GPU"))
    needed = {row["capacity"]: row["memory"] for row in plan_decode.plan(str(folder), tokens=40)["rows"]}[8]
    checkpoint = Checkpoint.open(folder)
    layers = experts_on_disk(checkpoint)
    layout = Layout(layers, torch.bfloat16, direct=True)

    def require(nbytes: int) -> None:
        monkeypatch.setattr(memory, "gpu", lambda _: memory.Room(nbytes, "the GPU"))
        budget.require(
            checkpoint, layers, torch.bfloat16, "cuda", 8, row_bytes=layout.slot_bytes, rows=lambda _: 0, ram=0,
            top_k=TOP_K, host=host_bytes(layout, Settings().readers, torch.device("cpu")), tokens=40,
        )  # fmt: skip

    require(needed)
    with pytest.raises(MemoryShortError, match="the GPU has"):
        require(needed - 1)


def test_several_memories_in_one_table(folders, remoe, rated):
    folder = folders("deepseek_v2")
    needed = {row["capacity"]: row["memory"] for row in planned(remoe, folder)["rows"]}
    sizes = f"{needed[4] - 1}B,{needed[8]}B,{needed[2] - 1}B"
    found = planned(remoe, folder, "--memory", sizes)
    assert [room["capacity"] for room in found["memory"]] == [3, 8, None]
    assert [row["capacity"] for row in found["rows"]] == [2, 3, 4, 8]
    assert found["next"].endswith("--cache 8")
    text = remoe("plan", folder, "--for", "decode", "--memory", sizes).out
    assert "Too little for the experts of one token: " in text
    rows = {line.split()[0]: line for line in text.splitlines() if line[:2].strip().isdigit()}
    assert list(rows) == ["2", "3", "4", "8"]
    assert rows["3"].endswith(show_size(needed[4] - 1)) and rows["8"].endswith(show_size(needed[8]))
    assert len(rows["2"]) == len(rows["4"]) < len(rows["3"]) == len(rows["8"])


def test_what_fits_nowhere_is_refused_with_what_would(folders, remoe, rated):
    folder = folders("deepseek_v2")
    least = planned(remoe, folder)["rows"][0]["memory"]
    ran = remoe("plan", folder, "--for", "decode", "--memory", f"{least - 1}B")
    error = ran.err.splitlines()[-1]
    assert ran.code == 1 and "Next:" not in ran.out and " with 2 slots a layer, the least, needs " in error
    hint = error.split("Try: remoe ")[1].split()
    assert remoe(*hint).code == 0
    # more of a request, more memory
    longer = planned(remoe, folder, "--tokens", "64")["rows"][0]["memory"]
    assert (
        least
        > longer
        == planned(remoe, folder, "--tokens", "32")["rows"][0]["memory"]
        + 32 * (budget.request_bytes(Checkpoint.open(folder).config, torch.float32, 1))
    )


def test_without_memory_for_it_this_machine_is_named(folders, remoe, monkeypatch, rated):
    monkeypatch.setattr(memory, "available", lambda: memory.Room(10**6, "the memory cgroup /a"))
    ran = remoe("plan", folders("deepseek_v2"), "--for", "decode")
    assert ran.code == 1 and "needs " in ran.err and "; the memory cgroup /a has 1 MB." in ran.err


@pytest.mark.parametrize("family", ["deepseek_v2", "mixtral"])
def test_config_alone_tells_about_the_same(folders, remoe, rated, family, tmp_path):
    folder = folders(family, torch.bfloat16)
    (tmp_path / "bare").mkdir()
    for name in ("config.json", INDEX):
        shutil.copy(folder / name, tmp_path / "bare" / name)
    whole, bare = planned(remoe, folder), planned(remoe, "bare")
    assert bare["absent"] and not whole["absent"]
    for one, other in zip(whole["rows"], bare["rows"], strict=True):
        assert {**one, "memory": 0} == {**other, "memory": 0}, "slots are whole pages where files are here"
        assert one["memory"] == pytest.approx(other["memory"], rel=0.01)
    assert "From config.json alone (no weight file is here)" in remoe("plan", "bare", "--for", "decode").out
    config = json.loads((folder / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (tmp_path / "bare/config.json").write_text(json.dumps(config))
    refused(remoe("plan", "bare", "--for", "decode"), "nor does config.json name a dtype", "remoe inspect bare")


def test_the_words_for_a_person(remoe):
    ran = remoe("plan", "demo", "--for", "decode", "--memory", "170MB,1TB")
    assert ran.code == 0, ran.err
    for words in (
        "demo: 5 MoE layers of 64 experts, 6 a token", "An expert 36.9 kB, all 11.8 MB", "computed in bfloat16", "MB a token",
        " 170 MB", " 1,000 GB", "Measured here: disk ", "ms a layer", "Hits from traces of its family and shape: demo",
        "Assumed: ", "Here only ", "Tuned gates had 30-38 % fewer misses at C = 8-16: demo",
        "Deltas on the Hub: not asked (a folder does not say", "Next: remoe decode demo --cache 64",
    ):  # fmt: skip
        assert words in ran.out, ran.out
    assert "Measuring this machine" in ran.err
    table = ran.out.split("\n\n")[1].splitlines()
    assert table[0].split() == ["C", "memory", "hit", "MB", "a", "token", "tpot", "ms", "tokens/s", "most", "in"]
    assert max(map(len, table)) <= 80


def test_rates_are_measured(tmp_path):
    model = plan_decode._Model(_Shape(), 3, 2, 8, 2, 32, 0)
    found = plan_decode._measure(model, "cpu", tmp_path, [])
    assert len(found.disk) == 3 and found.disk == sorted(found.disk) and found.disk[0] > 0 and found.link is None
    assert len(found.weights) == len(found.layer_s) == 3 and 0 < found.weights[0] <= found.weights[-1] < 1e13
    assert 10 > found.layer_s[0] >= found.layer_s[-1] > 1e-5 and not [*tmp_path.iterdir()]


def test_weights_over_time(monkeypatch):
    seconds = iter(range(10**6))
    monkeypatch.setattr(rates, "perf_counter", lambda: next(seconds))
    # 16 products of 1 << 16 bytes, once between the first look at the clock and the third
    assert rates.weight_rates(32, torch.float32, "cpu", 4.0, 2) == [(1 << 20) / 3] * 2


def test_a_hub_model_from_headers_and_what_is_known_of_it(tmp_path, made):
    folder = tiny_models.make("mixtral", tmp_path / "m", torch.bfloat16, vocab_size=20_000)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    report = {"cache": 3, "misses_change": -0.25}
    odd = {"commit": "0000", "report": {"cache": float("nan"), "hit_base": "a lot"}}
    with LoopbackHub() as hub:
        hub.accounts[TOKEN] = Account("me")
        sha = hub.add("model", "org/moe", {path.name: path.read_bytes() for path in folder.iterdir()})
        run = shutil.copytree(made / "run", tmp_path / "runs/a-run")
        facts = json.loads((run / "delta/remoe.json").read_text()) | {
            "base": "org/moe",
            "commit": sha,
            "report": report,
        }
        (run / "delta/remoe.json").write_text(json.dumps(facts))
        card = CARD.format("org/moe")
        hub.add("model", "you/old", {"README.md": card.encode(), "remoe.json": json.dumps(odd).encode()})
        hub.add("model", "you/empty", {"README.md": card.encode()})
        hub.add("model", "you/elses", {"README.md": CARD.format("org/other").encode()})
        hub.add("model", "you/lora", {"README.md": card.replace("remoe", "lora").encode()})
        client = Client(hub, tmp_path / "home", TOKEN)
        pushed = client(f"__import__('remoe_cli.push', fromlist=['x']).push({str(run)!r}, 'me/gates')")
        assert "error" not in pushed, pushed
        quick = "__import__('remoe_cli.train.rates', fromlist=['x'])"
        client(f"setattr({quick}, 'SECONDS', 0.02) or setattr({quick}, '_STAND_IN', 2 << 25)")
        hub.sent = 0
        found = client(f"{PLAN}('org/moe')")
        sent = hub.sent
        hub.faults.append(Fault("GET /api/models$", 500))
        failed = client(f"{KNOWN}('org/moe', None)")
        hub.faults.append(Fault("GET ", 500))
        gone = client(f"{PLAN}('org/moe')")
        client.close()
    assert found["commit"] == sha and found["disk"]["needed"] == weights and sent < weights / 4
    deltas = {one["id"]: one for one in found["deltas"]["found"]}
    assert set(deltas) == {"me/gates", "you/old", "you/empty"}
    assert deltas["me/gates"]["report"] == report and deltas["you/old"]["report"] == {}
    assert [one["same_commit"] for _, one in sorted(deltas.items())] == [True, None, False]
    text = summary(found)
    assert "me/gates: misses -25.0 % at C = 3" in text and "you/old: of another revision" in text
    assert "To be downloaded to " in text and f"org/moe@{sha[:8]}: 3 MoE layers" in text
    assert "you/empty: it says nothing of its figures" in text
    assert (
        failed["error"] == "HubError" and "status 500" in failed["message"] and "deltas of org/moe" in failed["message"]
    )
    assert gone["deltas"] == {"found": None, "why": "the Hub is out of reach"}
    assert "Deltas on the Hub: not asked (the Hub is out of reach)" in summary(gone)
    assert "none is known; remoe finetune makes one" in summary({**found, "deltas": {"found": [], "why": ""}})


def test_a_disk_without_room_is_refused(monkeypatch, folders, rated):
    monkeypatch.setattr(plan_decode, "disk_room", lambda *_: {"folder": "/x", "needed": 10**9, "free": 10**9 - 1})
    done = plan_decode.plan(str(folders("mixtral")))
    assert "needs 1 GB more on the disk of /x" in done["refusal"]["message"] and done["next"] is None


def test_bad_input(folders, remoe, tmp_path):
    folder = folders("mixtral")
    for options, words in (
        (("--for", "decode", "--memory", "8 apples"), "--memory takes a size such as 8GB"),
        (("--for", "decode", "--memory", "8GB,"), "--memory takes a size"),
        (("--for", "decode", "--steps", "3"), "--steps is an option of --for finetune"),
        (("--for", "decode", "--set", "train.lr=1"), "--set is an option of --for finetune"),
        (("--for", "decode", "--device-memory", "8GB"), "--device-memory is an option of --for finetune"),
        (("--memory", "8GB"), "--memory is an option of --for decode"),
        (("--tokens", "8"), "--tokens is an option of --for decode"),
        (("--for", "decode", "--tokens", "9999999"), "was made for"),
        (("--for", "serve"), "--for is finetune or decode, not 'serve'"),
    ):
        ran = remoe("plan", folder, *options)
        refused(ran, words)
        assert ran.code == 2
    refused(remoe("plan", "no/such/folder", "--for", "decode"), "there is no folder no/such/folder")
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense/config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 4}))
    refused(remoe("plan", "dense", "--for", "decode"), "is a dense model")
