"""The training loop: it changes what train.scope names, the gates alone unless a recipe says otherwise.

One step sees `accumulation` micro-batches. Every term is divided by its weight over the whole step, so that neither
micro-batch size nor packing changes the loss. Steps count from 1: a run of S steps with a warm-up of w*S has 1/(w*S)
of the learning rate (and of a_r, a_l) in its first step and all of it in step w*S and later. A decay of d*S mirrors that at
the end: 1/(d*S) of the learning rate in the last step.

Shape letters: L MoE layers, B rows, T slots a row, N = B*T, E routed experts, D hidden size, K experts a token.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch import nn, Tensor

from remoe_cli import memory
from remoe_cli.environment import out_of_memory
from remoe_cli.errors import DataError, RemoeError, TrainingError
from remoe_cli.families import Gate, Heads, RouterTap
from remoe_cli.families.tap import Routed
from remoe_cli.objectives import OBJECTIVES
from remoe_cli.objectives.remoe import overlap, ramp, Routing, Segments
from remoe_cli.recipe import Recipe, Train
from remoe_cli.stream.passes import Layers
from remoe_cli.train.losses import ANCHORS, text_terms, weighed
from remoe_cli.train.masters import Masters
from remoe_cli.train.packing import Batch, BEGIN, model_inputs, Position, require_packable
from remoe_cli.train.prepare import checkpointed, prepare
from remoe_cli.train.ranks import ALONE, is_lost, lost, Ranks
from remoe_cli.train.scope import Scope
from remoe_cli.train.state import RANDOM, State
from remoe_cli.train.streamed import require_scope, StreamedGradients
from remoe_cli.train.teacher import Teacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StepStats(NamedTuple):
    """One optimiser step, before its update. loss: the weighted sum; terms: unweighted means in nats of the
    objective's terms, cross entropy ("ce") first; eor: teacher-forced over the step's pairs; lr; grad_norm before clipping; tokens without padding;
    tokens_per_s of this step, data included; elapsed: seconds since the start of training; steer: what multiplied the
    locality terms."""

    step: int
    loss: float
    terms: dict[str, float]
    eor: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    elapsed: float
    steer: float = 1.0

    def row(self) -> dict[str, float]:
        """Flat, as metrics.jsonl has it."""
        row = self._asdict()
        return {"step": row.pop("step"), "loss": row.pop("loss"), **row.pop("terms"), **row}


@dataclass
class Trained:
    """What training leaves behind. gates: in-memory parameter name -> master (fp32, CPU); the model holds the same, in
    its own dtype. heads: trained ones (fp32, CPU), None without; others: what else training
    changed, by in-memory name, adapters merged. step: completed steps, those before a resume included; steps: one a step of this call;
    interrupted: Ctrl-C ended the run; notes: for the run's summary."""

    gates: dict[str, Tensor] = field(default_factory=dict)
    heads: Heads | None = None
    others: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0
    steps: list[StepStats] = field(default_factory=list)
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)


class Stopped(TrainingError):
    """Training that could not go on. `trained` holds the gates of the last completed step."""

    def __init__(self, message: str, hint: str, trained: Trained) -> None:
        super().__init__(message, hint)
        self.trained = trained


class Diverged(Stopped):
    """A loss or gradient that is not finite. `trained` holds the last gates whose loss and gradient were finite."""


