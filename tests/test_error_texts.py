"""Each error has a test that provokes it, but for those that are listed; here the ones that no other file provokes."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import error_sites
import numpy as np
import pytest
import torch
from commands import make_model, QUICK, refused, texts_of, write_rows

from remoe_cli import atomic, copies
from remoe_cli.cache import expert_cache, replay
from remoe_cli.delta import patch
from remoe_cli.errors import (
    CacheError,
    CheckpointError,
    DataError,
    DeltaError,
    FamilyError,
    RemoeError,
    RunError,
    UsageError,
)
from remoe_cli.families import loader
from remoe_cli.gguf import journal
from remoe_cli.offload import budget, checks
from remoe_cli.offload.settings import Settings
from remoe_cli.recipe import load
from remoe_cli.routing import RoutingTrace
from remoe_cli.train import files, hub_data
from remoe_cli.train.ranks import check_share

RECORDER = str(Path(__file__).parent / "recorder")
MOST = 22  # listed errors; only ever lowered


def test_the_list_holds_only_errors_that_there_are_and_does_not_grow():
    listed, names = error_sites.listed(), [site.name for site in error_sites.sites()]
    assert len(names) == len(set(names)) > 300
    assert not set(listed) - set(names), "no longer in the sources: take them from tests/unseen_errors.txt"
    assert len(listed) == len(set(listed)) <= MOST


def test_where_an_error_is_made_is_told_from_its_neighbours(tmp_path):
    """The recorder that the whole suite runs under, on two errors of one function, in a process of its own."""
    code = "from remoe_cli.offload.settings import Settings\nSettings(warm='hot')"
    env = {**os.environ, error_sites.FOLDER: str(tmp_path), "PYTHONPATH": os.pathsep.join([RECORDER, *sys.path])}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "warm is one of cold, batch, carry, not 'hot'" in ran.stderr
    (seen,) = {site.name for site in error_sites.sites()} - {*error_sites.unseen(tmp_path)}
    assert seen == "offload/settings.py Settings.__post_init__ UsageError: warm is one of {}, not {}."


@contextlib.contextmanager
def raises(kind: type[RemoeError], *words: str):
    """The kind itself, with these words in its line, and a next command."""
    with pytest.raises(kind) as caught:
        yield
    assert caught.type is kind and caught.value.hint
    for word in words:
        assert word in str(caught.value)


# Commands


def test_options_of_finetune(remoe):
    refused(remoe("finetune", "demo", "--parallel", "tp"), "--parallel tp: it is fsdp or ep", "remoe finetune --help")
    refused(remoe("finetune", "demo", "--stream", "maybe"), "--stream maybe: it is auto, on or off")
    refused(remoe("finetune", "demo", "--ram", "lots"), "--ram lots is no size such as 8GB")
    refused(remoe("finetune"), "needs a MODEL, or --resume", "remoe finetune demo")


def test_expert_parallelism_alone_or_of_stored_scales():
    train = load("remoe", "deepseek_v2").train
    with raises(UsageError, "--parallel ep needs several processes"):
        check_share(train, 1, "ep")
    with raises(UsageError, "--parallel ep needs experts that are not stored quantised"):
        check_share(train, 2, "ep", quantised=True)


def test_runs_that_cannot_be_gone_on_with(remoe, run, made):
    refused(remoe("finetune", "--resume", "--out", run), "is finished, so there is nothing to resume", "remoe eval")
    other = make_model(Path("other"))
    refused(remoe("finetune", other, "--resume", "--out", run, *QUICK), f"the run {run} is one of", f"not of {other}")


def test_runs_without_a_delta(remoe, run):
    refused(remoe("eval"), "there is no run with a delta in", "remoe finetune demo")
    shutil.rmtree(run / "delta")
    refused(remoe("push", run), "has no delta (status: finished)", "remoe finetune --resume")


def test_a_base_that_is_gone(remoe, run):
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "base": "/no/such/base"}))
    refused(remoe("eval", run, "--cache", 2), "no longer in /no/such/base", "--base FOLDER_OR_HUB_ID")


def test_two_domains_of_one_name(remoe, run, made, tmp_path):
    texts = write_rows(tmp_path / "other.jsonl", texts_of("a slow green turtle", 40))
    said = ("--domain", f"a={texts}", "--domain", f"a={texts}")
    refused(
        remoe("eval", run, "--cache", 2, "--no-measure", *said), "two domains are called 'a'", "--domain ANOTHER_NAME="
    )


def test_inspect_of_a_delta_takes_no_cache(remoe, run):
    refused(remoe("inspect", run, "--cache", 4), "is a delta; --cache is for a model", "remoe inspect")


def test_deltas_of_a_later_format(remoe, run, made):
    facts = json.loads((run / "delta/remoe.json").read_text())
    (run / "delta/remoe.json").write_text(json.dumps({**facts, "format": 99}))
    refused(remoe("inspect", run / "delta"), "has delta format 99; this remoe reads format 1")


def test_a_trace_that_is_there(remoe, model, texts):
    Path("t.trace").write_text("mine")
    refused(
        remoe("trace", model, "--prompts", texts, "--out", "t.trace"),
        "t.trace exists; nothing was written",
        "t-2.trace",
    )
    assert Path("t.trace").read_text() == "mine"


def test_a_trace_longer_than_the_model_has_positions(remoe, tmp_path, texts):
    model = make_model(tmp_path / "short", max_position_embeddings=16)
    ran = remoe("trace", model, "--prompts", texts, "--out", "t.trace", "--prompt-tokens", 12, "--new-tokens", 8)
    refused(ran, "a request of 20 tokens is longer than the 16", "made for")


def test_numbers_of_a_sweep(remoe):
    refused(remoe("sweep", "demo", "--cache", "8,many"), "--cache takes whole numbers such as 8,12, not '8,many'")


def test_a_tracker_that_is_not_there(remoe, model, texts, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    ran = remoe("finetune", model, "--data", texts, "--set", "train.tracker=trackio", *QUICK)
    refused(ran, "train.tracker trackio is not installed", "pip install")


def test_biases_are_refitted_where_a_family_has_them(remoe, model, texts):
    refused(remoe("finetune", model, "--data", texts, "--refit-bias", *QUICK), "selects its experts without a bias")


# Files and folders


def test_a_folder_inside_a_file_and_a_disk_without_room(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with raises(RunError, "file is a file, so nothing can be in it"):
        atomic.make_folder(tmp_path / "file/below")
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=10))
    with raises(RunError, "needs 1 kB and", "has 10 bytes free", "--out on another disk"):
        copies.require_room(1000, tmp_path / "out")


def test_rows_that_are_no_objects(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n[1, 2]\n')
    with raises(DataError, "rows.jsonl", "not a JSON object with fields"):
        files._rows([tmp_path / "rows.jsonl"], "auto")


def test_a_source_that_is_no_name_of_the_hub():
    with raises(DataError, "neither a file here nor a Hub data set"):
        hub_data._pin(SimpleNamespace(repo="a/b/c/d", revision=None, __str__=lambda _self: "a/b/c/d"))


def test_a_gguf_that_another_process_is_at_work_on(tmp_path):
    (path := tmp_path / "a.gguf").write_bytes(b"GGUF")
    with open(path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with raises(RunError, "another remoe is at work on", "the same command again"):
            with journal.locked(path):
                pass


# Decoder and caches


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"readers": 0}, "0 reader threads: from 1 to"),
        ({"io": "tape"}, "io is direct or buffered, not 'tape'"),
        ({"warm": "hot"}, "warm is one of cold, batch, carry, not 'hot'"),
        ({"ram": -1}, "neither the RAM tier nor a guess can be negative"),
        ({"throttle": 0}, "a throttle is a positive number of bytes a second, not 0"),
    ],
)
def test_settings_of_the_decoder(values, words):
    with raises(UsageError, words):
        Settings(**values)


def test_slots_that_the_memory_does_not_hold():
    with raises(CacheError, "m: these slots take", "fewer --cache"):
        budget.require_more("m", torch.device("cpu"), 10**18)


def decoder_of(top_k: int):
    return SimpleNamespace(checkpoint=SimpleNamespace(id="m"), top_k=top_k)


def test_caches_that_cannot_serve_a_decoder():
    def check(capacity, policy="lru", batch=1, **settings):
        checks.check_cache(decoder_of(2), capacity, policy, "forced", batch, Settings(**settings))

    with raises(CacheError, "too small to decode m", "remoe eval --cache 2"):
        check(1)
    with raises(UsageError, "a guess of 3 experts is more than the 2 that a token runs", "--guess 2"):
        check(4, guess=3)


def test_gates_of_another_model():
    base, gate = {"a": torch.zeros(8, 4)}, torch.zeros(4, 4)
    with raises(DeltaError, "b is not a gate of m"):
        checks.check_gates("m", base, {"b": gate}, None, 1)
    with raises(DeltaError, "a is [4, 4], but [8, 4] in m"):
        checks.check_gates("m", base, {"a": gate}, None, 1)


def test_prompts_that_cannot_be_decoded_together():
    with raises(UsageError, "a batch is 1 to 4 prompts of one length, not 2 of [1, 2] tokens"):
        checks.check_prompts([[1], [1, 2]], 3, None, 4)
    with raises(UsageError, "cannot decode 0 tokens after a prompt of 1."):
        checks.check_prompts([[1]], 0, None, 4)
    with raises(UsageError, "cannot decode 3 tokens after a prompt of 1 with 2 forced ids."):
        checks.check_prompts([[1]], 3, [[5, 6]], 4)


@pytest.fixture
def trace():
    ids = np.array([[[0, 1]], [[1, 2]], [[2, 3]]], dtype=np.int16)
    return lambda n_experts=4: RoutingTrace(ids, np.array([0, 3]), np.zeros(3, dtype=bool), n_experts)


def test_replays_that_cannot_be(trace):
    with raises(CacheError, "no replay option 'later': atomic or sequential"):
        replay(trace(), "lru", 2, step="later")
    with raises(CacheError, "2 budgets for 1 layers; one a layer is needed"):
        replay(trace(), "lru", [2, 2])
    with raises(CacheError, "a cache needs at least 1 slot a layer, not 0"):
        replay(trace(), "lru", 0)
    with raises(CacheError, "the fitted trace has 1 layers of 5 experts, this one 1 of 4"):
        replay(trace(), "static", 2, fit=trace(5))
    with raises(CacheError, "policy 'static' needs a fitted trace, which only replay knows; a decoder can use lru"):
        expert_cache.ExpertCache(2, "static", n_experts=4)


# Models


def test_checkpoints_that_lack_or_store_what_is_not_read():
    checkpoint = SimpleNamespace(id="m", tensors={})
    with raises(CheckpointError, "m lacks 2 tensors that the model needs, such as a", "copy or download"):
        loader.require_no_missing(checkpoint, ["b", "a"])
    with raises(FamilyError, "m stores weights as I4; remoe reads", "a bf16 copy"):
        loader._require_readable(checkpoint, "I4")


def test_a_delta_whose_heads_do_not_fit():
    gate = SimpleNamespace(parameters={"w": torch.zeros(8, 4)}, names=["w"])
    names = patch._head_names("temporal", {"w": "layers.0.gate.weight"}, [gate])
    with raises(DeltaError, "this delta has no head", "of [8, 4]"):
        patch.heads_for(SimpleNamespace(heads={names[0]: torch.zeros(2, 2)}), {"w": "layers.0.gate.weight"}, [gate])
