"""Errors below the commands that no other file provokes: what engines say of models, files and disks that cannot be used."""

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import refused
from safetensors.torch import save_file
from test_error_texts import raises

from remoe_cli.cache import choose
from remoe_cli.delta import forms
from remoe_cli.errors import (
    CacheError,
    CheckpointError,
    DataError,
    FamilyError,
    HubError,
    RunError,
    TraceError,
    TrainingError,
)
from remoe_cli.families import experts, loader, refuse
from remoe_cli.gguf import patch as gguf_patch
from remoe_cli.hub import failures, resolve, upload
from remoe_cli.measure import requests, rerouted
from remoe_cli.offload import store
from remoe_cli.report.stored import beside
from remoe_cli.routing import file, RoutingTrace
from remoe_cli.stream import passes
from remoe_cli.train import packing, ranks, tokens, trainer


def family(**values):
    return SimpleNamespace(family=SimpleNamespace(model_type="kind", **values))


def test_families_that_cannot_be_rerouted_or_streamed():
    with raises(FamilyError, "kind: its routing weights are no shares of its scores", "remoe reroute demo"):
        refuse.require_reroutable(family(reroutes=False))
    with raises(FamilyError, "kind: layers share their attention, so layers can't pass", "--stream off"):
        passes.require_streamable([family(entangled="layers share their attention")])


def test_layers_that_would_carry_a_state_over_borders():
    def model(attention, *kinds):
        return SimpleNamespace(
            config=SimpleNamespace(_attn_implementation=attention, layer_types=kinds, model_type="kind")
        )

    with raises(FamilyError, "kind: layers of the kind conv, recurrent may carry a state over borders"):
        packing.require_packable(model("sdpa", "recurrent", "conv"))
    with raises(FamilyError, "packed rows need attention of the kind", "not 'paged'"):
        packing.require_packable(model("paged"))


def test_experts_of_several_sizes():
    class Piece(tuple):
        nbytes = property(lambda self: self[2])

    layer = SimpleNamespace(layer=4, n_experts=2, pieces=lambda expert: [Piece(("file", 0, 100 + expert))])
    with raises(FamilyError, "expert 1 of layer 4 is stored in another size or dtype than the first"):
        store.one_expert_bytes([layer])


def test_tensors_that_fit_no_place():
    checkpoint = SimpleNamespace(id="m", tensors={})
    merge = SimpleNamespace(patterns=("up", "gate"), dim=0)
    with raises(FamilyError, "model.w is none of the tensors that make up experts.up"):
        experts._merged(checkpoint, {}, "experts.up", (8, 4), [("model.w", "down")], merge)
    model = torch.nn.Linear(2, 2)
    with raises(FamilyError, "m stores no weight of [2, 2]", "--set train.scope=gates+heads"):
        loader.on_disk(_Bare(model), checkpoint, {"weight": model.weight})


