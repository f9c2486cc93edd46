"""Run folders: runs/<time>-<model>-<recipe>/ holds the recipe, the metrics, the delta and the report of one run."""

import contextlib
import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remoe_cli import atomic
from remoe_cli.errors import RunError
from remoe_cli.recipe import read, Recipe
from remoe_cli.report.renderers.grid import grid

try:
    import fcntl
except ImportError:  # Windows: a run cannot be told from a killed one there
    fcntl = None  # type: ignore[assignment]

ROOT = Path("runs")
UNFINISHED = ("stopped", "interrupted", "failed")  # what --resume goes on from


@dataclass(frozen=True)
class Run:
    """existed: the user made the folder, so it stays when the run is discarded."""

    folder: Path
    existed: bool = False

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
    def steering(self) -> Path:
        """How a run with train.max_ppl was steered, a line a measurement."""
        return self.folder / "steering.jsonl"

    @property
    def own_text(self) -> Path:
        """What the base wrote for `--data self`."""
        return self.folder / "own_text.jsonl"

    @property
    def states(self) -> Path:
        """The folder of saved training states (train.state); gone once the run is finished."""
        return self.folder / "state"

    @property
    def recipe(self) -> Recipe:
        return read(self.recipe_file)

    @property
    def facts(self) -> dict:
        """run.json. Raises RunError when it is damaged."""
        path = self.folder / "run.json"
        try:
            facts = json.loads(path.read_text())
        except (OSError, ValueError):
            facts = None
        if not isinstance(facts, dict) or not isinstance(facts.get("model"), str):
            raise RunError(f"{path} is missing or damaged.", f"remoe runs rm {self.folder}, or another run: remoe runs")
        return facts

    @property
    def status(self) -> str:
        """finished, interrupted (Ctrl-C), failed, diverged, running, or stopped: killed while it ran.

        Raises RunError when run.json is damaged.
        """
        status = str(self.facts.get("status"))
        return "stopped" if status == "running" and not self._is_locked() else status

    @property
    def has_delta(self) -> bool:
        return (self.delta / "remoe.json").is_file()

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def check_unfinished(self) -> None:
        """Raises RunError when --resume cannot go on with it."""
        if self.status not in UNFINISHED:
            raise RunError(
                f"the run {self.folder} is {self.status}, so there is nothing to resume.", f"remoe eval {self.folder}"
            )

    @contextlib.contextmanager
    def locked(self, resumed: bool = False) -> Iterator[None]:
        """Marks the run as running until the block or the process ends. Raises RunError when another process has it, or
        (resumed) has finished it since it was chosen."""
        with open(self.folder / ".lock", "w") as stream:
            if fcntl:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise RunError(f"the run {self.folder} is running already.", "remoe runs") from None
            if resumed and self.facts.get("status") not in (*UNFINISHED, "running"):
                self.check_unfinished()
            yield

    def _is_locked(self) -> bool:
        try:
            with open(self.folder / ".lock") as stream:
                if fcntl:
                    fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def drop_states(self) -> None:
        shutil.rmtree(self.states, ignore_errors=True)

    def discard(self) -> None:
        """Removes the folder, and runs/ if nothing else is in it."""
        if self.existed:
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            return
        if self.folder.is_symlink():
            self.folder.unlink()
            return
        shutil.rmtree(self.folder)
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
    check_free(out)
    existed = out is not None and out.is_dir()
    if out is None:
        short = _plain(model.partition("@")[0].rstrip("/").rpartition("/")[2])
        stem = ROOT / f"{time.strftime('%Y%m%d-%H%M%S')}-{short}-{_plain(recipe.name)}"
        out, n = stem, 2
        while out.exists():
            out, n = stem.with_name(f"{stem.name}-{n}"), n + 1
    run = Run(atomic.make_folder(out), existed)
    try:
        atomic.write(run.recipe_file, recipe.to_yaml())
        run.note(model=model, status="running", created=time.time())
    except BaseException:
        run.discard()
        raise
    return run


def sweep_folder(model: str) -> Path:
    """Where the runs and results of a sweep lie by default."""
    return ROOT / f"sweep-{_plain(model.partition('@')[0].rstrip('/').rpartition('/')[2])}"


def check_free(out: Path | None) -> None:
    """Raises RunError when a new run cannot be put there: before a long download, not after it."""
    if out is None:
        atomic.check_writable(ROOT)
    else:
        hint = "the same command with another --out DIR, or with --resume if it is an unfinished run"
        atomic.require_free(out, hint)


