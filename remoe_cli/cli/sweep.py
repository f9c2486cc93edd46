"""The command `remoe sweep`. Heavy imports stay inside, so that --help is quick."""

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from remoe_cli.errors import UsageError


def sweep(
    model: Annotated[str, typer.Argument(help="Hub id (with @revision), local folder, or `demo`.")],
    recipe: Annotated[
        list[str] | None, typer.Option(help="Recipe name or YAML file; repeatable.", show_default="remoe")
    ] = None,
    weights: Annotated[
        str, typer.Option(help="Factors of the recipe's locality terms; `limit` is the one that ends at --max-ppl.")
    ] = "0.5,1,2",
    cache: Annotated[str, typer.Option(help="Expert slots a layer, such as 8,12.")] = "12",
    policy: Annotated[str, typer.Option(help="Cache policies, NAME or NAME:PARAMETER; lru is always there.")] = "lru",
    ahead: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="R,...", help="Candidates for loads ahead of each layer, with and without heads; 0 is none."
        ),
    ] = None,
    bonus: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="X,...", help="Rerouting: bonus of residents as of reroute --strength; 0 is always there."
        ),
    ] = None,
    admission: Annotated[str, typer.Option(help="forced, bypass or both, at equal memory.")] = "forced",
    max_ppl: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="+X%", help="Quality limit: cells beyond it are marked, and the best is sought within it."
        ),
    ] = None,
    data: Annotated[Optional[str], typer.Option(help="As --data of finetune.")] = None,  # noqa: UP045
    steps: Annotated[Optional[int], typer.Option(help="Optimiser steps of each run.")] = None,  # noqa: UP045
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value of every recipe; repeatable.")
    ] = None,
    control: Annotated[bool, typer.Option(help="Train cross entropy alone as well.")] = True,
    rows: Annotated[Optional[int], typer.Option(help="Rows of held-out text; by default as the recipe.")] = None,  # noqa: UP045
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Folder of its runs and results; what is there is not done again.", show_default="runs/sweep-MODEL"
        ),
    ] = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cpu, cuda or cuda:N; a GPU is used where there is one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")] = False,
) -> None:
    """Train recipes at several weights, and replay each with every cache, policy and rerouting bonus: one table, one plot.

    The same command again goes on after Ctrl-C or a crash: runs and rerouted cells that are there are taken.
    """
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note, width
    from remoe_cli.report.renderers.sweep import summary, WIDTH
    from remoe_cli.report.sweep_options import Asked
    from remoe_cli.run import sweep_folder

    asked = Asked(
        tuple(recipe or ("remoe",)), tuple(_words(weights)), tuple(_numbers("--cache", cache, int)), tuple(_words(policy)),
        tuple(_numbers("--ahead", ahead, int)), tuple(_numbers("--bonus", bonus, float)), admission, max_ppl, data, steps,
        tuple(set_ or ()), control, rows,
    )  # fmt: skip
    asked.check()
    note("Loading torch and transformers")
    from remoe_cli import sweep as verb

    done = verb.sweep(model, asked, out=out or sweep_folder(model), device=device)
    print_data(json.dumps(done) if as_json else summary(done, width(WIDTH)))
    note(f"Written: {done['folder']}/sweep.json")


def _words(text: str | None) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))


def _numbers(option: str, text: str | None, kind: type) -> list:
    try:
        return [kind(word) for word in _words(text)]
    except ValueError:
        what = "whole numbers such as 8,12" if kind is int else "numbers such as .1,.2"
        raise UsageError(f"{option} takes {what}, not {text!r}.", f"remoe sweep demo {option} 8") from None
