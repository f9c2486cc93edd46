"""Each step's figures for an experiment tracker (train.tracker), beside metrics.jsonl, which stays the truth."""

import contextlib
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from remoe_cli.console import note
from remoe_cli.errors import RunError
from remoe_cli.recipe import Recipe
from remoe_cli.run import Run

PROJECT = "remoe"  # under which wandb and trackio keep runs
_PATIENCE = 60.0  # seconds that a finished run waits for what was not sent yet
_PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}

Log = Callable[[Mapping[str, float], int], None]


def require_tracker(name: str) -> None:
    """name: a train.tracker, "" for none. Raises RunError where its package is not installed."""
    if not name:
        return
    with _quiet():
        try:
            importlib.import_module(_PACKAGES[name])
        except ImportError as error:
            reason = (str(error).splitlines() or [""])[0]
            raise RunError(f"train.tracker {name} is not installed ({reason}).", f"pip install {name}") from None


class Tracker:
    """What logs the steps of a run; without a tracker it does nothing. Close it."""

    def __init__(self, recipe: Recipe, run: Run, step: int = 0) -> None:
        """step: completed ones; a run that goes on is the same run to the tracker. Raises RunError where the tracker does not start."""
        self._name = recipe.train.tracker
        self._log: Log | None = None
        self._finish: Callable[[], object] = lambda: None
        if not self._name:
            return
        require_tracker(self._name)
        start = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}[self._name]
        try:
            with _quiet():
                self._log, self._finish = start(recipe, run, step)
        except Exception as error:  # each has errors of its own
            raise RunError(
                f"train.tracker {self._name} does not start ({_reason(error)}).",
                "the same command with --set train.tracker= (metrics.jsonl has every step)",
            ) from None

    def log(self, row: Mapping[str, float]) -> None:
        """A row of metrics.jsonl. A tracker that fails is left alone from then on, with one note."""
        log = self._log
        if log is not None:
            values = {name: value for name, value in row.items() if name != "step"}
            self._try(lambda: log(values, int(row["step"])))

    def close(self) -> None:
        finish, self._finish = self._finish, lambda: None
        self._try(finish)
        self._log = None

    def _try(self, work: Callable[[], object]) -> None:
        try:
            with _quiet():
                work()
        except Exception as error:
            self._log, self._finish = None, lambda: None
            note(f"Note: {self._name} has stopped ({_reason(error)}); training goes on, metrics.jsonl has every step")


def _tensorboard(recipe: Recipe, run: Run, step: int) -> tuple[Log, Callable[[], object]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=step + 1 if step else None, flush_secs=30)
    writer.add_text("recipe", f"```yaml\n{recipe.to_yaml()}```")

    def log(values: Mapping[str, float], at: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, at)

    return log, writer.close


def _wandb(recipe: Recipe, run: Run, step: int) -> tuple[Log, Callable[[], object]]:
    import wandb

    wanted = {"silent": True, "console": "off", "finish_timeout": _PATIENCE}
    known = getattr(wandb.Settings, "model_fields", wanted)  # older ones wait for the last upload without end
    tracked = wandb.init(
        project=PROJECT,
        name=run.folder.name,
        id=_identity(run),
        resume="allow",
        dir=str(run.folder),
        config=asdict(recipe),
        settings=wandb.Settings(**{name: value for name, value in wanted.items() if name in known}),
    )
    return lambda values, at: tracked.log(dict(values), step=at), tracked.finish


def _trackio(recipe: Recipe, run: Run, step: int) -> tuple[Log, Callable[[], object]]:
    import trackio

    trackio.init(
        PROJECT, name=f"{run.folder.name}-{_identity(run)}", resume="allow", config=asdict(recipe), embed=False
    )
    return lambda values, at: trackio.log(dict(values), step=at), trackio.finish


def _identity(run: Run) -> str:
    """The same for a run that goes on, another for every other run."""
    return hashlib.sha256(f"{run.folder.resolve()} {run.facts.get('created')}".encode()).hexdigest()[:12]


def _reason(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What a tracker prints goes to stderr: stdout is for scripts."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
