"""remoe sweep: recipes at several weights, each trained once, then every cache, policy and rerouting bonus on each of them."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from remoe_cli import __version__, atomic
from remoe_cli import recipe as recipes
from remoe_cli.cache import choose, live_policies
from remoe_cli.cache.replay import prepare
from remoe_cli.console import note, progress
from remoe_cli.delta import Delta, heads_for, put
from remoe_cli.environment import device_name, pick_device, versions
from remoe_cli.errors import DeltaError, RunError, TrainingError, UsageError
from remoe_cli.evaluate import finite
from remoe_cli.families import family_of, find_gates, Gate
from remoe_cli.families.loader import compute_dtype, experts_on_disk, gate_disk_names, in_memory, load_resident
from remoe_cli.finetune import finetune
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.hub.resolve import fetch_config, resolve
from remoe_cli.measure.steering import CE_ONLY, halves, is_ce_only, same_training
from remoe_cli.measure.swept import hindrance, Place, record_text, replayed, rerouted, Texts
from remoe_cli.offload.store import one_expert_bytes
from remoe_cli.recipe import limit_of, prompts_of, Recipe
from remoe_cli.report import plots
from remoe_cli.report.concentration import concentration_figures
from remoe_cli.report.figures import RANKS, text_figures
from remoe_cli.report.frontier import mark
from remoe_cli.report.locality import parallel_load
from remoe_cli.report.metrics import ratio, TextRows
from remoe_cli.report.sweep_options import Asked, STEERED
from remoe_cli.routing import RoutingTrace
from remoe_cli.run import Run
from remoe_cli.train import asked as finetuning
from remoe_cli.train.data import Documents, load_documents, load_tokenizer

FORMAT = 1


class Arm(NamedTuple):
    """asked: what finetune is asked for; None: the base. weight: of the recipe's own locality; None where it is steered."""

    name: str
    recipe: Recipe | None = None
    asked: finetuning.Asked | None = None
    weight: float | None = None


class Trained(NamedTuple):
    """key: of everything that decides what training gives. run: None for the base."""

    arm: Arm
    key: str
    run: Run | None