class _Bare(torch.nn.Module):
    """As transformers' models: a place for the loader's own renames, here none."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner, self.config = inner, SimpleNamespace(model_type="none")


def test_texts_that_are_too_short():
    with raises(DataError, "no held-out document has the 4 + 4 tokens of a request (the longest has 1)", "other texts"):
        requests.cut_requests([[1]], 2, 4, 4, other="other texts")
    with raises(DataError, "(the longest has 7)", "3 and 3"):
        requests.cut_requests([[1] * 7], 2, 4, 4, shorter=lambda prompt, steps: f"{prompt} and {steps}")


def test_routers_that_are_never_called():
    lonely = object.__new__(rerouted.Rerouter)
    lonely._gates, lonely._walked = [SimpleNamespace(layer=3)], {}
    with raises(FamilyError, "the routers of layers [3] did nothing in this pass"):
        lonely.take()


def test_traces_that_no_file_can_hold(tmp_path):
    ids = np.array([[[0, 1]], [[1, 2]]], dtype=np.int16)
    weights = np.array([[[1.0, np.inf]], [[0.5, 0.5]]], dtype=np.float16)
    trace = RoutingTrace(ids, np.array([0, 2]), np.zeros(2, dtype=bool), 4, weights=weights)
    with raises(TraceError, "t.trace was not written:", "finite"):
        file.write(trace, tmp_path / "t.trace")
    assert not (tmp_path / "t.trace").exists()


def test_a_trace_for_which_the_disk_has_no_room(remoe, made, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage._replace(free=10))
    asked = ("--requests", 1, "--prompt-tokens", 4, "--new-tokens", 2, "--out", "t.trace")
    ran = remoe("trace", made / "model", "--prompts", made / "texts.jsonl", *asked)
    refused(ran, "the trace needs", "has 10 bytes free", "fewer --requests")


def test_a_tokenizer_that_cannot_be_loaded(tmp_path):
    with raises(CheckpointError, "holds no tokenizer file", "copy the tokenizer's files"):
        tokens.load_tokenizer(SimpleNamespace(folder=tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with raises(CheckpointError, "has no tokenizer that transformers can load"):
        tokens.load_tokenizer(SimpleNamespace(folder=tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with raises(CheckpointError, "tokenizer.json cannot be read"):
        tokens.load_tokenizer(SimpleNamespace(folder=tmp_path))


def test_a_process_that_is_told_to_end():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with raises(TrainingError, "this process was told to end, as another one of the run did", "--resume"):
            ranks._ended(signal.SIGTERM, None)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RunError("the disk is full.", "df"), ("step 7: the disk is full (the gates of step 6 are kept).", "df")),
        (MemoryError(), ("step 7: out of memory; the gates of step 6 are kept.", "train.micro_batch=1")),
        (OSError(5, "Input/output error"), ("step 7: [Errno 5] Input/output error; the gates", "once that is mended")),
        (ValueError("odd\nand more"), ("step 7: ValueError: odd; the gates of step 6 are kept.", "--resume")),
    ],
)
def test_what_ends_training_is_told_with_its_step(error, words):
    told = str(trainer._stopped(error, 7, SimpleNamespace()))
    assert all(word in told for word in words)


def test_reports_that_cannot_be_set_beside_one_another():
    def report(base="m", capacities=(6,)):
        facts = {"id": base, "commit": None, "expert_bytes": 10, "moe_layers": 3}
        return {"base": facts, "conditions": {"capacities": list(capacities)}}

    with raises(RunError, "a is of the base m, b of n: compare runs of one base", "remoe report a"):
        beside([report(), report("n")], ["a", "b"])
    with raises(RunError, "a and b have no cache size in common", "--cache 6 of each"):
        beside([report(), report(capacities=(8,))], ["a", "b"])


def test_forms_of_packed_experts(remoe, made):
    model = made / "model"
    refused(remoe("pack", model, "--out", "p", "--experts", "int3"), "--experts is", "not 'int3'", "remoe pack")
    refused(remoe("pack", model, "--out", "p", "--experts", "int4", "--group", 7), "--group is", "not 7", "remoe pack")
    assert not Path("p").exists()


def test_packed_experts_of_a_later_format_or_not_whole(remoe, made):
    model = made / "model"
    assert remoe("pack", model, "--out", "p", "--force").code == 0
    facts = json.loads(Path("p/pack.json").read_text())
    Path("p/pack.json").write_text(json.dumps({**facts, "format": 99}))
    ran = remoe("decode", model, "--cache", 4, "--tokens", 1, "--pack", "p")
    refused(ran, "p is of the format 99; this version reads", "remoe pack")
    Path("p/pack.json").write_text(json.dumps(facts))
    largest = max(Path("p").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-4096])
    ran = remoe("decode", model, "--cache", 4, "--tokens", 1, "--pack", "p")
    refused(ran, "the packed experts are not whole", "bytes, not", "remoe pack")
    largest.unlink()
    refused(
        remoe("decode", model, "--cache", 4, "--tokens", 1, "--pack", "p"),
        "is missing: the packed experts are not whole",
    )


def test_plans_of_what_there_is_not(remoe, made):
    refused(remoe("plan", made / "model", "--for", "cooking"), "--for is", "not 'cooking'", "remoe plan")
    refused(remoe("plan", made / "model", "--ram", "much"), "--ram takes a size such as 8GB, not 'much'")


# The Hub's answers, and disks that lie


@pytest.fixture
def answer(monkeypatch):
    """answer(kind, status) is that error of the Hub's library."""
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)

    def make(kind, status):
        url = SimpleNamespace(path="/api/x")
        return kind("said", response=SimpleNamespace(status_code=status, headers={}, request=None, url=url))

    return make


def test_what_the_hub_refuses(answer):
    from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError

    def told(error):
        return str(failures.explain(error, "org/m", file="a.safetensors"))

    assert "a.safetensors of org/m is listed by" in told(answer(RemoteEntryNotFoundError, 404))
    assert "a stranger (no token is set) may not read a.safetensors of org/m (forbidden)" in told(
        answer(HfHubHTTPError, 403)
    )
    assert "is full (No space left on device); a.safetensors of org/m did not fit" in told(
        OSError(28, "No space left on device")
    )
    refused_push = upload._explain(answer(HfHubHTTPError, 403), "org/m", None, True)
    assert "your token may not open a pull request in org/m (no reason given)" in str(refused_push)


def test_a_cache_that_loses_a_file(monkeypatch):
    monkeypatch.setattr(resolve, "cached", lambda *_: None)
    with raises(HubError, "lost config.json of org/m while it was read", "the same command again"):
        resolve._folder("org/m", None, "0" * 40, "config.json")


def test_files_that_do_not_give_back_what_was_written(tmp_path, monkeypatch):
    (path := tmp_path / "a.gguf").write_bytes(bytes(16))
    monkeypatch.setattr(os, "pread", lambda *_: b"????")
    with raises(RunError, "a.gguf does not give back what was written to it", "another disk"):
        gguf_patch._write([(path, 4, b"abcd")])
    monkeypatch.undo()
    save_file({"gate": torch.zeros(2)}, tmp_path / "m.safetensors")
    with raises(RunError, "m.safetensors was not written as it should be (the gate gate reads back differently)"):
        forms.require_written(tmp_path / "m.safetensors", {"gate": torch.ones(2)})


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("lru+st_mo", "no prefetcher 'st_mo' (did you mean st_moe?); there are"),
        ("lru+st_moe:1:2:3:4:5:6:7", "so 'st_moe:1:2:3:4:5:6:7' means nothing"),
        ("lru+st_moe:many", "number from"),
        ("belady+st_moe", "policy belady takes no prefetcher"),
    ],
)
def test_prefetchers_that_there_are_not(policy, words):
    with raises(CacheError, words):
        choose(policy)
