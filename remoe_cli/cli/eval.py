"""The command `remoe eval`. Heavy imports stay inside, so that --help is quick."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Optional

import typer

from remoe_cli.cli.decode import Experts, Floor, Guess, Io, Pack, Ram, Readers, Reroute, Threads
from remoe_cli.cli.options import AsJson, Device
from remoe_cli.errors import CacheError, UsageError

TASKS = "Tasks"


def evaluate(
    run: Annotated[Optional[str], typer.Argument(help="Run folder or name; without it the latest run.")] = None,  # noqa: UP045
    cache: Annotated[str, typer.Option(help="Expert slots a layer, such as 6 or 6,8,12.")] = "6",
    control: Annotated[str | None, typer.Option(help="A second run to show beside it, such as a ce-only one.")] = None,
    policy: Annotated[
        str, typer.Option(help="Cache policies to simulate: names, NAME:PARAMETER, or `all`.")
    ] = "lru,lfu,fifo,belady",
    seeds: Annotated[int, typer.Option(metavar="N", help="Disjoint draws of held-out requests and rows.")] = 1,
    domain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]SOURCE",
            help="Another kind of text to measure on (as --data of finetune); repeatable. The demo shows its own two.",
        ),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Where the base lies, if not where the run found it.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="evaluate.key=value, in place of the run's; repeatable.")
    ] = None,
    measure: Annotated[bool, typer.Option(help="Time the offloaded decoder as well.")] = True,
    ram: Ram = None,
    guess: Guess = 0,
    reroute: Reroute = None,
    throttle: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="RATE", help="Experts come in no faster, such as 1GB/s.", rich_help_panel="Reading experts"
        ),
    ] = None,
    readers: Readers = 2,
    io: Io = "direct",
    pack: Pack = None,
    experts: Experts = None,
    floor: Floor = False,
    threads: Threads = None,
    tasks: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="NAME[=FILE],...",
            help="Tasks of lm-eval, such as gsm8k,mmlu, with items of the Hub or of a local file.",
            rich_help_panel=TASKS,
        ),
    ] = None,
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="N", help="The first N items of a task (or of each of its parts).", rich_help_panel=TASKS),
    ] = None,
    few_shot: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="N", help="Worked examples in each prompt, if not the task's own number.", rich_help_panel=TASKS
        ),
    ] = None,
    chat_template: Annotated[
        bool,
        typer.Option("--chat-template", help="Put prompts into the tokenizer's chat template.", rich_help_panel=TASKS),
    ] = False,
    run_code: Annotated[
        bool,
        typer.Option("--run-code", help="Run the code that the model writes (humaneval).", rich_help_panel=TASKS),
    ] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw usage.png and layers.png into the run: how far routing concentrates.")
    ] = False,
    fail_on_regress: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            metavar="X", help="Exit with 3 if the tuned perplexity or LRU misses are more than X % above the base's."
        ),
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Base, tuned and control side by side: quality, overlap, cache hits, and time measured on this machine.

    Changes against the base carry 95 % intervals over the same requests. A former report of other conditions stays beside
    the new one.
    """
    from remoe_cli import evaluate as verb
    from remoe_cli import show
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note, width
    from remoe_cli.measure.decode_options import Measuring
    from remoe_cli.measure.tasks import TaskOptions
    from remoe_cli.report.regressions import check_percent, regressions
    from remoe_cli.report.renderers.terminal import terminal
    from remoe_cli.report.verdict import verdict

    check_percent(fail_on_regress)
    report = verb.evaluate(
        run,
        _numbers(cache),
        control=control,
        policies=list(dict.fromkeys(name.strip() for name in policy.split(","))),
        seeds=seeds,
        domains=domain or [],
        base=base,
        overrides=set_ or [],
        measure=measure,
        measuring=Measuring(ram, guess, throttle, readers, io, pack, experts, floor, reroute),
        threads=threads,
        device=device,
        plot=plot,
        tasks=TaskOptions(tasks, limit, few_shot, chat_template, run_code),
    )
    show.write(report, Path(report["run"], show.PAGE))
    print_data(json.dumps(report) if as_json else f"{terminal(report, width(110))}\n{verdict(report)}")
    where = shlex.quote(report["run"])
    note(
        f"Written: {where}/report.json and, with pictures, {where}/{show.PAGE}. Next: remoe push --to FOLDER, or remoe push {where} you/your-delta"
    )
    if fail_on_regress is not None and (why := regressions(report, fail_on_regress)):
        note(f"Regressed: {'; '.join(why)}")
        raise typer.Exit(3)


def _numbers(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(
            f"--cache takes whole numbers such as 6 or 6,8,12, not {text!r}.", "remoe eval --cache 6,8,12"
        ) from None
    if found[0] < 1:
        raise CacheError(f"a cache needs at least 1 slot a layer, not {found[0]}.", "remoe eval --cache 6")
    return found
