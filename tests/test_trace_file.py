"""The trace file: to the byte as documented, mapped when read, and every kind of damage refused in its own words."""

from __future__ import annotations

import json
import re
import shlex
import struct
import subprocess
import sys
import tracemalloc
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remoe_cli.errors import RunError, TraceError
from remoe_cli.routing import read, RoutingTrace, write

HEADER = "<8sIIQIIIIQQQ"
VERSION, FLAGS, TOKENS, LAYERS, EXPERTS, TOP_K, CHECKSUM, REQUESTS, PROVENANCE, SIZE = (
    8,
    12,
    16,
    24,
    28,
    32,
    36,
    40,
    48,
    56,
)
ARRAYS = (
    "experts",
    "borders",
    "prefill",
    "weights",
    "probabilities",
    "temporal",
    "spatio",
    "guess",
    "guess_shared",
    "hidden",
)


def random_trace(seed: int, tokens: int, layers: int, n_experts: int, top_k: int, scores: str = "") -> RoutingTrace:
    rng = np.random.default_rng(seed)
    ranked = rng.random((tokens, layers, n_experts))
    cuts = np.unique(rng.integers(1, tokens, 3)) if tokens > 1 else []
    borders = np.array([0, *cuts, tokens])
    prefill = np.zeros(tokens, dtype=bool)
    for start, stop in zip(borders, borders[1:]):
        prefill[start : start + rng.integers(0, stop - start + 1)] = True
    wide = {"p": "probabilities", "t": "temporal", "s": "spatio", "g": "guess", "G": "guess_shared"}
    return RoutingTrace(
        experts=np.argsort(ranked, -1)[..., :top_k],
        borders=borders,
        prefill=prefill,
        n_experts=n_experts,
        weights=rng.random((tokens, layers, top_k)) if "w" in scores else None,
        provenance={"model": "Modell-ä", "seed": seed, "layers": list(range(layers))},
        hidden=rng.normal(size=(tokens, layers, 3 + seed % 3)) if "h" in scores else None,
        **{name: rng.random(ranked.shape) for letter, name in wide.items() if letter in scores},
    )


def equal(one: RoutingTrace, other: RoutingTrace) -> bool:
    same = [(getattr(one, name), getattr(other, name)) for name in ARRAYS]
    return (one.n_experts, one.provenance) == (other.n_experts, other.provenance) and all(
        (a is None and b is None) or (a.dtype == b.dtype and np.array_equal(a, b)) for a, b in same
    )


