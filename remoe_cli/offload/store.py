"""Expert bytes in the safetensors files: where they lie, reading them into given memory, and counting what was read."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from remoe_cli.errors import CheckpointError, FamilyError
from remoe_cli.families.experts import ExpertLayer

IO = "buffered"  # reads go through the page cache: what the disk really gave is storage_bytes


@dataclass
class IoCount:
    """reads: experts read; bytes: what the read calls returned; calls: read calls (parts that lie side by side share
    one); storage_bytes: what the kernel fetched from storage meanwhile (read-ahead included, page-cache hits not; the
    whole process), None where it does not say."""

    reads: int = 0
    bytes: int = 0
    calls: int = 0
    storage_bytes: int | None = None


class ExpertStore:
    """The experts of all MoE layers, left in their files. Layers are counted 0 to L - 1 here, dense ones not.

    Raises FamilyError where experts differ in size or layout from one another. Close it, or use it as a context.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._files: dict[Path, int] = {}
        self._runs: list[list[list[tuple[Path, int, list[int]]]]] = []
        self.expert_bytes = one_expert_bytes(layers)
        for layer in layers:
            experts = [layer.pieces(expert) for expert in range(layer.n_experts)]
            self._runs.append([_runs([(p.file, p.offset, p.nbytes) for p in pieces]) for pieces in experts])
        try:
            for path in {piece.file for layer in layers for e in range(layer.n_experts) for piece in layer.pieces(e)}:
                self._files[path] = os.open(path, os.O_RDONLY)
                if hasattr(os, "posix_fadvise"):
                    # the kernel's read-ahead would fetch neighbours that nobody asked for
                    os.posix_fadvise(self._files[path], 0, 0, os.POSIX_FADV_RANDOM)
        except OSError as error:
            self.close()
            path = error.filename
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.", f"ls -l {path}") from None

    def read(self, layer: int, expert: int, pieces: Sequence[memoryview], count: IoCount) -> None:
        """Fills pieces (writable, byte-sized, in the order of `ExpertLayer.pieces`) with one expert, and counts it.

        Raises CheckpointError where a file ends early or cannot be read.
        """
        for path, offset, order in self._runs[layer][expert]:
            buffers = [pieces[i] for i in order]
            while buffers:
                try:
                    got = os.preadv(self._files[path], buffers, offset)
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be read: {error.strerror}.", f"ls -l {path}") from None
                if not got:
                    raise CheckpointError(
                        f"{path} ends at byte {offset}, inside an expert: the file changed since it was opened.",
                        "copy or download the model again",
                    )
                count.calls += 1
                count.bytes += got
                offset += got
                buffers = _rest(buffers, got)
        count.reads += 1

    def close(self) -> None:
        """Closes the files; reads fail afterwards."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def one_expert_bytes(layers: Sequence[ExpertLayer]) -> int:
    """The stored size of every expert. Raises FamilyError where they differ in size or layout from one another."""
    first = layers[0].pieces(0)
    layout = [(piece.nbytes, piece.dtype, piece.shape, piece.dim, piece.start) for piece in first]
    for layer in layers:
        for expert in range(layer.n_experts):
            if [(p.nbytes, p.dtype, p.shape, p.dim, p.start) for p in layer.pieces(expert)] != layout:
                raise FamilyError(
                    f"expert {expert} of layer {layer.layer} is stored in another size or dtype than the first, "
                    "and slots of one size cannot hold it.",
                    "pip install -U remoe-cli",
                )
    return sum(piece.nbytes for piece in first)


def storage_bytes() -> int | None:
    """Bytes that this process had the kernel fetch from storage so far, None where the kernel does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def _runs(pieces: Sequence[tuple[Path, int, int]]) -> list[tuple[Path, int, list[int]]]:
    """(file, offset, piece numbers) of each stretch without a gap, so that it takes one call."""
    runs: list[tuple[Path, int, list[int]]] = []
    end: tuple[Path, int] | None = None
    for i in sorted(range(len(pieces)), key=lambda i: pieces[i][:2]):
        path, offset, nbytes = pieces[i]
        if end == (path, offset):
            runs[-1][2].append(i)
        else:
            runs.append((path, offset, [i]))
        end = (path, offset + nbytes)
    return runs


def _rest(buffers: list[memoryview], got: int) -> list[memoryview]:
    """What is left to fill after `got` bytes."""
    for i, buffer in enumerate(buffers):
        if got < len(buffer):
            return [buffer[got:], *buffers[i + 1 :]]
        got -= len(buffer)
    return []
