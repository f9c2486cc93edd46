"""The trace file: one RoutingTrace, memory-mapped when read. Documented to the byte in docs/trace-format.md.

Shape letters: T tokens, L MoE layers, E routed experts, K experts a token, R requests.
"""

import json
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remoe_cli import atomic
from remoe_cli.errors import command, TraceError
from remoe_cli.routing.trace import FLOATS, MOST_EXPERTS, RoutingTrace

MAGIC, VERSION = b"REMOETRC", 1
ALIGNMENT = 64
_HEADER = struct.Struct("<8sIIQIIIIQQQ")
_FLAGS = {name: 1 << bit for bit, name in enumerate(FLOATS)}
_BLOCK = 1 << 12  # tokens
_FOREIGN = (b"PK\x03\x04", b"\x1f\x8b", b"# route_trace", b"turn,phase,")  # npz, gzip, and a route CSV's first line


class _Header(NamedTuple):
    """In the order of the file. flags: which of FLOATS are there. checksum: see _checksum."""

    magic: bytes
    version: int
    flags: int
    tokens: int
    layers: int
    experts: int
    top_k: int
    checksum: int
    requests: int
    provenance: int
    size: int


class _Section(NamedTuple):
    name: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + int(np.prod(self.shape, dtype=object)) * np.dtype(self.dtype).itemsize


