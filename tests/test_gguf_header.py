"""The GGUF header reader: what gguf-py reads, and nothing that a damaged or hostile file could make of it."""

import random
import struct
import tracemalloc
from pathlib import Path

import demo_gguf
import gguf
import numpy as np
import pytest
import torch
from faults import chosen
from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st

from remoe_cli.delta import Delta
from remoe_cli.errors import CheckpointError, RemoeError
from remoe_cli.gguf import parts, patch_in_place, undo
from remoe_cli.gguf.header import Array, read_header, TYPES
from remoe_cli.hub.checkpoint import Checkpoint

U32, U64, TEXT, ARRAY = 4, 10, 8, 9
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int, n_dims: int | None = None) -> bytes:
    n = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", n, *dims, kind, offset)


def whole(
    pairs: list[bytes], tensors: list[bytes], data: int, version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(pairs)))) + b"".join(pairs + tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


GOOD_PAIRS = [
    pair("general.architecture", TEXT, text("deepseek2")),
    pair("deepseek2.block_count", U32, struct.pack("<I", 2)),
    pair("tokens", ARRAY, struct.pack("<IQ", TEXT, 2) + text("a") + text("bé")),
    pair("scores", ARRAY, struct.pack("<IQ", 6, 3) + bytes(12)),
]
GOOD_TENSORS = [
    tensor("blk.0.ffn_gate_inp.weight", (4, 2), 0, 0),
    tensor("blk.1.ffn_gate_inp.weight", (4, 2), 0, 32),
    tensor("token_embd.weight", (32, 2), 8, 64),
]
GOOD = whole(GOOD_PAIRS, GOOD_TENSORS, 64 + 68)


@pytest.fixture
def read(tmp_path):
    def of(content: bytes):
        path = tmp_path / "x.gguf"
        path.write_bytes(content)
        return read_header(path)

    return of


def damaged(read, content: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as raised:
        read(content)
    assert "\n" not in raised.value.message and raised.value.hint


def test_a_file_by_hand(read):
    header = read(GOOD)
    assert header.metadata == {
        "general.architecture": "deepseek2", "deepseek2.block_count": 2, "tokens": Array(TEXT, 2), "scores": Array(6, 3),
    }  # fmt: skip
    assert (header.version, header.alignment, header.data, header.size) == (3, 32, len(GOOD) - 132, len(GOOD))
    assert list(header.tensors.values()) == [
        ((2, 4), "F32", header.data, 32), ((2, 4), "F32", header.data + 32, 32), ((2, 32), "Q8_0", header.data + 64, 68),
    ]  # fmt: skip
    assert header.number("deepseek2.block_count") == 2 and header.number("general.architecture") is None


def test_the_types_are_those_of_gguf_py():
    known = {
        int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind])
        for kind in gguf.GGMLQuantizationType
        if kind in gguf.GGML_QUANT_SIZES
    }
    assert {number: TYPES[number] for number in known} == known


SCALARS = {
    "uint8": st.integers(0, 255), "int8": st.integers(-128, 127), "uint16": st.integers(0, 65535), "int16": st.integers(-32768, 32767),
    "uint32": st.integers(0, 2**32 - 1), "int32": st.integers(-(2**31), 2**31 - 1), "uint64": st.integers(0, 2**64 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1), "float32": st.floats(width=32, allow_nan=False), "float64": st.floats(allow_nan=False),
    "bool": st.booleans(), "string": st.text(min_size=1),
}  # fmt: skip
PAIRS = st.one_of(*(st.tuples(st.just(kind), values) for kind, values in SCALARS.items()))
FLOATS = st.sampled_from(["F32", "F16", "BF16", "Q8_0", "Q4_0"])


