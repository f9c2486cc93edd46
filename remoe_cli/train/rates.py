"""What this machine does in a second: bytes from the disk that holds a model, bytes of memory, arithmetic of its experts."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch.nn import functional as F

from remoe_cli.errors import RunError
from remoe_cli.offload.arena import Arena, PAGE
from remoe_cli.offload.layout import Image, Window
from remoe_cli.offload.store import ExpertStore

SECONDS = 3.0  # of each measurement
_READ = 33_554_432  # bytes of a read, as of a layer
_READERS = 2
_STAND_IN = 268_435_456  # bytes of the file that is read in the place of a model which is not here yet
_COPY = 268_435_456  # bytes, more than a processor's caches hold


class Rates(NamedTuple):
    """Bytes a second of `disk`, past the page cache unless `io` is "buffered", and of `link`, from host memory to the device;
    flops: a second, of the experts' products in the compute dtype. None: not measured, as for a device that is not here."""

    disk: float
    io: str
    link: float | None
    flops: float | None


def disk_rate(folder: Path, files: Sequence[Path], seconds: float) -> tuple[float, str]:
    """Bytes a second of reads of 32 MB anywhere in these files, and "direct" or "buffered" as `ExpertStore` says; without files, from
    one that is written into `folder` for that long.

    Raises RunError where that cannot be written, CheckpointError where a file cannot be read.
    """
    large = [file for file in files if file.stat().st_size >= 2 * _READ]
    if large:
        return _read_rate(large, seconds)
    with _stand_in(folder) as file:
        return _read_rate([file], seconds)


def copy_rate(device: str, seconds: float) -> float:
    """Bytes a second from host memory to the device; on a CPU from memory to memory."""
    cuda = device.startswith("cuda")
    source = torch.ones(_COPY, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty(_COPY, dtype=torch.uint8, device=device)
    return _COPY * _per_second(lambda: target.copy_(source, non_blocking=True), device, seconds)


def flop_rate(
    hidden: int, inner: int, rows: int, n_experts: int, dtype: torch.dtype, device: str, seconds: float
) -> float:
    """Operations a second of [rows, hidden] times [hidden, inner] and back, over n_experts weights in turn."""
    up = [torch.full((inner, hidden), 0.01, dtype=dtype, device=device) for _ in range(n_experts)]
    down = [torch.full((hidden, inner), 0.01, dtype=dtype, device=device) for _ in range(n_experts)]
    x = torch.full((rows, hidden), 0.01, dtype=dtype, device=device)

    def every() -> None:
        for first, second in zip(up, down):
            F.linear(F.linear(x, first), second)

    return 4.0 * rows * hidden * inner * n_experts * _per_second(every, device, seconds)


@torch.no_grad()
def _per_second(work: Callable[[], object], device: str, seconds: float) -> float:
    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    work()  # kernels are chosen and compiled
    wait()
    done, start = 0, perf_counter()
    while perf_counter() - start < seconds or not done:
        work()
        wait()
        done += 1
    return done / (perf_counter() - start)


def _read_rate(files: Sequence[Path], seconds: float) -> tuple[float, str]:
    sizes = [file.stat().st_size for file in files]
    rows = Arena(_READERS, _READ)
    store = ExpertStore(files)
    begin = perf_counter()

    def read(reader: int) -> int:
        draw, moved = random.Random(reader), 0
        while perf_counter() - begin < seconds or not moved:
            (file, size) = draw.choices(list(zip(files, sizes)), sizes)[0]
            offset = draw.randrange((size - _READ) // PAGE) * PAGE
            moved += store.read(Image((Window(file, offset, _READ, _READ, 0),), ()), rows.buffer(reader))[0]
        return moved

    try:
        with ThreadPoolExecutor(_READERS) as pool:
            moved = sum(pool.map(read, range(_READERS)))
        return moved / (perf_counter() - begin), store.io
    finally:
        store.close()


@contextmanager
def _stand_in(folder: Path) -> Iterator[Path]:
    """A file of random bytes on the disk, gone afterwards."""
    block = os.urandom(_READ)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".remoe-probe-") as file:
            for _ in range(_STAND_IN // _READ):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            yield Path(file.name)
    except OSError as error:
        raise RunError(f"the disk at {folder} cannot be measured ({error.strerror}).", f"df {folder}") from None
