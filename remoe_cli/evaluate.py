"""remoe eval: base, tuned and control side by side, simulated and measured; writes report.json."""

import contextlib
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from remoe_cli import __version__, atomic
from remoe_cli import recipe as recipes
from remoe_cli import run as runs
from remoe_cli.cache import choose, POLICIES
from remoe_cli.cache.policies import ALONE
from remoe_cli.cache.policy import SCORES
from remoe_cli.console import note, progress
from remoe_cli.delta import Delta
from remoe_cli.environment import check_threads, device_name, pick_device, versions
from remoe_cli.errors import CacheError, command, DataError, instead, RunError, UsageError
from remoe_cli.families import family_of, KINDS, top_k_of
from remoe_cli.families.loader import compute_dtype, experts_on_disk
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.hub.resolve import resolve
from remoe_cli.measure.arms import about, Arm, choose_arms, control_of, head_kinds, measure_resident
from remoe_cli.measure.decode_options import Again, AS_IS, check_guess, fitted, Measuring, rule_of
from remoe_cli.measure.domains import held_out, OWN
from remoe_cli.measure.offloaded import check_decoder, measure_offloaded, Offloaded
from remoe_cli.measure.requests import Requests
from remoe_cli.measure.steering import told
from remoe_cli.measure.tasks import NO_TASKS, TaskOptions, Tasks
from remoe_cli.offload import OffloadedDecoder
from remoe_cli.offload.compute import compute_threads
from remoe_cli.offload.store import one_expert_bytes
from remoe_cli.recipe import Recipe
from remoe_cli.report import plots
from remoe_cli.report.drawn import training
from remoe_cli.report.figures import figures
from remoe_cli.report.stored import FORMAT, to_json
from remoe_cli.run import Run
from remoe_cli.train.data import Documents, load_tokenizer

POLICIES_SHOWN = ("lru", "lfu", "fifo", "belady")
WITH_HEADS = ("decayed", "temporal", "spatio_temporal")  # shown besides where a run has them
DOMAIN_POLICIES = ("lru",)
NOT_MEASURED = Offloaded({}, 0, [])


