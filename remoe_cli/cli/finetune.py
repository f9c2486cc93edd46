"""The command `remoe finetune`. Heavy imports stay inside, so that --help is quick."""

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from remoe_cli.cli.options import AsJson, Device
from remoe_cli.errors import UsageError
from remoe_cli.sizes import parse_size


def finetune(
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="Hub id (with @revision), local folder, or `demo`; may be left out with --resume."),
    ] = None,
    recipe: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Recipe name (`remoe recipes` lists them) or YAML file.", show_default="remoe"),
    ] = None,
    data: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="`demo`, a file, a folder, a Hub data set, or `self`: what the base itself writes."),
    ] = None,
    steps: Annotated[Optional[int], typer.Option(help="Optimiser steps; warm-ups scale with them.")] = None,  # noqa: UP045
    out: Annotated[Optional[Path], typer.Option(help="Run folder; by default runs/<time>-<model>-<recipe>.")] = None,  # noqa: UP045
    max_ppl: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="+X%", help="Steer the locality terms so that held-out perplexity ends so far from the base's."
        ),
    ] = None,
    ce_only: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="RUN", help="With --max-ppl: the CE-only run to tell drift by; by default one under runs/."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value of the recipe; repeatable.")
    ] = None,
    refit_bias: Annotated[
        bool,
        typer.Option(
            "--refit-bias",
            help="Give each expert back the load it had in the base, where the family selects with a bias.",
        ),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the latest unfinished run; start one where there is none.")
    ] = False,
    stream: Annotated[
        str,
        typer.Option(
            help="Let layers pass through memory one by one: `auto` (where the model does not fit), `on`, `off`."
        ),
    ] = "auto",
    ram: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="SIZE", help="With --stream: host memory for layers that stay; by default what is free."),
    ] = None,
    parallel: Annotated[
        str, typer.Option(help="How processes of torchrun share the model: `fsdp`, or `ep` (tokens travel to experts).")
    ] = "fsdp",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Train the router gates of MODEL, everything else frozen; writes a run folder with the delta.

    Ctrl-C saves the gates so far and exits with 130; after that, or after a crash, --resume goes on.
    """
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note

    if model is None and not resume:
        raise UsageError("finetune needs a MODEL, or --resume.", "remoe finetune demo")
    if stream not in ("auto", "on", "off"):
        raise UsageError(f"--stream {stream}: it is auto, on or off.", "remoe finetune --help")
    if parallel not in ("fsdp", "ep"):
        raise UsageError(f"--parallel {parallel}: it is fsdp or ep.", "remoe finetune --help")
    room = None if ram is None else parse_size(ram)
    if ram is not None and room is None:
        raise UsageError(f"--ram {ram} is no size such as 8GB.", "remoe finetune --help")
    note("Loading torch and transformers")
    from remoe_cli import finetune as verb
    from remoe_cli import finetuned

    overrides = (*(set_ or ()), *(["train.refit_bias=true"] if refit_bias else []))
    asked = verb.Asked(recipe, data, steps, overrides, max_ppl)
    done = verb.finetune(
        model, asked, out=out, device=device, resume=resume, ce_only=ce_only, stream=stream, ram=room, parallel=parallel
    )
    if as_json:
        print_data(json.dumps(finetuned.as_json(done)))
    else:
        print_data(finetuned.summary(done))
    if done.interrupted:
        raise typer.Exit(130)