def slowly(path: Path) -> dict:
    """Read by the table of docs/trace-format.md, value by value; nothing of remoe's reader."""
    raw = path.read_bytes()
    magic, version, flags, tokens, layers, n_experts, top_k, checksum, requests, facts, size = struct.unpack_from(
        HEADER, raw
    )
    assert (magic, version, size) == (b"REMOETRC", 1, len(raw))
    at, found, summed = 64, {"n_experts": n_experts}, raw[:36] + bytes(4) + raw[40:64]

    def take(name: str, code: str, *shape: int) -> None:
        nonlocal at, summed
        start = (at + 63) // 64 * 64
        assert raw[at:start].strip(b"\0") == b""
        count = int(np.prod(shape))
        values = struct.unpack_from(f"<{count}{code}", raw, start)
        at = start + count * struct.calcsize(code)
        summed += raw[start:at] if code != "e" else b""
        found[name] = np.array(values).reshape(shape)

    take("borders", "q", requests + 1)
    take("prefill", "?", tokens)
    take("experts", "h", tokens, layers, top_k)
    for bit, name in enumerate(("weights", "probabilities", "temporal", "spatio", "guess", "guess_shared")):
        if flags >> bit & 1:
            take(name, "e", tokens, layers, n_experts if bit else top_k)
    start = (at + 63) // 64 * 64
    at = start + facts
    found["provenance"] = json.loads(raw[start:at])
    assert checksum == zlib.crc32(summed + raw[start:at])
    if flags & 64:
        wide = (len(raw) - (at + 63) // 64 * 64) // (2 * tokens * layers)
        take("hidden", "e", tokens, layers, wide)
    assert at == len(raw)
    return found


def test_the_header_is_documented_to_the_byte():
    sizes = {"8 bytes": "8s", "u32": "I", "u64": "Q"}
    page = (Path(__file__).parent.parent / "docs/trace-format.md").read_text()
    fields = re.findall(r"^\| (\d+) \| (8 bytes|u32|u64) \|", page, re.MULTILINE)
    code = "<"
    for offset, kind in fields:
        assert struct.calcsize(code) == int(offset)
        code += sizes[kind]
    assert code == HEADER and struct.calcsize(code) == 64
    sections = re.findall(r"^\| ([a-z ]+) \| ([iuf]\d+) (\[.*?\]) \|", page, re.MULTILINE)
    assert [f"{name} {kind} {shape}" for name, kind, shape in sections] == [
        "borders i64 [R + 1]", "phase u8 [T]", "experts i16 [T, L, K]", "weights f16 [T, L, K]",
        "probabilities f16 [T, L, E]", "temporal f16 [T, L, E]",
        "spatio f16 [T, L, E]", "guess f16 [T, L, E]", "guess shared f16 [T, L, E]", "hidden f16 [T, L, H]",
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 40),
    layers=st.integers(1, 4),
    spare=st.integers(0, 5),
    top_k=st.integers(1, 4),
    scores=st.sampled_from(["", "w", "p", "wp", "wt", "ws", "wpts", "gGh", "h", "wpgh"]),
)
def test_what_is_written_is_read(tmp_path_factory, seed, tokens, layers, spare, top_k, scores):
    path = tmp_path_factory.mktemp("t") / "t.trace"
    trace = random_trace(seed, tokens, layers, top_k + spare, top_k, scores)
    assert write(trace, path) == path.stat().st_size
    assert equal(read(path), trace)
    twin = slowly(path)
    assert twin["provenance"] == trace.provenance and twin["n_experts"] == trace.n_experts
    assert {name for name in ARRAYS if name in twin} == {name for name in ARRAYS if getattr(trace, name) is not None}
    assert all(np.array_equal(twin[name], getattr(trace, name)) for name in ARRAYS if name in twin)


def test_a_file_by_hand(tmp_path):
    """One request of a prompt token and a decoded one, two layers, top-2 of 5, with weights."""
    path = tmp_path / "t.trace"
    facts = b'{"model":"x"}'
    borders, phase, ids = struct.pack("<2q", 0, 2), bytes([1, 0]), struct.pack("<8h", 4, 0, 1, 2, 0, 4, 3, 1)
    header = [b"REMOETRC", 1, 1, 2, 2, 5, 2, 0, 1, len(facts), 320 + len(facts)]
    header[7] = zlib.crc32(struct.pack(HEADER, *header) + borders + phase + ids + facts)
    content = struct.pack(HEADER, *header) + b"".join(part.ljust(64, b"\0") for part in (borders, phase, ids))
    content += struct.pack("<8e", 0.75, 0.25, 0.5, 0.5, 1, 0, 0.625, 0.375).ljust(64, b"\0") + facts
    path.write_bytes(content)
    trace = read(path)
    assert trace.experts.tolist() == [[[4, 0], [1, 2]], [[0, 4], [3, 1]]]
    assert trace.weights is not None and trace.weights[1, 1].tolist() == [0.625, 0.375]
    assert (trace.borders.tolist(), trace.prefill.tolist()) == ([0, 2], [True, False])
    assert (trace.n_experts, trace.provenance, trace.probabilities) == (5, {"model": "x"}, None)
    again = tmp_path / "again.trace"
    write(trace, again)
    assert again.stat().st_size == len(content) + 1  # the same, but for a space after the colon
    assert again.read_bytes()[64:320] == content[64:320]