def train(
    model: "PreTrainedModel",
    gates: Sequence[Gate],
    batches: Iterable[Batch],
    recipe: Recipe,
    *,
    on_step: Callable[[StepStats], None] | None = None,
    state: State | None = None,
    save: Callable[[State], None] | None = None,
    steer: Callable[[int], float] | None = None,
    layers: Layers | None = None,
    ranks: Ranks = ALONE,
) -> Trained:
    """Tunes a loaded causal LM in place, on the device and in the dtype where it is: what train.scope names.

    batches: micro-batches, `accumulation` of them a step, from the state's position on; when they run out early, the
    run ends with a note. on_step is called after each step's update, save every train.save_seconds and when training
    ends. state: where an earlier call came to; the gates then end as if it had not stopped. steer: called before each
    step with its number; its value multiplies the scale of every locality term (all but cross entropy and trust). layers: the
    model's where they don't stay in memory; each then comes once each way a step. ranks: the processes that train together, all of which
    call this with the same batches; save is called by the first one only.
    The model is left in eval mode, with gradients required of what trains only and its balance loss at 0. Ctrl-C ends
    the run after the last completed step. Raises Diverged when a loss or gradient is not finite, Stopped for whatever
    else ends it (out of memory, a full disk), DataError when there is no batch at all.
    """
    settings = recipe.train
    torch.manual_seed(settings.seed)
    if layers is not None:
        require_scope(settings.scope)
    trained = Trained(notes=prepare(model, gates, settings.scope))
    loop = _Loop(model, list(gates), recipe, layers, ranks)
    done = loop.begin(state)
    stream = iter(batches)
    start, saved = time.perf_counter() - done.elapsed, time.monotonic()
    try:
        with checkpointed(model, settings.checkpointing and layers is None):
            for step in range(done.step + 1, settings.steps + 1):
                began = time.perf_counter()
                micro = list(islice(stream, settings.accumulation))
                if not micro:
                    break
                strength = steer(step) if steer else 1.0
                measured = loop.gradients(micro, step, strength)
                if not (math.isfinite(measured["loss"]) and math.isfinite(measured["grad_norm"])):
                    proven = {f"master/{name}": tensor for name, tensor in done.part("proven").items()}
                    done = replace(done, step=max(0, done.step - 1), tensors=proven)
                    raise Diverged(
                        f"step {step}: the loss ({measured['loss']:.4g}) or its gradient ({measured['grad_norm']:.4g}) "
                        "is not finite; the last good gates are kept.",
                        f"remoe finetune MODEL --set train.lr={settings.lr / 10:g}",
                        trained,
                    )
                lr = loop.update(step)
                now = time.perf_counter()
                after = loop.state(step, micro[-1].next, now - start, proven=done.part("master"))
                tokens = int(measured.pop("tokens"))
                timing: dict[str, Any] = {"tokens_per_s": tokens / (now - began), "elapsed": after.elapsed}
                trained.steps.append(StepStats(step=step, lr=lr, tokens=tokens, steer=strength, **timing, **measured))
                if on_step:
                    on_step(trained.steps[-1])
                done = after
                if save and time.monotonic() - saved >= settings.save_seconds:
                    save(done)
                    saved = time.monotonic()
        _last_save(save, done)
    except KeyboardInterrupt:
        ranks.save_undisturbed()
        trained.interrupted = True
        _last_save(save, done)
    except Diverged:
        raise
    except Exception as error:
        ranks.save_undisturbed()
        _last_save(save, done)
        raise _stopped(error, done.step + 1, trained) from error
    finally:
        loop.finish(done, trained)
        trained.step = done.step
        trained.steps = [stats for stats in trained.steps if stats.step <= done.step]
    if not done.step and not trained.interrupted:
        raise DataError("the texts hold no batch to train on.", "remoe finetune MODEL --data FILE.jsonl")
    if done.step < settings.steps and not trained.interrupted:
        trained.notes.append(f"the texts ended after step {done.step} of {settings.steps}")
    return trained


def _last_save(save: Callable[[State], None] | None, done: State) -> None:
    """Where training ends; an older state serves as well where this one finds no room."""
    if save and done.step:
        with suppress(RemoeError):
            save(done)


def _stopped(error: Exception, step: int, trained: Trained) -> Stopped:
    """What ended training, in one line. The states saved before it stay."""
    kept = f"the gates of step {step - 1} are kept"
    error = lost() if is_lost(error) else error
    if isinstance(error, RemoeError):
        return Stopped(f"step {step}: {error.message.removesuffix('.')} ({kept}).", error.hint, trained)
    if out_of_memory(error):
        smaller = "--set train.micro_batch=1 --set train.checkpointing=true (and a smaller train.sequence)"
        return Stopped(f"step {step}: out of memory; {kept}.", f"the same command with {smaller}", trained)
    reason = (str(error).splitlines() or [""])[0]
    if isinstance(error, OSError):
        return Stopped(f"step {step}: {reason}; {kept}.", "the same command with --resume once that is mended", trained)
    return Stopped(f"step {step}: {type(error).__name__}: {reason}; {kept}.", "the same command with --resume", trained)


