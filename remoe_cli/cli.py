"""Every command: options -> one verb -> print. Heavy imports stay inside the commands, so that --help is quick."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Optional

import typer

from remoe_cli import __version__
from remoe_cli.cli_apply import apply
from remoe_cli.cli_decode import decode, Floor, Guess, Io, Pack, Ram, Readers, Reroute, Threads
from remoe_cli.cli_delta import diff, inspect, merge
from remoe_cli.cli_pack import pack
from remoe_cli.cli_plan import plan
from remoe_cli.cli_replay import replay
from remoe_cli.cli_reroute import reroute
from remoe_cli.cli_sweep import sweep
from remoe_cli.cli_trace import trace
from remoe_cli.errors import CacheError, UsageError
from remoe_cli.sizes import parse_size

app = typer.Typer(
    help="Make Mixture-of-Experts models cacheable by tuning only their router gates; measure the gain on your own machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start: remoe finetune demo && remoe eval --cache 8,12 && remoe push --to out",
)

Device = Annotated[Optional[str], typer.Option(help="cpu, cuda or cuda:N; a GPU is used where there is one.")]  # noqa: UP045
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"remoe {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
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


@app.command("eval")
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
    floor: Floor = False,
    threads: Threads = None,
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
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note
    from remoe_cli.measure.decode_options import Measuring
    from remoe_cli.report.regressions import check_percent, regressions
    from remoe_cli.report.renderers.terminal import terminal

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
        measuring=Measuring(ram, guess, throttle, readers, io, pack, floor, reroute),
        threads=threads,
        device=device,
        plot=plot,
    )
    print_data(json.dumps(report) if as_json else terminal(report))
    where = shlex.quote(report["run"])
    note(f"Written: {where}/report.json. Next: remoe push --to FOLDER, or remoe push {where} you/your-delta")
    if fail_on_regress is not None and (why := regressions(report, fail_on_regress)):
        note(f"Regressed: {'; '.join(why)}")
        raise typer.Exit(3)


@app.command()
def push(
    run: Annotated[Optional[str], typer.Argument(help="Run folder or name; without it the latest run.")] = None,  # noqa: UP045
    repo: Annotated[
        str | None, typer.Argument(help="Hub repository (user/name); by default <you>/<base>-remoe.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[Optional[str], typer.Option(help="Branch to push to; made if it is not there.")] = None,  # noqa: UP045
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request instead; needs no right to write.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent; send nothing.")] = False,
    to: Annotated[Optional[Path], typer.Option(help="Write to this folder instead of the Hub.")] = None,  # noqa: UP045
    forms: Annotated[
        list[str] | None,
        typer.Option("--as", metavar="FORM", help="peft or gguf: a form to put beside the delta; repeatable."),
    ] = None,
    gguf: Annotated[
        list[Path] | None, typer.Option(help="With --as gguf: a GGUF with the tuned gates (any part); repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish the delta with its recipe, report and card: to the Hub, or to a folder with --to.

    The same delta twice makes no second commit, and no second pull request while the first is open.
    """
    from remoe_cli import push as verb
    from remoe_cli.console import data as print_data

    run, repo = verb.arguments(run, repo)
    done = verb.push(
        run,
        repo,
        to=to,
        private=private,
        dry_run=dry_run,
        create_pr=create_pr,
        revision=revision,
        forms=forms or (),
        ggufs=gguf or (),
    )
    if as_json:
        print_data(json.dumps(done._asdict()))
        return
    for name, size in done.files.items():
        print_data(f"{size:>12,}  {name}")
    if dry_run:
        print_data(
            f"Dry run: nothing was {'written' if to else 'sent'} to {done.where}. Next: the same command without --dry-run"
        )
    else:
        state = "Pushed to" if done.new else "Unchanged, already at"
        print_data(
            f"{state} {done.where}. Next: remoe apply {shlex.quote(done.name)} {shlex.quote(done.base)} --out DIR"
        )


@app.command()
def pull(
    delta: Annotated[str, typer.Argument(help="Delta repository (user/name, with @revision).")],
    out: Annotated[Optional[Path], typer.Option(help="Folder for it; by default ./NAME. Must not exist yet.")] = None,  # noqa: UP045
    form: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--as", metavar="FORM", help="peft or gguf: bring that form too, which must lie beside the delta."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download a delta from the Hub into a folder, checked."""
    from remoe_cli import pull as verb
    from remoe_cli.console import data as print_data

    done = verb.pull(delta, out, form)
    if as_json:
        print_data(json.dumps({**done._asdict(), "folder": str(done.folder)}))
        return
    print_data(
        f"{done.folder}: {done.gates} gates, {done.nbytes:,} bytes, recipe {done.recipe}, from {done.repo}@{done.commit}"
    )
    if done.form_files:
        print_data(f"With it: {', '.join(done.form_files)}")
    print_data(
        f"Base {done.base}. Next: remoe apply {shlex.quote(str(done.folder))} {shlex.quote(done.base)} --out DIR"
    )


app.command()(apply)
app.command()(inspect)
app.command()(diff)
app.command()(merge)
app.command()(decode)
app.command()(pack)
app.command()(plan)
app.add_typer(trace, name="trace")
app.command()(replay)
app.command()(reroute)
app.command()(sweep)


@app.command()
def recipes(
    family: Annotated[str, typer.Argument(help="`demo`, or a family such as qwen3_moe.")] = "deepseek_v2",
    as_json: AsJson = False,
) -> None:
    """List the recipes of a family: what each is for, and its file, to copy and pass to --recipe."""
    from remoe_cli import recipe
    from remoe_cli.console import data as print_data
    from remoe_cli.families import FAMILIES

    if family not in (known := ["demo", *FAMILIES]):
        raise UsageError(f"there is no family {family!r}; allowed: {', '.join(known)}.", "remoe recipes demo")
    found = {name: (recipe.purpose(path), str(path)) for name, path in recipe.shipped(family).items()}
    if as_json:
        print_data(json.dumps([{"name": name, "purpose": why, "file": file} for name, (why, file) in found.items()]))
        return
    wide = max(map(len, found)) + 2
    print_data("\n".join(f"{name:<{wide}}{why}\n{'':<{wide}}{file}" for name, (why, file) in found.items()))
    shown = recipe.load("remoe", family)
    print_data(f"\nEvery key, as the recipe remoe for {family} has it:")
    print_data("\n".join(f"  --set {shlex.quote(recipe.setting(shown, key))}" for key in recipe.key_names()))


runs = typer.Typer(help="List the runs under runs/, or remove some.", invoke_without_command=True)
app.add_typer(runs, name="runs")


@runs.callback()
def list_runs(context: typer.Context, as_json: AsJson = False) -> None:
    from remoe_cli import run
    from remoe_cli.console import data as print_data

    if context.invoked_subcommand is not None:
        return
    found = run.every()
    print_data(json.dumps([run.row(one) for one in found]) if as_json else run.table(found))


@runs.command("rm")
def remove_runs(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders or names.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove run folders, with all that was trained in them."""
    from remoe_cli import run
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note

    found = run.removable(names)
    note(run.table(found))
    if not yes and not typer.confirm(f"Remove {len(found)} run(s)?", err=True):
        raise typer.Exit(1)
    for one in found:
        one.discard()
        print_data(f"Removed {one.folder}")


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
