"""The machine and the versions that a figure was made with."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version

from remoe_cli import __version__
from remoe_cli.errors import UsageError

# what RuntimeErrors of torch, CUDA and cuBLAS say when memory ran out
_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory", "_alloc_failed")


def versions() -> dict[str, str]:
    """Of remoe, Python and the libraries that shape a result."""
    found = {"remoe": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "safetensors", "datasets"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def pick_device(wanted: str | None) -> str:
    """The named device, else the first GPU, else the CPU. Raises UsageError for a device that is not there."""
    import torch

    if wanted is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]*))?", wanted):
        raise UsageError(f"--device is cpu, cuda or cuda:N, not {wanted!r}.", "the same command with --device cpu")
    kind, _, index = wanted.partition(":")
    if kind == "cuda" and int(index or 0) >= (there := torch.cuda.device_count()):
        raise UsageError(f"torch sees {there} CUDA devices here, no {wanted}.", "the same command with --device cpu")
    return wanted


def check_threads(threads: int | None) -> None:
    """Raises UsageError for a number of compute threads that this machine has no cores for."""
    cores = os.cpu_count() or 1
    if threads is not None and not 1 <= threads <= cores:
        raise UsageError(
            f"--threads is 1 to {cores}, this machine's cores, not {threads}.", "the same command with --threads 1"
        )


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the CPU or a GPU: torch has a class of its own for the GPU only."""
    if any(cls.__name__ in ("OutOfMemoryError", "MemoryError") for cls in type(error).__mro__):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in said for words in _NO_MEMORY)


def device_name(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return (
        f"{_cpu_name()}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