def test_nothing_is_copied(tmp_path):
    """8 million accesses: read, checked, and decode() of a trace without prompts, in a fraction of its memory."""
    path = tmp_path / "t.trace"
    tokens, layers, top_k = 250_000, 8, 4
    experts = (np.arange(tokens * layers, dtype=np.int16).reshape(tokens, layers, 1) % 13) + np.arange(
        4, dtype=np.int16
    )
    trace = RoutingTrace(experts, np.array([0, tokens]), np.zeros(tokens, dtype=bool), 16, experts.astype(np.float16))
    size = write(trace, path)
    tracemalloc.start()
    found = read(path).decode()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.n_tokens * layers * top_k == 8_000_000 and np.array_equal(found.experts, experts)
    assert peak < size / 8
    assert not found.experts.flags.writeable and found.weights is not None and not found.weights.flags.writeable


@pytest.fixture
def whole(tmp_path) -> Path:
    path = tmp_path / "t.trace"
    write(random_trace(3, 20, 2, 8, 3, "wp"), path)
    return path


def broken(path: Path, *words: str) -> None:
    with pytest.raises(TraceError) as stopped:
        read(path)
    for word in (str(path), *words):
        assert word in stopped.value.message, stopped.value.message
    assert stopped.value.hint.strip() and "\n" not in str(stopped.value)


def test_every_truncation_is_refused(tmp_path):
    whole = tmp_path / "t.trace"
    write(random_trace(3, 4, 1, 5, 2, "w"), whole)
    content = whole.read_bytes()
    for length in range(len(content)):
        whole.write_bytes(content[:length])
        broken(whole, "empty" if not length else "truncated")
    whole.write_bytes(content + b"\0")
    broken(whole, "longer than it should be")


@pytest.mark.parametrize(
    ("offset", "code", "value", "words"),
    [
        (0, "B", 0, "does not begin with REMOETRC"),
        (VERSION, "I", 2, "version 2; this remoe reads version 1"),
        (VERSION, "I", 0, "version 0"),
        (FLAGS, "I", 128 + 3, "flags that version 1 does not know"),
        (FLAGS, "I", 1, "the shapes in its header come to"),
        (CHECKSUM, "I", 1, "its checksum is not that of its content"),
        (TOKENS, "Q", 21, "the shapes in its header come to"),
        (TOKENS, "Q", 2**63, "the shapes in its header come to"),
        (LAYERS, "I", 0, "0 layers"),
        (LAYERS, "I", 2**32 - 1, "the shapes in its header come to"),
        (EXPERTS, "I", 2, "3 of 2 experts a token"),
        (EXPERTS, "I", 40_000, "3 of 40000 experts a token"),
        (TOP_K, "I", 0, "0 of 8 experts a token"),
        (TOP_K, "I", 4, "the shapes in its header come to"),
        (REQUESTS, "Q", 2**62, "the shapes in its header come to"),
        (PROVENANCE, "Q", 5, "the shapes in its header come to"),
        (SIZE, "Q", 5, "longer than it should be"),
    ],
)
def test_a_damaged_header(whole, offset, code, value, words):
    content = bytearray(whole.read_bytes())
    struct.pack_into(f"<{code}", content, offset, value)
    whole.write_bytes(content)
    broken(whole, words)


def section(trace: RoutingTrace, name: str) -> int:
    at = 64
    for part, dtype, shape in (
        ("borders", "i8", (trace.n_requests + 1,)),
        ("prefill", "u1", (trace.n_tokens,)),
        ("experts", "i2", trace.experts.shape),
        ("weights", "f2", trace.experts.shape),
        ("probabilities", "f2", (trace.n_tokens, trace.n_layers, trace.n_experts)),
        ("provenance", "u1", (0,)),
    ):
        at = (at + 63) // 64 * 64
        if part == name:
            return at
        at += int(np.prod(shape)) * np.dtype(dtype).itemsize
    raise KeyError(name)


