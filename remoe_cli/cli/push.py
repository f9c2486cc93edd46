"""The commands `remoe push` and `remoe pull`. Heavy imports stay inside, so that --help is quick."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Optional

import typer

from remoe_cli.cli.options import AsJson


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