def sweep(model: str, asked: Asked, *, out: Path, device: str | None = None) -> dict[str, Any]:
    """Everything docs/sweep.md lists, also written to out/sweep.json and as plots beside it. What an earlier call has
    trained or measured in `out` is taken from there.

    Raises RemoeError for every mistake, most of them before anything is trained.
    """
    asked.check()
    where = pick_device(device)
    atomic.make_folder(out)
    found = fetch_config(model)
    family = family_of(found.config, found.id)
    arms = _arms(asked, lambda one: finetuning.choose_recipe(model, family.model_type, one))
    checkpoint = resolve(found)
    tokenizer = load_tokenizer(checkpoint)
    texts_of: dict[Any, Documents] = {}

    def documents(recipe: Recipe) -> Documents:
        """The texts that are measured, and their fingerprints."""
        data = replace(recipe.data, source=prompts_of(recipe.data.source), labels="all")
        place = (data, recipe.train.seed)
        if place not in texts_of:
            texts_of[place] = load_documents(data, tokenizer, seed=recipe.train.seed)
        return texts_of[place]

    first = arms[1].recipe
    assert first is not None
    notes: list[str] = []
    trained = [Trained(arms[0], _key(_base(checkpoint)), None)]
    ce_only: dict[str, str] = {}
    for number, arm in enumerate(arms[1:], 1):
        assert arm.recipe is not None
        of = documents(arm.recipe)
        key = _key(_base(checkpoint), _deciding(arm.recipe), of.pinned, of.sha256, of.heldout_sha256)
        note(f"Arm {number} of {len(arms) - 1}: {arm.name}")
        training = recipes.Recipe(train=same_training(arm.recipe), data=arm.recipe.data).to_yaml()
        run = _run(model, arm, out / f"{arm.recipe.name}-{key[:12]}", device, ce_only.get(training), notes)
        if run is not None:
            trained.append(Trained(arm, key, run))
            if is_ce_only(arm.recipe):
                ce_only[training] = str(run.folder)
    own = documents(first)
    held_out = own.heldout if asked.limit is None else halves(own)[1].heldout
    rows = asked.rows or first.evaluate.rows
    texts = Texts(held_out, first.train.sequence, rows, first.train.micro_batch)
    dtype = compute_dtype(checkpoint, where, first.train.dtype)
    bench = _Bench(checkpoint, where, dtype, texts, asked, _Kept(out / "cells.json", texts, dtype), notes)
    measured = list(bench.measure(trained))
    report = finite(_report(model, asked, out, bench, measured, own.source))
    atomic.write(out / "sweep.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    _plot(report, {one.name: one.uses for one in measured if one.uses is not None}, out)
    return report


def _arms(asked: Asked, choose_recipe: Callable[[finetuning.Asked], Recipe]) -> list[Arm]:
    """The base, then of each recipe cross entropy alone (once for all that train alike) and each weight."""
    found = [Arm("base")]
    for name in asked.recipes:
        wanted = finetuning.Asked(name, asked.data, asked.steps, tuple(asked.overrides))
        own = choose_recipe(wanted)
        if own.train.max_ppl != "off":
            raise UsageError(
                f"the recipe {own.name} has train.max_ppl of its own: a sweep would measure on the texts that steered it.",
                f"the same command with --set train.max_ppl=off --weights limit --max-ppl {own.train.max_ppl}",
            )
        more: list[tuple[str, float | None, finetuning.Asked]] = []
        if asked.control and own.train.scope != "heads":
            more.append(("ce-only", 0.0, wanted._replace(overrides=(*wanted.overrides, *CE_ONLY))))
        for weight in _weights(asked, own):
            if weight == STEERED:
                more.append((f"{own.name} {asked.max_ppl}", None, wanted._replace(max_ppl=asked.max_ppl)))
            else:
                scale = f"objective.scale={own.objective.scale * float(weight):g}"
                more.append(
                    (
                        f"{own.name} x{float(weight):g}",
                        float(weight),
                        wanted._replace(overrides=(*wanted.overrides, scale)),
                    )
                )
        for title, factor, one in more:
            recipe = choose_recipe(one)
            if all(known.recipe is None or _deciding(known.recipe) != _deciding(recipe) for known in found):
                same = sum(known.name.partition(" (")[0] == title for known in found)
                found.append(Arm(f"{title} ({same + 1})" if same else title, recipe, one, factor))
    return found


def _weights(asked: Asked, own: Recipe) -> Sequence[str]:
    """Heads alone move no perplexity, so that there is nothing to steer: their limit is their own weight."""
    if own.train.scope != "heads":
        return asked.weights
    return ["1" if weight == STEERED else weight for weight in asked.weights]


def _base(checkpoint: Checkpoint) -> str:
    """A local folder is known by its files."""
    if checkpoint.commit or checkpoint.id == "demo":
        return f"{checkpoint.id}@{checkpoint.commit}"
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.folder.iterdir())
    return json.dumps([str(checkpoint.folder.resolve()), files])


def _deciding(recipe: Recipe) -> str:
    """All of a recipe that decides what is trained. Of cross entropy alone no key of an objective does."""
    train, objective = replace(recipe.train, save_seconds=0.0), recipe.objective
    if is_ce_only(recipe):
        train, objective = same_training(recipe), recipes.Objective()
    rows = recipe.evaluate.rows if limit_of(recipe.train.max_ppl) is not None else 1
    evaluate = recipes.Evaluate(rows=rows)
    return replace(recipe, name="any", objective=objective, train=train, evaluate=evaluate).to_yaml()


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _run(
    model: str, arm: Arm, folder: Path, device: str | None, ce_only: str | None, notes: list[str]
) -> Run | None:  # fmt: skip
    """The finished run of an arm: the one that is there, else trained or gone on with. None for one that cannot be had."""
    assert arm.asked is not None
    run = Run(folder)
    status = run.status if (folder / "run.json").is_file() else None
    if status == "finished":
        note(f"Taken from {folder}")
        return run
    if status != "diverged":
        try:
            steered = ce_only if arm.asked.max_ppl else None
            done = finetune(model, arm.asked, out=folder, device=device, resume=True, ce_only=steered)
        except TrainingError as error:
            notes.append(f"{arm.name} is left out: {error.message}")
            return None
        if done.interrupted:
            raise KeyboardInterrupt
        return done.run
    notes.append(f"{arm.name} is left out: its run diverged ({folder})")
    return None


