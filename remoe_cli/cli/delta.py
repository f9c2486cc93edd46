"""The commands `remoe inspect`, `diff` and `merge`. Heavy imports stay inside, so that --help is quick."""

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from remoe_cli.errors import command, UsageError

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]
_FOUND = "folder, run folder or name, or Hub id (with @revision)."


def inspect(
    name: Annotated[
        str, typer.Argument(help=f"Delta {_FOUND} Or a model: demo, a folder with a config.json, or Hub id.")
    ],
    cache: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="C[,C...]",
            help="Of a model: experts kept a layer, to say how much memory they take.",
            show_default="a quarter, half and all",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a delta or a model holds; of a model only config.json and headers are read.

    Of a delta: its gates, the base it belongs to and what its report said. Of a model: layers, experts, gates, sizes, memory at
    --cache, and whether remoe can tune it.
    """
    from remoe_cli import inspect as verb
    from remoe_cli import inspect_model
    from remoe_cli.console import data as print_data

    capacities = [] if cache is None else _slots(cache)
    if verb.is_model(name):
        model = inspect_model.inspect(name, capacities)
        print_data(json.dumps(model) if as_json else inspect_model.summary(model))
        return
    if capacities:
        raise UsageError(f"{name} is a delta; --cache is for a model.", command("inspect", name))
    found = verb.inspect(name)
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


def _slots(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--cache takes whole numbers such as 6,8, not {text!r}.", "--cache 6,8") from None


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--weights takes numbers such as 2,1, not {text!r}.", "--weights 1,1") from None
