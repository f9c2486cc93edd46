"""The commands `remoe runs` and `remoe recipes`. Heavy imports stay inside, so that --help is quick."""

import json
import shlex
from textwrap import wrap
from typing import Annotated

import typer

from remoe_cli.cli.options import AsJson
from remoe_cli.errors import UsageError


def recipes(
    family: Annotated[str, typer.Argument(help="`demo`, or a family such as qwen3_moe.")] = "deepseek_v2",
    as_json: AsJson = False,
) -> None:
    """List the recipes of a family: what each is for, and its file, to copy and pass to --recipe."""
    from remoe_cli import recipe
    from remoe_cli.console import data as print_data
    from remoe_cli.console import width
    from remoe_cli.families import FAMILIES

    if family not in (known := ["demo", *FAMILIES]):
        raise UsageError(f"there is no family {family!r}; allowed: {', '.join(known)}.", "remoe recipes demo")
    found = {name: (recipe.purpose(path), str(path)) for name, path in recipe.shipped(family).items()}
    if as_json:
        print_data(json.dumps([{"name": name, "purpose": why, "file": file} for name, (why, file) in found.items()]))
        return
    wide, columns = max(map(len, found)) + 2, width()
    apart = columns < 2 * wide  # names above what they are for
    indent = " " * (2 if apart else wide)
    for name, (why, file) in found.items():
        words = wrap(why, columns, initial_indent=indent, subsequent_indent=indent)
        print_data("\n".join([name, *words] if apart else [name + words[0][len(name) :], *words[1:]]))
        print_data(f"{indent}{file}")
    shown = recipe.load("remoe", family)
    print_data(f"\nEvery key, as the recipe remoe for {family} has it:")
    print_data("\n".join(f"  --set {shlex.quote(recipe.setting(shown, key))}" for key in recipe.key_names()))


runs = typer.Typer(help="List the runs under runs/, or remove some.", invoke_without_command=True)


@runs.callback()
def list_runs(context: typer.Context, as_json: AsJson = False) -> None:
    from remoe_cli import run
    from remoe_cli.console import data as print_data
    from remoe_cli.console import width

    if context.invoked_subcommand is not None:
        return
    found = run.every()
    print_data(json.dumps([run.row(one) for one in found]) if as_json else run.table(found, width()))


@runs.command("rm")
def remove_runs(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders or names.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove run folders, with all that was trained in them."""
    from remoe_cli import run
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note, width

    found = run.removable(names)
    note(run.table(found, width()))
    if not yes and not typer.confirm(f"Remove {len(found)} run(s)?", err=True):
        raise typer.Exit(1)
    for one in found:
        one.discard()
        print_data(f"Removed {one.folder}")
