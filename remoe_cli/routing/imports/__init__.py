"""Traces of other tools, one file a format: readers that give a RoutingTrace and say how its figures were counted.

Each leaves the replay options of the published figures in provenance["accounting"]; docs/trace-format.md lists them.
"""

import shlex
from collections.abc import Callable
from pathlib import Path

from remoe_cli.errors import TraceError
from remoe_cli.routing.imports import expert_npz, route_csv
from remoe_cli.routing.trace import RoutingTrace

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
    return IMPORTS[format or guess(path)](path, n_experts)


def guess(path: Path) -> str:
    """The format that the content names. Raises TraceError where it names none."""
    try:
        with open(path, "rb") as stream:
            start = stream.read(4)
    except OSError as error:
        why = f"there is no file {path}" if isinstance(error, FileNotFoundError) else f"{path}: {error.strerror}"
        raise TraceError(f"{why}.", f"ls {shlex.quote(str(path.parent))}") from None
    if start == b"REMO":
        raise TraceError(f"{path} is a trace of remoe already.", f"remoe replay {shlex.quote(str(path))} --cache 8")
    if start.startswith(b"PK"):
        keys = expert_npz.keys(path)
        kinds = [kind for kind, key in (("esft-npz", "sample_lengths"), ("cacheable-npz", "meta")) if key in keys]
        if "experts" in keys and len(kinds) == 1:
            return kinds[0]
        raise _unknown(path, f"its arrays are {', '.join(sorted(keys)) or 'none'}")
    if start.startswith((b"\x1f\x8b", b"#", b"turn")):
        return "route-csv"
    raise _unknown(path, "it is neither an npz nor a route CSV")


def _unknown(path: Path, why: str) -> TraceError:
    command = f"remoe trace import {shlex.quote(str(path))} --format route-csv -o t.trace"
    return TraceError(f"the format of {path} cannot be told: {why}; known: {', '.join(IMPORTS)}.", command)
