"""remoe finetune: freeze everything but the gates, train them, and write the change as a delta."""

import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TYPE_CHECKING

from remoe_cli import recipe as recipes
from remoe_cli import run as runs
from remoe_cli.console import note, progress
from remoe_cli.delta import Delta, gates_for, put
from remoe_cli.environment import device_name, pick_device, versions
from remoe_cli.families import family_of, find_gates, Gate
from remoe_cli.families.loader import compute_dtype, gate_disk_names, load_resident
from remoe_cli.hub.resolve import fetch_config, resolve
from remoe_cli.measure.text import measure_text, TextMeasures
from remoe_cli.recipe import Recipe
from remoe_cli.run import Run
from remoe_cli.train.data import Documents, load_documents, load_tokenizer
from remoe_cli.train.packing import batches
from remoe_cli.train.trainer import Diverged, StepStats, train, Trained

if TYPE_CHECKING:
    from remoe_cli.hub.checkpoint import Checkpoint


class Finetuned(NamedTuple):
    """before, after: held-out text under base and tuned gates; after is None when Ctrl-C ended the run."""

    run: Run
    delta: Delta
    before: TextMeasures
    after: TextMeasures | None
    steps: int
    interrupted: bool


def finetune(
    model: str,
    *,
    recipe: str = "remoe",
    data: str | None = None,
    steps: int | None = None,
    out: Path | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
) -> Finetuned:
    """The whole verb. Raises RemoeError for every mistake; on Ctrl-C or a loss that is not finite the gates so far are saved."""
    found = fetch_config(model)
    family = family_of(found.config, model)
    settings = choose_recipe(model, family.model_type, recipe, data, steps, overrides)
    where = pick_device(device)
    run = runs.create(model, settings, out)
    try:
        checkpoint = resolve(found)
        documents = load_documents(settings.data, load_tokenizer(checkpoint), seed=settings.train.seed)
        dtype = compute_dtype(checkpoint, where, settings.train.dtype)
        loaded = load_resident(checkpoint, dtype, where)
        gates, disk_names = find_gates(loaded), gate_disk_names(loaded, checkpoint)
        run.note(
            model=model, base=_lasting_name(checkpoint), commit=checkpoint.commit, model_type=family.model_type, status="running",
            created=time.time(), device=device_name(where), dtype=str(dtype).removeprefix("torch."), environment=versions(),
        )  # fmt: skip
        _introduce(run, checkpoint, settings, documents, gates)
        before = _measure("base", loaded, gates, documents, settings)
    except BaseException:
        run.discard()  # nothing was trained yet
        raise
    try:
        trained = _train(loaded, gates, documents, settings, run)
    except Diverged as error:
        if error.trained.steps:
            _save(run, checkpoint, disk_names, error.trained, settings, status="diverged")
        run.note(status="diverged", steps=len(error.trained.steps))
        raise
    delta = _save(run, checkpoint, disk_names, trained, settings, "interrupted" if trained.interrupted else "finished")
    after = None
    if not trained.interrupted:
        put(loaded, gates_for(disk_names, delta))  # as shipped: cast to the base's stored dtype
        after = _measure("tuned", loaded, gates, documents, settings)
    run.note(before=before._asdict(), after=after._asdict() if after else None)
    return Finetuned(run, delta, before, after, len(trained.steps), trained.interrupted)


def _lasting_name(checkpoint: "Checkpoint") -> str:
    """What `remoe eval` finds the base by, from whatever folder it is called."""
    return checkpoint.id if checkpoint.commit or checkpoint.id == "demo" else str(checkpoint.folder.resolve())


def choose_recipe(
    model: str, model_type: str, name: str, data: str | None, steps: int | None, overrides: Sequence[str]
) -> Recipe:
    """The recipe for this model, then --set, then --data and --steps."""
    given = [f"data.source={json.dumps(data)}"] if data is not None else []
    given += [f"train.steps={steps}"] if steps is not None else []
    return recipes.load(name, "demo" if model == "demo" else model_type, [*overrides, *given])


