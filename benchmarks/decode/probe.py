"""What the storage gives when nobody computes: reads of one expert's size, past the page cache, two at a time."""

from __future__ import annotations

import mmap
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

ALIGN = 4096


def bandwidth(folder: Path, size: int, reads: int, readers: int = 2) -> float:
    """Bytes a second over `reads` random places in a checkpoint's shards; buffered reads of an emptied page cache where the
    file system has no O_DIRECT."""
    size = -(-size // ALIGN) * ALIGN
    files = [file for file in sorted(folder.glob("*.safetensors")) if file.stat().st_size > 2 * size]
    opened = [_open(file) for file in files or sorted(folder.glob("*.safetensors"))[:1]]
    try:
        draw = random.Random(0)
        places = []
        for _ in range(reads):
            file = draw.choice(opened)
            last = max(1, (os.fstat(file).st_size - size) // ALIGN)
            places.append((file, draw.randrange(last) * ALIGN))
        buffers = [_memory(size) for _ in range(readers)]

        def read(reader: int) -> int:
            return sum(os.preadv(file, [buffers[reader]], at) for file, at in places[reader::readers])

        start = time.perf_counter()
        with ThreadPoolExecutor(readers) as pool:
            moved = sum(pool.map(read, range(readers)))
        return moved / (time.perf_counter() - start)
    finally:
        for file in opened:
            os.close(file)


def _memory(size: int) -> mmap.mmap:
    """Touched, and of huge pages where the kernel has them: into small ones a direct read is half as fast."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(bytes(size))
    return memory


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        opened = os.open(file, os.O_RDONLY)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        return opened
