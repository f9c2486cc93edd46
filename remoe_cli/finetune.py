"""remoe finetune: freeze everything but the gates, train them, and write the change as a delta."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TYPE_CHECKING

import torch

from remoe_cli import atomic
from remoe_cli import run as runs
from remoe_cli.console import note, progress
from remoe_cli.delta import Delta, heads_on_disk, put
from remoe_cli.environment import device_name, pick_device, versions
from remoe_cli.errors import RemoeError, RunError, UsageError
from remoe_cli.families import family_of, find_gates, Gate
from remoe_cli.families.loader import (
    compute_dtype,
    gate_disk_names,
    in_memory,
    load_expert_parallel,
    load_resident,
    on_disk,
)
from remoe_cli.finetuned import Finetuned
from remoe_cli.hub.resolve import fetch_config, resolve
from remoe_cli.measure.sample import measure_heldout
from remoe_cli.measure.steering import ce_only_beside, check_control, control_command, Steering
from remoe_cli.recipe import is_own, Recipe
from remoe_cli.report import plots
from remoe_cli.report.metrics import TextMeasures
from remoe_cli.resumed import base_of, check_resumed, documents_of, state_of, step_of
from remoe_cli.run import Run
from remoe_cli.sizes import show_size
from remoe_cli.stream.choose import stream_of
from remoe_cli.stream.sharded import load_sharded
from remoe_cli.stream.stream import Stream, Traffic
from remoe_cli.train.asked import Asked, choose_recipe, kept_recipe
from remoe_cli.train.data import Documents, load_tokenizer
from remoe_cli.train.own_text import BATCH, own_documents
from remoe_cli.train.packing import batches, BEGIN, Document
from remoe_cli.train.ranks import check_share, is_lost, lost, Ranks
from remoe_cli.train.refit import refitted, require_biases
from remoe_cli.train.state import State
from remoe_cli.train.streamed import require_scope
from remoe_cli.train.tokens import about_positions, check_vocabulary
from remoe_cli.train.trackers import require_tracker, Tracker
from remoe_cli.train.trainer import Diverged, StepStats, Stopped, train, Trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from remoe_cli.hub.checkpoint import Checkpoint

FAR = 0.002  # from the limit, as a change of perplexity


def finetune(
    model: str | None,
    asked: Asked = Asked(),  # noqa: B008  immutable
    *,
    out: Path | None = None,
    device: str | None = None,
    resume: bool = False,
    ce_only: str | None = None,
    stream: str = "auto",
    ram: int | None = None,
    parallel: str = "fsdp",
) -> Finetuned:
    """The whole verb. model: None only with resume. resume: goes on with the latest unfinished run (of this model, or in
    `out`), and starts one where there is none. ce_only: the run that shows, beside one with a limit, what cross entropy
    alone does; by default the latest of the same texts and steps under runs/. stream: "auto" | "on" | "off", whether layers pass
    through memory one by one; ram: bytes of host memory for those that stay; parallel: "fsdp" | "ep", how several processes share
    the model.

    Raises RemoeError for every mistake; whatever ends training early, the gates so far are saved first.
    """
    with ExitStack() as until:
        where = pick_device(device)
        ranks = Ranks.join(where)
        until.callback(ranks.leave)
        old = ranks.agree(runs.unfinished(model, out) if resume else None)
        if ranks.scratch:
            out, old = ranks.follow(old)
        ranks.agree(None)  # what the others copy is whole
        try:
            return _finetune(model, asked, out, ranks.device(where), old, resume, ce_only, stream, ram, parallel, ranks)
        except RuntimeError as error:
            if ranks.world > 1 and is_lost(error):
                raise lost() from None
            raise


def _finetune(
    model: str | None,
    asked: Asked,
    out: Path | None,
    where: str,
    old: Run | None,
    resume: bool,
    ce_only: str | None,
    stream: str,
    ram: int | None,
    parallel: str,
    ranks: Ranks,
) -> Finetuned:
    if old is None and model is None:
        raise RunError("there is no unfinished run to resume.", "remoe runs, or remoe finetune MODEL")
    if old is None:
        runs.check_free(out)
    if ce_only is not None and asked.max_ppl is None and not resume:
        raise UsageError("--ce-only goes with --max-ppl.", "the same command without --ce-only")
    control = None if ce_only is None else runs.find(ce_only)
    found = fetch_config(base_of(old) if old else str(model))
    family = family_of(found.config, found.id)
    settings = (
        choose_recipe(str(model), family.model_type, asked)
        if old is None
        else kept_recipe(old, family.model_type, asked)
    )
    check_share(settings.train, ranks.world, parallel, bool(found.config.get("quantization_config")))
    require_tracker(settings.train.tracker)
    checkpoint = resolve(found)
    tokenizer = load_tokenizer(checkpoint)
    if isinstance(size := checkpoint.config.get("vocab_size"), int):
        check_vocabulary(tokenizer, size, checkpoint.id)
    documents, steering_texts = documents_of(settings, old, tokenizer)
    dtype = compute_dtype(checkpoint, where, settings.train.dtype)
    run = old or runs.create(str(model), settings, out)
    with run.locked(resumed=old is not None), ExitStack() as until:
        run.note(status="running", error=None)
        try:
            sharded = ranks.world > 1 and stream != "on"
            layers = None if sharded else stream_of(checkpoint, settings, dtype, where, stream, ram)
            if layers:
                until.callback(layers.close)
                loaded = layers.model
            elif sharded:
                require_scope(settings.train.scope)
                if parallel == "ep":
                    loaded = load_expert_parallel(checkpoint, dtype, ranks.world)
                else:
                    loaded = load_sharded(checkpoint, dtype, where)
            else:
                loaded = load_resident(checkpoint, dtype, where)
            gates, names = find_gates(loaded), gate_disk_names(loaded, checkpoint)
            if settings.train.refit_bias:
                require_biases(gates)
            job = _Job(run, settings, checkpoint, documents, loaded, gates, names, layers, ranks)
            facts = {
                "base": _lasting_name(checkpoint), "commit": checkpoint.commit, "model_type": family.model_type,
                "gates_sha256": checkpoint.sha256(*sorted(names.values())),
                "device": device_name(where), "dtype": str(dtype).removeprefix("torch."), "environment": versions(),
                "data": documents.pinned, "data_sha256": documents.sha256, "heldout_sha256": documents.heldout_sha256,
                "top_k": gates[0].top_k, "n_experts": gates[0].n_experts, "moe_layers": len(gates),
                "gate_parameters": sum(p.numel() for gate in gates for p in gate.parameters.values()),
                "streamed_layers": len(layers.layers) - layers.kept if layers else 0, "processes": ranks.world,
            }  # fmt: skip
            check_resumed(run, facts)
            run.note(**facts)
            if control is not None:
                check_control(control, run)
            _introduce(job)
            known = run.facts.get("before")
            before = TextMeasures(**known) if known else _measure("base", job)
            run.note(before=before._asdict())
            steering = Steering(run, settings, loaded, gates, steering_texts, layers) if steering_texts else None
            texts: Iterable[Document] = documents.train
            if is_own(settings.data.source):
                if layers and not run.own_text.is_file():
                    passes = -(-settings.data.own_samples // BATCH) * settings.data.own_tokens
                    read = show_size(passes * sum(layers.layer_bytes[layers.kept :]))
                    note(f"Note: streamed, the base writes slowly: {passes:,} passes read {read}")
                texts = own_documents(loaded, tokenizer, texts, settings.data, settings.train.seed, run.own_text)
                note(f"Note: {len(texts):,} texts of {sum(len(text.ids) for text in texts):,} tokens to train on")
            state = state_of(run) if old else None
            tracker = Tracker(settings, run, state.step if state else 0)
            until.callback(tracker.close)
        except BaseException:
            if old is None:
                run.discard()  # nothing was trained yet
            raise
        return _train_and_save(job, texts, before, state, steering, control, tracker)


class _Job(NamedTuple):
    """What every part of the work needs. documents: without those that steer. disk_names: in-memory gate parameter ->
    on-disk name. layers: of a streamed model; ranks: the processes of the run."""

    run: Run
    recipe: Recipe
    checkpoint: "Checkpoint"
    documents: Documents
    model: "PreTrainedModel"
    gates: list[Gate]
    disk_names: dict[str, str]
    layers: Stream | None
    ranks: Ranks


def _train_and_save(
    job: _Job,
    texts: Iterable[Document],
    before: TextMeasures,
    state: State | None,
    steering: Steering | None,
    control: Run | None,
    tracker: Tracker,
) -> Finetuned:
    """Everything from the first step on: whatever ends training, the gates so far are saved."""
    run = job.run
    try:
        trained = _train(job, texts, state, steering, tracker)
    except Stopped as error:
        status = "diverged" if isinstance(error, Diverged) else "failed"
        run.note(status=status, steps=error.trained.step, error=error.message)
        if error.trained.step:
            _save(job, error.trained, status)
        if status == "diverged":
            run.drop_states()  # going on from them diverges again
        raise
    if trained.interrupted and not trained.step:
        raise KeyboardInterrupt  # there is nothing to save
    if job.recipe.train.refit_bias and not trained.interrupted:
        rows = batches(texts, job.recipe.train.sequence, job.recipe.train.micro_batch, repeat=True)
        base = {name: job.checkpoint.read(disk) for name, disk in job.disk_names.items()}
        trained.gates |= refitted(job.model, job.gates, base, trained, rows, job.layers)
    delta = _save(job, trained, "interrupted" if trained.interrupted else "running")
    after = None
    if not trained.interrupted:
        put(job.model, in_memory(job.model, job.checkpoint, delta.tensors))  # as shipped
        after = _measure("tuned", job)
        run.note(after=after._asdict(), **(_steered(job, steering, trained.step) if steering else {}))
        run.note(status="finished")
        run.drop_states()
        if steering:
            _tell_apart(job, steering, before, control)
    return Finetuned(run, delta, before, after, trained.step, trained.interrupted)


def _lasting_name(checkpoint: "Checkpoint") -> str:
    """What `remoe eval` finds the base by, from whatever folder it is called."""
    return checkpoint.id if checkpoint.commit or checkpoint.id == "demo" else str(checkpoint.folder.resolve())


def _introduce(job: _Job) -> None:
    run, checkpoint, gates, facts = job.run, job.checkpoint, job.gates, job.run.facts
    pinned = checkpoint.id + (f"@{checkpoint.commit[:12]}" if checkpoint.commit else "")
    note(f"Run {run.folder}")
    note(
        f"Base {pinned}: {len(gates)} gates of {gates[0].n_experts} experts, scope {job.recipe.train.scope}: {_trainable(job)}"
    )
    source = job.documents.source
    texts = f"what the base writes after prompts from {source}" if is_own(job.recipe.data.source) else source
    note(
        f"Recipe {job.recipe.name}, texts {texts}, {facts['device']}, {facts['dtype']}; the model's balance loss is off"
    )
    too_long = about_positions(job.recipe.train.sequence, job.model.config, checkpoint.id)
    answers = ["perplexity counts all tokens, not the answers alone"] if job.recipe.data.labels == "answers" else []
    for line in [*job.documents.notes, *([too_long] if too_long else []), *answers]:
        note(f"Note: {line}")


def _trainable(job: _Job) -> str:
    """What trains, counted where it is gates and heads."""
    scope = job.recipe.train.scope
    if scope == "full":
        return "every parameter trains"
    head = sum(gate.parameters[gate.names[0]].numel() for gate in job.gates)
    count = job.run.facts["gate_parameters"] * (scope != "heads") + head * len(job.recipe.heads)
    return f"{count:,} parameters {'and adapters ' if scope == 'gates+lora' else ''}train, the rest is frozen"


def _measure(name: str, job: _Job) -> TextMeasures:
    return measure_heldout(
        f"measure {name}", job.model, job.gates, job.documents.heldout, job.recipe, layers=job.layers
    ).measures()


def _train(
    job: _Job, texts: Iterable[Document], state: State | None, steering: Steering | None, tracker: Tracker
) -> Trained:
    run, recipe = job.run, job.recipe
    settings = recipe.train
    start = state.position if state else BEGIN
    if steering:
        steering.begin(state.step if state else 0)
    rows = batches(texts, settings.sequence, settings.micro_batch, repeat=True, start=start)
    kept = run.metrics.read_text().splitlines() if state and run.metrics.is_file() else []
    steps = [line for line in kept if state and step_of(line) <= state.step]
    atomic.write(run.metrics, "".join(f"{line}\n" for line in steps))
    with (
        open(run.metrics, "a", buffering=1) as stream,
        progress("train", settings.steps, already=state.step if state else 0) as bar,
    ):

        def on_step(stats: StepStats) -> None:
            stream.write(json.dumps(stats.row()) + "\n")
            tracker.log(stats.row())
            bar.update(
                stats.step,
                f"loss {stats.loss:.3f}  {'  '.join(f'{name} {value:.3f}' for name, value in stats.terms.items())}  "
                f"EOR {stats.eor:.3f}  {stats.tokens_per_s:,.0f} tok/s" + _traffic(job),
            )

        trained = train(
            job.model, job.gates, rows, recipe, on_step=on_step, state=state, steer=steering,
            layers=job.layers, ranks=job.ranks,
            save=(lambda state: state.save(run.states)) if job.ranks.main else None,
        )  # fmt: skip
    for line in trained.notes:
        note(f"Note: {line}")
    return trained


def _traffic(job: _Job) -> str:
    """What the layers cost since it was last asked."""
    if job.layers is None:
        return ""
    spent, job.layers.traffic = job.layers.traffic, Traffic()
    return f"  {show_size(spent.read_bytes)} read, {spent.waited_s:.1f} s waited"


def _steered(job: _Job, steering: Steering, step: int) -> dict[str, Any]:
    """For run.json: how near the run ended to its limit."""
    found: dict[str, Any] = {**job.run.facts["steering"], "change": steering.finish(step), "ce_only": None}
    if abs(found["change"] - found["limit"]) > FAR:
        note("Note: the run ended off its limit; more steps, or a recipe whose weights are nearer to it, help")
    plots.plot_steering(
        [point._asdict() for point in steering.points], found["limit"], job.run.steering.with_suffix(".png")
    )
    return {"steering": found}


def _tell_apart(job: _Job, steering: Steering, before: TextMeasures, control: Run | None) -> None:
    """Notes in run.json what cross entropy alone does, where a run shows it. Leaves that run's gates in the model."""
    control = control or ce_only_beside(job.run)
    if control is None:
        note(f"Note: no CE-only run tells apart what training itself does; {control_command(job.run)} makes one")
        return
    try:
        put(job.model, in_memory(job.model, job.checkpoint, Delta.load(control.delta).tensors))
    except RemoeError as error:  # this run is whole without it
        note(f"Note: {control.folder} is not measured beside it: {error.message}")
        return
    reported = _measure("CE-only", job).perplexity / before.perplexity - 1
    ce_only = {"run": str(control.folder), "change": steering.change(), "reported_change": reported}
    job.run.note(steering={**job.run.facts["steering"], "ce_only": ce_only})


def _save(job: _Job, trained: Trained, status: str) -> Delta:
    gates = {job.disk_names[name]: tensor for name, tensor in trained.gates.items()}
    if job.recipe.train.scope == "heads":  # as stored: the model may hold them rounded
        gates = {name: job.checkpoint.read(name) for name in gates}
    gates |= on_disk(job.model, job.checkpoint, trained.others)
    heads = heads_on_disk(trained.heads, job.disk_names, job.gates)
    kept = torch.float32 if job.recipe.train.delta_dtype == "float32" else None
    delta = Delta.of(job.checkpoint, gates, job.recipe.name, versions(), heads, kept)
    delta.save(job.run.delta)
    job.run.note(status=status, steps=trained.step, changed=delta.changed, notes=trained.notes)
    return delta
