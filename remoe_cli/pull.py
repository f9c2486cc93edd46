"""remoe pull: a delta from the Hub into a folder."""

import shutil
from pathlib import Path
from typing import NamedTuple

from remoe_cli import atomic
from remoe_cli.apply import fetch_delta
from remoe_cli.delta import BESIDE, Delta, FACTS, GATES
from remoe_cli.errors import UsageError


class Pulled(NamedTuple):
    """base: what the delta belongs to, with @commit where it is from the Hub; nbytes: of all files."""

    folder: Path
    repo: str
    commit: str
    base: str
    recipe: str
    gates: int
    nbytes: int


def pull(name: str, out: Path | None = None) -> Pulled:
    """Writes the delta to `out` (by default a folder of the repository's name), whole or not at all.

    name: "org/name" or "org/name@revision". Raises HubError, DeltaError, or RunError when the folder is taken.
    """
    if Path(name).exists():
        raise UsageError(
            f"{name} is here already; pull takes a repository of the Hub.", f"remoe apply {name} BASE --out DIR"
        )
    repo = name.partition("@")[0]
    folder = out or Path(repo.rpartition("/")[2])
    atomic.require_free(folder)
    source, commit = fetch_delta(name)
    delta = Delta.load(source)
    with atomic.new_folder(folder) as scratch:
        for path in (source / file for file in (GATES, FACTS, *BESIDE)):
            if path.is_file():
                shutil.copyfile(path, scratch / path.name)
        nbytes = sum(path.stat().st_size for path in scratch.iterdir())
    base = delta.base + (f"@{delta.commit}" if delta.commit else "")
    return Pulled(folder, repo, commit, base, delta.recipe, len(delta.tensors), nbytes)
