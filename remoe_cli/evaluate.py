"""remoe eval: base, tuned and control side by side, simulated and measured; writes report.json."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from remoe_cli import __version__, atomic
from remoe_cli import run as runs
from remoe_cli.cache import POLICIES
from remoe_cli.console import progress
from remoe_cli.delta import Delta, gates_for, put
from remoe_cli.environment import device_name, pick_device, versions
from remoe_cli.errors import CacheError, RunError, UsageError
from remoe_cli.families import family_of, find_gates
from remoe_cli.families.loader import compute_dtype, gate_disk_names, load_resident
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.hub.resolve import resolve
from remoe_cli.measure.decode_traces import decode, Decoded
from remoe_cli.measure.offloaded import measure_offloaded, Offloaded
from remoe_cli.measure.requests import cut_requests, Requests
from remoe_cli.measure.text import measure_text
from remoe_cli.offload import OffloadedDecoder
from remoe_cli.offload.store import IO
from remoe_cli.recipe import Recipe
from remoe_cli.report.cells import cache_cells, decode_figures
from remoe_cli.run import Run
from remoe_cli.train.data import Documents, load_documents, load_tokenizer

FORMAT = 1


@dataclass(frozen=True)
class Arm:
    """One set of gates under comparison. gates: in-memory name -> tensor; empty for the base."""

    name: str
    role: str  # base, tuned or control
    gates: dict[str, torch.Tensor]


def evaluate(
    run: str | None,
    capacities: Sequence[int],
    *,
    control: str | None = None,
    policies: Sequence[str] = ("lru", "lfu", "fifo", "belady"),
    measure: bool = True,
    threads: int | None = None,
    device: str | None = None,
) -> dict:
    """The report (docs/report.md), also written into the run folder. Raises RemoeError for every mistake."""
    _check_policies(policies)
    found = runs.find(run)
    recipe, where = found.recipe, pick_device(device)
    checkpoint = _base(found)
    tokenizer = load_tokenizer(checkpoint)
    documents = load_documents(recipe.data, tokenizer, seed=recipe.train.seed)
    requests = cut_requests(
        documents.heldout, recipe.evaluate.requests, recipe.evaluate.prompt_tokens, recipe.evaluate.new_tokens + 1
    )
    dtype = compute_dtype(checkpoint, where, recipe.train.dtype)
    model = load_resident(checkpoint, dtype, where)
    gates, disk_names = find_gates(model), gate_disk_names(model, checkpoint)
    capacities = _within(capacities, gates[0].n_experts)
    arms = _arms(
        found, control, checkpoint, disk_names, {n: p.detach().clone() for g in gates for n, p in g.parameters.items()}
    )
    results, traces = [], {}
    for arm in arms:
        put(model, arm.gates)
        result, traces[arm.name] = _resident(arm, model, gates, documents, requests, recipe)
        results.append(result)
    n_gates, n_experts, top_k = len(gates), gates[0].n_experts, gates[0].top_k
    del model, gates  # a gate holds its layer's experts: none may stay resident while they are measured on disk
    with OffloadedDecoder(checkpoint, top_k, device=where, dtype=dtype, threads=threads) as decoder:
        _simulate(results, traces, capacities, policies, decoder.expert_bytes)
        timed = Requests(*(part[: recipe.evaluate.measured] for part in requests))
        swapped = {arm.name: arm.gates for arm in arms}
        offloaded = (
            measure_offloaded(decoder, swapped, timed, capacities)
            if measure
            else Offloaded({n: [] for n in swapped}, 0, [])
        )
        expert_bytes = decoder.expert_bytes
    for result in results:
        result["measured"] = offloaded.rows[result["name"]]
    report = {
        "format": FORMAT,
        "remoe": __version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run": str(found.folder),
        "base": {
            "id": Delta.load(found.delta).base, "commit": checkpoint.commit, "model_type": checkpoint.model_type, "moe_layers": n_gates,
            "n_experts": n_experts, "top_k": top_k, "expert_bytes": expert_bytes,
        },
        "recipe": recipe.name,
        "conditions": {
            "device": where, "device_name": device_name(where), "dtype": str(dtype).removeprefix("torch."),
            "threads": threads or torch.get_num_threads(), **{k: v for k, v in versions().items() if k != "remoe"},
            "data": documents.source, "seed": recipe.train.seed, "text_tokens": results[0]["text"]["tokens"],
            "requests": len(requests.prompts_RP), "prompt_tokens": recipe.evaluate.prompt_tokens,
            "new_tokens": recipe.evaluate.new_tokens, "capacities": capacities, "policies": list(policies),
            "reset": "request", "warm": "cold", "step": "atomic", "measured_requests": offloaded.requests,
            "io": IO,
        },
        "notes": [*documents.notes, *offloaded.notes],
        "arms": results,
    }  # fmt: skip
    atomic.write(found.report, json.dumps(report, indent=1) + "\n")
    return report


def regressions(report: dict, percent: float) -> list[str]:
    """What is more than `percent` % worse in the tuned arm than in the base: perplexity, or LRU misses at a cache size."""
    base, tuned = (next(arm for arm in report["arms"] if arm["role"] == role) for role in ("base", "tuned"))
    limit, found = 1 + percent / 100, []
    if tuned["text"]["perplexity"] > limit * base["text"]["perplexity"]:
        found.append(f"perplexity {base['text']['perplexity']:.3f} -> {tuned['text']['perplexity']:.3f}")
    for before, after in zip(base["cache"], tuned["cache"], strict=True):
        if (before["trace"], before["policy"], before["admission"]) == ("forced", "lru", "forced") and after[
            "misses"
        ] > limit * before["misses"]:
            found.append(f"LRU misses at C = {before['capacity']}: {before['misses']:,} -> {after['misses']:,}")
    return found


def _check_policies(policies: Sequence[str]) -> None:
    for policy in policies:
        if policy not in POLICIES:
            raise UsageError(
                f"no cache policy {policy!r}; allowed: {', '.join(POLICIES)}.",
                "remoe eval --cache 6 --policy lru,belady",
            )
    if "lru" not in policies:
        raise UsageError(
            "the policies must include lru, which the others are compared with.",
            "remoe eval --cache 6 --policy lru,belady",
        )


def _within(capacities: Sequence[int], n_experts: int) -> list[int]:
    if max(capacities) > n_experts:
        raise CacheError(
            f"--cache {max(capacities)} is more than the {n_experts} experts a layer of this model has.",
            f"remoe eval --cache {n_experts}",
        )
    return sorted(capacities)


def _base(run: Run) -> Checkpoint:
    facts = run.facts
    base = facts["base"] + (f"@{facts['commit']}" if facts["commit"] else "")
    checkpoint = resolve(base)
    family_of(checkpoint.config, base)
    return checkpoint


def _arms(run: Run, control: str | None, checkpoint: Checkpoint, disk_names: dict[str, str], base: dict) -> list[Arm]:
    arms = [Arm("base", "base", base)]
    if control is not None:
        beside = runs.find(control)
        if beside.folder.resolve() == run.folder.resolve():
            raise RunError(
                "the control is the run itself.",
                "remoe finetune MODEL --recipe ce-only, then remoe eval --control THAT_RUN",
            )
        arms.append(_arm(beside, "control", checkpoint, disk_names))
    arms.append(_arm(run, "tuned", checkpoint, disk_names))
    if len({arm.name for arm in arms}) < len(arms):
        arms = [
            Arm(f"{arm.name} ({arm.role})" if arm.role != "base" else arm.name, arm.role, arm.gates) for arm in arms
        ]
    return arms


def _arm(run: Run, role: str, checkpoint: Checkpoint, disk_names: dict[str, str]) -> Arm:
    delta = Delta.load(run.delta)
    if delta.is_applied(checkpoint):
        raise RunError(
            f"{checkpoint.id} holds the tuned gates of {run.folder} already.",
            "remoe eval with the base it was made from",
        )
    return Arm(run.recipe.name, role, gates_for(disk_names, delta))


def _resident(
    arm: Arm, model, gates, documents: Documents, requests: Requests, recipe: Recipe
) -> tuple[dict, dict[str, Decoded]]:
    settings = recipe.evaluate
    with progress(f"{arm.name}: text", settings.rows) as bar:
        text = measure_text(
            model, gates, documents.heldout, recipe.train.sequence, settings.rows, batch=recipe.train.micro_batch, on_batch=bar.update
        )  # fmt: skip
    decoded = {}
    for kind, forced in (("forced", requests.continuations_RS[:, :-1]), ("greedy", None)):
        with progress(f"{arm.name}: {kind} decode", len(requests.prompts_RP)) as bar:
            decoded[kind] = decode(model, gates, requests.prompts_RP, settings.new_tokens, forced, on_batch=bar.update)
    figures = {kind: decode_figures(d.trace, d.ids_RS) for kind, d in decoded.items()}
    return {"name": arm.name, "role": arm.role, "text": text._asdict(), "decode": figures}, decoded


def _simulate(
    results: list[dict], traces: dict[str, dict[str, Decoded]], capacities, policies, expert_bytes: int
) -> None:
    """Fills in each arm's cache cells."""
    base = {kind: decoded.trace for kind, decoded in traces["base"].items()}
    with progress("simulate", len(results)) as bar:
        for done, result in enumerate(results, 1):
            result["cache"] = [
                cell
                for kind, decoded in traces[result["name"]].items()
                for cell in cache_cells(decoded.trace, base[kind], kind, capacities, policies, expert_bytes)
            ]
            bar.update(done)
