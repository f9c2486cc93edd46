"""Damaged and hostile deltas and checkpoints: whatever the bytes, one line says why, and nothing is written but `out`, whole.

30 cases of each kind by a fixed seed; REMOE_FAULTS=all makes it 1000.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from stat import S_ISDIR

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_delta import make_delta

from remoe_cli import diff, inspect, merge
from remoe_cli.apply import apply
from remoe_cli.delta import Delta
from remoe_cli.delta.stored import dtype_named, stored_bytes
from remoe_cli.errors import RemoeError
from remoe_cli.hub.checkpoint import Checkpoint, INDEX, indexed

CASES = 1000 if os.environ.get("REMOE_FAULTS") == "all" else 30
ODD = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, float("inf"), float("nan"), "", "x", "a\0b", "\ud800", "\x1b[2J",
    "a\nb", "../x", "/etc/passwd", "x" * 100_000, [], [[]], {}, {"": ""}, {"a": {"b": []}}, [0, 0], [-1, 4], [0, 2**62], [1] * 100,
    "BF16", "F32", "bfloat16", "float32", "float64", "complex64", "I64",
]  # fmt: skip
NAMES = [
    "../x", "../x.safetensors", "/etc/passwd", "/tmp/x.safetensors", "a/b.safetensors", "./x.safetensors", "..", ".", "",
    "a\0.safetensors", "\ud800.safetensors", ".hidden.safetensors", "config.json", "x" * 300 + ".safetensors", "\n.safetensors",
    "model.bin", "remoe_applied.json", "..\\x.safetensors/..", "é" * 130 + ".safetensors",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """base/, delta/ (with heads) and other/ in one folder, and what must stay as it is beside them."""
    folder = tmp_path_factory.mktemp("whole")
    base = Checkpoint.open(tiny_models.make("mixtral", folder / "base", torch.bfloat16))
    delta = make_delta(base)
    heads = {name.replace("weight", "temporal"): torch.ones(8, 32) for name in delta.tensors}
    Delta.of(base, delta.tensors, "remoe", {"remoe": "test"}, heads).save(folder / "delta")
    make_delta(base, 0.1).save(folder / "other")
    return folder


@pytest.fixture
def world(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "world"))


def seen(world: Path) -> dict[str, tuple]:
    """All that lies in and beside it but out/: names, and of files whether they are links, sizes and times."""
    every = [path for path in world.parent.rglob("*") if world / "out" not in (path, *path.parents)]
    stats = {str(path): path.lstat() for path in every}
    return {path: S_ISDIR(s.st_mode) or (s.st_mode, s.st_size, s.st_mtime_ns) for path, s in stats.items()}


def refusal(work: Callable[[], object]) -> str | None:
    """What a user is told, None where it worked. Anything but a RemoeError is a bug and raised."""
    try:
        work()
    except RemoeError as error:
        assert error.message.isprintable() and error.message and len(error.message) < 2100, error.message[:300]
        assert error.hint and not isinstance(error, NotImplementedError)
        return error.message
    return None


def all_or_nothing(world: Path, form: str) -> str | None:
    """Applies in the world: refused and nothing written, or written whole."""
    before, out = seen(world), world / "out"
    told = refusal(lambda: apply(str(world / "delta"), str(world / "base"), out, form))
    assert seen(world) == before, "something beside `out` was touched"
    if told is None:
        delta, written = Delta.load(world / "delta"), Checkpoint.open(out)
        for name in delta.tensors:
            info = written.tensors[name]
            assert written.raw(name) == stored_bytes(delta.tensor(name, dtype_named(info.dtype)))
        assert not any(path.name.startswith(".") for path in out.iterdir())
    else:
        assert not out.exists(), "a refused delta left something"
    shutil.rmtree(out, ignore_errors=True)
    return told


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut off, lengthened, some bits flipped, a stretch put elsewhere, or another length in its first 8 bytes."""
    kind = rng.randrange(6)
    at = rng.randrange(len(data) + 1)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data + rng.randbytes(rng.randrange(1, 64))
    if kind == 2:
        found = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            found[rng.randrange(min(len(found), rng.choice([16, 400, len(found)])))] ^= 1 << rng.randrange(8)
        return bytes(found)
    if kind == 3:
        return data[:at] + data[at + rng.randrange(1, 9) :]
    if kind == 4:
        return rng.choice([0, 1, 7, 2**20, 2**31, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little") + data[8:]
    return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]


def odd(value: object, rng: random.Random) -> object:
    """The same JSON with one value, somewhere in it, replaced, removed or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        if (what := rng.random()) < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if what < 0.2:
            return {(str(rng.choice(ODD)) if name == key else name): item for name, item in value.items()}
        return {**value, key: odd(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], odd(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD)


def header_changed(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header is odd in one place."""
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(odd(json.loads(data[8 : 8 + length]), rng)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def every_verb(world: Path) -> None:
    """What reads a delta, all of it: shown to the end, in an encoding that a terminal takes."""
    one, other = str(world / "delta"), str(world / "other")
    for work in (
        lambda: inspect.summary(inspect.inspect(one)).encode(),
        lambda: json.dumps(inspect.inspect(one), allow_nan=False),
        lambda: diff.summary(diff.diff(one, other)).encode(),
        lambda: json.dumps(diff.diff(other, one), allow_nan=False),
    ):
        refusal(work)
    before = seen(world)
    told = refusal(lambda: merge.merge([one, other], None, world / "out"))
    assert seen(world) == before and (told is None) == (world / "out").exists()
    if told is None:
        Delta.load(world / "out")
    shutil.rmtree(world / "out", ignore_errors=True)


@pytest.mark.parametrize("file", ["gates.safetensors", "heads.safetensors", "remoe.json"])
@pytest.mark.parametrize("how", ["bytes", "structure"])
def test_damaged_deltas(world, file, how):
    path, rng = world / "delta" / file, random.Random(f"{file} {how}")
    whole, told = path.read_bytes(), 0
    for _ in range(CASES):
        if how == "bytes":
            path.write_bytes(damaged(whole, rng))
        elif file == "remoe.json":
            path.write_text(json.dumps(odd(json.loads(whole), rng)))
        else:
            path.write_bytes(header_changed(whole, rng))
        told += all_or_nothing(world, rng.choice(["copy", "overlay"])) is not None
        every_verb(world)
    assert told > CASES / 2, "most damage is found"
    path.write_bytes(whole)
    assert all_or_nothing(world, "copy") is None


@pytest.mark.parametrize("file", ["config.json", INDEX, "model-00002-of-00004.safetensors"])
@pytest.mark.parametrize("how", ["bytes", "structure"])
def test_damaged_bases(world, file, how):
    path, rng = world / "base" / file, random.Random(f"{file} {how}")
    whole = path.read_bytes()
    for _ in range(CASES):
        if how == "bytes":
            path.write_bytes(damaged(whole, rng))
        elif path.suffix == ".json":
            path.write_text(json.dumps(odd(json.loads(whole), rng)))
        else:
            path.write_bytes(header_changed(whole, rng))
        all_or_nothing(world, rng.choice(["copy", "overlay"]))
    path.write_bytes(whole)
    assert all_or_nothing(world, "overlay") is None


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.encode("unicode_escape").decode()[:20])
def test_no_file_name_leads_anywhere(world, name):
    """A weight file of that name is refused, whether it is there or not, before anything is read from it."""
    index = json.loads((world / "base" / INDEX).read_text())
    first = min(index["weight_map"])
    index["weight_map"][first] = name
    (world / "base" / INDEX).write_text(json.dumps(index))
    for target in (world / "x", world / "x.safetensors", world / "base/.hidden.safetensors", world / "base/model.bin"):
        shutil.copyfile(world / "base/model-00001-of-00004.safetensors", target)
    for form in ("copy", "overlay"):
        told = all_or_nothing(world, form)
        assert told is not None and "is not a safetensors index" in told


def test_ordinary_names_are_taken(tmp_path):
    names = ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch model é.safetensors", "a..b.safetensors"]
    path = tmp_path / INDEX
    path.write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}))
    assert indexed(path) == sorted(names)


