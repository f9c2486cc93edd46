"""The command `remoe report`. Heavy imports stay inside, so that --help is quick."""

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from remoe_cli.cli.options import AsJson


def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN...]",
            help="Runs, folders with a report.json, or such files; without any the latest evaluated run.",
        ),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="The page; by default report.html beside the report, or here where there are several.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a report, or several runs of one base side by side: a table here, and a page with pictures as one HTML file.

    The page needs no network. A picture of its headline is written beside it.
    """
    from remoe_cli import show as verb
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note, width
    from remoe_cli.report.renderers.terminal import terminal

    done = verb.show(names or [], out)
    print_data(json.dumps(done.report) if as_json else f"{terminal(done.report, width(110))}\n{done.verdict}")
    note(f"Written: {', '.join(map(str, done.written))}")
