"""How much memory this process may still take, and what says so: the machine, a cgroup above it, or a GPU."""

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page


class Room(NamedTuple):
    """nbytes: what may still be taken; limit: what says so, for a message ("the machine", "the memory cgroup /a/b")."""

    nbytes: int
    limit: str


def available(root: Path = Path("/")) -> Room:
    """The least of what the machine has to give and what each memory cgroup above this process still allows.

    Page cache counts as free, since the kernel gives it up. root: where proc/ and sys/ lie. Without /proc the bound is the
    machine's whole memory.
    """
    return min([_machine(root), *_cgroups(root)])


def gpu(device: str) -> Room:
    """What the GPU has to give ("cuda", "cuda:1"), memory that torch keeps for later use included."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Room(free + kept, f"the GPU {device}")


def first_that_fit(sizes: Sequence[int], room: int) -> list[int]:
    """The numbers of the first ones, as long as they fit into `room` bytes together."""
    found = []
    for number, size in enumerate(sizes):
        if size > room:
            break
        room -= size
        found.append(number)
    return found


def give_back() -> None:
    """Returns what this process has freed to the system. glibc keeps holes below large blocks for itself: over a run of many
    sizes they grow to more than what is in use. About 10 ms; nothing where the C library has no malloc_trim."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _machine(root: Path) -> Room:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return Room(int(value.split()[0]) * 1024, "the machine")
    return Room(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the machine")


def _cgroups(root: Path) -> Iterator[Room]:
    """One Room for each limit on the way up from this process's own cgroups."""
    own = {kinds: path for _, kinds, path in (line.split(":", 2) for line in _lines(root / "proc/self/cgroup"))}
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind == "cgroup2":
            path = own.get("")
        elif kind == "cgroup" and "memory" in options.split(","):
            path = next((path for kinds, path in own.items() if "memory" in kinds.split(",")), None)
        else:
            continue
        if path is not None:
            shown, top = mount.split(" ")[3:5]
            yield from _hierarchy(root / top.lstrip("/"), path, shown, v2=kind == "cgroup2")


def _hierarchy(top: Path, path: str, shown: str, *, v2: bool) -> Iterator[Room]:
    """top: where the hierarchy is mounted; shown: which of its cgroups is to be seen there, another than "/" in a container."""
    own = top / _below(path, shown)
    for folder in (own, *own.parents):
        counts = _v2(folder) if v2 else _v1(folder, own=folder == own)
        if counts is not None:
            limit, used, reclaimable = counts
            name = PurePosixPath("/", folder.relative_to(top))
            yield Room(max(0, limit - max(0, used - reclaimable)), f"the memory cgroup {name}")
        if folder == top:
            return


def _below(path: str, shown: str) -> PurePosixPath:
    """`path` as seen from `shown`; a container that cannot see its own cgroup under its name sees it as the mount itself."""
    try:
        inside = PurePosixPath(path).relative_to(shown)
    except ValueError:
        inside = PurePosixPath()
    return PurePosixPath() if ".." in inside.parts else inside


def _v2(folder: Path) -> tuple[int, int, int] | None:
    """limit, in use, of that reclaimable; None without a limit. Above memory.high the kernel slows a process to a crawl."""
    limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    stat = _table(folder / "memory.stat")
    reclaimable = sum(stat.get(name, 0) for name in ("active_file", "inactive_file", "slab_reclaimable"))
    return min(known), _number(folder / "memory.current") or 0, reclaimable


def _v1(folder: Path, *, own: bool) -> tuple[int, int, int] | None:
    """As _v2. own: whether this process is in that very cgroup; the limit of one above it binds only with use_hierarchy."""
    limit = _number(folder / "memory.limit_in_bytes")
    if limit is None or limit >= _UNLIMITED or not (own or _number(folder / "memory.use_hierarchy")):
        return None
    stat = _table(folder / "memory.stat")
    reclaimable = sum(stat.get(f"total_{name}", 0) for name in ("active_file", "inactive_file"))
    return limit, _number(folder / "memory.usage_in_bytes") or 0, reclaimable


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """None for a file that is not there, and for "max"."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _table(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in _lines(path))}