@pytest.mark.parametrize("form", ["copy", "overlay"])
@pytest.mark.parametrize("name", ["model-00002-of-00004.safetensors", "model-gates.safetensors", "config.json"])
def test_what_is_linked_from_elsewhere_is_read_and_never_written(world, form, name):
    """As in the Hub's cache, where every file is a link; also under the name that the overlay's own file has."""
    base, elsewhere = world / "base", world / "elsewhere"
    elsewhere.mkdir()
    source = base / ("model-00002-of-00004.safetensors" if name.startswith("model") else name)
    source.rename(elsewhere / "blob")
    (base / name).symlink_to(elsewhere / "blob")
    index = json.loads((base / INDEX).read_text())
    index["weight_map"] = {key: name if value == source.name else value for key, value in index["weight_map"].items()}
    (base / INDEX).write_text(json.dumps(index))
    before = (elsewhere / "blob").read_bytes()
    assert all_or_nothing(world, form) is None
    assert (elsewhere / "blob").read_bytes() == before


def test_files_of_claimed_terabytes_are_not_read(world):
    """Sparse: they take no room, and reading one would not end well."""
    for file in (
        "delta/remoe.json",
        "delta/gates.safetensors",
        "delta/heads.safetensors",
        "base/config.json",
        f"base/{INDEX}",
    ):
        path = world / file
        kept = path.read_bytes()
        with open(path, "r+b") as stream:
            stream.truncate(1 << 42)
        told = all_or_nothing(world, "copy")
        assert told is not None and path.name in told and "bytes" in told
        path.write_bytes(kept)
    assert all_or_nothing(world, "copy") is None


@settings(max_examples=CASES, deadline=None)
@given(data=st.data())
def test_no_facts_whatever_give_anything_but_a_reason(whole, tmp_path_factory, data):
    """remoe.json built from the words that it may hold."""
    world = tmp_path_factory.getbasetemp() / "facts"
    shutil.copytree(whole / "delta", world / "delta", dirs_exist_ok=True)
    facts = json.loads((whole / "delta/remoe.json").read_text())
    single = st.sampled_from(ODD) | st.text(max_size=4) | st.integers() | st.floats()
    values = st.recursive(
        single, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    )
    for key in data.draw(st.sets(st.sampled_from([*facts, "report"]), min_size=1, max_size=3)):
        facts[key] = data.draw(values)
    name = data.draw(st.sampled_from(sorted(json.loads((whole / "delta/remoe.json").read_text())["gates"])))
    if isinstance(facts["gates"], dict) and isinstance(facts["gates"].get(name), dict):
        facts["gates"][name] = facts["gates"][name] | data.draw(
            st.dictionaries(
                st.sampled_from(["dtype", "shape", "base_dtype", "base_sha256", "base_sha256_f16", "sha256"]), values
            )
        )
    (world / "delta/remoe.json").write_text(json.dumps(facts))
    refusal(lambda: inspect.summary(inspect.inspect(str(world / "delta"))).encode())
