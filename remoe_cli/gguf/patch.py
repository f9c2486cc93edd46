"""Putting a delta's gates into a GGUF: into a copy of it, or in place with a journal that takes them out again."""

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from remoe_cli import atomic
from remoe_cli.console import note
from remoe_cli.copies import copy_files
from remoe_cli.delta import Delta
from remoe_cli.errors import command, DeltaError, instead, RunError
from remoe_cli.gguf import journal as journals
from remoe_cli.gguf.gates import find_gates, Found
from remoe_cli.gguf.header import Header
from remoe_cli.gguf.journal import Journal, locked, sync_folder
from remoe_cli.gguf.parts import read_parts

_BLOB = re.compile(r"(sha256[-:])?[0-9a-f]{40,64}")  # how the Hub's and Ollama's caches name files: by their own digest


@dataclass(frozen=True)
class Patched:
    """files: the parts, where the tuned gates are or were. gates: tensors written. written_bytes: all that was written, journal
    or copy included. state: "patched", "already tuned", "undone" or "nothing to undo"."""

    files: list[Path]
    gates: int
    written_bytes: int
    seconds: float
    state: str


def parts(file: Path) -> list[Path]:
    """All parts of the GGUF that `file` is a part of, in order. Raises CheckpointError for a missing or damaged one."""
    return [header.file for header in read_parts(Path(file))]


def state(delta: Delta, file: Path) -> str:
    """ "base" or "tuned". Raises DeltaError, with the reason, when the GGUF holds neither."""
    return "tuned" if find_gates(delta, read_parts(Path(file)), cast=False).is_tuned else "base"


def patch_copy(delta: Delta, file: Path, out: Path, cast: bool = False) -> Patched:
    """Writes a copy that differs in the gates' bytes only. out: a .gguf file, or a folder, which gets all parts; a split GGUF
    needs a folder. cast: tuned values are rounded to the dtype of the base's gates first.

    Raises DeltaError for another base, CheckpointError for a damaged GGUF, RunError when `out` is taken, not writable or the
    disk too small.
    """
    begin, headers = time.monotonic(), read_parts(Path(file))
    first, out = headers[0].file, _free_place(Path(out), headers)
    if journals.path_of(first).exists():
        with locked(first):
            _repair(first)
    with locked(first, shared=True):
        found = _found(delta, headers, cast)
        sources = [header.file for header in headers]
        with _scratch(out) as scratch:
            shared = copy_files(sources, scratch, out)
            if not found.is_tuned:
                _write((scratch / gate.file.name, gate.offset, gate.new) for gate in found.gates)
            whole = scratch if len(headers) > 1 else scratch / first.name
            os.replace(whole, out)
            sync_folder(out.parent)
    written = 0 if shared else sum(header.size for header in headers)
    written += 0 if found.is_tuned else sum(len(gate.new) for gate in found.gates)
    files = [out / source.name for source in sources] if len(sources) > 1 else [out]
    return _patched(files, found, written, begin)


def patch_in_place(delta: Delta, file: Path, cast: bool = False) -> Patched:
    """Writes the tuned gates over the base's. What stood there is in the journal before the first byte changes, and `undo` puts
    it back; a call that was killed is repaired by the next one.

    Raises DeltaError for another base, CheckpointError for a damaged GGUF, RunError for a file that is not to be changed in place
    (links, caches, read-only) and for a full disk.
    """
    begin, headers = time.monotonic(), read_parts(Path(file))
    first, files = headers[0].file, [header.file for header in headers]
    _check_in_place(files)
    with locked(first):
        _repair(first)
        found = _found(delta, headers, cast)
        changed = [gate for gate in found.gates if gate.old != gate.new]
        if found.is_tuned or not changed:
            return _patched(files, Found([], True), 0, begin)
        _check_unpatched(first)
        try:
            journal = Journal.write(first, headers, changed, delta.base)
            _write((gate.file, gate.offset, gate.new) for gate in changed)
            journal = journal.mark(journals.PATCHED)
        except BaseException:
            with instead(command("apply", first, undo=True)):
                _roll_back(first)
            raise
    written = journal.nbytes + 1 + sum(len(gate.new) for gate in changed)
    return _patched(files, Found(changed, False), written, begin)


def undo(file: Path) -> Patched:
    """Puts back what stood in the gates' place before an in-place patch, byte for byte. Without a journal there is nothing to undo.

    Raises RunError when the journal is damaged, or the file is another one since.
    """
    begin, files = time.monotonic(), parts(file)
    _check_in_place(files)
    with locked(files[0]):
        journal = Journal.load(files[0])
        if journal is None:
            return Patched(files, 0, 0, time.monotonic() - begin, "nothing to undo")
        gates, written = _put_back(journal)
    return Patched(files, gates, written, time.monotonic() - begin, "undone")


def _found(delta: Delta, headers: list[Header], cast: bool) -> Found:
    """find_gates, with the way back as next command where another delta was put in before."""
    first = headers[0].file
    if not journals.path_of(first).exists():
        return find_gates(delta, headers, cast)
    with instead(command("apply", first, undo=True), DeltaError):
        return find_gates(delta, headers, cast)


