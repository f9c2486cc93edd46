"""remoe pull: a delta from the Hub into a folder, with a form of it where that lies beside it."""

from pathlib import Path
from typing import NamedTuple

from remoe_cli import atomic
from remoe_cli.apply import fetch_delta
from remoe_cli.copies import copy_files
from remoe_cli.delta import BESIDE, Delta, FACTS, GATES
from remoe_cli.delta.peft import ADAPTER, holds_gates
from remoe_cli.errors import DeltaError, UsageError

FORMS = {"peft": ADAPTER, "gguf": ("*.gguf",)}  # form -> its files


class Pulled(NamedTuple):
    """base: what the delta belongs to, with @commit where it is from the Hub; nbytes: of all files; form_files: those of the
    form that was asked for."""

    folder: Path
    repo: str
    commit: str
    base: str
    recipe: str
    gates: int
    nbytes: int
    form_files: list[str]


def pull(name: str, out: Path | None = None, form: str | None = None) -> Pulled:
    """Writes the delta to `out` (by default a folder of the repository's name), whole or not at all.

    name: "org/name" or "org/name@revision". form: of FORMS, to come too. Raises HubError, DeltaError (also where the form holds
    other gates than the delta), or RunError when the folder is taken.
    """
    if form is not None and form not in FORMS:
        raise UsageError(
            f"beside a delta lies {' or '.join(FORMS)}, not {form}; copies and overlays are made by remoe apply.",
            f"remoe pull {name} --as peft",
        )
    if Path(name).exists():
        raise UsageError(
            f"{name} is here already; pull takes a repository of the Hub.", f"remoe apply {name} BASE --out DIR"
        )
    repo = name.partition("@")[0]
    folder = out or Path(repo.rpartition("/")[2])
    atomic.require_free(folder)
    source, commit = fetch_delta(name, FORMS.get(form or "", ()))
    delta = Delta.load(source)
    formed = sorted({path for pattern in FORMS.get(form or "", ()) for path in source.glob(pattern)})
    _check(delta, source, formed, form, repo)
    with atomic.new_folder(folder) as scratch:
        others = [path for file in (GATES, FACTS, *BESIDE) if (path := source / file).is_file()]
        copy_files([*others, *formed], scratch, folder)
        nbytes = sum(path.stat().st_size for path in scratch.iterdir())
    base = delta.base + (f"@{delta.commit}" if delta.commit else "")
    names = [path.name for path in formed]
    return Pulled(folder, repo, commit, base, delta.recipe, len(delta.tensors), nbytes, names)


def _check(delta: Delta, source: Path, formed: list[Path], form: str | None, repo: str) -> None:
    """Raises DeltaError where the form's files hold other gates than the delta beside them."""
    stale = ""
    if form == "peft" and not holds_gates(source, delta):
        stale = "the adapter"
    elif form == "gguf":
        from remoe_cli import gguf

        seen: set[Path] = set()
        for file in formed:
            if file not in seen:
                seen |= set(gguf.parts(file))
                stale = stale or (file.name if gguf.state(delta, file) != "tuned" else "")
    if stale:
        raise DeltaError(
            f"{stale} in {repo} does not hold the gates of the delta beside it.", f"remoe pull {repo}, then remoe apply"
        )
