"""What `remoe replay` refuses: one line, the next command, nothing on stdout."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import refused
from test_replay_command import cells_of, LAYERS, random_trace, result

from remoe_cli.routing import write


@pytest.fixture
def file(tmp_path) -> Path:
    write(random_trace(), tmp_path / "one.trace")
    return tmp_path / "one.trace"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy", "lrv"), "did you mean lru"),
        (("--policy", "lru,"), "no cache policy ''"),
        (("--policy", "lru:2"), "no parameter"),
        (("--policy", "lrfu:-1"), "from 0"),
        (("--policy", "lrfu:x"), "'x'"),
        (("--cache", "0"), "at least 1 slot"),
        (("--cache", "-2,4"), "at least 1 slot"),
        (("--cache", "six"), "'six'"),
        (("--cache", "4,"), "'4,'"),
        (("--admission", "open"), "forced, bypass or both"),
        (("--equal", "time"), "memory or slots"),
        (("--step", "half"), "atomic or sequential"),
        (("--reset", "daily"), "request or never"),
        (("--touch-order", "random"), "weight or listed"),
        (("--warm", "hot"), "cold or prefill or carry"),
        (("--sessions", "0"), "at least 1"),
        (("--sessions", "2"), "carry"),
        (("--pool", "--budgets", "one.trace"), "one pool"),
        (("--estimate", "fast"), "takes a link"),
        (("--estimate", "4GB/s,45ms"), "size of an expert"),
        (("--expert-bytes", "big"), "--expert-bytes"),
        (("--policy", "static"), "--fit"),
        (("--policy", "decayed"), "--probabilities"),
        (("--policy", "gate"), "weights"),
        (("--fit", "absent.trace"), "absent.trace"),
        (("--fit", "other.trace"), "another model"),
        (("--against", "other.trace"), "another model"),
        (("--budgets", "other.trace"), "another model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_options_are_refused(remoe, file, tmp_path, words, said):
    write(random_trace(layers=LAYERS + 1), tmp_path / "other.trace")
    refused(remoe("replay", file, *(() if "--cache" in words else ("--cache", "4")), *words), said)


def test_files_that_are_no_traces_are_refused(remoe, file, tmp_path):
    whole = file.read_bytes()
    (tmp_path / "short.trace").write_bytes(whole[:-40])
    (tmp_path / "noise.trace").write_bytes(b"not a trace at all" * 40)
    (tmp_path / "later.trace").write_bytes(whole[:8] + b"\xff" + whole[9:])
    write(random_trace(prompt=99), tmp_path / "prompts.trace")
    for name, said in (("short", "bytes"), ("noise", ""), ("later", "version"), ("prompts", "no decoded token")):
        refused(remoe("replay", f"{name}.trace", "--cache", "4"), f"{name}.trace", said)
    refused(remoe("replay", tmp_path, "--cache", "4"))


def test_memory_that_staging_alone_fills(remoe, tmp_path):
    """One layer of two slots: bypass would keep both as its staging buffer."""
    write(random_trace(layers=1), tmp_path / "small.trace")
    got = result(remoe("replay", "small.trace", "--cache", "2,4", "--policy", "lru", "--json"))
    assert [(one["admission"], one["capacity"]) for one in got["unavailable"]] == [("bypass", 2)]
    assert "staging" in got["unavailable"][0]["reason"]
    assert cells_of(got)["lru", "forced", 2]["gap_closed"] is None  # no Belady with bypass of that memory
    refused(remoe("replay", "small.trace", "--cache", "2", "--policy", "lru", "--admission", "bypass"), "staging")


def test_expert_bytes_that_do_not_fit_the_layers(remoe, tmp_path):
    write(random_trace(provenance={"expert_bytes": [1, 2]}), tmp_path / "odd.trace")
    refused(remoe("replay", "odd.trace", "--cache", "4"), "expert_bytes")


def test_an_accounting_that_means_nothing(remoe, tmp_path):
    write(random_trace(provenance={"accounting": {"step": "half"}}), tmp_path / "odd.trace")
    refused(remoe("replay", "odd.trace", "--cache", "4"), "accounting", "atomic or sequential")
