"""The command `remoe predictor`. Heavy imports stay inside, so that --help is quick."""

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

predictor = typer.Typer(
    no_args_is_help=True, help="Networks that foretell experts from hidden states, for the prefetcher promoe."
)


@predictor.callback()
def root() -> None:
    pass


@predictor.command()
def train(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace of `remoe trace --hidden`.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write; must not exist yet.")],
    ahead: Annotated[
        int, typer.Option(metavar="N", help="Layers between a hidden state and what it foretells, 1 to 3.")
    ] = 1,
    width: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="N", help="Of each network; by default two million parameters a layer at most."),
    ] = None,
    epochs: Annotated[int, typer.Option(metavar="N", help="Passes over the trace.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")] = False,
) -> None:
    """Train a predictor on a trace with hidden states; the last tenth of its requests tells how well it foretells."""
    from remoe_cli import predictor as verb
    from remoe_cli.console import data as print_data

    done = verb.train(trace, out, verb.Asked(ahead, width, epochs, seed))
    print_data(json.dumps(done) if as_json else verb.summary(done))
