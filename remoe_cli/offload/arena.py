"""Host memory for experts: page-aligned rows of exactly the size asked for."""

import mmap
import weakref
from contextlib import suppress

import torch

PAGE = 4096  # what O_DIRECT wants offsets, lengths and memory to be multiples of
_HUGE = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which the mmap module does not name
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU


class Arena:
    """`rows` [n_rows, row_bytes] uint8, each row on a page boundary (row_bytes is a multiple of PAGE).

    pinned: registered with CUDA, so that copies to a GPU run beside the host. torch's own pinned allocator would round the
    size up to a power of two. All of it is taken at once, so that no token pays for it (a virtual machine's host may take
    40 ms to hand out 17 MB), and given back once nobody holds a view.
    """

    def __init__(self, n_rows: int, row_bytes: int, *, pinned: bool = False) -> None:
        if row_bytes % PAGE:
            raise ValueError(f"rows of {row_bytes} bytes are no multiple of {PAGE}")
        self.nbytes = n_rows * row_bytes
        memory = mmap.mmap(-1, max(PAGE, self.nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if row_bytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)  # fewer page-table walks while weights stream through the core
        with torch.inference_mode(False):  # reader threads write to it, and they are in no mode
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            try:
                memory.madvise(_POPULATE_WRITE)
            except (OSError, AttributeError, ValueError):  # before Linux 5.14, or another system
                flat.zero_()
            self.rows = flat[: self.nbytes].view(n_rows, row_bytes)
        if pinned and self.nbytes:
            _register(flat)
            weakref.finalize(self, _unregister, flat.data_ptr())  # before the memory goes, which `rows` holds

    def buffer(self, row: int) -> memoryview:
        """A row as writable bytes."""
        return self.rows[row].numpy().data


def _register(flat: torch.Tensor) -> None:
    code = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), _PORTABLE))
    if code:
        raise RuntimeError(f"cudaHostRegister failed on {flat.numel():,} bytes with error {code}")


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
