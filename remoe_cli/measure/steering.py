"""Steering a run by quality: one half of the held-out texts is measured during the run and says how far locality may go;
all figures are made on the other half. The control law is train/steer.py's."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from remoe_cli import atomic
from remoe_cli import run as runs
from remoe_cli.console import note
from remoe_cli.delta import put
from remoe_cli.errors import command, DataError, RunError
from remoe_cli.families import Gate
from remoe_cli.families.spread import whole
from remoe_cli.measure.text import measure_rows
from remoe_cli.recipe import limit_of, Recipe, Train
from remoe_cli.run import Run
from remoe_cli.stream.passes import Layers
from remoe_cli.train.data import Documents
from remoe_cli.train.steer import interval, next_factor, Point, START

RECENT = "steering"  # a folder
MEAN_OF = 4  # measurements
_SAME = ("gates_sha256", "data", "data_sha256")  # in run.json
CE_ONLY = (
    "objective.scale=0",
    "objective.trust=0",
    "objective.target=text",
    "name=ce-only",
)  # makes a recipe its own control


def halves(documents: Documents) -> tuple[list[list[int]], Documents]:
    """The held-out texts that steer (every second one, from the first on), and the documents with the others held out.
    Raises DataError when there is one text only."""
    if len(documents.heldout) < 2:
        raise DataError(
            "train.max_ppl needs two held-out texts, one to steer by and one to report on; there is one.",
            "the same command with --data of more texts, or without --max-ppl",
        )
    rest = replace(documents, heldout=documents.heldout[1::2], domains=documents.domains[1::2])
    return documents.heldout[::2], rest


def reported(documents: Documents, recipe: Recipe) -> Documents:
    """What figures are made on: of a steered run without the texts that it was steered by."""
    return documents if limit_of(recipe.train.max_ppl) is None else halves(documents)[1]


def unsteered(documents: Documents, delta: str | None) -> Documents:
    """Without the texts that steered the run of this name or folder, or of this delta in its run, where it held out the
    same ones; where it held out others, a note."""
    facts: dict[str, Any] = {}
    named = Path(delta or "").expanduser()
    for folder in (named, named.parent, runs.ROOT / named) if delta else ():
        with suppress(RunError):
            facts = facts or Run(folder).facts
    if not facts.get("steering"):
        return documents
    rest = halves(documents)[1] if len(documents.heldout) > 1 else documents
    if rest.heldout_sha256 == facts.get("heldout_sha256"):
        return rest
    note(f"Note: {delta} was steered by held-out texts, which may be among these")
    return documents


class Steering:
    """`train(..., steer=steering)` after `begin`. Each point is appended to the run's steering.jsonl as it is made, so that
    a resumed run goes on from those of the steps that it keeps; the factor depends on nothing else.

    Where the learning rate falls, gates are noisy until it has: what would be measured is not what is shipped. So the mean of
    the last gates is measured there, which is about where a falling rate ends."""

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        model: torch.nn.Module,
        gates: list[Gate],
        texts: list[list[int]],
        layers: Layers | None = None,
    ) -> None:
        """While the model holds the base's gates, which are measured once and noted in run.json."""
        limit = limit_of(recipe.train.max_ppl)
        assert limit is not None
        self._limit, self._file, self._recipe = limit, run.steering, recipe
        self._model, self._gates, self._texts, self._layers = model, gates, texts, layers
        train = recipe.train
        falls = (train.lr_decay > 0 or train.schedule != "constant") and train.scope.startswith("gates")
        self._recent = _Recent(model, gates, run.folder / RECENT) if falls and "lora" not in train.scope else None
        self.points: list[Point] = []
        if "steering" not in run.facts:
            run.note(steering={"limit": limit, "texts": len(texts), "base_loss": self._loss()})
        self._base = run.facts["steering"]["base_loss"]

    def begin(self, done: int) -> None:
        """done: steps that were completed before."""
        self.points = [one for one in read_path(self._file) if one.step <= done and one.steer is not None]
        atomic.write(self._file, "".join(map(_line, self.points)))
        if self._recent:
            self._recent.begin([one.step for one in self.points])

    def __call__(self, step: int) -> float:
        """The factor for this step, before which `step` - 1 are completed."""
        done, settings = step - 1, self._recipe.train
        last = self.points[-1] if self.points else None
        if last is None or (done % interval(settings.steps) == 0 and last.step < done):
            with self._recent.mean_with(done) if self._recent else nullcontext():
                change = self.change() if done else 0.0
            last = Point(done, change, next_factor(self.points, change, self._limit))
            self._append(last)
        return START if last.steer is None else last.steer

    def finish(self, step: int) -> float:
        """The change at the run's end, by what the model now holds."""
        change = self.change()
        if self._recent:
            self._recent.end()
        self._append(Point(step, change, None))
        return change

    def change(self) -> float:
        """Of the steering texts' perplexity, against the base's."""
        return math.expm1(self._loss() - self._base)

    def _loss(self) -> float:
        train = self._recipe.train
        rows = self._recipe.evaluate.rows
        found = measure_rows(
            self._model, self._gates, self._texts, train.sequence, rows, batch=train.micro_batch, layers=self._layers
        )
        return found.measures().loss

    def _append(self, point: Point) -> None:
        self.points.append(point)
        with open(self._file, "a") as stream:
            stream.write(_line(point))