def summary(done: Finetuned) -> str:
    """What the command ends with: before and after, the delta's size, the next command."""
    lines = [f"{done.run.folder}: {done.steps} steps, {100 * done.delta.changed:.1f} % of the gate elements changed"]
    if done.delta.changed == 0:
        lines.append(
            "Warning: no gate element survived the cast to the checkpoint's dtype; use more steps or a larger train.lr."
        )
    if done.after is None:
        lines.append(
            f"base   perplexity {done.before.perplexity:.3f}   EOR {done.before.eor:.3f}   (interrupted: tuned gates not measured)"
        )
    else:
        change = 100 * (done.after.perplexity / done.before.perplexity - 1)
        lines.append(f"base   perplexity {done.before.perplexity:.3f}   EOR {done.before.eor:.3f}")
        lines.append(
            f"tuned  perplexity {done.after.perplexity:.3f}   EOR {done.after.eor:.3f}   ({change:+.2f} % perplexity)"
        )
    lines.append(f"Next: remoe eval {shlex.quote(str(done.run.folder))} --cache {_suggested_cache(done)}")
    return "\n".join(lines)


def _suggested_cache(done: Finetuned) -> int:
    facts = done.run.facts
    return min(max(6, facts["top_k"]), facts["n_experts"])


def _introduce(run: Run, checkpoint: "Checkpoint", recipe: Recipe, documents: Documents, gates: Sequence[Gate]) -> None:
    trained = sum(p.numel() for gate in gates for p in gate.parameters.values())
    run.note(top_k=gates[0].top_k, n_experts=gates[0].n_experts, moe_layers=len(gates), gate_parameters=trained)
    pinned = checkpoint.id + (f"@{checkpoint.commit[:12]}" if checkpoint.commit else "")
    note(f"Run {run.folder}")
    note(
        f"Base {pinned}: {len(gates)} gates of {gates[0].n_experts} experts, {trained:,} parameters train, the rest is frozen"
    )
    facts = run.facts
    note(
        f"Recipe {recipe.name}, data {documents.source}, {facts['device']}, {facts['dtype']}; the model's balance loss is off"
    )
    for line in documents.notes:
        note(f"Note: {line}")


def _measure(name: str, model, gates, documents: Documents, recipe: Recipe) -> TextMeasures:
    with progress(f"measure {name}", recipe.evaluate.rows) as bar:
        return measure_text(
            model, gates, documents.heldout, recipe.train.sequence, recipe.evaluate.rows,
            batch=recipe.train.micro_batch, on_batch=bar.update,
        )  # fmt: skip


def _train(model, gates, documents: Documents, recipe: Recipe, run: Run) -> Trained:
    rows = batches(documents.train, recipe.train.sequence, recipe.train.micro_batch, repeat=True)
    with open(run.metrics, "w", buffering=1) as stream, progress("train", recipe.train.steps) as bar:

        def on_step(stats: StepStats) -> None:
            stream.write(json.dumps(stats._asdict()) + "\n")
            bar.update(
                stats.step,
                f"loss {stats.loss:.3f}  ce {stats.ce:.3f}  trust {stats.trust:.4f}  reuse {stats.reuse:.3f}  smooth {stats.smooth:.3f}  "
                f"lag {stats.lag:.3f}  window {stats.window:.3f}  EOR {stats.eor:.3f}  {stats.tokens_per_s:,.0f} tok/s",
            )

        trained = train(model, gates, rows, recipe, on_step=on_step)
    for line in trained.notes:
        note(f"Note: {line}")
    return trained


def _save(
    run: Run, checkpoint: "Checkpoint", disk_names: dict[str, str], trained: Trained, recipe: Recipe, status: str
) -> Delta:
    gates = {disk_names[name]: tensor for name, tensor in trained.gates.items()}
    delta = Delta.of(checkpoint, gates, recipe.name, versions())
    delta.save(run.delta)
    run.note(status=status, steps=len(trained.steps), changed=delta.changed, notes=trained.notes)
    return delta


def as_json(done: Finetuned) -> dict:
    """The result for scripts."""
    return {
        "run": str(done.run.folder),
        "steps": done.steps,
        "interrupted": done.interrupted,
        "changed": done.delta.changed,
        "before": done.before._asdict(),
        "after": done.after._asdict() if done.after else None,
    }
