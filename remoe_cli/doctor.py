"""The verb `doctor`: what of this machine and installation matters to remoe, line by line, each with what to do about it."""

import os
import platform
import shutil
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from remoe_cli import __version__, config
from remoe_cli.environment import device_name, pick_device
from remoe_cli.errors import RemoeError
from remoe_cli.hub.failures import broken, cache, endpoint, status_of
from remoe_cli.memory import available, gpu
from remoe_cli.sizes import show_size

PACKAGE = "remoe-cli"
PATIENCE = 5.0  # seconds for the Hub
SECONDS = 1.5  # of reading from the disk
SLOW = 500e6  # bytes a second: below, experts from this disk are waited for most of the time
SCARCE = 2_000_000_000  # bytes
_NARROW = 60  # columns
_PROBE = 300_000_000  # bytes that measuring a disk writes for a moment
_BUFFERED = "remoe decode --io buffered"
_LLAMA = ("llama-cli", "llama-server")

Status = Literal["ok", "warn", "fail"]


class Line(NamedTuple):
    """name: what was looked at; text: what was found; next: the command that mends it, or gets what is absent, "" for none."""

    name: str
    status: Status
    text: str
    next: str = ""


def doctor(folder: Path | None, settings: Sequence[config.Default] | RemoeError) -> Iterator[Line]:
    """Line by line, as they are found, in under 15 seconds. folder: the one whose disk is measured, by default the Hub's cache;
    settings: what file and environment say, or why they cannot be read. Writes 268 MB below the folder for a moment."""
    hub = _aside(_hub)
    yield from _packages()
    yield from _safely("device", _device, f"{Path(sys.executable).name} -m torch.utils.collect_env")
    yield _memory()
    yield from _disk(folder or Path(cache()))
    yield from hub()
    yield from _optional()
    yield _settings(settings)


def shown(line: Line, width: int) -> str:
    """For a person: the status first, what to do about it below."""
    label, indent = f"{line.status:<5} {line.name:<12} ", 19
    if width < _NARROW:
        label, indent = f"{line.status:<5} {line.name}\n", 4
    body = [line.text, *([f"-> {line.next}"] if line.next else [])]
    filled = "\n".join(
        textwrap.fill(one, width - indent, break_on_hyphens=False, break_long_words=False) for one in body
    )
    return label + textwrap.indent(filled, " " * indent)[0 if width < _NARROW else indent :]


def summary(lines: Sequence[Line]) -> str:
    """What all came to, in one sentence."""
    counts = {status: sum(line.status == status for line in lines) for status in ("fail", "warn")}
    if not any(counts.values()):
        return "All is well."
    return "; ".join(f"{n} {status}" for status, n in counts.items() if n) + "."


def _packages() -> Iterator[Line]:
    """What pyproject.toml asks for, and what is there."""
    from packaging.requirements import Requirement

    yield Line("remoe", "ok", f"{__version__}, Python {platform.python_version()}")
    try:
        wanted = [Requirement(one) for one in requires(PACKAGE) or []]
    except PackageNotFoundError:
        yield Line("packages", "warn", f"{PACKAGE} is not installed, only run", "pip install .")
        return
    found = []
    for one in wanted:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            there = version(one.name)
        except PackageNotFoundError:
            yield Line(one.name, "fail", f"absent; {one} is needed", f"pip install '{one}'")
            continue
        if not one.specifier.contains(there, prereleases=True):
            yield Line(one.name, "fail", f"{there}; {one} is needed", f"pip install -U '{one}'")
        else:
            found.append(f"{one.name} {there}")
    yield Line("packages", "ok", ", ".join(found))


def _device() -> Line:
    import torch

    device = pick_device(None)
    if device == "cuda":
        return Line("device", "ok", f"{device_name(device)}, {show_size(gpu(device).nbytes)} free")
    if shutil.which("nvidia-smi"):
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        text = f"{device_name(device)}; a GPU driver is here, but torch ({built}) sees no GPU"
        return Line("device", "warn", text, "nvidia-smi, then a torch of that CUDA version from https://pytorch.org")
    return Line("device", "ok", f"{device_name(device)}; no GPU")


def _memory() -> Line:
    room = available()
    text = f"{show_size(room.nbytes)} free, as {room.limit} allows"
    if room.nbytes < SCARCE:
        return Line("memory", "warn", text, "end other programs, or decode with a smaller --cache")
    return Line("memory", "ok", text)


def _disk(folder: Path) -> Iterator[Line]:
    """Of the folder, or of the nearest one above it that is there."""
    from remoe_cli.train.rates import disk_rate

    place = next(one for one in (folder, *folder.absolute().parents) if one.is_dir())
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        yield Line("disk", "fail", f"{place} cannot be written", "HF_HOME=/a/disk/with/room, or --folder FOLDER")
        return
    if free < _PROBE:
        yield Line("disk", "fail", f"{place}: {show_size(free)} free", "HF_HOME=/a/disk/with/room")
        return
    try:
        rate, _ = disk_rate(place, [], SECONDS)
    except RemoeError as error:
        yield Line("disk", "fail", error.message, error.hint)
        return
    text = f"{place}: reads {show_size(rate)}/s, {show_size(free)} free"
    slow = rate < SLOW
    yield Line(
        "disk", "warn" if slow else "ok", text, "HF_HOME on a faster disk, or remoe decode --ram" if slow else ""
    )
    yield from _safely("O_DIRECT", lambda: _direct(place), _BUFFERED)