def _check_unpatched(first: Path) -> None:
    """One patch at a time: a second journal would take the base's gates from the first."""
    journal = Journal.load(first)
    if journal is None:
        return
    journal.check_files()
    if set(journal.found()) != {"old"}:
        raise DeltaError(f"{first} holds the gates of another delta already.", command("apply", first, undo=True))


def _repair(first: Path) -> None:
    """Ends a patch or an undo that was killed: rolls it back, or keeps it where every gate had been written."""
    journal = Journal.load(first)
    if journal is None or journal.state == journals.PATCHED:
        return
    journal.check_files()
    if set(journal.found()) == {"new"}:
        journal.mark(journals.PATCHED)
        note(f"Note: an earlier patch or undo of {first} was cut off; the tuned gates were all there and stay")
        return
    _put_back(journal)
    note(f"Note: an earlier patch or undo of {first} was cut off; the gates that stood there before are back")


def _roll_back(first: Path) -> None:
    """After a failure in this call."""
    journal = Journal.load(first)
    if journal is not None and journal.state == journals.PENDING:
        _put_back(journal)


def _put_back(journal: Journal) -> tuple[int, int]:
    """The old gates, and no journal. Gates and bytes written. Raises RunError where the file is another one since."""
    journal.check_files()
    found = journal.found()
    if journal.state == journals.PATCHED and "other" in found:
        tensor = journal.entries[found.index("other")].tensor
        raise journal.stale(f"{tensor} holds neither what the patch wrote nor what stood there before")
    changed = [entry for entry, stands in zip(journal.entries, found, strict=True) if stands != "old"]
    if changed:
        if journal.state == journals.PATCHED:
            journal.mark(journals.PENDING)  # from here on every call puts back
        _write((entry.file, entry.offset, entry.old) for entry in changed)
    journal.remove()
    return len(changed), sum(len(entry.old) for entry in changed) + bool(changed)


def _write(pieces: Iterable[tuple[Path, int, bytes]]) -> None:
    """(file, offset, bytes): written, synced, and read back from the disk. Raises RunError where one cannot be."""
    written: dict[Path, list[tuple[int, bytes]]] = {}
    for file, offset, content in pieces:
        written.setdefault(file, []).append((offset, content))
    for file, places in written.items():
        try:
            with open(file, "r+b", buffering=0) as stream:
                for offset, content in places:
                    left = memoryview(content)
                    while left:
                        count = os.pwrite(stream.fileno(), left, offset)
                        left, offset = left[count:], offset + count
                os.fsync(stream.fileno())
                for offset, content in places:
                    _forget(stream.fileno(), offset, len(content))
                    if os.pread(stream.fileno(), len(content), offset) != content:
                        raise RunError(f"{file} does not give back what was written to it.", "another disk")
        except OSError as error:
            raise RunError(f"{file} cannot be written ({error.strerror}).", f"ls -l {file}") from None


def _forget(handle: int, offset: int, nbytes: int) -> None:
    """So that the next read comes from the disk, where the system can do that."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _check_in_place(files: list[Path]) -> None:
    for file in files:
        status = file.lstat()
        why = ""
        if stat.S_ISLNK(status.st_mode) or _BLOB.fullmatch(file.name):
            why = "it lies in a cache, or is a link to another file, that others read too"
        elif status.st_nlink > 1:
            why = f"it has {status.st_nlink} names (hard links), and all of them would change"
        elif not status.st_mode & 0o222 or not os.access(file, os.W_OK):
            why = "it is read-only"
        if why:
            out = f"{file.stem}-tuned.gguf" if len(files) == 1 else "FOLDER"
            raise RunError(f"{file} is not changed in place: {why}.", command("apply", "DELTA", file, out=out))


def _free_place(out: Path, headers: list[Header]) -> Path:
    """Where the copy will be. Raises RunError when that is taken or cannot be written."""
    if len(headers) > 1 and out.suffix == ".gguf":
        raise RunError(f"this GGUF has {len(headers)} parts, so --out must be a folder.", "--out FOLDER")
    if len(headers) == 1 and out.suffix != ".gguf":
        out = out / headers[0].file.name
    atomic.require_free(out, "the same command with another --out")
    atomic.make_folder(out.parent)
    return out


@contextlib.contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out` that vanishes in the end, and with it those of calls that were killed."""
    prefix = f".{out.name}.remoe-"
    for left in out.parent.iterdir():
        number = left.name.removeprefix(prefix)
        if left.name.startswith(prefix) and number.isdigit() and (int(number) == os.getpid() or not _runs(int(number))):
            shutil.rmtree(left, ignore_errors=True)
    scratch = out.with_name(f"{prefix}{os.getpid()}")
    try:
        scratch.mkdir()
        yield scratch
    except OSError as error:
        raise atomic.unwritable(out.parent, error) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _patched(files: list[Path], found: Found, written: int, begin: float) -> Patched:
    state = "already tuned" if found.is_tuned else "patched"
    return Patched(files, len(found.gates), written, time.monotonic() - begin, state)