@QUICK
@given(
    pairs=st.lists(PAIRS, max_size=8),
    arrays=st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=5) | st.lists(st.text(min_size=1), min_size=1, max_size=4), max_size=3),
    tensors=st.lists(st.tuples(FLOATS, st.lists(st.integers(1, 3), min_size=0, max_size=3)), max_size=5),
    alignment=st.sampled_from([None, 8, 32, 64, 4096]),
)  # fmt: skip
def test_it_reads_what_gguf_py_writes_and_reads(tmp_path_factory, pairs, arrays, tensors, alignment):
    path = tmp_path_factory.mktemp("written") / "x.gguf"
    writer = gguf.GGUFWriter(path, "deepseek2")
    if alignment:
        writer.add_custom_alignment(alignment)
    for number, (kind, value) in enumerate(pairs):
        getattr(writer, f"add_{kind}")(f"key.{number}", value)
    for number, values in enumerate(arrays):
        writer.add_array(f"array.{number}", values)
    for number, (kind, dims) in enumerate(tensors):
        data = np.full([*dims, 32], number + 1, np.float32)
        quantised = gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(f"t.{number}.weight", quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not tensors:  # gguf-py pads behind the header where tensors follow only
        assert read_header(path).tensors == {}
        return
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    assert (ours.alignment, ours.data) == (theirs.alignment, theirs.data_offset)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            found, value = ours.metadata[key], field.contents()
            assert (found.length == len(value)) if isinstance(found, Array) else found == value
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert ours.tensors == {
        t.name: (tuple(reversed(t.shape.tolist())), t.tensor_type.name, t.data_offset, t.n_bytes)
        for t in theirs.tensors
    }


def test_truncations_are_named(read):
    for length in range(0, len(GOOD), 3):
        damaged(read, GOOD[:length], "no whole GGUF file")


@pytest.mark.parametrize("bit", chosen(range(8)))
def test_every_flipped_bit_of_the_header_is_read_or_refused(read, bit):
    """Never a traceback, and never a tensor outside of the file."""
    header = read(GOOD)
    refused = 0
    for at in range(header.data):
        content = bytearray(GOOD)
        content[at] ^= 1 << bit
        try:
            found = read(bytes(content))
        except CheckpointError:
            refused += 1
            continue
        for place in found.tensors.values():
            assert found.data <= place.offset <= len(GOOD) and place.offset + (place.nbytes or 0) <= len(GOOD)
    assert refused > header.data / 3


@QUICK
@given(st.binary(max_size=400), st.integers(0, 5), st.integers(0, 5))
def test_noise_behind_a_good_begin_is_refused(tmp_path_factory, noise, n_tensors, n_pairs):
    path = tmp_path_factory.mktemp("noise") / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_pairs) + noise)
    try:
        assert len(read_header(path).tensors) == n_tensors
    except CheckpointError as error:
        assert "Try: " in str(error)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not begin as one"),
        (b"GGML" + GOOD[4:], "does not begin as one"),
        (GOOD[:4] + struct.pack(">I", 3) + GOOD[8:], "big-endian"),
        (whole(GOOD_PAIRS, GOOD_TENSORS, 132, version=1), "has version 1"),
        (whole(GOOD_PAIRS, GOOD_TENSORS, 132, version=4), "has version 4"),
        (whole(GOOD_PAIRS, GOOD_TENSORS, 132, counts=(2**64 - 1, 4)), "no whole GGUF file"),
        (whole(GOOD_PAIRS, GOOD_TENSORS, 132, counts=(3, 2**63)), "no whole GGUF file"),
        (whole([struct.pack("<Q", 2**64 - 1) + b"key"], [], 64), "goes on for 18,446,744,073,709,551,615 bytes"),
        (whole([pair("k", TEXT, struct.pack("<Q", 2**40))], [], 64), "goes on for"),
        (whole([pair("k", ARRAY, struct.pack("<IQ", 6, 2**62))], [], 64), "goes on for"),
        (whole([pair("k", ARRAY, struct.pack("<IQ", TEXT, 2**62))], [], 64), "goes on for"),
        (whole([pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1))], [], 64), "array of the unknown type 9"),
        (whole([pair("k", 13, bytes(8))], [], 64), "unknown type 13"),
        (whole([pair("k", U32, bytes(4)), pair("k", U32, bytes(4))], [], 0), "the key k twice"),
        (whole([pair("", U32, bytes(4))], [], 0), "holds the name ''"),
        (whole([pair("a\nb", U32, bytes(4))], [], 0), r"holds the name 'a\\nb'"),
        (whole([struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<I", U32) + bytes(4)], [], 0), "not UTF-8"),
        *[
            (whole([pair("general.alignment", U32, struct.pack("<I", n))], GOOD_TENSORS, 132), f"alignment is {n}")
            for n in (0, 3, 33)
        ],
        (whole([pair("general.alignment", TEXT, text("32"))], GOOD_TENSORS, 132), "alignment is '32'"),
        (whole([pair("general.alignment", U32, struct.pack("<I", 2**31))], GOOD_TENSORS, 132), "no whole GGUF file"),
        (whole([], [tensor("t", (), 0, 0, n_dims=2**32 - 1)], 64), "4,294,967,295 dimensions"),
        (whole([], [tensor("t", (1, 1, 1, 1, 1), 0, 0)], 64), "5 dimensions"),
        (whole([], [tensor("t", (2**63, 2**63, 2**63, 2**63), 0, 0)], 64), "but t ends at"),
        (whole([], [tensor("t", (17,), 8, 0)], 64), "rows of 17 elements, no multiple of the 32 of Q8_0"),
        (whole([], [tensor("t", (4,), 0, 0), tensor("t", (4,), 0, 32)], 64), "the tensor t twice"),
        (whole([], [tensor("t", (4,), 0, 8)], 64), "no multiple of the alignment 32"),
        (whole([], [tensor("t", (4,), 0, 64)], 64), "but t ends at"),
        (whole([], [tensor("t", (4,), 0, 2**64 - 32)], 64), "but t ends at"),
        (whole([], [tensor("t", (4,), 999, 2**63)], 64), "but t ends at"),
        (whole([], [tensor("t", (16,), 0, 0), tensor("u", (16,), 0, 32)], 128), "u and t lie on the same bytes"),
    ],
)
def test_hostile_headers_are_refused_with_the_reason_and_without_memory(read, content, words):
    tracemalloc.start()
    damaged(read, content, words)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


def test_a_type_that_only_a_fork_knows_is_no_damage(read):
    header = read(whole([], [tensor("a", (4,), 139, 0), tensor("b", (4,), 0, 32)], 64))
    assert header.tensors["a"].type == "type 139" and header.tensors["a"].nbytes is None
    assert header.tensors["b"].nbytes == 16


def test_a_header_that_claims_gigabytes_is_not_read(tmp_path):
    path = tmp_path / "x.gguf"
    with open(path, "wb") as stream:
        stream.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IQ", TEXT, 8 << 30))
        stream.truncate(9 << 30)  # sparse
    with pytest.raises(CheckpointError, match="headers may take 134,217,728"):
        read_header(path)


def test_what_is_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(CheckpointError, match="cannot be read") as raised:
            read_header(path)
        assert "\n" not in raised.value.message


@pytest.mark.parametrize("case", chosen(range(20)))
def test_flipped_headers_never_lead_to_a_write_beside_the_gates(tmp_path, folders, case):
    """The whole way: whatever a flipped bit of the header says, a patch is refused, or it ends and can be undone."""
    checkpoint = Checkpoint.open(folders("deepseek_v2", torch.bfloat16))
    gates = {n: checkpoint.read(n) + 1 for n in checkpoint.tensors if n.endswith("mlp.gate.weight")}
    delta = Delta.of(checkpoint, gates, "remoe", {})
    file = demo_gguf.write_gates(checkpoint, tmp_path / "x.gguf")
    good, ends, chance = file.read_bytes(), {"refused": 0, "patched": 0}, random.Random(case)
    header_bytes = good.rindex(b"ffn_gate_inp.weight") + 40
    for _ in range(40):
        content = bytearray(good)
        content[chance.randrange(header_bytes)] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
        try:
            patch_in_place(delta, file)
            ends["patched"] += 1
        except RemoeError:
            ends["refused"] += 1
            assert file.read_bytes() == content
        else:
            undo(file)
            assert file.read_bytes() == content
        assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]
    assert min(ends.values()) > 0


def test_part_names_cannot_lead_out_of_the_folder(tmp_path: Path):
    pairs = [pair("split.count", 2, struct.pack("<H", 2)), pair("split.no", 2, struct.pack("<H", 0))]
    file = tmp_path / "..-00001-of-00002.gguf"
    file.write_bytes(whole(pairs, [], 0))
    with pytest.raises(CheckpointError, match=r"\.\.-00002-of-00002\.gguf is not there"):
        parts(file)
