"""The command `remoe doctor`. Heavy imports stay inside, so that --help is quick."""

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from remoe_cli.cli.options import AsJson
from remoe_cli.config import Default
from remoe_cli.errors import RemoeError


def doctor(
    context: typer.Context,
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where models lie, whose disk is measured.", show_default="the Hub's cache"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at what remoe needs and can use here: packages, device, memory, disk, Hub, token, extras, settings.

    Each line is ok, warn or fail, with the next command. Exit code 1 where a line fails. Under 15 seconds.
    """
    from remoe_cli import doctor as verb
    from remoe_cli.cli.root import settings
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note, width

    top = context.find_root()
    found: list[Default] | RemoeError
    try:
        found = settings(top.command, top)
    except RemoeError as error:
        found = error
    note("Loading torch, reading from the disk, asking the Hub")
    lines = []
    for line in verb.doctor(folder, found):
        lines.append(line)
        if not as_json:
            print_data(verb.shown(line, width()))
    print_data(json.dumps(verb.rows(lines)) if as_json else verb.summary(lines))
    if any(line.status == "fail" for line in lines):
        raise typer.Exit(1)
