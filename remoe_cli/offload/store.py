"""Expert bytes in the safetensors files: reading them into given memory, and counting what was read."""

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from remoe_cli.errors import CheckpointError, FamilyError
from remoe_cli.families.experts import ExpertLayer
from remoe_cli.offload.arena import Arena, PAGE
from remoe_cli.offload.layout import Image, Window

IN_MEMORY = ("tmpfs", "ramfs")  # newer kernels take O_DIRECT there, and serve it from memory


@dataclass
class IoCount:
    """reads: experts brought into slots; bytes: their own size; ram: those of them that the RAM tier had; read_bytes: what
    the read calls moved, whole pages included; calls: read calls (tensors that lie side by side share one); busy_s: time
    during which a read was under way; storage_bytes: what the kernel fetched from storage meanwhile (the whole process; none
    for page-cache hits), None where it does not say."""

    reads: int = 0
    bytes: int = 0
    ram: int = 0
    read_bytes: int = 0
    calls: int = 0
    busy_s: float = 0.0
    storage_bytes: int | None = None


class ExpertStore:
    """The files of some experts, open for reading. io: "direct" (O_DIRECT, past the page cache) or "buffered"; io_reason: why
    it is buffered, "" where it is direct or was asked to be buffered. Close it, or use it as a context.

    Raises CheckpointError where a file cannot be opened.
    """

    def __init__(self, files: Iterable[Path], *, direct: bool = True) -> None:
        self._files: dict[Path, int] = {}
        self.io, self.io_reason = "buffered", ""
        try:
            for path in sorted({*files}):
                self._files[path] = os.open(path, os.O_RDONLY)
        except OSError as error:
            self.close()
            raise _unreadable(Path(error.filename), error) from None
        if direct:
            self.io_reason = self._go_direct()
            self.io = "buffered" if self.io_reason else "direct"
        for file in self._files.values():
            if hasattr(os, "posix_fadvise"):
                # what is cached is given back; read-ahead would fetch neighbours that nobody asked for
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)

    def _go_direct(self) -> str:
        """Opens all files with O_DIRECT, or none. Returns why not."""
        if not hasattr(os, "O_DIRECT"):
            return "this system has no O_DIRECT"
        for path in self._files:
            if (kind := file_system(path)) in IN_MEMORY:
                return f"{kind} is memory, not storage"
        direct: dict[Path, int] = {}
        page = Arena(1, PAGE).buffer(0)
        for path in self._files:
            try:
                direct[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
                os.preadv(direct[path], [page], 0)
            except OSError:
                for file in direct.values():
                    os.close(file)
                return f"{file_system(path) or 'this file system'} takes no O_DIRECT"
        self.close()
        self._files = direct
        return ""

    def read(self, image: Image, row: memoryview) -> tuple[int, int]:
        """Fills a row with one expert; returns the bytes read and the calls it took.

        Raises CheckpointError, which names the file, where it ends early or cannot be read.
        """
        read = calls = 0
        for window in image.windows:
            got = 0
            while got < window.needed:
                piece = row[window.start + got : window.start + window.nbytes]
                try:
                    n = os.preadv(self._files[window.file], [piece], window.offset + got)
                except OSError as error:
                    raise _unreadable(window.file, error) from None
                calls += 1
                got += n
                if not n or (got < window.needed and self.io == "direct" and n % PAGE):
                    raise _short(window, got)
            read += got
        return read, calls

    def close(self) -> None:
        """Closes the files; reads fail afterwards."""
        for file in self._files.values():
            os.close(file)
        self._files = {}


def one_expert_bytes(layers: Sequence[ExpertLayer]) -> int:
    """The stored size of every expert. Raises FamilyError where they differ in size or layout from one another."""
    first = layers[0].pieces(0)
    layout = [piece[2:] for piece in first]
    for layer in layers:
        for expert in range(layer.n_experts):
            if [piece[2:] for piece in layer.pieces(expert)] != layout:
                raise FamilyError(
                    f"expert {expert} of layer {layer.layer} is stored in another size or dtype than the first, "
                    "and slots of one size cannot hold it.",
                    "pip install -U remoe-cli",
                )
    return sum(piece.nbytes for piece in first)


def expert_files(layers: Sequence[ExpertLayer]) -> set[Path]:
    return {piece.file for layer in layers for expert in range(layer.n_experts) for piece in layer.pieces(expert)}


def file_system(path: Path) -> str:
    """The kind of file system that holds a path ("ext4", "tmpfs"), "" where the system does not say."""
    try:
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            if left.split()[2] == wanted:
                return right.split()[0]
    except OSError:
        pass
    return ""


def drop_page_cache(files: Iterable[Path]) -> None:
    """Asks the kernel to forget what it has cached of these files."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def storage_bytes() -> int | None:
    """Bytes that this process had the kernel fetch from storage so far, None where the kernel does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    reason = "the disk reports an error" if error.errno == errno.EIO else error.strerror
    return CheckpointError(f"{path} cannot be read: {reason}.", f"ls -l {path}")


def _short(window: Window, got: int) -> CheckpointError:
    return CheckpointError(
        f"{window.file} ends at byte {window.offset + got}, inside an expert: the file changed since it was opened.",
        "copy or download the model again",
    )
