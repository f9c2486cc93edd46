"""remoe push: the delta, its recipe, report and card, to the Hub or to a folder."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from remoe_cli import atomic
from remoe_cli import run as runs
from remoe_cli.delta import Delta
from remoe_cli.errors import RunError, UsageError
from remoe_cli.report.renderers.card import card


class Pushed(NamedTuple):
    """where: folder or Hub address; name: what `remoe apply` finds it by; files: names and bytes; new: False when nothing
    was sent (a dry run, or the same content)."""

    where: str
    name: str
    files: dict[str, int]
    new: bool


def arguments(first: str | None, second: str | None) -> tuple[str | None, str | None]:
    """`push [RUN] [REPO]`: one argument alone is a run if such a run exists, else a repository."""
    if first is None or second is not None:
        return first, second
    if Path(first, "run.json").is_file() or (runs.ROOT / first / "run.json").is_file():
        return first, None
    if first.count("/") == 1 and not first.startswith((".", "/")) and not Path(first).exists():
        return None, first
    raise UsageError(f"{first} is neither a run nor a repository of the form user/name.", "ls runs")


def push(
    run: str | None, repo: str | None, *, to: Path | None = None, private: bool = False, dry_run: bool = False
) -> Pushed:
    """Raises RunError without a run, HubError without a token or right to write."""
    found = runs.find(run)
    if to is not None:
        with atomic.new_folder(to) as scratch:
            files = assemble(found, scratch)
        return Pushed(str(to), str(to), files, True)
    from remoe_cli.hub.upload import push_folder

    with tempfile.TemporaryDirectory() as scratch_name:
        files = assemble(found, Path(scratch_name))
        base = Delta.load(found.delta).base.rstrip("/").rpartition("/")[2]
        message = f"remoe: {found.recipe.name} gates"
        done = push_folder(Path(scratch_name), repo, private=private, dry_run=dry_run, base_name=base, message=message)
        return Pushed(done.url, done.repo, files, done.new)


def assemble(run: runs.Run, folder: Path) -> dict[str, int]:
    """The files of a pushed delta: gates.safetensors, remoe.json, recipe.yaml, report.json (if evaluated), README.md."""
    delta = Delta.load(run.delta)
    for source in (run.delta / "gates.safetensors", run.delta / "remoe.json", run.recipe_file):
        shutil.copyfile(source, folder / source.name)
    report = None
    if run.report.is_file():
        try:
            report = json.loads(run.report.read_text())
        except ValueError:
            raise RunError(f"{run.report} is damaged.", f"remoe eval {run.folder} --cache 6") from None
        shutil.copyfile(run.report, folder / "report.json")
    atomic.write(folder / "README.md", card(delta, run.recipe, run.facts, report))
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