def evaluate(
    run: str | None,
    capacities: Sequence[int],
    *,
    control: str | None = None,
    policies: Sequence[str] = POLICIES_SHOWN,
    seeds: int = 1,
    domains: Sequence[str] = (),
    base: str | None = None,
    overrides: Sequence[str] = (),
    measure: bool = True,
    measuring: Measuring = AS_IS,
    threads: int | None = None,
    device: str | None = None,
    plot: bool = False,
    tasks: TaskOptions = NO_TASKS,
) -> dict:
    """The report (docs/report.md), also written into the run folder, with plots beside it where asked for.

    Raises RemoeError for every mistake.
    """
    again = _command(
        run, [("--domain", domains), ("--set", overrides)],
        {
            "cache": ",".join(map(str, capacities)), "control": control,
            "policy": ",".join(policies) if tuple(policies) != POLICIES_SHOWN else None, "seeds": seeds if seeds != 1 else None,
            "base": base, "no_measure": not measure, **measuring.given(), "threads": threads, "device": device,
            **tasks.given(),
        },
    )  # fmt: skip
    asked = policies
    policies = list(
        dict.fromkeys(
            name
            for word in policies
            for name in ([one for one in _without_fit() if one in ALONE] if word == "all" else [word])
        )
    )
    _check_options(policies, seeds, threads, again)
    measuring.check_measured(measure)
    settings = measuring.settings(again)
    found, where = runs.find(run), pick_device(device)
    _check_writable(found)
    recipe = _recipe(found, overrides)
    capacities = _within(capacities, found, again)
    checkpoint = _base(found, base)
    top_k = top_k_of(checkpoint.config)
    check_guess(settings.guess, top_k, again)
    rule = rule_of(measuring.reroute, top_k, found.facts["n_experts"], again)
    beside = control_of(found, control)
    arms = choose_arms(found, beside, checkpoint)
    policies = _served(policies, asked, arms, again)
    scores = any({*SCORES} & _needs(name) for name in policies)
    tokenizer = load_tokenizer(checkpoint)
    scored = Tasks(tasks, tokenizer, again)
    texts = held_out(recipe, tokenizer, seeds, domains)
    _check_same_texts(found, texts.documents)
    dtype = compute_dtype(checkpoint, where, recipe.train.dtype)
    expert_bytes = one_expert_bytes(experts_on_disk(checkpoint))
    timed = Requests(*(part[: recipe.evaluate.measured] for part in texts.sample.requests))
    tokens = len(timed.prompts_RP[0]) + len(timed.continuations_RS[0])  # all are of one length
    largest = max(*capacities, top_k)
    if measure:
        with fitted(again, capacities), instead(again(ram=None), UsageError):
            check_decoder(checkpoint, dtype, where, largest, settings, measuring.pack, tokens)
    resident = measure_resident(checkpoint, dtype, where, arms, texts.samples, recipe, scores, scored.run)
    offloaded = NOT_MEASURED
    if measure:
        with fitted(again, capacities):
            decoder = OffloadedDecoder(
                checkpoint, largest, device=where, dtype=dtype, threads=compute_threads(threads), settings=settings, pack=measuring.pack,
                tokens=tokens,
            )  # fmt: skip
        with decoder:
            settings = decoder.settings
            offloaded = measure_offloaded(
                decoder, {arm: gates for arm, gates in resident.gates.items() if arm not in resident.further}, timed,
                capacities, heads=resident.heads, policies=["lru", *(name for name in policies if {*KINDS} & _needs(name))],
                floor=measuring.floor, reroute=rule,
            )  # fmt: skip

    def figures_of(name: str, policies: Sequence[str]) -> list[dict[str, Any]]:
        arms, draws = resident.measured[name], texts.samples[name].draws
        with progress(f"simulate {name}".rstrip(), len(arms)) as bar:
            return list(figures(arms, capacities, policies, expert_bytes, draws, bar.update, name == OWN))

    report = {
        "format": FORMAT,
        "remoe": __version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run": str(found.folder),
        "base": {
            "id": Delta.load(found.delta).base, "commit": checkpoint.commit, "model_type": checkpoint.model_type,
            "moe_layers": resident.moe_layers, "n_experts": resident.n_experts, "top_k": resident.top_k,
            "expert_bytes": expert_bytes,
        },
        "recipe": recipe.name,
        "steering": told(found),
        "conditions": {
            "device": where, "device_name": device_name(where), "dtype": str(dtype).removeprefix("torch."),
            "threads": compute_threads(threads), **{k: v for k, v in versions().items() if k != "remoe"},
            "data": texts.documents.source, "seed": recipe.train.seed, "draws": texts.sample.draws,
            "text_tokens": resident.measured[OWN]["base"].text.measures().tokens,
            "requests": len(texts.sample.requests.prompts_RP), "prompt_tokens": recipe.evaluate.prompt_tokens,
            "new_tokens": recipe.evaluate.new_tokens, "capacities": capacities, "policies": list(policies),
            "reset": "request", "warm": "cold", "step": "atomic", "measured_requests": offloaded.requests, "io": offloaded.io,
            "offload": {**asdict(settings), "pack": measuring.pack and str(measuring.pack), "reroute": measuring.reroute} if measure else None,
            "tasks": scored.conditions(),
        },
        "notes": [
            *texts.notes, *about(found, beside, base), *offloaded.notes, *scored.notes,
            *(f"{arm} changes more than gates, so it was not measured on disk" for arm in resident.further if measure),
        ],
        "arms": [
            {
                "name": arm.name, "role": arm.role, **shown, "training": of and training(of.metrics),
                "measured": offloaded.rows.get(arm.name, []),
            }
            for arm, of, shown in zip(arms, [None, *beside, found], figures_of(OWN, policies), strict=True)
        ],
        "domains": [
            {
                "name": domain.name, "source": domain.source, "trained": domain.trained, "draws": domain.sample.draws,
                "arms": [
                    {"name": arm.name, "role": arm.role, **shown}
                    for arm, shown in zip(arms, figures_of(domain.name, DOMAIN_POLICIES), strict=True)
                ],
            }
            for domain in texts.domains
        ],
        "tasks": scored.rows(arms),
    }  # fmt: skip
    report = finite(report)
    _write(report, found)
    if plot:
        forced = {arm.name: resident.measured[OWN][arm.name].decoded["forced"].trace.uses() for arm in arms}
        plots.plot_usage(forced, found.folder / "usage.png")
        plots.plot_layers(
            {arm["name"]: arm["decode"]["forced"]["concentration"] for arm in report["arms"]},
            found.folder / "layers.png",
        )
    return report


def _command(run: str | None, repeated: Sequence[tuple[str, Sequence[str]]], options: dict[str, Any]) -> Again:
    """The command that was asked for, some of its options changed. repeated: options that are given once a value."""
    words = [*([] if run is None else [run]), *(word for name, of in repeated for one in of for word in (name, one))]
    return lambda **changes: command("eval", *words, **{**options, **changes})


