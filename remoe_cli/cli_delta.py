"""The commands `remoe inspect`, `diff` and `merge`. Heavy imports stay inside, so that --help is quick."""

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from remoe_cli.errors import UsageError

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]
_FOUND = "folder, run folder or name, or Hub id (with @revision)."


def inspect(
    delta: Annotated[str, typer.Argument(help=f"Delta {_FOUND}")],
    as_json: AsJson = False,
) -> None:
    """Show what a delta holds, which base it belongs to and what its report said."""
    from remoe_cli import inspect as verb
    from remoe_cli.console import data as print_data

    found = verb.inspect(delta)
    print_data(json.dumps(found) if as_json else verb.summary(found))


def diff(
    first: Annotated[str, typer.Argument(help=f"Delta {_FOUND}")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Show how far two deltas are apart, gate by gate, and whether they can be merged."""
    from remoe_cli import diff as verb
    from remoe_cli.console import data as print_data

    found = verb.diff(first, second)
    print_data(json.dumps(found) if as_json else verb.summary(found))


def merge(
    deltas: Annotated[list[str], typer.Argument(metavar="DELTA...", help=f"Two or more of one base: {_FOUND}")],
    out: Annotated[Path, typer.Option(help="Folder for the merged delta; must not exist yet.")],
    weights: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="W,W", help="One number a delta, such as 2,1; scaled to sum 1.", show_default="all equal"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Average the gates of several deltas of one base, and their heads where all have them."""
    from remoe_cli import merge as verb
    from remoe_cli.console import data as print_data

    done = verb.merge(deltas, None if weights is None else _numbers(weights), out)
    print_data(json.dumps(done) if as_json else verb.summary(done))


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--weights takes numbers such as 2,1, not {text!r}.", "--weights 1,1") from None
