"""Files that appear under their final name only when they are whole."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from remoe_cli.errors import RunError


def write(path: Path, content: str | bytes) -> None:
    """Writes and syncs a neighbour, then renames it over `path`. Raises RunError when the folder cannot be written."""
    with new_file(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content becomes `path` if the block succeeds, and vanishes if it does not.

    Raises RunError when the folder cannot be written, or `path` is a folder.
    """
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        with open(temporary, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise unwritable(path.parent, error) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> Path:
    """mkdir -p, with RunError instead of OSError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from None
    if not os.access(path, os.W_OK):
        raise unwritable(path, None)
    return path


def check_writable(path: Path) -> None:
    """Raises RunError when `path` could not be made; makes nothing."""
    place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise unwritable(path, None)


def require_free(path: Path, hint: str = "the same command with another folder") -> None:
    """Raises RunError, with that hint, when `path` holds something already, or could not be made."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise RunError(f"{path} exists and is not an empty folder; nothing was written.", hint)
    check_writable(path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A scratch folder beside `path` that becomes `path` if the block succeeds, and vanishes if it does not.

    Raises RunError when `path` holds something already or cannot be written.
    """
    require_free(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise unwritable(path, error) from None
    scratch.chmod(0o755)
    try:
        yield scratch
        if path.is_dir():
            path.rmdir()
        os.replace(scratch, path)
    except OSError as error:
        raise unwritable(path, error) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def free_name(path: Path) -> Path:
    """`path`, or where that is taken the first of NAME-2, NAME-3 ... that is not."""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


def unwritable(folder: Path, error: OSError | None) -> RunError:
    for part in (folder, *folder.absolute().parents):
        if part.exists() and not part.is_dir():
            return RunError(f"{part} is a file, so nothing can be in it.", "the same command with another folder")
    why = f" ({error.strerror})" if error is not None and error.strerror else ""
    return RunError(f"the folder {folder} cannot be written{why}.", "the same command with another folder")
