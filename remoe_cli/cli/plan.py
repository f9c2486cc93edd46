"""The command `remoe plan`. Heavy imports stay inside, so that --help is quick."""

import json
from typing import Annotated, Optional

import typer

from remoe_cli.errors import command, RemoeError, UsageError
from remoe_cli.sizes import parse_size


def plan(
    model: Annotated[str, typer.Argument(help="Hub id (with @revision), local folder, or `demo`.")],
    purpose: Annotated[str, typer.Option("--for", metavar="VERB", help="What to plan: finetune.")] = "finetune",
    recipe: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Recipe name or YAML file, as of finetune.", show_default="remoe"),
    ] = None,
    steps: Annotated[Optional[int], typer.Option(help="Optimiser steps.")] = None,  # noqa: UP045
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value of the recipe; repeatable.")
    ] = None,
    device: Annotated[Optional[str], typer.Option(help="cpu, cuda or cuda:N, as of finetune.")] = None,  # noqa: UP045
    device_memory: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SIZE",
            help="Of the device, such as 8GB, also one that is not here; by default what is free on this one.",
        ),
    ] = None,
    ram: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="SIZE", help="Host memory, such as 16GB; by default what is free here."),
    ] = None,
    devices: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=2, max=4096, help="To spread the layers over; by default the fewest that fit."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")] = False,
) -> None:
    """Show what tuning MODEL takes: memory, weight traffic and time a step, and which mode fits.

    Only config.json and headers are read; rates are measured on this machine in about ten seconds. Exit code 1 where nothing
    fits on one device, with what would.
    """
    if purpose != "finetune":
        raise UsageError(f"--for is finetune, not {purpose!r}.", command("plan", model))
    sizes = {"device-memory": device_memory, "ram": ram}
    asked_sizes = {name: None if text is None else _size(name, text, model) for name, text in sizes.items()}
    from remoe_cli import plan as verb
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note

    note("Loading torch and transformers")
    found = verb.plan(
        model,
        verb.Asked(recipe, None, steps, tuple(set_ or ())),
        device=device,
        device_memory=asked_sizes["device-memory"],
        ram=asked_sizes["ram"],
        devices=devices,
    )
    print_data(json.dumps(found) if as_json else verb.summary(found))
    if found["refusal"]:
        raise RemoeError(**found["refusal"])


def _size(name: str, text: str, model: str) -> int:
    if (size := parse_size(text)) is None:
        raise UsageError(f"--{name} takes a size such as 8GB, not {text!r}.", command("plan", model, **{name: "8GB"}))
    return size