@pytest.mark.parametrize(
    ("name", "code", "value", "words"),
    [
        ("borders", "q", -1, "rising positions from 0 to 20"),
        ("prefill", "B", 7, "the phase of a token is 7"),
        ("experts", "h", 8, "want ids 0 to 7, got 0 to 8"),
        ("experts", "h", -1, "want ids 0 to 7, got -1 to 7"),
        ("weights", "e", float("nan"), "weights holds values that are not finite"),
        ("weights", "e", float("inf"), "weights holds values that are not finite"),
        ("probabilities", "e", float("-inf"), "probabilities holds values that are not finite"),
        ("weights", "e", -0.5, "weights holds values below 0"),
        ("probabilities", "e", -6e-8, "probabilities holds values below 0"),
        ("provenance", "B", 0x80, "its provenance is no JSON"),
    ],
)
def test_a_damaged_section(whole, name, code, value, words):
    content = bytearray(whole.read_bytes())
    struct.pack_into(f"<{code}", content, section(read(whole), name), value)
    whole.write_bytes(content)
    broken(whole, words)


def test_an_expert_twice_in_one_token(whole):
    content = bytearray(whole.read_bytes())
    trace, token, layer = read(whole), 11, 1
    at = section(trace, "experts") + 2 * (token * 2 + layer) * 3
    struct.pack_into("<2h", content, at, 5, 5)
    whole.write_bytes(content)
    broken(whole, "token 11 names an expert twice in layer 1")


def test_an_empty_request(whole):
    content = bytearray(whole.read_bytes())
    struct.pack_into("<q", content, section(read(whole), "borders") + 8, 0)
    whole.write_bytes(content)
    broken(whole, "request 0 is empty")


def test_provenance_must_be_an_object(tmp_path, whole):
    facts = b"[1, 2]"
    trace = read(whole)
    content = bytearray(whole.read_bytes()[: section(trace, "provenance")]) + facts
    struct.pack_into("<QQ", content, PROVENANCE, len(facts), len(content))
    other = tmp_path / "other.trace"
    other.write_bytes(content)
    broken(other, "no JSON object")


@pytest.mark.parametrize("content", [b"PK\x03\x04rest", b"\x1f\x8brest", b"# route_trace v1\n", b"turn,phase,step\n"])
def test_a_trace_of_another_tool_is_sent_to_import(tmp_path, content):
    path = tmp_path / "t.npz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="another tool") as stopped:
        read(path)
    assert stopped.value.hint.startswith(f"remoe trace import {path}")


def test_no_file(tmp_path):
    broken(tmp_path / "none.trace", "there is no trace")
    broken(tmp_path, "is a folder")
    broken(Path("-"), "cannot come through a pipe")
    broken(Path("/dev/null"), "is no file", "pipe")


def test_a_request_that_became_empty_is_named_and_not_its_phases(tmp_path):
    """Request 0 swallows request 1, so that a prompt token seems to follow a decoded one."""
    path = tmp_path / "t.trace"
    prefill = np.array([True, False] * 3)
    trace = RoutingTrace(np.zeros((6, 1, 1), int), np.array([0, 2, 4, 6]), prefill, 1)
    write(trace, path)
    content = bytearray(path.read_bytes())
    struct.pack_into("<q", content, section(trace, "borders") + 8, 4)
    path.write_bytes(content)
    broken(path, "request 1 is empty")


def test_minus_zero_is_a_weight(tmp_path):
    trace = RoutingTrace(
        np.array([[[0]]]),
        np.array([0, 1]),
        np.zeros(1, bool),
        2,
        np.array([[[-0.0]]]),
    )
    write(trace, tmp_path / "t.trace")
    assert equal(read(tmp_path / "t.trace"), trace)