def finite(value: Any) -> Any:
    """The same with null for every number that is not finite, which JSON has no word for, and lists for tuples."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _without_fit() -> list[str]:
    return [name for name, policy in POLICIES.items() if "fit" not in policy.needs or "future" in policy.needs]


def _needs(policy: str) -> set[str]:
    return {*choose(policy).policy.needs}


def _served(policies: list[str], asked: Sequence[str], arms: Sequence[Arm], again: Again) -> list[str]:
    """Those that an arm can serve, and where heads are there and nothing else was asked for, those that read them too.

    Raises UsageError for one that was asked for by name and reads heads that no arm has.
    """
    kinds = head_kinds(arms)
    if kinds and tuple(asked) == POLICIES_SHOWN:
        policies = [*policies, *WITH_HEADS]
        asked = ["all"]
    served = [name for name in policies if {*KINDS} & _needs(name) <= kinds]
    if len(served) < len(policies) and "all" not in asked:
        missing = next(name for name in policies if name not in served)
        raise UsageError(
            f"policy {missing} reads heads beside the gates, which none of these runs has.",
            again(policy=",".join(served)),
        )
    return served


def _check_options(policies: Sequence[str], seeds: int, threads: int | None, again: Again) -> None:
    fitted = [name for name in policies if choose(name).name not in _without_fit()]
    if fitted:
        raise UsageError(
            f"policy {fitted[0]} is fitted on another trace, which remoe eval has not.",
            "remoe replay T.trace --cache 6 --policy static --fit OTHER.trace",
        )
    if "lru" not in policies:
        raise UsageError(
            "the policies must include lru, which the others are compared with.",
            again(policy=",".join(["lru", *policies])),
        )
    if seeds < 1:
        raise UsageError(f"--seeds is at least 1, not {seeds}.", again(seeds=3))
    check_threads(threads)


def _check_writable(run: Run) -> None:
    """Before the long measurement, not after it."""
    if not os.access(run.folder, os.W_OK):
        raise RunError(
            f"the folder {run.folder} cannot be written, so it can hold no report.",
            f"cp -r {run.folder} COPY, then remoe eval COPY",
        )


def _recipe(run: Run, overrides: Sequence[str]) -> Recipe:
    """The run's, with the texts that it found and other settings of how to evaluate."""
    for override in overrides:
        if not override.strip().startswith("evaluate."):
            raise UsageError(
                f"remoe eval takes --set evaluate.KEY=VALUE only, not {override!r}.",
                "remoe eval --set evaluate.requests=64",
            )
    recipe = recipes.override(run.recipe, overrides)
    return replace(recipe, data=replace(recipe.data, source=run.facts.get("data") or recipe.data.source))


def _within(capacities: Sequence[int], run: Run, again: Again) -> list[int]:
    n_experts = run.facts["n_experts"]
    if max(capacities) > n_experts:
        raise CacheError(
            f"--cache {max(capacities)} is more than the {n_experts} experts a layer of this model has.",
            again(cache=",".join(map(str, sorted({min(capacity, n_experts) for capacity in capacities})))),
        )
    return sorted(capacities)


def _base(run: Run, given: str | None) -> Checkpoint:
    """The base that the run names, or the one given: whether its gates fit the delta is checked with the arms."""
    facts = run.facts
    if given is None and facts["base"].startswith("/") and not Path(facts["base"]).exists():
        raise RunError(
            f"the base of this run is no longer in {facts['base']}.", f"remoe eval {run.folder} --base FOLDER_OR_HUB_ID"
        )
    base = given or facts["base"] + (f"@{facts['commit']}" if facts["commit"] else "")
    checkpoint = resolve(base)
    family_of(checkpoint.config, base)
    return checkpoint


def _check_same_texts(run: Run, documents: Documents) -> None:
    before = run.facts.get("heldout_sha256")
    if before is not None and before != documents.heldout_sha256:
        raise DataError(
            f"the held-out texts of {documents.source} are not those of this run: the source, the tokenizer or the Python "
            "whose library the demo reads has changed, so the gates may have been trained on them.",
            f"the former texts back in place, or a new run: remoe finetune MODEL --data {documents.pinned}",
        )


def _write(report: dict, run: Run) -> None:
    """The last report is report.json. A former one of other conditions (sizes, draws, policies, domains, machine) stays
    beside it, so that a quick look does not cost a long measurement."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none, or damaged
        text = run.report.read_text()
        former = json.loads(text)
        kept = run.folder / f"report-{former['created'].replace(':', '')}.json"
        if _evidence(former) != _evidence(report):
            atomic.write(kept, text)
            note(f"Note: the former report had other conditions; it is kept as {kept}")
    atomic.write(run.report, to_json(report))


def _evidence(report: dict) -> tuple:
    names = [[part["name"] for part in report.get(key, [])] for key in ("arms", "domains")]
    return report["remoe"], report["conditions"], names
