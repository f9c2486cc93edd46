"""remoe push: the delta, its recipe, report and card, perhaps a form of it beside them, to the Hub or to a folder."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from remoe_cli import atomic
from remoe_cli import run as runs
from remoe_cli.copies import copy_files
from remoe_cli.delta import Delta
from remoe_cli.delta.peft import adapter_tensors, write_adapter
from remoe_cli.errors import command, DeltaError, RunError, UsageError
from remoe_cli.hub.licence import licence_of
from remoe_cli.hub.resolve import resolve
from remoe_cli.recipe import is_own, OWN_TEXT, prompts_of
from remoe_cli.report.charts import HEADLINE, headline_png
from remoe_cli.report.renderers.card import card
from remoe_cli.report.stored import to_json
from remoe_cli.report.summary import summary
from remoe_cli.report.verdict import verdict

FORMS = ("peft", "gguf")  # that are pushed beside a delta


class Pushed(NamedTuple):
    """where: folder or Hub address; name, base: what `remoe apply` finds both by; files: names and bytes; new: False when
    nothing was sent (a dry run, or the same content)."""

    where: str
    name: str
    base: str
    files: dict[str, int]
    new: bool
    dry_run: bool


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
    forms: Sequence[str] = (),
    ggufs: Sequence[Path] = (),
) -> Pushed:
    """forms: of FORMS, what goes beside the delta. ggufs: patched ones (any part of a split one), for the form gguf.

    Raises RunError without a run, HubError without a token or right to write, UsageError for a name that cannot be,
    DeltaError for a GGUF with other gates.
    """
    _check_forms(forms, ggufs)
    if to is not None and (repo is not None or private or create_pr or revision is not None):
        raise UsageError(
            "--to writes a folder; a repository, --private, --create-pr and --revision belong to a push to the Hub.",
            f"remoe push --to {to}",
        )
    from remoe_cli.hub.upload import check_branch, push_folder, target_of

    check_branch(revision)
    found = runs.find(run)
    delta = Delta.load(found.delta)
    base = _findable(delta, found.facts)
    if to is not None and not dry_run:
        with atomic.new_folder(to) as scratch:
            files = assemble(found, scratch, forms=forms, ggufs=ggufs, out=to)
        return Pushed(str(to), str(to), base, files, True, False)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch_name:
        folder = Path(scratch_name)
        if to is not None:
            atomic.require_free(to)
            return Pushed(str(to), str(to), base, assemble(found, folder, forms=forms, ggufs=ggufs), False, True)
        target = target_of(repo, _last_part(delta.base, found.facts.get("base")), dry_run)
        files = assemble(found, folder, target, forms, ggufs)
        done = push_folder(
            folder,
            target,
            message=f"remoe: {found.recipe.name} gates",
            private=private,
            dry_run=dry_run,
            create_pr=create_pr,
            revision=revision,
        )
        name = f"{done.repo}@{done.revision}" if done.revision else done.repo
        return Pushed(done.url, name, base, files, done.new, dry_run)


def assemble(
    run: runs.Run,
    folder: Path,
    name: str | None = None,
    forms: Sequence[str] = (),
    ggufs: Sequence[Path] = (),
    out: Path | None = None,
) -> dict[str, int]:
    """The files of a pushed delta: gates.safetensors, remoe.json, recipe.yaml, report.json and headline.png (if evaluated),
    README.md, and those of the forms.

    Nothing in them names a folder of this machine. name: the repository, where it is known already. out: what `folder` will
    be, if it stays; else GGUFs are links in it.
    """
    delta, facts, report, recipe = Delta.load(run.delta), run.facts, _report(run), run.recipe
    licence = licence_of(delta.base, delta.commit)
    parts = _tuned_parts(delta, ggufs, run)
    adapter = adapter_tensors(delta, resolve(_findable(delta, facts))) if "peft" in forms else {}
    if delta.commit is None:
        delta = replace(delta, base=_last_part(delta.base, facts.get("base")))
    try:
        delta = replace(delta, report=summary(report)) if report is not None else delta
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, StopIteration):
        raise _stale(run) from None
    delta.save(folder)
    if adapter:
        write_adapter(adapter, folder, delta.base, delta.commit)
    _place(parts, folder, out)
    recipe = replace(recipe, data=replace(recipe.data, source=_texts(recipe.data.source, facts.get("data"))))
    atomic.write(folder / "recipe.yaml", recipe.to_yaml())
    try:
        if report is not None:
            report["run"] = _last_part(report["run"], run.folder.resolve())
            report["base"]["id"] = delta.base
            atomic.write(folder / "report.json", to_json(report))
            with atomic.new_file(folder / HEADLINE) as stream:
                stream.write(headline_png(report, verdict(report)))
        text = card(
            delta,
            recipe,
            facts,
            report,
            name=name or "THIS_REPO",
            licence=licence,
            adapter=bool(adapter),
            ggufs=[file.name for file in parts],
        )
    except (KeyError, TypeError, AttributeError, IndexError, ValueError):
        raise _stale(run) from None
    atomic.write(folder / "README.md", text)
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def _check_forms(forms: Sequence[str], ggufs: Sequence[Path]) -> None:
    unknown = [form for form in forms if form not in FORMS]
    if unknown:
        raise UsageError(
            f"beside a delta goes {' or '.join(FORMS)}, not {unknown[0]}; copies and overlays are made by remoe apply.",
            "remoe push RUN REPO --as peft",
        )
    if ("gguf" in forms) != bool(ggufs):
        raise UsageError(
            "--as gguf and --gguf FILE, a GGUF with the tuned gates, go together.",
            "remoe apply DELTA FILE.gguf --out NEW.gguf, then remoe push RUN REPO --as gguf --gguf NEW.gguf",
        )


def _tuned_parts(delta: Delta, ggufs: Sequence[Path], run: runs.Run) -> list[Path]:
    """All files of these GGUFs. Raises DeltaError where one does not hold the delta's gates, UsageError for a name twice."""
    if not ggufs:
        return []
    from remoe_cli import gguf

    found: list[Path] = []
    for file in ggufs:
        file = file.expanduser()
        if gguf.state(delta, file) != "tuned":
            raise DeltaError(
                f"{file} holds the base's gates, not the tuned ones.",
                command("apply", run.folder, file, out=file.with_name(f"{file.stem}-tuned.gguf")),
            )
        found += [part for part in gguf.parts(file) if part not in found]
    names = [file.name for file in found]
    if len(set(names)) < len(names):
        raise UsageError("two of the GGUFs have the same name.", "the same command with another name for one of them")
    return found


def _place(files: Sequence[Path], folder: Path, out: Path | None) -> None:
    """The files in a folder that stays (`out`, once it is whole), or links to them in one that does not."""
    if out is not None:
        copy_files(files, folder, out)
        return
    for file in files:
        (folder / file.name).symlink_to(file.absolute())


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


def _findable(delta: Delta, facts: dict[str, Any]) -> str:
    """What finds the delta's base from any folder of this machine."""
    return f"{delta.base}@{delta.commit}" if delta.commit else str(facts.get("base") or delta.base)


def _texts(source: str, pinned: str | None) -> str:
    """data.source without folders. pinned: what it was found as, an absolute path for local texts (run.json)."""
    prefix, named = f"{OWN_TEXT}:" if is_own(source) else "", prompts_of(source)
    local = Path(pinned).is_absolute() if pinned else Path(named).expanduser().exists()
    return prefix + (_last_part(named, pinned) if local else named)


def _last_part(*paths: str | Path | None) -> str:
    """The name of the first path that has one ("." has none)."""
    return next((name for path in paths if path and (name := Path(path).name) not in ("", "..")), "local")
