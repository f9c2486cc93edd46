"""The command `remoe pack`. Heavy imports stay inside, so that --help is quick."""

import json
from pathlib import Path
from typing import Annotated

import typer


def pack(
    model: Annotated[str, typer.Argument(help="Hub id (with @revision), local folder, or `demo`.")],
    out: Annotated[Path, typer.Option(help="Folder for the packed experts; must not exist yet.")],
    experts: Annotated[
        str,
        typer.Option(
            metavar="FORM",
            help="stored: as they are; int8, int4: in fewer bits, which changes what the model says a little.",
        ),
    ] = "stored",
    group: Annotated[int, typer.Option(help="Inputs that share a scale of int4: 32, 64, 128 or 256.")] = 64,
    force: Annotated[bool, typer.Option("--force", help="Also where an expert takes about one read already.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")] = False,
) -> None:
    """Copy the experts of MODEL so that one read brings each: as they are stored, where the checkpoint keeps an expert's tensors
    apart, or in 8 or 4 bits a weight. Gates stay as they are.

    `remoe decode MODEL --pack DIR` reads experts from there, everything else from MODEL.
    """
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note

    note("Loading torch and transformers")
    from remoe_cli import pack as verb

    done = verb.pack(model, out, experts=experts, group=group, force=force)
    print_data(json.dumps(done) if as_json else verb.summary(done))
