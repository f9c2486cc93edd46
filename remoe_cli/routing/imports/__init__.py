"""Traces of other tools, one file a format: readers that give a RoutingTrace and say how its figures were counted.

Each leaves the replay options of the published figures in provenance["accounting"]; docs/trace-format.md lists them.
"""

import gzip
import shlex
import zlib
from collections.abc import Callable
from pathlib import Path

from remoe_cli.errors import command, TraceError
from remoe_cli.routing.imports import expert_npz, route_csv
from remoe_cli.routing.imports.refuse import again, OUT
from remoe_cli.routing.trace import RoutingTrace

__all__ = ["IMPORTS", "OUT", "guess", "read_foreign"]

Reader = Callable[[Path, int | None], RoutingTrace]

IMPORTS: dict[str, Reader] = {
    "route-csv": route_csv.read,
    "esft-npz": expert_npz.read_esft,
    "cacheable-npz": expert_npz.read_cacheable,
}


def read_foreign(path: Path, format: str | None = None, n_experts: int | None = None) -> RoutingTrace:
    """The trace in a file of another tool. format: a key of IMPORTS, told from the content where None.

    n_experts: routed experts a layer, where the file does not say. Raises TraceError.
    """
    if not path.is_file():
        why = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        raise TraceError(f"{why}.", shlex.join(["ls", str(path if path.is_dir() else path.parent)]))
    if format is not None:
        _check_named(path, format)
    return IMPORTS[format or guess(path)](path, n_experts)


def _check_named(path: Path, format: str) -> None:
    """Refuses a file whose content names another format; one whose content names none may be of any."""
    try:
        found = guess(path)
    except TraceError:
        return
    if found != format:
        raise TraceError(f"{path} cannot be imported as {format}: its content is {found}.", again(path))


def guess(path: Path) -> str:
    """The format that the content of the file names. Raises TraceError where it names none."""
    try:
        with open(path, "rb") as stream:
            start = stream.read(16)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}.", shlex.join(["ls", "-l", str(path)])) from None
    if start.startswith(b"REMO"):
        raise TraceError(f"{path} is a trace of remoe already.", command("replay", path, cache=8))
    if start.startswith(b"PK"):
        keys = expert_npz.keys(path)
        kinds = [kind for kind, key in (("esft-npz", "sample_lengths"), ("cacheable-npz", "meta")) if key in keys]
        if "experts" in keys and len(kinds) == 1:
            return kinds[0]
        hint = again(path, format="esft-npz") if "experts" in keys and kinds else None
        raise _unknown(path, f"its arrays are {', '.join(sorted(keys)) or 'none'}", hint)
    if start.startswith(b"\x1f\x8b"):
        start = _unpacked(path, start)
    if start.startswith((b"\x1f\x8b", b"# route_trace", b"turn,")):
        return "route-csv"
    raise _unknown(path, "it is neither an npz nor a route CSV")


def _unpacked(path: Path, start: bytes) -> bytes:
    """The first bytes in a gzip file; of a damaged one as they are, so that its reader says what is wrong."""
    try:
        with gzip.open(path) as stream:
            return stream.read(16)
    except (OSError, EOFError, zlib.error):
        return start


def _unknown(path: Path, why: str, hint: str | None = None) -> TraceError:
    reason = f"the format of {path} cannot be told: {why}; known: {', '.join(IMPORTS)}."
    return TraceError(reason, hint or command("trace", "import", help=True))
