"""The machine and the versions that a figure was made with."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from remoe_cli import __version__
from remoe_cli.errors import UsageError


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
    kind, colon, index = wanted.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not index.isdecimal()):
        raise UsageError(f"--device is cpu, cuda or cuda:N, not {wanted!r}.", "the same command with --device cpu")
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