def test_the_next_command_of_what_cannot_be_read_runs(remoe, whole, tmp_path):
    """Each Try line is run as it stands; it leaves the bad file alone and writes a trace that can be read."""
    content = whole.read_bytes()
    Path("empty.trace").touch()
    Path("cut.trace").write_bytes(content[:-9])
    Path("t.trace").write_text("mine, and no trace")
    Path("my folder").mkdir()
    size = ["--requests", 1, "--prompt-tokens", 2, "--new-tokens", 2]
    for name in ("empty.trace", "cut.trace", "t.trace", "none.trace", "my folder"):
        before = Path(name).read_bytes() if Path(name).is_file() else None
        with pytest.raises(TraceError) as stopped:
            read(Path(name))
        words = shlex.split(stopped.value.hint)
        assert words[0] == "remoe" and remoe(*words[1:], *size).code == 0, stopped.value.hint
        assert read(Path(words[words.index("-o") + 1])).n_requests == 1
        assert before is None or Path(name).read_bytes() == before


def test_a_pipe_is_told_to_go_through_a_file(whole, tmp_path):
    remoe = f"{sys.executable} -m remoe_cli"
    run = partial(subprocess.run, shell=True, cwd=tmp_path, capture_output=True, text=True)
    whole.rename(tmp_path / "base.trace")
    ran = run(f"cat base.trace | {remoe} replay /dev/stdin --cache 4")
    assert ran.returncode == 1 and "cannot come through a pipe" in ran.stderr
    hint = ran.stderr.splitlines()[-1].partition("Try: ")[2]
    ran = run(f"cat base.trace | ({hint.replace('remoe', remoe)})")
    assert ran.returncode == 0 and "lru" in ran.stdout


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"borders": np.array([0, 2, 2, 3])}, "request 1 is empty"),
        ({"experts": np.zeros((0, 1, 1), int), "borders": np.array([0]), "prefill": np.zeros(0, bool)}, "no request"),
        ({"weights": np.array([[[0.5]], [[np.nan]], [[0.5]]])}, "weights holds values that are not finite"),
        ({"provenance": {"x": object()}}, "provenance is no JSON"),
        ({"provenance": {"x": float("nan")}}, "provenance is no JSON"),
    ],
)
def test_what_a_file_cannot_hold_is_not_written(tmp_path, changes, words):
    fields = {
        "experts": np.array([[[0]], [[1]], [[0]]]), "borders": np.array([0, 3]), "prefill": np.zeros(3, bool), "n_experts": 2,
    }  # fmt: skip
    with pytest.raises(TraceError, match=words):
        write(RoutingTrace(**{**fields, **changes}), tmp_path / "t.trace")
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_former_file(whole, monkeypatch):
    before = whole.read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RunError, match="No space left"):
        write(random_trace(4, 9, 2, 8, 3), whole)
    assert whole.read_bytes() == before and [path.name for path in whole.parent.iterdir()] == [whole.name]


@pytest.mark.parametrize(
    ("section", "at"),
    [("header", 28), ("experts", 0), ("prefill", -1), ("borders", -1), ("provenance", 4)],
)
def test_damage_that_leaves_a_possible_trace_is_noticed(tmp_path, section, at):
    """E, an id within its range, a zero between sections, a letter of the provenance."""
    path = tmp_path / "t.trace"
    experts = np.array([[[4, 0]], [[2, 1]]])
    write(RoutingTrace(experts, np.array([0, 2]), np.zeros(2, bool), 8, provenance={"model": "name"}), path)
    raw = bytearray(path.read_bytes())
    starts = {"header": 0, "borders": 128, "prefill": 192, "experts": 192, "provenance": raw.index(b"name") - 4}
    raw[starts[section] + at] ^= 1
    path.write_bytes(raw)
    with pytest.raises(TraceError, match="damaged"):
        read(path)


def test_provenance_that_json_does_not_know_is_refused(tmp_path):
    path = tmp_path / "t.trace"
    write(
        RoutingTrace(np.zeros((1, 1, 1), int), np.array([0, 1]), np.zeros(1, bool), 1, provenance={"seed": 123}), path
    )
    path.write_bytes(path.read_bytes().replace(b"123", b"NaN"))
    with pytest.raises(TraceError, match="NaN is no number of JSON"):
        read(path)
