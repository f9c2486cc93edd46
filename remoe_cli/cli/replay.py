"""The command `remoe replay`: options -> the verb -> print. No torch, and numpy only once it runs."""

import json
from pathlib import Path
from typing import Annotated, Optional

import typer


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A file of `remoe trace` or `remoe trace import`.")],
    cache: Annotated[str, typer.Option(help="Expert slots a layer, such as 6 or 6,8,12.")],
    policy: Annotated[
        str, typer.Option(help="`all`, or NAME, NAME:PARAMETER and +PREFETCHER, such as lru,lrfu:0.1,lru+st_moe:6.")
    ] = "all",
    admission: Annotated[str, typer.Option(help="forced, bypass or both.")] = "both",
    equal: Annotated[
        str, typer.Option(help="memory: the staging buffer of bypass is taken from its slots; slots: it comes on top.")
    ] = "memory",
    pool: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option("--pool/--no-pool", help="One pool of slots for all layers.", show_default="no"),
    ] = None,
    budgets: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="TRACE", help="Slots of each layer, fitted on this trace, in place of the same for all."),
    ] = None,
    fit: Annotated[Optional[Path], typer.Option(metavar="TRACE", help="The trace that `static` is fitted on.")] = None,  # noqa: UP045
    predictor: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="What `remoe predictor train` wrote, for +promoe."),
    ] = None,
    tune: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="TRACE", help="Parameters that are not given, where a policy has a grid: the best on this trace."
        ),
    ] = None,
    against: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="TRACE", help="The base's trace: shown beside, and the gap is measured on it."),
    ] = None,
    estimate: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="LINK,COMPUTE", help="Estimate the time a token, such as 4GB/s,45ms."),
    ] = None,
    expert_bytes: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SIZE", help="Stored size of an expert, such as 17.3MB (B: bytes); by default what the trace says."
        ),
    ] = None,
    step: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="atomic: a token's experts at once; sequential: one by one.", show_default="atomic"),
    ] = None,
    reset: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="request: a fresh cache for each; never: one cache for all, as --warm carry.", show_default="request"
        ),
    ] = None,
    touch_order: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="weight: the heaviest expert last; listed: as recorded.", show_default="weight"),
    ] = None,
    warm: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="cold; prefill: the prompt goes through the cache first, token by token; batch: the same, as one step a "
            "layer; carry: one cold cache for all requests, as --reset never.",
            show_default="cold",
        ),
    ] = None,
    sessions: Annotated[int, typer.Option(metavar="N", help="Requests that take turns; with --warm carry.")] = 1,
    figures: Annotated[
        bool, typer.Option("--figures", help="Also print overlap, reuse, working sets, misses a token, the LRU curve.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Machine-readable result on stdout, with all figures.")
    ] = False,
) -> None:
    """What a recorded trace would load: every policy, admission and cache size in one table. Needs no model and no torch.

    A trace that was imported with accounting rules of its own is replayed with them; options that are given win.
    """
    from remoe_cli import replay as verb
    from remoe_cli.console import data as print_data
    from remoe_cli.console import width
    from remoe_cli.report.renderers.replay import figure_tables, replay_table

    asked = verb.Asked(
        capacities=cache.split(","),
        policies=[name.strip() for name in policy.split(",")],
        admission=admission,
        equal=equal,
        pool=pool,
        step=step,
        reset=reset,
        touch_order=touch_order,
        warm=warm,
        sessions=sessions,
        budgets=budgets,
        fit=fit,
        predictor=predictor,
        tune=tune,
        against=against,
        estimate=estimate,
        expert_bytes=expert_bytes,
        figures=figures,
        as_json=as_json,
    )
    result = verb.replay(trace, asked, with_figures=figures or as_json)
    if as_json:
        print_data(json.dumps(result))
        return
    print_data(replay_table(result, width()))
    if figures:
        print_data("\n" + figure_tables(result, width()))
