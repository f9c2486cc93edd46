"""What this machine does in a second: bytes from the disk that holds a model, bytes of memory, arithmetic of its experts."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch.nn import functional as F

from remoe_cli.errors import RunError
from remoe_cli.offload.arena import Arena, PAGE
from remoe_cli.offload.compute import compute_threads, linear, running
from remoe_cli.offload.layout import Image, Window
from remoe_cli.offload.store import ExpertStore

SECONDS = 3.0  # of each measurement
_READ = 33_554_432  # bytes of a read, as of a layer
_READERS = 2
_STAND_IN = 268_435_456  # bytes of the file that is read in the place of a model which is not here yet
_COPY = 268_435_456  # bytes, more than a processor's caches hold
_PRODUCT = (
    8_388_608  # bytes of the weights of one product: few enough to fit an expert, enough for the call to cost nothing
)


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
    (rate,), io = disk_rates(folder, files, seconds, _READ, 1)
    return rate, io


def disk_rates(folder: Path, files: Sequence[Path], seconds: float, nbytes: int, times: int) -> tuple[list[float], str]:
    """As `disk_rate` with reads of `nbytes`, 32 MB at most, in whole pages; `times` rates, each of an equal part of the time."""
    size = min(-(-nbytes // PAGE) * PAGE, _READ)
    large = [file for file in files if file.stat().st_size >= 2 * size]
    with nullcontext(large) if large else _stand_in(folder) as read:
        found = [_read_rate(read, seconds / times, size) for _ in range(times)]
    return [rate for rate, _ in found], found[0][1]


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


def weight_rates(hidden: int, dtype: torch.dtype, device: str, seconds: float, times: int) -> list[float]:
    """Bytes of weights a second that one token goes through, in products with [inner, hidden] as the decoder makes them, with
    its threads; `times` rates, each of an equal part of the time."""
    inner = max(1, _PRODUCT // (hidden * dtype.itemsize))
    one = torch.full((inner, hidden), 0.01, dtype=dtype, device=device)
    weights = [one.clone() for _ in range(max(1, _COPY // one.nbytes))]
    x = torch.full((1, hidden), 0.01, dtype=dtype, device=device)

    def every() -> None:
        for weight in weights:
            linear(x, weight)

    with running(torch.device(device), compute_threads(None)):
        return [len(weights) * one.nbytes * _per_second(every, device, seconds / times) for _ in range(times)]


def _read_rate(files: Sequence[Path], seconds: float, nbytes: int) -> tuple[float, str]:
    sizes = [file.stat().st_size for file in files]
    rows = Arena(_READERS, nbytes)
    store = ExpertStore(files)
    begin = perf_counter()

    def read(reader: int) -> int:
        draw, moved = random.Random(reader), 0
        while perf_counter() - begin < seconds or not moved:
            (file, size) = draw.choices(list(zip(files, sizes)), sizes)[0]
            offset = draw.randrange((size - nbytes) // PAGE) * PAGE
            moved += store.read(Image((Window(file, offset, nbytes, nbytes, 0),), ()), rows.buffer(reader))[0]
        return moved

    try:
        with ThreadPoolExecutor(_READERS) as pool:
            moved = sum(pool.map(read, range(_READERS)))
        return moved / (perf_counter() - begin), store.io
    finally:
        store.close()


@contextmanager
def _stand_in(folder: Path) -> Iterator[list[Path]]:
    """A file of random bytes on the disk, gone afterwards."""
    block = os.urandom(_READ)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".remoe-probe-") as file:
            for _ in range(_STAND_IN // _READ):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            yield [Path(file.name)]
    except OSError as error:
        raise RunError(f"the disk at {folder} cannot be measured ({error.strerror}).", f"df {folder}") from None