class _Recent:
    """The gates of the last measurements, and their mean. Each lies in a file until the run's end, for a resumed one."""

    def __init__(self, model: torch.nn.Module, gates: list[Gate], folder: Path) -> None:
        self._model, self._folder = model, folder
        self._parameters = {name: tensor for gate in gates for name, tensor in gate.parameters.items()}
        self._last: list[dict[str, torch.Tensor]] = []

    def begin(self, steps: list[int]) -> None:
        """steps: of the measurements that the run goes on from. Raises RunError where theirs are missing."""
        self._last = [self._read(self._folder / f"{step}.safetensors") for step in steps[-MEAN_OF:]]

    def _read(self, file: Path) -> dict[str, torch.Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return load(file.read_bytes())
        except (OSError, SafetensorError):
            raise RunError(f"{file} is missing or damaged.", "the same command without --resume") from None

    @contextmanager
    def mean_with(self, step: int) -> Iterator[None]:
        """The model holds the mean of the last gates, these among them; afterwards its own again."""
        from safetensors.torch import save

        own = {name: whole(tensor).clone() for name, tensor in self._parameters.items()}
        self._last = [*self._last, {name: tensor.cpu() for name, tensor in own.items()}][-MEAN_OF:]
        atomic.make_folder(self._folder)
        atomic.write(self._folder / f"{step}.safetensors", save(self._last[-1]))
        try:
            put(self._model, {name: torch.stack([gates[name].float() for gates in self._last]).mean(0) for name in own})
            yield
        finally:
            put(self._model, own)

    def end(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def ce_only_beside(run: Run) -> Run | None:
    """The latest finished run under runs/ that differs from this one by having cross entropy alone: same base, texts and
    training. None where there is none."""
    return next((one for one in reversed(runs.every()) if _is_control(one, run)), None)


def check_control(one: Run, run: Run) -> None:
    """Raises RunError where `one`, named as what cross entropy alone does, cannot show that beside `run`."""
    reason = None
    if one.status != "finished":
        reason = f"is {one.status}"
    elif one.facts.get("gates_sha256") != run.facts.get("gates_sha256"):
        reason = "was made from other gates"
    elif not is_ce_only(one.recipe):
        reason = "was trained on more than cross entropy"
    if reason is not None:
        raise RunError(f"--ce-only {one.folder} {reason}.", control_command(run))


def control_command(run: Run) -> str:
    """What trains the control of `run`."""
    changes = [word for setting in (*CE_ONLY, "train.max_ppl=off") for word in ("--set", setting)]
    return command("finetune", run.facts["model"], "--recipe", run.recipe_file, *changes)


def _is_control(one: Run, run: Run) -> bool:
    facts, others = one.facts, run.facts
    if one.status != "finished" or any(facts.get(key) != others.get(key) for key in _SAME) or not one.has_delta:
        return False
    recipe, other = one.recipe, run.recipe
    return is_ce_only(recipe) and same_training(recipe) == same_training(other) and recipe.data == other.data


def is_ce_only(recipe: Recipe) -> bool:
    """Whether it trains the model, and by cross entropy alone."""
    objective = recipe.objective
    only = not recipe.has_locality and objective.trust == 0 and objective.target == "text"
    return only and recipe.train.scope != "heads"


def same_training(recipe: Recipe) -> Train:
    """What two runs of equal texts must share to be each other's control. Heads learn from locality alone, and nothing
    learns from them."""
    scope = recipe.train.scope.removesuffix("+heads")
    return replace(recipe.train, scope=scope, max_ppl="off", save_seconds=0.0, checkpointing=False)


def told(run: Run) -> dict[str, Any] | None:
    """For report.json: what run.json says of the steering, and its path; None for a run without a limit."""
    found = run.facts.get("steering")
    return found and {**found, "path": [point._asdict() for point in read_path(run.steering)]}


def read_path(file: Path) -> list[Point]:
    """The points of steering.jsonl, without a last line that a kill cut off; none where there is no such file."""
    found: list[Point] = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            found.append(Point(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return found


def _line(point: Point) -> str:
    return json.dumps(point._asdict()) + "\n"
