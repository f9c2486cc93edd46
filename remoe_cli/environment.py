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
    if wanted != "cpu" and not wanted.startswith("cuda"):
        raise UsageError(f"--device is cpu, cuda or cuda:N, not {wanted!r}.", "the same command with --device cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError("torch sees no CUDA device here.", "the same command with --device cpu")
    return wanted


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
