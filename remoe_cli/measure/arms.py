"""Arms: the sets of gates under comparison, measured one after the other in one resident model."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from remoe_cli import run as runs
from remoe_cli.delta import Delta, heads_for, put
from remoe_cli.errors import command, RunError
from remoe_cli.families import find_gates, Heads
from remoe_cli.families.loader import gate_disk_names, in_memory, load_resident
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.measure.sample import measure, Sample
from remoe_cli.recipe import Recipe
from remoe_cli.report.figures import Measured
from remoe_cli.run import Run


class Arm(NamedTuple):
    """delta: None for the base, whose gates are the checkpoint's own."""

    name: str
    role: str  # base, tuned or control
    delta: Delta | None


def control_of(run: Run, control: str | None) -> list[Run]:
    """The run to show beside it, if any. Raises RunError where there is none of that name, it is the run itself, or some of
    this run's texts steered it."""
    if control is None:
        return []
    found = runs.find(control)
    if found.folder.resolve() == run.folder.resolve():
        raise RunError(
            "the control is the run itself.",
            "remoe finetune MODEL --recipe ce-only, then remoe eval --control THAT_RUN",
        )
    if found.facts.get("steering") and not run.facts.get("steering") and found.facts["data"] == run.facts["data"]:
        raise RunError(
            f"the control {found.folder} was steered by half of the texts that {run.folder} is measured on.",
            command("eval", found.folder, control=run.folder),
        )
    return [found]


def choose_arms(run: Run, beside: Sequence[Run], checkpoint: Checkpoint) -> list[Arm]:
    """Base, control, tuned. Raises DeltaError or RunError where a delta was not made from this checkpoint."""
    chosen = [*((one, "control") for one in beside), (run, "tuned")]
    names = [one.recipe.name for one, _ in chosen]
    if len({"base", *names}) <= len(names):
        names = [f"{name} ({role})" for name, (_, role) in zip(names, chosen, strict=True)]
    deltas = [_delta(one, checkpoint) for one, _ in chosen]
    arms = zip(names, (role for _, role in chosen), deltas, strict=True)
    return [Arm("base", "base", None), *(Arm(*arm) for arm in arms)]


def about(run: Run, beside: Sequence[Run], base: str | None) -> list[str]:
    """Notes on what was compared."""
    notes = [f"the base was read from {Path(base).name if Path(base).expanduser().exists() else base}"] if base else []
    if run.recipe.data.labels == "answers":
        notes.append("perplexity counts all tokens, not only those of answers, which were learned")
    for control in beside:
        if control.facts.get("data") != run.facts.get("data"):
            notes.append("the control was trained on other texts than the tuned gates")
    return notes


def _delta(run: Run, checkpoint: Checkpoint) -> Delta:
    delta = Delta.load(run.delta)
    if (
        delta.is_applied(checkpoint) and delta.changed
    ):  # where heads alone were trained, the base's gates are the delta's
        raise RunError(
            f"{checkpoint.id} holds the tuned gates of {run.folder} already.",
            f"remoe eval {run.folder} --base {delta.base}",
        )
    return delta


def head_kinds(arms: Sequence[Arm]) -> set[str]:
    """Of the heads that any of them has."""
    return {name.rpartition(".")[2] for arm in arms if arm.delta is not None for name in arm.delta.heads}


class Resident(NamedTuple):
    """measured: sample -> arm -> what it did. gates: arm -> in-memory name -> tensor; heads: arm -> on the CPU, None where it
    has none. further: arms that change more than gates."""

    measured: dict[str, dict[str, Measured]]
    gates: dict[str, dict[str, torch.Tensor]]
    heads: dict[str, Heads | None]
    further: list[str]
    moe_layers: int
    n_experts: int
    top_k: int


def measure_resident(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: str,
    arms: Sequence[Arm],
    samples: Mapping[str, Sample],
    recipe: Recipe,
    scores: bool = False,
    also: Callable[[str, Any], None] | None = None,
) -> Resident:
    """Every arm on every sample, each once. scores: the traces hold the routers' probabilities, and what an arm's heads gave.
    also: called with each arm's name and the model that holds its gates. The model is gone afterwards: no expert may stay resident while they are measured on disk."""
    model = load_resident(checkpoint, dtype, device)
    gates, stored = find_gates(model), gate_disk_names(model, checkpoint)
    own = {name for gate in gates for name in (*gate.names, *gate.biases)}
    deltas = {arm.name: {} if arm.delta is None else arm.delta.tensors for arm in arms}
    changed = {name: in_memory(model, checkpoint, tensors) for name, tensors in deltas.items()}
    heads = {arm.name: None if arm.delta is None else heads_for(arm.delta, stored, gates) for arm in arms}
    everything = own.union(*changed.values())
    stock = {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name in everything}
    measured: dict[str, dict[str, Measured]] = {name: {} for name in samples}
    for arm in arms:
        put(model, {**stock, **changed[arm.name]})
        for name, sample in samples.items():
            first = next(other for other in samples if samples[other] is sample)
            title = f"{arm.name}, {name}" if name else arm.name
            measured[name][arm.name] = (
                measure(title, model, gates, sample, recipe, scores, heads[arm.name])
                if first == name
                else measured[first][arm.name]
            )
        if also is not None:
            also(arm.name, model)
    tuned = {arm: {name: {**stock, **tensors}[name] for name in own} for arm, tensors in changed.items()}
    further = [arm for arm, tensors in changed.items() if not tensors.keys() <= own]
    return Resident(measured, tuned, heads, further, len(gates), gates[0].n_experts, gates[0].top_k)