class _Kept:
    """Cells that were measured before, in one file; the same texts and rules only."""

    def __init__(self, file: Path, texts: Texts, dtype: torch.dtype) -> None:
        self._file = file
        digest = hashlib.sha256(json.dumps([*map(list, texts.documents)]).encode()).hexdigest()
        self._rules = [FORMAT, __version__, digest, texts.sequence, texts.rows, str(dtype)]
        try:
            self._cells: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError):
            self._cells = {}

    def get(self, *place: object) -> dict[str, Any] | None:
        return self._cells.get(_key(*self._rules, *place))

    def put(self, found: dict[str, Any], *place: object) -> dict[str, Any]:
        self._cells[_key(*self._rules, *place)] = found
        atomic.write(self._file, json.dumps(self._cells))
        return found


class Measured(NamedTuple):
    """arm: as sweep.json has it, without the changes against the base. cells: the same. uses: [L, E]."""

    name: str
    arm: dict[str, Any]
    cells: list[dict[str, Any]]
    uses: Any


class _Bench:
    """Measures arms, one after the other in one model, which is loaded where something is not known yet."""

    def __init__(
        self, checkpoint: Checkpoint, device: str, dtype: torch.dtype, texts: Texts, asked: Asked, kept: _Kept, notes: list[str]
    ) -> None:  # fmt: skip
        self.checkpoint, self.device, self.dtype, self.texts, self.asked = checkpoint, device, dtype, texts, asked
        self.notes = notes
        self.expert_bytes = one_expert_bytes(experts_on_disk(checkpoint))
        self._kept = kept
        self._model: Any = None
        self._gates: list[Gate] = []
        self._stock: dict[str, torch.Tensor] = {}

    def measure(self, trained: Sequence[Trained]) -> Iterator[Measured]:
        for policy in self.asked.every_policy:
            prepare(policy)
        base: TextRows | None = None
        for one in trained:
            try:
                self._put(one)
            except DeltaError as error:
                self.notes.append(f"{one.arm.name} is left out: {error.message}")
                continue
            with progress(f"{one.arm.name}: text", self.texts.rows) as bar:
                text, trace = record_text(
                    self._model, self._gates, self._heads, self.texts, self._needs_probabilities(), bar.update
                )
            shown = text_figures(text, base)
            base = base or text
            arm = {
                "name": one.arm.name, "recipe": one.arm.recipe and one.arm.recipe.name, "weight": one.arm.weight,
                "run": one.run and str(one.run.folder), **shown, "perplexity_change": shown["perplexity_change"] or 0.0,
                "concentration": concentration_figures(trace),
                "parallel_load": {str(ranks): parallel_load(trace, ranks) for ranks in RANKS},
                "requests": trace.n_requests, "steering": one.run and one.run.facts.get("steering"),
            }  # fmt: skip
            yield Measured(one.arm.name, arm, list(self._cells(one, arm, text, trace, base)), trace.uses())

    def _needs_probabilities(self) -> bool:
        return any("probabilities" in choose(policy).policy.needs for policy in self.asked.every_policy)

    def _put(self, one: Trained) -> None:
        if self._model is None:
            self._model = load_resident(self.checkpoint, self.dtype, self.device)
            self._gates = find_gates(self._model)
            self._names = gate_disk_names(self._model, self.checkpoint)
            self._sha256 = self.checkpoint.sha256(*sorted(self._names.values()))
        self._heads = None
        put(self._model, self._stock)
        if one.run is not None:
            if one.run.facts["gates_sha256"] != self._sha256:
                raise RunError(
                    f"the run {one.run.folder} was made from other gates.", "the same command with another --out DIR"
                )
            delta = Delta.load(one.run.delta)
            tuned = in_memory(self._model, self.checkpoint, delta.tensors)
            own = dict(self._model.named_parameters())
            self._stock |= {name: own[name].detach().clone() for name in tuned if name not in self._stock}
            put(self._model, tuned)
            self._heads = heads_for(delta, self._names, self._gates)

    def _cells(
        self, one: Trained, arm: dict[str, Any], text: TextRows, trace: RoutingTrace, base: TextRows
    ) -> Iterator[dict[str, Any]]:
        """Bonuses are tried from the smallest on, until one is over the limit."""
        limit = self.asked.limit
        for place in (Place(*one) for one in self.asked.places):
            why = hindrance(place, trace)
            if why is not None:
                if not (self._lacks_heads(place) or place.bonus):
                    self.notes.append(f"{place.policy}, {place.admission}, C = {place.capacity}: {why}")
                continue
            change = arm["perplexity_change"]
            for bonus in sorted({0.0, *self.asked.bonuses}):
                here = place._replace(bonus=bonus)
                if bonus and (hindrance(here, trace) or (limit is not None and change > limit)):
                    break
                cell = self._kept.get(one.key, *here) or self._kept.put(
                    self._cell(one, here, trace, text, base), one.key, *here
                )
                change = cell["perplexity_change"]
                yield {"arm": one.arm.name, **here._asdict(), **cell}

    def _lacks_heads(self, place: Place) -> bool:
        return self._heads is None and bool({"temporal", "spatio"} & set(choose(place.policy).policy.needs))

    def _cell(self, one: Trained, place: Place, trace: RoutingTrace, text: TextRows, base: TextRows) -> dict[str, Any]:
        if place.bonus:
            title = f"{one.arm.name}: C = {place.capacity}, {place.policy}, {place.admission}, bonus {place.bonus:g}"
            with progress(title, self.texts.rows) as bar:
                text, loads = rerouted(self._model, self._gates, self.texts, place, self.expert_bytes, bar.update)
        else:
            loads = replayed(trace, place, self.expert_bytes)
        shown = text_figures(text, base)
        return finite({key: shown[key] for key in ("perplexity", "perplexity_change", "perplexity_change_95")} | loads)


