"""remoe push: the delta, its recipe, report and card, to the Hub or to a folder."""

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from remoe_cli import atomic
from remoe_cli import recipe as recipes
from remoe_cli import run as runs
from remoe_cli.delta import Delta
from remoe_cli.errors import RunError, UsageError
from remoe_cli.hub.licence import licence_of
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
    raise UsageError(f"{first} is neither a run nor a repository of the form user/name.", "remoe runs")


def push(
    run: str | None,
    repo: str | None,
    *,
    to: Path | None = None,
    private: bool = False,
    dry_run: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
) -> Pushed:
    """Raises RunError without a run, HubError without a token or right to write."""
    if to is not None and (repo or private or create_pr or revision):
        raise UsageError(
            "--to writes a folder; a repository, --private, --create-pr and --revision belong to a push to the Hub.",
            f"remoe push --to {to}",
        )
    found = runs.find(run)
    if to is not None and not dry_run:
        with atomic.new_folder(to) as scratch:
            files = assemble(found, scratch)
        return Pushed(str(to), str(to), files, True)
    from remoe_cli.hub.upload import push_folder, target_of

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch_name:
        folder = Path(scratch_name)
        if to is not None:
            atomic.require_free(to)
            return Pushed(str(to), str(to), assemble(found, folder), False)
        base_name = Path(Delta.load(found.delta).base).name
        files = assemble(found, folder, target_of(repo, base_name, dry_run))
        done = push_folder(
            folder,
            repo,
            base_name=base_name,
            message=f"remoe: {found.recipe.name} gates",
            private=private,
            dry_run=dry_run,
            create_pr=create_pr,
            revision=revision,
        )
        return Pushed(done.url, done.repo, files, done.new)


def assemble(run: runs.Run, folder: Path, name: str | None = None) -> dict[str, int]:
    """The files of a pushed delta: gates.safetensors, remoe.json, recipe.yaml, report.json (if evaluated), README.md.

    Nothing in them names a folder of this machine. name: the repository, where it is known already.
    """
    delta, facts, report = Delta.load(run.delta), run.facts, _report(run)
    local = _local_folders(run, delta, facts)
    licence = licence_of(delta.base, delta.commit)
    delta = replace(delta, base=_without(local, delta.base))
    delta.save(folder)
    recipe_file = folder / "recipe.yaml"
    recipe = _without(local, yaml.safe_load(run.recipe.to_yaml()))
    atomic.write(recipe_file, yaml.safe_dump(recipe, sort_keys=False))
    if report is not None:
        report = _without(local, report)
        atomic.write(folder / "report.json", json.dumps(report, indent=1) + "\n")
    try:
        text = card(delta, recipes.read(recipe_file), facts, report, name=name or "THIS_REPO", licence=licence)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError):
        raise _stale(run) from None
    atomic.write(folder / "README.md", text)
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def _report(run: runs.Run) -> dict[str, Any] | None:
    if not run.report.is_file():
        return None
    try:
        report = json.loads(run.report.read_text())
    except (OSError, ValueError, RecursionError):
        report = None
    if not isinstance(report, dict):
        raise _stale(run)
    return report


def _stale(run: runs.Run) -> RunError:
    return RunError(
        f"{run.report} is damaged, or of another version of remoe.", f"remoe eval {run.folder} --cache 6, or remove it"
    )


def _local_folders(run: runs.Run, delta: Delta, facts: dict[str, Any]) -> list[str]:
    """The folders of this machine that a run's files may name, longest first."""
    base, source = Path(delta.base), run.recipe.data.source.removeprefix("self:")
    pinned = str(facts.get("data") or "").removeprefix("self:")
    inside = [run.folder, run.folder.resolve(), Path.cwd() / "x", Path.home() / "x"]
    inside += [base] if delta.commit is None else []
    if Path(pinned).is_absolute() or Path(source).expanduser().exists():
        inside += [Path(pinned), Path(source)]
    folders = {str(path.parent) for path in inside} - {".", "/", ""}
    return sorted(folders, key=len, reverse=True)


def _without(folders: list[str], value: Any) -> Any:
    """The value with the names of these folders taken out of every text in it: a path keeps its last part."""
    if isinstance(value, dict):
        return {key: _without(folders, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without(folders, inner) for inner in value]
    if isinstance(value, str):
        for folder in folders:
            value = re.sub(rf"(?<![\w/.-]){re.escape(folder)}/", "", value)
    return value