class _Loop:
    """The state of a run: what trains, its masters, optimiser, and the frozen base gates that Trust-KL compares with."""

    def __init__(
        self,
        model: "PreTrainedModel",
        gates: list[Gate],
        recipe: Recipe,
        layers: Layers | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.gates, self.recipe, self.ranks = model, gates, recipe, ranks
        self.objective = OBJECTIVES[recipe.objective.name]
        self.terms = self.objective.terms(recipe.objective)
        self.scope = Scope(model, gates, recipe)
        self.masters = Masters(self.scope.parameters, ranks.world)
        self.teacher = Teacher(model, self.scope.parameters) if recipe.objective.target == "base" else None
        base = self.scope.trained_gates()
        self.base = [tuple(base[name] for name in gate.names) for gate in gates]
        self.optimiser = _optimiser(list(self.masters.tensors.values()), recipe.train)
        self.streamed = layers and StreamedGradients(layers, gates, self.scope, self.masters, self.teacher, self.base)

    def begin(self, state: State | None) -> State:
        """Takes up an earlier call's state; without one the base gates are where training starts."""
        if state is None:
            return self.state(0, BEGIN, 0.0, proven=self.masters.snapshot())
        self.masters.restore(state.part("master"))
        groups = self.optimiser.state_dict()["param_groups"]
        moments = {key.partition("/")[0] for key in state.tensors} - {"master", "proven", RANDOM}
        parts = {moment: state.part(moment) for moment in moments}
        each = {i: {m: parts[m][name] for m in moments} for i, name in enumerate(self.masters.tensors)}
        self.optimiser.load_state_dict({"state": each if moments else {}, "param_groups": groups})
        torch.set_rng_state(state.tensors[RANDOM])
        return state

    def state(self, step: int, position: Position, elapsed: float, proven: dict[str, Tensor]) -> State:
        """A copy of all that the next step depends on. proven: the gates before the last update."""
        tensors = {f"master/{name}": tensor for name, tensor in self.masters.snapshot().items()}
        tensors |= {f"proven/{name}": tensor for name, tensor in proven.items()}
        for name, master in self.masters.tensors.items():
            moments = self.optimiser.state.get(master, {})
            tensors |= {f"{moment}/{name}": value.detach().clone() for moment, value in moments.items()}
        return State(step, position, elapsed, {**tensors, RANDOM: torch.get_rng_state()})

    def finish(self, done: State, trained: Trained) -> None:
        """Leaves the model, and what is reported of it, as they were after the last completed step."""
        masters = done.part("master")
        self.masters.restore(masters)
        masters = {name: tensor.cpu() for name, tensor in masters.items()}
        trained.gates = {name: masters.get(name, gate.cpu()) for name, gate in self.scope.trained_gates().items()}
        trained.heads = self.scope.trained_heads(masters)
        trained.others = self.scope.trained_others(masters)

    def gradients(self, micro: list[Batch], step: int, steer: float = 1.0) -> dict[str, Any]:
        """Leaves the step's gradient in the masters; returns its loss, unweighted terms, eor, grad_norm and tokens."""
        self.masters.clear()
        segments = [Segments.of(batch.document_BT) for batch in micro]  # on the CPU: they decide shapes and weights
        parts = [
            self.objective.weights(part, self.recipe.objective, batch.learned_BT)
            for batch, part in zip(micro, segments, strict=True)
        ]
        weights = {name: sum(part[name] for part in parts) for name in parts[0]}
        held = {"ce": 1.0} if self.teacher is None else {"ce": 0.0, "distillation": 1.0}
        weights["distillation"] = weights["ce"]
        tokens = sum(int(part.length_S.sum()) for part in segments)
        scales = {**held, **self.objective.scales(self.recipe.objective, step, self.recipe.train.steps)}
        scales = {name: scale if name in ANCHORS else steer * scale for name, scale in scales.items()}
        micro = self.ranks.share(micro)
        segments = [Segments.of(batch.document_BT) for batch in micro] if self.ranks.world > 1 else segments
        for batch, part in zip(micro, segments, strict=True):
            first_BT = (part.position_N.view(batch.ids_BT.shape) == 0) & (batch.document_BT >= 0)
            if first_BT.sum(1).max() > 1:
                require_packable(self.model)
        if self.streamed:
            measured = self.streamed.run(micro, segments, weights, scales, self._routing_terms)
        else:
            measured = torch.zeros(len(scales) + 1, dtype=torch.float64, device=self.model.device)
            for batch, part in zip(micro, segments, strict=True):
                measured += self._backward(batch, part, weights, scales)
        self.ranks.total([*self.masters.own_gradients(), measured])
        norm = nn.utils.clip_grad_norm_(self.masters.tensors.values(), self.recipe.train.clip or math.inf)
        *values, eor, grad_norm = [*measured.tolist(), float(norm)]  # the step's only wait for the device
        terms = dict(zip(scales, values, strict=True))
        loss = sum(scales[name] * value for name, value in terms.items())
        return {"loss": loss, "terms": terms, "eor": eor, "grad_norm": grad_norm, "tokens": tokens}

    def update(self, step: int) -> float:
        """One optimiser step from the masters' gradients; returns its learning rate."""
        settings = self.recipe.train
        rise = ramp(step, settings.steps, settings.lr_warmup)
        fall = ramp(settings.steps + 1 - step, settings.steps, settings.lr_decay)
        lr = settings.lr * min(rise, fall, _cosine(step, settings))
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        self.masters.write()
        return lr

    def _backward(
        self, batch: Batch, segments: Segments, weights: dict[str, float], scales: dict[str, float]
    ) -> Tensor:
        """Adds one micro-batch to the gradients; returns its share of each term, in the order of scales, and of EOR."""
        inputs = model_inputs(self.model, batch, segments)
        segments = segments.to(self.model.device)
        learned_BT = None if batch.learned_BT is None else batch.learned_BT.to(self.model.device)
        base_BTV = self.teacher.logits(inputs) if self.teacher else None
        with RouterTap(self.gates) as tap, torch.set_grad_enabled(self.scope.moves_model):
            logits_BTV = self.model(**inputs).logits
            routed = tap.take()
        routing = self._routing(routed)
        text = text_terms(logits_BTV, base_BTV, inputs["input_ids"], segments, learned_BT)
        loss, shares = weighed({**text, **self._routing_terms(routing, segments)}, weights, scales)
        if loss is not None and loss.requires_grad:
            loss.backward()
        self.masters.accumulate()
        memory.give_back()
        eor = overlap(routing.choice_LNK, segments).double() / (weights["lag"] or 1.0)
        return torch.stack([*(shares[name] for name in scales), eor])

    def _routing_terms(self, routing: Routing, segments: Segments) -> dict[str, Callable[[], Tensor]]:
        return {name: partial(term, routing, segments) for name, term in self.terms.items()}

    def _routing(self, routed: list[Routed]) -> Routing:
        logp_LNE = torch.stack([layer.score.log_probabilities(layer.logits_NE) for layer in routed])
        with torch.no_grad():
            references = [
                layer.score.log_probabilities(gate.logits(layer.hidden_ND, *base))
                for gate, layer, base in zip(self.gates, routed, self.base, strict=True)
            ]
        choices, heads = torch.stack([layer.choice_NK for layer in routed]), self.scope.heads
        foreseen = {
            f"{kind}_LNE": torch.stack(
                [heads.probabilities(kind, i, one.hidden_ND, one.score) for i, one in enumerate(routed)]
            )
            for kind in heads.kinds
        }
        return Routing(logp_LNE, torch.stack(references), choices, **foreseen)


def _optimiser(masters: list[Tensor], settings: Train) -> torch.optim.AdamW:
    for master in masters:
        master.requires_grad_(True)
    return torch.optim.AdamW(masters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)


def _cosine(step: int, settings: Train) -> float:
    """Half a cosine from 1 at the last warm-up step to nearly 0 at the run's last; 1 for a constant schedule."""
    if settings.schedule == "constant":
        return 1.0
    warmup = settings.lr_warmup * settings.steps
    return 0.5 + 0.5 * math.cos(math.pi * max(0.0, step - warmup) / (settings.steps + 1 - warmup))
