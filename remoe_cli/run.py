"""Run folders: runs/<time>-<model>-<recipe>/ holds the recipe, the metrics, the delta and the report of one run."""

import contextlib
import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from remoe_cli import atomic
from remoe_cli.errors import RunError
from remoe_cli.recipe import read, Recipe

ROOT = Path("runs")


@dataclass(frozen=True)
class Run:
    folder: Path

    @property
    def delta(self) -> Path:
        return self.folder / "delta"

    @property
    def report(self) -> Path:
        return self.folder / "report.json"

    @property
    def recipe_file(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def recipe(self) -> Recipe:
        return read(self.recipe_file)

    @property
    def facts(self) -> dict:
        """run.json. Raises RunError when it is damaged."""
        try:
            return json.loads((self.folder / "run.json").read_text())
        except (OSError, ValueError):
            raise RunError(
                f"{self.folder}/run.json is missing or damaged.", "remoe eval ANOTHER_RUN (ls runs)"
            ) from None

    @property
    def has_delta(self) -> bool:
        return (self.delta / "remoe.json").is_file()

    def discard(self) -> None:
        """Removes the folder, and runs/ if nothing else is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.parent == ROOT:
            with contextlib.suppress(OSError):
                ROOT.rmdir()

    def note(self, **facts) -> None:
        """Merges facts into run.json."""
        path = self.folder / "run.json"
        known = self.facts if path.is_file() else {}
        atomic.write(path, json.dumps({**known, **facts}, indent=1) + "\n")


def create(model: str, recipe: Recipe, out: Path | None = None) -> Run:
    """A new run folder, named by time, model and recipe unless `out` names it. Raises RunError when it cannot be made."""
    if out is None:
        short = re.sub(r"[^A-Za-z0-9._-]+", "-", model.partition("@")[0].rstrip("/").rpartition("/")[2])
        stem = ROOT / f"{time.strftime('%Y%m%d-%H%M%S')}-{short}-{recipe.name}"
        out, n = stem, 2
        while out.exists():
            out, n = stem.with_name(f"{stem.name}-{n}"), n + 1
    elif out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise RunError(
            f"{out} exists and is not an empty folder; nothing was written.", "the same command with another --out DIR"
        )
    run = Run(atomic.make_folder(out))
    atomic.write(run.recipe_file, recipe.to_yaml())
    return run


def find(name: str | None) -> Run:
    """The run of that folder, or of that name under runs/; without a name the latest that has a delta.

    Raises RunError, with the command that makes one, when there is none.
    """
    if name is None:
        found = [run for path in ROOT.glob("*/run.json") if (run := Run(path.parent)).has_delta]
        if not found:
            raise RunError(f"there is no run with a delta in {ROOT.resolve()} yet.", "remoe finetune demo")
        return max(found, key=lambda run: run.facts.get("created", 0))
    for folder in (Path(name), ROOT / name):
        if (folder / "run.json").is_file():
            run = Run(folder)
            if not run.has_delta:
                raise RunError(
                    f"the run {folder} has no delta (status: {run.facts.get('status')}).", "remoe finetune demo"
                )
            return run
    raise RunError(f"{name} is not a run folder (no run.json in it or in {ROOT / name}).", "ls runs")
