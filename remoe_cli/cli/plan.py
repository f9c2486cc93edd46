"""The command `remoe plan`. Heavy imports stay inside, so that --help is quick."""

import json
from typing import Annotated, Any, Optional

import typer

from remoe_cli.errors import command, RemoeError, UsageError
from remoe_cli.sizes import parse_size

_TUNING, _DECODING = "With --for finetune", "With --for decode"


def plan(
    model: Annotated[str, typer.Argument(help="Hub id (with @revision), local folder, or `demo`.")],
    purpose: Annotated[
        str, typer.Option("--for", metavar="VERB", help="What to plan: finetune or decode.")
    ] = "finetune",
    memory: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SIZE[,SIZE...]",
            help="That a decoder may take, such as 8GB; by default what is free on the device.",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            metavar="N",
            help="Of the longest request, prompt and answer.",
            show_default="2048",
            rich_help_panel=_DECODING,
        ),
    ] = None,
    recipe: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Recipe name or YAML file, as of finetune.", show_default="remoe", rich_help_panel=_TUNING),
    ] = None,
    steps: Annotated[Optional[int], typer.Option(help="Optimiser steps.", rich_help_panel=_TUNING)] = None,  # noqa: UP045
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value of the recipe; repeatable.", rich_help_panel=_TUNING),
    ] = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cpu, cuda or cuda:N; a GPU is used where there is one."),
    ] = None,
    device_memory: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SIZE",
            help="Of the device, such as 8GB, also one that is not here; by default what is free on this one.",
            rich_help_panel=_TUNING,
        ),
    ] = None,
    ram: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SIZE",
            help="Host memory, such as 16GB; by default what is free here.",
            rich_help_panel=_TUNING,
        ),
    ] = None,
    devices: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=2,
            max=4096,
            help="To spread the layers over; by default the fewest that fit.",
            rich_help_panel=_TUNING,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")] = False,
) -> None:
    """Show what tuning or decoding MODEL takes here, before its weights are downloaded.

    Tuning: memory, weight traffic and time a step, and which mode fits. Decoding with experts on disk: how many fit into a memory, and
    which misses and time a token are to be expected. Only config.json and headers are read; rates are measured on this machine in
    about ten seconds. Exit code 1 where nothing fits, with what would.
    """
    given: dict[str, dict[str, object]] = {
        "finetune": {
            "recipe": recipe, "steps": steps, "set": set_, "device-memory": device_memory, "ram": ram, "devices": devices,
        },
        "decode": {"memory": memory, "tokens": tokens},
    }  # fmt: skip
    if purpose not in given:
        raise UsageError(f"--for is {' or '.join(given)}, not {purpose!r}.", command("plan", model))
    for other in given.keys() - {purpose}:
        for option in (name for name, value in given[other].items() if value):
            raise UsageError(f"--{option} is an option of --for {other}.", _again(model, purpose))
    sizes = {name: None if text is None else _size(name, text, model, "finetune")
             for name, text in (("device-memory", device_memory), ("ram", ram))}  # fmt: skip
    memories = [_size("memory", text, model, "decode") for text in memory.split(",")] if memory is not None else []
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note, width

    note("Loading torch and transformers")
    found: dict[str, Any]
    if purpose == "decode":
        from remoe_cli import plan_decode
        from remoe_cli.report.renderers.plan_decode import summary

        found = plan_decode.plan(model, memories, tokens=tokens, device=device)
    else:
        from remoe_cli import plan as verb
        from remoe_cli.report.renderers.plan import summary

        found = verb.plan(
            model,
            verb.Asked(recipe, None, steps, tuple(set_ or ())),
            device=device,
            device_memory=sizes["device-memory"],
            ram=sizes["ram"],
            devices=devices,
        )
    print_data(json.dumps(found) if as_json else summary(found, width()))
    if found["refusal"]:
        raise RemoeError(**found["refusal"])


def _again(model: str, purpose: str, **options: object) -> str:
    return command("plan", model, **({} if purpose == "finetune" else {"for": purpose}), **options)


def _size(name: str, text: str, model: str, purpose: str) -> int:
    if (size := parse_size(text)) is None:
        raise UsageError(f"--{name} takes a size such as 8GB, not {text!r}.", _again(model, purpose, **{name: "8GB"}))
    return size
