"""What `remoe replay` refuses: one line, the next command, nothing on stdout."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import refused
from test_replay_command import cells_of, LAYERS, random_trace, result

from remoe_cli.routing import read, write


@pytest.fixture
def file(tmp_path) -> Path:
    write(random_trace(), tmp_path / "one.trace")
    return tmp_path / "one.trace"


def commands(said: str) -> list[list[str]]:
    """The command lines of a Try, or of the table."""
    return [shlex.split(part) for part in said.strip().splitlines()[-1].rpartition("Try: ")[2].split(" && ")]


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
        (("--warm", "hot"), "cold or prefill or carry"),
        (("--sessions", "0"), "at least 1"),
        (("--sessions", "2"), "--reset never"),
        (("--sessions", "2", "--warm", "prefill"), "not prefill"),
        (("--warm", "carry", "--reset", "request"), "one cache for all requests"),
        (("--policy", "LRU"), "did you mean lru"),
        (("--policy", "lru,Bellady,gibberish,lfu:3"), "did you mean belady"),
        (("--pool", "--cache", "6,x,0"), "'6,x,0'"),
        (("--pool", "--budgets", "one.trace"), "one pool"),
        (("--estimate", "fast"), "takes a link"),
        (("--estimate", "4GB/s,45ms"), "size of an expert"),
        (("--expert-bytes", "big"), "--expert-bytes"),
        (("--policy", "static"), "--fit"),
        (("--policy", "decayed"), "--probabilities"),
        (("--policy", "gate"), "weights"),
        (("--fit", "absent.trace"), "absent.trace"),
        (("--fit", "other.trace"), "another model"),
        (("--fit", "other.trace", "--policy", "static"), "another model"),
        (("--fit", "folder", "--policy", "static"), "folder is a folder"),
        (("--against", "other.trace"), "another model"),
        (("--budgets", "other.trace"), "another model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_options_are_refused(remoe, file, tmp_path, words, said):
    write(random_trace(layers=LAYERS + 1), tmp_path / "other.trace")
    (tmp_path / "folder").mkdir()
    write(random_trace(seed=1), tmp_path / "folder" / "fit.trace")
    ran = remoe("replay", file, *(() if "--cache" in words else ("--cache", "4")), *words, "--touch-order", "listed")
    refused(ran, said)
    assert ". Try: " in ran.err
    if words[-1] == "absent.trace":
        return  # that is recorded anew: tests/test_trace_file.py
    (tried,) = commands(ran.err)
    assert tried[:3] == ["remoe", "replay", str(file)] and " --touch-order listed" in " ".join(tried)
    assert remoe(*tried[1:]).code == 0, tried


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
    ran = remoe("replay", "small.trace", "--cache", "2", "--policy", "lru", "--admission", "bypass")
    refused(ran, "staging")
    (tried,) = commands(ran.err)
    assert tried[-2:] == ["--equal", "slots"] and remoe(*tried[1:]).code == 0


def test_expert_bytes_that_do_not_fit_the_layers(remoe, tmp_path):
    write(random_trace(provenance={"expert_bytes": [1, 2]}), tmp_path / "odd.trace")
    ran = remoe("replay", "odd.trace", "--cache", "4", "--policy", "lru")
    refused(ran, "expert_bytes")
    (tried,) = commands(ran.err)
    assert tried[-2:] == ["--expert-bytes", "17.3MB"] and remoe(*tried[1:]).code == 0


def test_an_accounting_that_means_nothing(remoe, tmp_path):
    write(random_trace(provenance={"accounting": {"step": "half"}}), tmp_path / "odd.trace")
    refused(remoe("replay", "odd.trace", "--cache", "4"), "accounting", "atomic or sequential")


def test_an_order_that_is_none(remoe, file):
    ran = remoe("replay", file, "--cache", "4", "--touch-order", "random", "--warm", "carry", "--json")
    refused(ran, "weight or listed")
    assert commands(ran.err) == [["remoe", "replay", str(file), "--cache", "4", "--warm", "carry", "--json"]]


def test_an_accounting_that_means_nothing_is_overruled(remoe, tmp_path):
    write(random_trace(provenance={"accounting": {"step": "half"}}), tmp_path / "odd.trace")
    (tried,) = commands(remoe("replay", "odd.trace", "--cache", "4", "--policy", "lru").err)
    assert tried[-2:] == ["--step", "atomic"] and remoe(*tried[1:]).code == 0


def test_nothing_is_replayed_before_a_refusal_that_gives_every_reason(remoe, file, monkeypatch):
    from remoe_cli import replay as verb

    monkeypatch.setattr(verb, "run", lambda *_, **__: pytest.fail("a replay was run"))
    ran = remoe("replay", file, "--cache", "4", "--policy", "decayed,retention,static,gate")
    refused(
        ran,
        "decayed, retention: the trace has no router probabilities",
        "static: it is fitted on another trace",
        "gate: the trace has no routing weights",
    )
    assert "Replaying" not in ran.err


def test_what_a_recorded_trace_lacks_is_recorded_by_the_next_command(remoe, tmp_path):
    tiny = ("--requests", "2", "--prompt-tokens", "8", "--new-tokens", "6")
    assert remoe("trace", "demo", *tiny, "-o", "one.trace").code == 0
    for policy, made in (("decayed", "one-full.trace"), ("static", "one-fit.trace")):
        ran = remoe("replay", "one.trace", "--cache", "8", "--policy", policy)
        refused(ran)
        record, again = commands(ran.err)
        assert [record[:3], again[:2]] == [["remoe", "trace", "demo"], ["remoe", "replay"]]
        assert remoe(*record[1:]).code == 0 and (tmp_path / made).exists()
        done = remoe(*again[1:], "--json")
        assert {cell["policy"] for cell in result(done)["cells"]} == {policy}
        if policy == "decayed":  # the very same tokens
            assert read(tmp_path / made).experts.tolist() == read(tmp_path / "one.trace").experts.tolist()


def test_a_trace_of_prompts_only_is_recorded_anew(remoe, tmp_path):
    write(random_trace(prompt=99), tmp_path / "prompts.trace")
    ran = remoe("replay", "prompts.trace", "--cache", "4")
    assert commands(ran.err) == [["remoe", "trace", "demo", "-o", "prompts-2.trace"]]


def test_sessions_are_a_wrong_option(remoe, file):
    assert remoe("replay", file, "--cache", "4", "--sessions", "4").code == 2


def test_what_cannot_be_mapped(remoe, file, tmp_path, monkeypatch):
    options = ("--cache", "4,5", "--policy", "lru", "--json")
    (tmp_path / "t.trace").write_text("taken")
    os.mkfifo(tmp_path / "pipe")
    for name in ("-", "pipe"):
        ran = remoe("replay", name, *options)
        refused(ran, "cannot come through a pipe")
        line = ran.err.rpartition("Try: ")[2].strip()
        assert line == "cat > t-2.trace; remoe replay t-2.trace --cache 4,5 --policy lru --json"
    shell = line.replace("remoe ", f"{shlex.quote(sys.executable)} -m remoe_cli ")
    done = subprocess.run(f"cat {file} | {shell}", shell=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["capacities"] == [4, 5]
    refused(remoe("replay", "/dev/null", *options), "/dev/null is a device", "remoe trace demo -o t-3.trace")


def test_a_folder_of_traces(remoe, file, tmp_path):
    (tmp_path / "runs").mkdir()
    refused(remoe("replay", "runs", "--cache", "4"), "folder", "remoe trace demo -o")
    (tmp_path / "runs" / "b.trace").write_bytes(file.read_bytes())
    ran = remoe("replay", "runs", "--cache", "4", "--policy", "lru")
    assert commands(ran.err) == [["remoe", "replay", "runs/b.trace", "--cache", "4", "--policy", "lru"]]


def test_the_next_command_has_every_option(remoe, monkeypatch):
    """What Asked.command says is read as the same options, each of them apart from its default."""
    from remoe_cli import replay as verb

    seen = []
    monkeypatch.setattr(verb, "replay", lambda path, asked, **_: seen.append((path, asked)) or sys.exit(0))
    full = verb.Asked(
        ("4", "12"), ["lru", "lrfu:0.1"], "bypass", "slots", False, "sequential", "never", "listed", "carry", 3,
        Path("b c.trace"), Path("f.trace"), Path("p.npz"), Path("o.trace"), Path("a.trace"), "4GB/s, 45ms", "17.3MB", True, True,
    )  # fmt: skip
    for asked in (full, replace(full, pool=True, figures=False), verb.Asked(("6",), ["all"])):
        words = shlex.split(asked.command(Path("my $t.trace")))
        remoe(*words[1:])
        path, got = seen.pop()
        assert (path, {**vars(got), "capacities": (*got.capacities,)}) == (Path("my $t.trace"), vars(asked))
    assert verb.Asked((6,)).command(Path("t.trace")) == "remoe replay t.trace --cache 6"
    assert len({*vars(full)}) == sum(vars(full)[name] != vars(verb.Asked(("6",)))[name] for name in vars(full))


@pytest.mark.parametrize("accounting", [5, [], None, "x"])
def test_accounting_that_is_no_table(remoe, tmp_path, accounting):
    write(random_trace(provenance={"accounting": accounting}), tmp_path / "odd.trace")
    refused(remoe("replay", "odd.trace", "--cache", "4"), "accounting", "no table of options")


@pytest.mark.parametrize("size", [-5, 0, "x", [1, 2, 3, 4], 1.5, True, 10**400])
def test_a_trace_with_a_size_that_no_expert_has(remoe, tmp_path, size):
    write(random_trace(provenance={"expert_bytes": size}), tmp_path / "odd.trace")
    for more in ((), ("--pool",)):
        refused(remoe("replay", "odd.trace", "--cache", "4", *more), "expert_bytes", "--expert-bytes 17.3MB")


def test_sizes_beyond_all_experts(remoe, tmp_path):
    write(random_trace(), tmp_path / "one.trace")
    many = "9" * 400
    refused(remoe("replay", "one.trace", "--cache", "4", "--expert-bytes", many), "--expert-bytes takes a size")
    refused(
        remoe("replay", "one.trace", "--cache", "4", "--expert-bytes", "1MB", "--estimate", f"{many}GB/s,45ms"),
        "--estimate takes a link",
    )
