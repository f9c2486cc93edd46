"""Copies of large files: sharing their blocks with the source where the file system can do that, else byte by byte."""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from remoe_cli.console import progress
from remoe_cli.errors import RunError
from remoe_cli.sizes import show_size

_FICLONE = 0x40049409  # Linux: the target shares the source's blocks until either is written to
_CANNOT = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM)
_BLOCK = 16 << 20
_SHOWN = 500_000_000  # bytes from which a person waits long enough to be told


def copy_files(sources: Sequence[Path], folder: Path, out: Path) -> bool:
    """Copies files into `folder` (what becomes `out`) under their own names; True where none takes room of its own.

    Raises RunError, before a byte is copied, where the disk is too small.
    """
    left = [source for source in sources if not clone(source, folder / source.name)]
    total, done = sum(source.stat().st_size for source in left), 0
    require_room(total, out)
    with progress("copy", total, in_bytes=True) if total >= _SHOWN else nullcontext() as bar:

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if bar is not None:
                bar.update(done)

        for source in left:
            copy(source, folder / source.name, count)
    return not left


def clone_or_copy(source: Path, target: Path, on_bytes: Callable[[int], None] = lambda _: None) -> bool:
    """True where `target` shares its blocks with `source`; else it is a copy, and on_bytes was told of each block's size."""
    if clone(source, target):
        return True
    copy(source, target, on_bytes)
    return False


def clone(source: Path, target: Path) -> bool:
    """Makes `target` a file that shares its blocks with `source`; False, and no target, where this file system cannot."""
    try:
        from fcntl import ioctl
    except ImportError:  # not on Windows
        return False
    try:
        with open(source, "rb") as old, open(target, "wb") as new:
            ioctl(new.fileno(), _FICLONE, old.fileno())
            return True
    except OSError as error:
        with suppress(FileNotFoundError):
            target.unlink()
        if error.errno in _CANNOT:
            return False
        raise


def copy(source: Path, target: Path, on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """A plain copy, synced to the disk."""
    with open(source, "rb") as old, open(target, "wb") as new:
        while block := old.read(_BLOCK):
            new.write(block)
            on_bytes(len(block))
        new.flush()
        os.fsync(new.fileno())


def require_room(needed: int, out: Path) -> None:
    """Raises RunError where the disk on which `out` will be has fewer bytes free."""
    place = next(folder for folder in out.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise RunError(
            f"{out} needs {show_size(needed)} and {place} has {show_size(free)} free.",
            "the same command with --out on another disk",
        )
