"""The header of a GGUF file, read strictly: every length is checked against the file before anything is read or kept.

Layout: magic, version, two counts, the key-value pairs, the tensors' names, dimensions, types and offsets, padding, data
(GGUF versions 2 and 3, little-endian). What llama.cpp would not load may still pass here; what lies outside of the file, or
twice in it, does not.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from remoe_cli.errors import CheckpointError

_MAX_HEADER = 1 << 27  # bytes; vocabularies of 256k tokens with their merges take under 20 MB
_MAX_DIMENSIONS = 4
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# ggml's number of a tensor type -> its name, elements in a block, bytes of a block
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip


class TensorPlace(NamedTuple):
    """shape: row-major as in safetensors, the reverse of ggml's order. offset: absolute, bytes. nbytes: None for a type that is
    not in TYPES (forks have types of their own)."""

    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int | None


class Array(NamedTuple):
    """An array among the metadata, whose elements are not kept. type: GGUF's number of the elements' type."""

    type: int
    length: int


@dataclass(frozen=True)
class Header:
    """size: of the file, bytes. data: where the tensors' data begins, bytes. metadata: key -> number, bool, text or Array."""

    file: Path
    size: int
    version: int
    alignment: int
    data: int
    metadata: dict[str, object]
    tensors: dict[str, TensorPlace]

    def number(self, key: str) -> int | None:
        """A whole number among the metadata, None where there is none under that key."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_header(file: Path) -> Header:
    """Raises CheckpointError, with the reason, when the file is no GGUF, is damaged or cannot be read."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            return _parsed(file, size, _Cursor(stream, size))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).", f"ls -l {file.parent}") from None
    except _Damaged as error:
        raise damaged(file, str(error)) from None


def damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is no whole GGUF file: {why}.", "download or copy the file again")


class _Damaged(ValueError):
    """The reason, as a sentence without its end."""


class _Cursor:
    """Reads forward, and never past the file's end or the bound on headers."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self.at = stream, 0
        self._end, self._bounded = min(size, _MAX_HEADER), size > _MAX_HEADER

    def take(self, nbytes: int) -> bytes:
        self._check(nbytes)
        found = self._stream.read(nbytes)
        if len(found) != nbytes:
            raise _Damaged("it became shorter while it was read")
        self.at += nbytes
        return found

    def skip(self, nbytes: int) -> None:
        self._check(nbytes)
        self._stream.seek(nbytes, 1)
        self.at += nbytes

    def number(self, form: str = "<Q"):
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> bytes:
        return self.take(self.number())

    def _check(self, nbytes: int) -> None:
        if nbytes > self._end - self.at:
            bound = f" (headers may take {_MAX_HEADER:,})" if self._bounded else ""
            raise _Damaged(
                f"its header goes on for {nbytes:,} bytes at {self.at:,}, past the end at {self._end:,}{bound}"
            )


def _parsed(file: Path, size: int, cursor: _Cursor) -> Header:
    if size < 24 or cursor.take(4) != b"GGUF":
        raise _Damaged("it does not begin as one")
    version = cursor.number("<I")
    if version not in (2, 3):
        raise _Damaged(
            "it is big-endian, and remoe reads little-endian ones only"
            if version & 0xFFFF == 0
            else f"it has version {version}, and remoe reads 2 and 3"
        )
    n_tensors, n_pairs = cursor.number(), cursor.number()
    metadata: dict[str, object] = {}
    for _ in range(n_pairs):  # a claimed count costs nothing: each pair must lie in the file
        key = _name(cursor.text())
        if key in metadata:
            raise _Damaged(f"it holds the key {key} twice")
        metadata[key] = _value(cursor, cursor.number("<I"), key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Damaged(f"its alignment is {alignment!r}, and a power of two is allowed")
    entries = {}
    for _ in range(n_tensors):
        name = _name(cursor.text())
        if name in entries:
            raise _Damaged(f"it holds the tensor {name} twice")
        entries[name] = _entry(cursor, name)
    data = -(-cursor.at // alignment) * alignment
    tensors = {name: place._replace(offset=data + place.offset) for name, place in entries.items()}
    _check_places(tensors, size, alignment, data)
    return Header(file, size, version, alignment, data, metadata, tensors)


def _name(text: bytes) -> str:
    try:
        name = text.decode()
    except UnicodeDecodeError:
        raise _Damaged("a name in its header is not UTF-8") from None
    if not name.isprintable() or not name:
        raise _Damaged(f"its header holds the name {name[:40]!r}")
    return name


def _value(cursor: _Cursor, kind: int, key: str) -> object:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.text().decode(errors="replace")
    if kind != _ARRAY:
        raise _Damaged(f"the value of {key} has the unknown type {kind}")
    element, count = cursor.number("<I"), cursor.number()
    if element in _SCALARS:
        cursor.skip(count * struct.calcsize(_SCALARS[element]))
    elif element == _STRING:
        for _ in range(count):
            cursor.skip(cursor.number())
    else:
        raise _Damaged(f"{key} is an array of the unknown type {element}")
    return Array(element, count)


def _entry(cursor: _Cursor, name: str) -> TensorPlace:
    """With the offset as it is written: from the begin of the data."""
    n_dimensions = cursor.number("<I")
    if n_dimensions > _MAX_DIMENSIONS:
        raise _Damaged(f"{name} has {n_dimensions:,} dimensions, and {_MAX_DIMENSIONS} are allowed")
    shape = tuple(reversed([cursor.number() for _ in range(n_dimensions)]))
    number, offset = cursor.number("<I"), cursor.number()
    if number not in TYPES:
        return TensorPlace(shape, f"type {number}", offset, None)
    kind, block, block_bytes = TYPES[number]
    if (shape[-1] if shape else 1) % block:
        raise _Damaged(f"{name} has rows of {shape[-1]:,} elements, no multiple of the {block} of {kind}")
    return TensorPlace(shape, kind, offset, math.prod(shape) // block * block_bytes)


def _check_places(tensors: dict[str, TensorPlace], size: int, alignment: int, data: int) -> None:
    end, before = data, ""
    for name, place in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes or 0)):
        if (place.offset - data) % alignment:
            raise _Damaged(f"{name} lies at {place.offset - data:,}, no multiple of the alignment {alignment}")
        if place.offset < end:
            raise _Damaged(f"{name} and {before} lie on the same bytes")
        end, before = place.offset + (place.nbytes or 0), name
        if end > size:
            raise _Damaged(f"it holds {size:,} bytes, but {name} ends at {end:,}")