def every() -> list[Run]:
    """The runs under runs/ that can be read, oldest first."""
    found = []
    for path in ROOT.glob("*/run.json"):
        with contextlib.suppress(RunError):
            found.append((Run(path.parent).facts.get("created") or 0.0, Run(path.parent)))
    return [run for _, run in sorted(found, key=lambda pair: pair[0])]


def find(name: str | None) -> Run:
    """The run of that folder, or of that name under runs/; without a name the latest that has a delta.

    Raises RunError, with the command that makes one, when there is none.
    """
    if name is None:
        found = [run for run in every() if run.has_delta]
        if not found:
            raise RunError(f"there is no run with a delta in {ROOT.resolve()} yet.", "remoe finetune demo")
        return found[-1]
    run = named(name)
    if not run.has_delta:
        status = run.status
        again = {"running": "remoe runs, until it is finished", "diverged": "remoe finetune demo"}.get(
            status, f"remoe finetune --resume --out {run.folder}"
        )
        raise RunError(f"the run {run.folder} has no delta (status: {status}).", again)
    return run


def named(name: str) -> Run:
    """The run of that folder, or of that name under runs/. Raises RunError when there is none."""
    for folder in (Path(name), ROOT / name):
        if (folder / "run.json").is_file():
            return Run(folder)
    raise RunError(f"{name} is not a run folder (no run.json in it or in {ROOT / name}).", "remoe runs")


def unfinished(model: str | None, out: Path | None) -> Run | None:
    """The latest run that --resume can go on with: in `out`, else under runs/, of this model if one is named.

    None when there is none. Raises RunError when `out` holds a run of another model, or one that is finished, running or
    diverged.
    """
    if out is not None:
        if not (out / "run.json").is_file():
            return None
        run = Run(out)
        if model not in (None, run.facts["model"]):
            raise RunError(f"the run {out} is one of {run.facts['model']}, not of {model}.", "another --out DIR")
        run.check_unfinished()
        return run
    found = [run for run in every() if run.status in UNFINISHED and model in (None, run.facts["model"])]
    return found[-1] if found else None


def removable(names: Sequence[str]) -> list[Run]:
    """The runs of these names. Raises RunError, before any is removed, for one that is no run or is running."""
    found = [_of_any_kind(name) for name in names]
    for run in found:
        if run._is_locked():
            raise RunError(f"the run {run.folder} is running.", "Ctrl-C in its terminal first")
    return found


def _of_any_kind(name: str) -> Run:
    """As `named`; a run whose run.json is damaged or gone is known by its recipe."""
    for folder in (Path(name), ROOT / name):
        if (folder / "recipe.yaml").is_file() and any((folder / part).exists() for part in (".lock", "run.json")):
            return Run(folder)
    return named(name)


def row(run: Run) -> dict[str, Any]:
    """One run as `remoe runs --json` shows it. perplexity: held out, of base and tuned gates, where measured."""
    facts = run.facts
    before, after = facts.get("before") or {}, facts.get("after") or {}
    return {
        "run": str(run.folder),
        "created": facts.get("created"),
        "model": facts["model"],
        "status": run.status,
        "steps": facts.get("steps", 0),
        "perplexity": [before.get("perplexity"), after.get("perplexity")],
        "evaluated": run.report.is_file(),
        "bytes": run.nbytes,
    }


def table(found: Sequence[Run], width: int = 120) -> str:
    """Lines for a person, the oldest run first."""
    if not found:
        return f"No runs in {ROOT.resolve()}. Next: remoe finetune demo"
    rows = [("RUN", "STATUS", "STEPS", "PERPLEXITY", "EVAL", "SIZE")]
    for one in found:
        try:
            facts = row(one)
        except RunError:
            rows.append((str(one.folder), "damaged", "", "", "", f"{one.nbytes / 1e6:.1f} MB"))
            continue
        perplexity = " -> ".join(f"{value:.3f}" for value in facts["perplexity"] if value is not None)
        evaluated = "yes" if facts["evaluated"] else "no"
        rows.append(
            (
                facts["run"],
                facts["status"],
                str(facts["steps"]),
                perplexity,
                evaluated,
                f"{facts['bytes'] / 1e6:.1f} MB",
            )
        )
    return "\n".join(grid(rows[0], rows[1:], width))


def _plain(name: str) -> str:
    """Fit for a folder's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:60] or "run"