def write(trace: RoutingTrace, path: Path) -> int:
    """Writes the trace under its name once it is whole; the file's size in bytes.

    Raises TraceError for a trace that a file cannot hold (no request, a request without a token, scores that are not
    finite, weights or probabilities below 0, provenance that is no JSON), RunError when the folder cannot be written.
    """
    if why := _unfit(trace):
        raise TraceError(f"{path} was not written: {why}.", _fresh(path))
    try:
        provenance = json.dumps(trace.provenance, allow_nan=False, sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise TraceError(f"{path} was not written: its provenance is no JSON ({error}).", _fresh(path)) from None
    flags = sum(flag for name, flag in _FLAGS.items() if getattr(trace, name) is not None)
    shape = trace.n_tokens, trace.n_layers, trace.n_experts, trace.top_k
    header = _Header(MAGIC, VERSION, flags, *shape, 0, trace.n_requests, len(provenance), 0)
    sections = _sections(header, 0 if trace.hidden is None else trace.hidden.shape[-1])
    content: dict[str, Any] = {name: getattr(trace, name) for name in ("experts", "borders", "prefill", *FLOATS)}
    content["provenance"] = np.frombuffer(provenance, dtype=np.uint8)
    header = header._replace(size=sections[-1].end)
    header = header._replace(checksum=_checksum(header, sections, content))
    with atomic.new_file(path) as stream:
        stream.write(_HEADER.pack(*header))
        for section in sections:
            stream.write(bytes(section.offset - stream.tell()))
            for block in _blocks(content[section.name]):  # what is mapped or transposed is never copied as a whole
                stream.write(np.ascontiguousarray(block, dtype=section.dtype).data)
    return header.size


def _checksum(header: _Header, sections: list[_Section], content: dict[str, Any]) -> int:
    """CRC-32 of the header, where it is 0 itself, and of all sections but the floats, which would take long to read."""
    found = zlib.crc32(_HEADER.pack(*header._replace(checksum=0)))
    for section in sections:
        for block in () if section.name in FLOATS else _blocks(content[section.name]):
            found = zlib.crc32(np.ascontiguousarray(block, dtype=section.dtype).data, found)
    return found


def read(path: Path) -> RoutingTrace:
    """The trace, its arrays mapped from the file and checked, none of them copied.

    Raises TraceError for anything but a whole trace of this version: what is wrong with it, and the next command.
    """
    header, size = _header(path)
    if size != header.size:
        state = "truncated" if size < header.size else "longer than it should be"
        raise _damaged(path, f"{size:,} bytes, its header says {header.size:,}", state)
    sections = _sections(header)
    if why := _impossible(header, sections):
        raise _damaged(path, why)
    whole = np.memmap(path, dtype=np.uint8, mode="r")
    found = {section.name: whole[section.offset : section.end] for section in sections}
    arrays = {s.name: found[s.name].view(s.dtype).reshape(s.shape) for s in sections}
    between = [whole[before.end : after.offset] for before, after in zip(sections, sections[1:])]
    altered = _checksum(header, sections, arrays) != header.checksum or any(gap.any() for gap in between)
    try:
        provenance = json.loads(arrays.pop("provenance").tobytes(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its provenance is no JSON ({error})") from None
    if not isinstance(provenance, dict):
        raise _damaged(path, "its provenance is no JSON object")
    if found["prefill"].max(initial=0) > 1:
        raise _damaged(path, f"the phase of a token is {found['prefill'].max()}, not 0 or 1")
    arrays["prefill"] = arrays["prefill"].view(np.bool_)
    if why := _empty(arrays["borders"]):  # before the phases, which then belong to other requests
        raise _damaged(path, why)
    try:
        trace = RoutingTrace(n_experts=header.experts, provenance=provenance, **arrays)
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    if why := _unfit(trace):
        raise _damaged(path, why)
    if altered:  # last, since what is named above says more
        raise _damaged(path, "its checksum is not that of its content")
    return trace


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _damaged(path: Path, why: str, state: str = "damaged") -> TraceError:
    return TraceError(f"{path} is {state}: {why}; copy it again from where it is whole, or record anew.", _fresh(path))


def _fresh(path: Path) -> str:
    """A command that writes a whole trace beside that path."""
    return command("trace", "demo", o=atomic.free_name(path))


def _header(path: Path) -> tuple[_Header, int]:
    """And the size of the file."""
    try:
        mode = os.stat(path).st_mode if str(path) != "-" else stat.S_IFIFO
        if stat.S_ISDIR(mode):
            raise TraceError(f"{path} is a folder; a trace is a file.", _fresh(path / "t.trace"))
        if not stat.S_ISREG(mode):
            hint = "cat > t.trace; remoe replay t.trace --cache 8"
            raise TraceError(f"{path} is no file; a trace is mapped, so it cannot come through a pipe.", hint)
        with open(path, "rb") as stream:
            raw, size = stream.read(_HEADER.size), os.fstat(stream.fileno()).st_size
    except OSError as error:
        why = f"there is no trace {path}" if isinstance(error, FileNotFoundError) else f"{path}: {error.strerror}"
        raise TraceError(f"{why}.", _fresh(Path(path.name or "t.trace"))) from None
    if not raw:
        raise TraceError(f"{path} is empty; copy it again from where it is whole, or record anew.", _fresh(path))
    if raw[: len(MAGIC)] != MAGIC[: len(raw)]:
        if raw.startswith(_FOREIGN):
            hint = command("trace", "import", path, o=atomic.free_name(Path("t.trace")))
            raise TraceError(f"{path} is no trace of remoe, but may be one of another tool.", hint)
        fresh = _fresh(Path("t.trace"))
        raise TraceError(f"{path} is no trace: it does not begin with {MAGIC.decode()}.", fresh)
    if len(raw) < _HEADER.size:
        raise _damaged(path, f"{size} bytes, less than a header", "truncated")
    header = _Header(*_HEADER.unpack(raw))
    if header.version != VERSION:
        raise TraceError(
            f"{path} is a trace of version {header.version}; this remoe reads version {VERSION}.",
            "pip install -U remoe-cli" if header.version > VERSION else _fresh(path),
        )
    return header, size


def _sections(header: _Header, width: int | None = None) -> list[_Section]:
    """In the order of the file, each at the next multiple of ALIGNMENT. width: of hidden states, None: as wide as the file's size says."""
    T, L, E, K = header.tokens, header.layers, header.experts, header.top_k
    parts: list[tuple[str, str, tuple[int, ...]]] = [
        ("borders", "<i8", (header.requests + 1,)),
        ("prefill", "|u1", (T,)),
        ("experts", "<i2", (T, L, K)),
        *(
            (name, "<f2", (T, L, K if name == "weights" else E))
            for name, flag in _FLAGS.items()
            if header.flags & flag and name != "hidden"
        ),
        ("provenance", "|u1", (header.provenance,)),
    ]
    sections, end = [], _HEADER.size
    for name, dtype, shape in parts:
        sections.append(_Section(name, -(-end // ALIGNMENT) * ALIGNMENT, dtype, shape))
        end = sections[-1].end
    if header.flags & _FLAGS["hidden"]:  # the last one: the header has no place for its width
        start = -(-end // ALIGNMENT) * ALIGNMENT
        wide = width if width is not None else (header.size - start) // max(1, 2 * T * L)
        sections.append(_Section("hidden", start, "<f2", (T, L, max(1, wide))))
    return sections


def _impossible(header: _Header, sections: list[_Section]) -> str | None:
    if header.flags >= 1 << len(_FLAGS):
        return "its header holds flags that version 1 does not know"
    if not 1 <= header.top_k <= header.experts <= MOST_EXPERTS or header.layers < 1:
        return f"its header says {header.layers} layers with {header.top_k} of {header.experts} experts a token"
    if sections[-1].end != header.size:
        return f"the shapes in its header come to {sections[-1].end:,} bytes, not the {header.size:,} it says"
    return None


def _unfit(trace: RoutingTrace) -> str | None:
    """Why a file does not hold such a trace."""
    if not trace.n_requests:
        return "the trace holds no request"
    if why := _empty(trace.borders):
        return why
    for name in FLOATS:
        array = getattr(trace, name)
        for block in () if array is None else _blocks(array):
            bits = block.view(np.uint16)
            # exponent bits all set: infinite or not a number; far quicker than isfinite for float16
            if ((bits & 0x7C00) == 0x7C00).any():
                return f"{name} holds values that are not finite"
            if name != "hidden" and bits.max(initial=0) > 0x8000:  # a sign bit, but for -0
                return f"{name} holds values below 0"
    return None


def _empty(borders: np.ndarray) -> str | None:
    empty = np.flatnonzero(np.diff(borders) == 0)
    return f"request {empty[0]} is empty" if len(empty) else None


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    return (array[start : start + _BLOCK] for start in range(0, len(array), _BLOCK))