def _direct(folder: Path) -> Line:
    from remoe_cli.offload.store import ExpertStore

    with tempfile.NamedTemporaryFile(dir=folder, prefix=".remoe-probe-") as file:
        file.write(bytes(4096))
        file.flush()
        store = ExpertStore([Path(file.name)])
        store.close()
    if store.io == "direct":
        return Line("O_DIRECT", "ok", "experts are read past the page cache")
    return Line("O_DIRECT", "warn", f"{store.io_reason}: reads go through the page cache", _BUFFERED)


def _hub() -> list[Line]:
    """Whether it answers, and whether it knows the token, which is never shown."""
    from huggingface_hub import constants, get_token, HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import get_session

    token, login = get_token(), "hf auth login"
    kept = Line("token", "ok", "present") if token else Line("token", "warn", "none: public models only", login)
    if constants.HF_HUB_OFFLINE:
        return [Line("Hub", "warn", "HF_HUB_OFFLINE is set: only what is in the cache", "unset HF_HUB_OFFLINE"), kept]
    try:
        get_session().head(endpoint(), timeout=PATIENCE)
    except Exception as error:  # whatever the HTTP library makes of a network that is not there
        return [
            Line("Hub", "warn", f"{broken(error)}; what is in the cache works", "the same command with a network"),
            kept,
        ]
    reached = Line("Hub", "ok", f"{endpoint()} answers")
    if token:
        try:
            kept = Line("token", "ok", f"accepted, of {HfApi().whoami()['name']}")
        except HfHubHTTPError as error:
            if status_of(error) == 401:
                kept = Line("token", "fail", f"{endpoint()} does not accept it", f"{login} --force")
        except Exception as error:
            kept = Line("token", "warn", f"present; {broken(error)}", "the same command again")
    return [reached, kept]


def _optional() -> Iterator[Line]:
    """Extras of the package by name, and runtimes that deltas are for."""
    from packaging.requirements import Requirement

    extras: dict[str, list[str]] = {}
    try:
        wanted = [Requirement(one) for one in requires(PACKAGE) or []]
    except PackageNotFoundError:
        wanted = []
    for one in wanted:
        if one.marker is not None and "extra" in str(one.marker):
            extra = str(one.marker).rpartition("extra == ")[2].strip("\"'")
            extras.setdefault(extra, []).append(one.name)
    for extra, names in extras.items():
        absent = [name for name in names if not _installed(name)]
        text = (
            f"not installed ({', '.join(absent)})" if absent else ", ".join(f"{name} {version(name)}" for name in names)
        )
        yield Line(f"extra {extra}", "ok", text, f"pip install '{PACKAGE}[{extra}]'" if absent else "")
    llama = next((path for name in _LLAMA if (path := shutil.which(name))), None)
    yield Line("llama.cpp", "ok", llama or "not found on PATH; takes deltas as --as gguf")
    python = os.environ.get("REMOE_VLLM")
    vllm = (
        f"in {python}"
        if python
        else "installed"
        if find_spec("vllm")
        else "not installed; takes deltas as --as overlay"
    )
    yield Line("vLLM", "ok", vllm)


def _settings(found: Sequence[config.Default] | RemoeError) -> Line:
    if isinstance(found, RemoeError):
        return Line("settings", "fail", found.message, found.hint)
    path = config.place()
    names = [f"{' '.join((*one.words, f'--{one.option}'))} {one.value}" for one in found]
    return Line(
        "settings", "ok", f"{path}{'' if path.is_file() else ' (none there)'}: {', '.join(names) or 'none set'}"
    )


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _safely(name: str, look: Callable[[], Line], next: str) -> Iterator[Line]:
    """What could not be looked at is a failure of its own, and the rest goes on."""
    try:
        yield look()
    except Exception as error:
        yield Line(name, "fail", f"{type(error).__name__}: {error}".splitlines()[0], next)


def _aside(look: Callable[[], list[Line]]) -> Callable[[], list[Line]]:
    """Begins at once; the answer waits for it, but not for ever: looking up a name has no time-out of its own."""
    found: list[Line] = []
    thread = threading.Thread(target=lambda: found.extend(look()), daemon=True)
    thread.start()

    def answer() -> list[Line]:
        thread.join(2 * PATIENCE)
        return found or [Line("Hub", "warn", f"{endpoint()} gives no answer", "the same command with a network")]

    return answer


def rows(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """For --json."""
    return [line._asdict() for line in lines]
