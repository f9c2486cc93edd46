"""The journal of an in-place patch: NAME.gguf.remoe-undo, which holds what stood in the gates' place.

Layout: MAGIC; one byte of state and seven zeros; u64 little-endian length of the JSON that follows; JSON; the old bytes of the
gates in the JSON's order; sha256 of JSON and old bytes. It is written under another name, synced and renamed before the first
gate is touched, so it is whole wherever it is found. One journal, beside the first part, serves all parts.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from remoe_cli import atomic
from remoe_cli.delta.stored import digest
from remoe_cli.errors import RunError
from remoe_cli.gguf.gates import GateBytes
from remoe_cli.gguf.header import Header

MAGIC = b"remoeun1"
PENDING, PATCHED = b"P", b"D"  # gates may be old, new or torn; gates are all new
_STATE_AT, _JSON_AT, _SHA_BYTES = 8, 24, 32
_SUFFIX = ".remoe-undo"


@dataclass(frozen=True)
class Entry:
    """One gate: where it lies, what stood there and the sha256 of what was put there."""

    file: Path
    tensor: str
    offset: int
    old: bytes
    new_sha256: str


@dataclass(frozen=True)
class Journal:
    """headers: of each file that is written to: (size, bytes before its data, their sha256). nbytes: of the journal itself."""

    path: Path
    headers: dict[Path, tuple[int, int, str]]
    entries: list[Entry]
    state: bytes
    nbytes: int

    @classmethod
    def write(cls, first: Path, headers: Sequence[Header], gates: Sequence[GateBytes], base: str) -> "Journal":
        """Writes and syncs one that is pending. Raises RunError where the folder cannot be written or is full."""
        files = sorted({gate.file for gate in gates})
        known = {header.file: header for header in headers}
        marks = {file: (known[file].size, known[file].data, _head_sha256(file, known[file].data)) for file in files}
        facts = {
            "format": 1,
            "base": base,
            "files": [
                {"name": file.name, "size": size, "header_bytes": head, "header_sha256": sha256}
                for file, (size, head, sha256) in marks.items()
            ],
            "gates": [
                {
                    "file": files.index(gate.file), "tensor": gate.tensor, "offset": gate.offset, "bytes": len(gate.old),
                    "old_sha256": digest(gate.old), "new_sha256": digest(gate.new),
                }
                for gate in gates
            ],
        }  # fmt: skip
        text = json.dumps(facts).encode()
        body = text + b"".join(gate.old for gate in gates)
        whole = MAGIC + PENDING + bytes(7) + len(text).to_bytes(8, "little") + body + hashlib.sha256(body).digest()
        path = path_of(first)
        for left in path.parent.glob(f".{glob.escape(path.name)}.tmp*"):  # of a call that was killed
            left.unlink(missing_ok=True)
        atomic.write(path, whole)
        sync_folder(path.parent)
        entries = [Entry(gate.file, gate.tensor, gate.offset, gate.old, digest(gate.new)) for gate in gates]
        return cls(path, marks, entries, PENDING, len(whole))

    @classmethod
    def load(cls, first: Path) -> "Journal | None":
        """The journal of the GGUF with that first part; None where there is none. Raises RunError when it is damaged."""
        path = path_of(first)
        try:
            whole = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunError(f"{path} cannot be read ({error.strerror}).", f"ls -l {path}") from None
        try:
            return _parsed(path, whole)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise RunError(
                f"{path} is damaged ({str(error) or type(error).__name__}), so nothing was undone.",
                f"rm {path}, and download or copy {path.name.removesuffix(_SUFFIX)} again",
            ) from None

    def check_files(self) -> None:
        """Raises RunError where a file is not the one that was patched."""
        for file, (size, head, sha256) in self.headers.items():
            try:
                same = file.stat().st_size == size and _head_sha256(file, head) == sha256
            except OSError:
                same = False
            if not same:
                raise self.stale(f"{file.name} is not there, or is another file since")

    def found(self) -> list[str]:
        """What stands in each gate's place: "old", "new" or "other" ("old" where old and new are the same)."""
        states = []
        for entry in self.entries:
            with open(entry.file, "rb") as stream:
                stream.seek(entry.offset)
                stands = stream.read(len(entry.old))
            new = digest(stands) == entry.new_sha256
            states.append("old" if stands == entry.old else "new" if new else "other")
        return states

    def mark(self, state: bytes) -> "Journal":
        with open(self.path, "r+b") as stream:
            stream.seek(_STATE_AT)
            stream.write(state)
            stream.flush()
            os.fsync(stream.fileno())
        return replace(self, state=state)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def stale(self, why: str) -> RunError:
        return RunError(f"{self.path} cannot be followed: {why}; nothing was changed.", f"rm {self.path}")


def path_of(first: Path) -> Path:
    return first.with_name(first.name + _SUFFIX)


@contextlib.contextmanager
def locked(first: Path, shared: bool = False) -> Iterator[None]:
    """Keeps other calls of remoe away from the GGUF with that first part. Raises RunError when one is at work on it."""
    with open(first, "rb") as stream:
        try:
            fcntl.flock(stream.fileno(), (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another remoe is at work on {first}.", "the same command again when that one has ended"
            ) from None
        yield


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _parsed(path: Path, whole: bytes) -> Journal:
    """Raises ValueError, KeyError, TypeError or IndexError when it is damaged."""
    begin = _JSON_AT + int.from_bytes(whole[16:_JSON_AT], "little")
    body, state = whole[_JSON_AT:-_SHA_BYTES], whole[_STATE_AT : _STATE_AT + 1]
    if whole[: len(MAGIC)] != MAGIC or state not in (PENDING, PATCHED) or begin > len(whole) - _SHA_BYTES:
        raise ValueError("it does not begin as a journal")
    if hashlib.sha256(body).digest() != whole[-_SHA_BYTES:]:
        raise ValueError("its bytes have changed")
    facts = json.loads(whole[_JSON_AT:begin])
    names = [file["name"] for file in facts["files"]]
    if facts["format"] != 1 or any(name != Path(name).name for name in names):
        raise ValueError("it is of another format")
    files = [path.with_name(name) for name in names]
    headers = {
        file: (int(one["size"]), int(one["header_bytes"]), str(one["header_sha256"]))
        for file, one in zip(files, facts["files"], strict=True)
    }
    entries, at = [], begin
    for gate in facts["gates"]:
        old = whole[at : at + gate["bytes"]]
        at += len(old)
        file, offset = files[gate["file"]], int(gate["offset"])
        if digest(old) != gate["old_sha256"] or not headers[file][1] <= offset <= headers[file][0] - len(old):
            raise ValueError(f"{gate['tensor']} is not where it should be")
        entries.append(Entry(file, str(gate["tensor"]), offset, old, str(gate["new_sha256"])))
    return Journal(path, headers, entries, state, len(whole))


def _head_sha256(file: Path, nbytes: int) -> str:
    with open(file, "rb") as stream:
        return digest(stream.read(nbytes))