def _report(
    model: str, asked: Asked, out: Path, bench: _Bench, measured: Sequence[Measured], source: str
) -> dict[str, Any]:  # fmt: skip
    cells = [cell for one in measured for cell in one.cells]
    reference = {
        cell["capacity"]: cell["mb_a_token"]
        for cell in measured[0].cells
        if (cell["policy"], cell["admission"], cell["bonus"]) == ("lru", "forced", 0)
    }
    for cell in cells:
        before = reference.get(cell["capacity"])
        cell["load_change"] = None if before is None else ratio(cell["mb_a_token"] - before, before)
    live = {*live_policies()}
    first = measured[0].arm
    return {
        "format": FORMAT,
        "remoe": __version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": model,
        "commit": bench.checkpoint.commit,
        "folder": str(out),
        "limit": asked.limit,
        "conditions": {
            "device": bench.device, "device_name": device_name(bench.device), "dtype": str(bench.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(), "versions": versions(), "data": source, "rows": bench.texts.rows,
            "row_tokens": bench.texts.sequence, "tokens": first["tokens"], "requests": first["requests"],
            "expert_bytes": bench.expert_bytes, "equal": "memory", "method": "cache-prior",
        },
        "arms": [one.arm for one in measured],
        "cells": mark([cell for cell in cells if choose(cell["policy"]).name in live], asked.limit)
        + [{**cell, "within": None, "frontier": False, "best": False} for cell in cells if choose(cell["policy"]).name not in live],
        "notes": list(dict.fromkeys(bench.notes)),
    }  # fmt: skip


def _plot(report: dict[str, Any], uses: dict[str, Any], out: Path) -> None:
    live = [cell for cell in report["cells"] if choose(cell["policy"]).name in {*live_policies()}]
    plots.plot_pareto(live, report["limit"], out / "pareto.png")
    plots.plot_layers({arm["name"]: arm["concentration"] for arm in report["arms"]}, out / "layers.png")
    plots.plot_usage(uses, out / "usage.png")
    note(f"Plots: {', '.join(str(out / name) for name in ('pareto.png', 'layers.png', 'usage.png'))}")
