"""remoe decode: continue prompts with the experts left on disk, once or in a sweep of settings."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import product, repeat
from math import lcm
from time import monotonic
from typing import Any, NamedTuple

import torch

from remoe_cli import __version__
from remoe_cli.apply import find_delta
from remoe_cli.cache import choose, live_policies
from remoe_cli.cache.prefetch.predictor import Predictor
from remoe_cli.cache.reroute import Rule
from remoe_cli.console import note, progress
from remoe_cli.delta import Delta, gates_for, heads_for
from remoe_cli.environment import check_threads, device_name, pick_device, versions
from remoe_cli.errors import CacheError, command, DataError, DeltaError, instead, UsageError
from remoe_cli.families import family_of, Heads, top_k_of
from remoe_cli.families.loader import experts_on_disk
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.hub.resolve import fetch_config, resolve
from remoe_cli.measure.decode_options import (
    Asked,
    check_for_model,
    check_heads,
    fitted,
    Plan,
    plan_of,
    predictor_of,
    PROMPT,
    rule_of,
    shorter_of,
)
from remoe_cli.measure.decoded import by_session, figures, nll
from remoe_cli.measure.prompts import default_recipe, lay_out, load_in_order
from remoe_cli.offload import Decoded, DecodedBatch, Floor, OffloadedDecoder, take_turns
from remoe_cli.offload.compute import compute_threads
from remoe_cli.offload.small import unpacked
from remoe_cli.report.metrics import ratio
from remoe_cli.sizes import show_size
from remoe_cli.train.data import load_tokenizer

Change = tuple[dict[str, torch.Tensor], Heads | None]  # gates by in-memory name, and heads

FORMAT = 1
_WARM_UP = 2  # tokens of prompt: enough for first calls to allocate, few enough to touch few experts


class _Prompts(NamedTuple):
    """ids: of each request. forced: how their texts go on, with --forced. rows: of the source, from 1 on, in which they begin, None for --prompt. source: for display.
    notes: what is not as it was asked for."""

    ids: list[list[int]]
    forced: list[list[int]] | None
    rows: list[int] | None
    source: str
    notes: list[str]


class Ready(NamedTuple):
    """A model whose files are here, and options that fit it. change: the delta, and whether the model holds its gates already."""

    plan: Plan
    device: str
    checkpoint: Checkpoint
    change: Delta | None
    applied: bool
    rule: Rule | None
    tokenizer: Any
    predictor: Predictor | None


def decode(model: str, asked: Asked) -> dict[str, Any]:
    """Texts, counts and times of every combination of settings, as docs/decode.md lists them.

    Raises RemoeError for every mistake, most of them before anything is loaded.
    """
    found = ready(model, asked)
    plan, checkpoint, tokenizer = found.plan, found.checkpoint, found.tokenizer
    prompts = _prompts(asked, plan, model, checkpoint, tokenizer, room_of(checkpoint.config, plan, asked, model))
    longest = max(map(len, prompts.ids)) + max(plan.tokens)
    with opened(model, asked, found, longest) as (decoder, tuned):
        notes = [*prompts.notes, *taken(decoder, plan)]
        for sentence in notes:
            note(f"Note: {sentence}")
        rows = list(_rows(decoder, plan, asked, tuned, found.rule, prompts, tokenizer, found.predictor))
        return {
            **about(decoder, plan, model, asked, prompts.ids, prompts.source, prompts.rows),
            "notes": notes,
            "rows": rows,
        }  # fmt: skip


def ready(model: str, asked: Asked) -> Ready:
    """All that can be checked is checked before the model is downloaded. Raises RemoeError."""

    def again(**changes: Any) -> str:
        return asked.command(model, **changes)

    with instead(asked.command(model, policy=None)):
        check_live(asked.policy)
    plan = plan_of(asked, model)
    with instead(asked.command(model, threads=None)):
        check_threads(asked.threads)
    with instead(asked.command(model, device="cpu")):
        where = pick_device(asked.device)
    found = fetch_config(model)
    family_of(found.config, model)
    predictor = predictor_of(asked.policy, asked.predictor, again)
    check_for_model(plan, top_k_of(found.config), asked, model)
    room_of(found.config, plan, asked, model)
    change = find_delta(asked.delta) if asked.delta is not None else None
    check_heads(asked.policy, {name.rpartition(".")[2] for name in change.heads} if change is not None else (), again)
    checkpoint = resolve(found)
    applied = change is not None and change.is_applied(checkpoint)
    if change is not None and applied and asked.beside_base:
        base = change.base + (f"@{change.commit}" if change.commit else "")
        raise UsageError(
            f"{model} holds the tuned gates already, so --beside-base has no base to show.",
            f"{again(beside_base=False)}, and beside it {asked.command(base, delta=None, beside_base=False)}",
        )
    layer = experts_on_disk(checkpoint)[0]
    rule = rule_of(asked.reroute, layer.top_k, layer.n_experts, again)
    return Ready(plan, where, checkpoint, change, applied, rule, load_tokenizer(checkpoint), predictor)


@contextmanager
def opened(model: str, asked: Asked, found: Ready, longest: int) -> Iterator[tuple[OffloadedDecoder, Change]]:
    """The decoder, with the base's gates, and what the delta puts in their place. longest: tokens of the longest request, new
    ones included. Raises RemoeError."""

    def again(**changes: Any) -> str:
        return asked.command(model, **changes)

    plan, change = found.plan, found.change
    with fitted(again, plan.capacities, shorter_of(plan, longest)), instead(again(ram=None), UsageError):
        decoder = OffloadedDecoder(
            found.checkpoint, max(plan.capacities), asked.policy, admission=asked.admission, device=found.device,
            threads=compute_threads(asked.threads), settings=plan.settings, pack=asked.pack, batch=max(plan.batches),
            tokens=longest * max(*plan.batches, asked.sessions), predictor=found.predictor,
        )  # fmt: skip
    with decoder:
        tuned: Change = {}, None
        if change is not None:
            first = command("apply", asked.delta, model, out="DIR")
            with instead(f"{first}, then {asked.command('DIR', beside_base=False)}", DeltaError):
                gates = {} if found.applied else gates_for(decoder.disk_names, change)
            tuned = gates, heads_for(change, decoder.disk_names, decoder.gates)
        yield decoder, tuned


def about(
    decoder: OffloadedDecoder, plan: Plan, model: str, asked: Asked, prompts: Sequence[Sequence[int]], source: str,
    rows: Sequence[int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a result begins with: what was asked, the model, the conditions."""
    known, device, checkpoint = versions(), str(decoder.device), decoder.checkpoint
    return {
        "format": FORMAT,
        "remoe": __version__,
        "requested": {
            "model": model, **asdict(asked), "pack": asked.pack and str(asked.pack),
            "predictor": asked.predictor and str(asked.predictor),
        },
        "model": {
            "id": checkpoint.id, "commit": checkpoint.commit, "moe_layers": decoder.n_layers,
            "n_experts": decoder.n_experts, "top_k": decoder.top_k, "expert_bytes": decoder.expert_bytes,
        },
        "conditions": {
            "device": device, "device_name": device_name(device), "dtype": str(decoder.dtype).removeprefix("torch."),
            "threads": decoder.threads, "torch": known["torch"],
            "transformers": known["transformers"], "prompts": source,
            "prompt_rows": rows, "prompt_tokens": [len(ids) for ids in prompts],
            "sampling": plan.sampling and asdict(plan.sampling), "io": decoder.io, "io_reason": decoder.io_reason,
        },
    }  # fmt: skip


def check_live(policy: str) -> None:
    """Raises UsageError for an unknown policy, a parameter that it does not take, or one that only a replay can serve."""
    hint = "remoe decode demo --cache 8 --policy lru"
    try:
        name = choose(policy).name
    except CacheError as error:
        raise UsageError(error.message, hint) from None
    if name not in (live := live_policies()):
        raise UsageError(
            f"a running model can use the policies {', '.join(live)}, not {policy!r}: it needs what only a replay has.",
            hint,
        )


class _Run(NamedTuple):
    """One row's settings. tuned: with the delta's gates and heads."""

    capacity: int
    policy: str
    admission: str
    reroute: str | None
    tuned: bool


def _rows(
    decoder: OffloadedDecoder, plan: Plan, asked: Asked, change: Change, rule: Rule | None, prompts: _Prompts, tokenizer: Any,
    predictor: Predictor | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One row a combination: throttle by throttle, then batch, tokens, cache; with --beside-base two."""
    capacities = list(dict.fromkeys(min(capacity, decoder.n_experts) for capacity in plan.capacities))
    combinations = list(product(plan.throttles, plan.batches, plan.tokens, capacities))
    runs = len(combinations) * (2 if asked.beside_base else 1)
    if runs > 1:
        decoder.configure(capacities[-1], batch=max(plan.batches))
        decoder.decode(prompts.ids[0][:_WARM_UP], 2)
    tokens, begin = 0, monotonic()

    def decoded(run: _Run, throttle: float | None, batch: int, n_new: int) -> dict[str, Any]:
        nonlocal tokens
        decoder.apply_gates(*(change if run.tuned else ({}, None)))
        decoder.configure(
            run.capacity, run.policy, admission=run.admission, batch=batch, reroute=rule if run.reroute else None,
            settings=replace(decoder.settings, throttle=throttle), predictor=predictor,
        )  # fmt: skip
        done: list[Decoded | DecodedBatch] = []
        floors: list[Floor] = []
        ids: list[list[int]] = []
        losses: list[torch.Tensor] = []
        for at in range(0, len(prompts.ids), batch * asked.sessions):
            rows = slice(at, at + batch * asked.sessions)
            forced = prompts.forced and prompts.forced[rows]
            how: dict[str, Any] = {"forced": forced, "sampling": plan.sampling, "keep_logits": asked.forced}
            if asked.sessions > 1:
                ran: Sequence[Decoded | DecodedBatch] = take_turns(decoder, prompts.ids[rows], n_new, **how)
            else:
                ran = [decoder.decode_batch(prompts.ids[rows], n_new, **how)]
            for one in ran:
                done.append(one._replace(logits=None))
                its_ids = one.ids if isinstance(one, DecodedBatch) else [one.ids]
                ids += its_ids
                if one.logits is not None:
                    logits_BNV = one.logits if isinstance(one, DecodedBatch) else one.logits[None]
                    losses.append(nll(logits_BNV, its_ids))
                if asked.floor:
                    floors.append(decoder.floor(one))
                tokens += len(its_ids) * n_new
            if bar is not None:
                bar.update(tokens, f"  {tokens / max(monotonic() - begin, 1e-3):.1f} tokens/s")
        return {
            "gates": asked.delta if run.tuned and asked.delta else "base", "capacity": decoder.capacity, "policy": run.policy,
            "admission": run.admission, "batch": batch, "new_tokens": n_new, "reroute": run.reroute, "sessions": by_session(done, asked.sessions), **asdict(decoder.settings),
            **figures(decoder, done, floors), "perplexity": torch.cat(losses).mean().exp().item() if losses else None,
            "texts": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
        }  # fmt: skip

    total = len(prompts.ids) * sum(n_new for _, _, n_new, _ in combinations) * runs // len(combinations)
    with progress("decode", total) if len(prompts.ids) * runs > 1 else nullcontext() as bar:
        for throttle, batch, n_new, capacity in combinations:
            run = _Run(capacity, asked.policy, asked.admission, asked.reroute, True)
            row = decoded(run, throttle, batch, n_new)
            if not asked.beside_base:
                yield row
                continue
            slots = decoder.capacity * decoder.n_layers + decoder.staging
            beside = _Run(min(-(-slots // decoder.n_layers), decoder.n_experts), "lru", "forced", None, False)
            base = decoded(beside, throttle, batch, n_new)
            compared = {
                "bytes_of_base": ratio(row["mb_a_token"], base["mb_a_token"]),
                "perplexity_change": ratio(row["perplexity"] - base["perplexity"], base["perplexity"]),
            }
            yield from ({**row, **compared}, base)


def taken(decoder: OffloadedDecoder, plan: Plan) -> Iterator[str]:
    """What is not as it was asked for, or not as quick as it could be."""
    yield from unpacked(decoder.small, decoder.device.type, decoder.dtype)
    if (most := max(plan.capacities)) > decoder.n_experts:
        yield f"--cache {most} is taken as {decoder.n_experts}: these are all experts of a layer"
    if (ram := decoder.settings.ram) < plan.settings.ram:
        yield f"--ram is taken as {show_size(ram)}: that holds all experts"


def room_of(config: dict, plan: Plan, asked: Asked, model: str) -> int | None:
    """Tokens that the model's positions leave for the prompt; None where it has no limit. Raises UsageError."""
    longest, most = config.get("max_position_embeddings"), 1 if asked.flexible else max(plan.tokens)
    if not isinstance(longest, int):
        return None
    needed = asked.context or 1
    if needed + most > longest:
        changes: dict[str, Any] = {"context": longest - most}
        if most >= longest or asked.context is None:
            fewer = min(32, max(1, longest // 2))
            changes = {"tokens": fewer, "context": asked.context and min(asked.context, longest - fewer)}
        raise UsageError(
            f"{needed} tokens of prompt and {most} new ones are more than the {longest} that {model} was made for.",
            asked.command(model, **changes),
        )
    return longest - most


def _prompts(
    asked: Asked, plan: Plan, model: str, checkpoint: Checkpoint, tokenizer: Any, room: int | None
) -> _Prompts:
    """As many as every batch size divides."""
    together = lcm(*plan.batches)
    texts: Iterable[tuple[int, list[int]]]
    if asked.prompts is None:
        found = ids_of(tokenizer, PROMPT if asked.prompt is None else asked.prompt, asked, model)
        if room is not None and asked.context is None and len(found) > room:
            most = max(plan.tokens)
            raise UsageError(
                f"{len(found)} tokens of prompt and {most} new ones are more than the {room + most} that {model} was made for.",
                asked.command(model, context=room),
            )
        if together > 1 and plan.sampling is None:
            raise UsageError(
                f"--batch {asked.batch} of one prompt says the same in every row: name more prompts, or sample.",
                asked.command(model, prompt=None, prompts="demo"),
            )
        texts, source, wanted = repeat((1, found)), "one prompt", together
    else:
        recipe = default_recipe(model, checkpoint.model_type)
        texts, source = load_in_order(
            asked.prompts, recipe, tokenizer, asked.command(model, prompts="demo"), asked.delta
        )
        wanted = asked.requests or max(recipe.evaluate.measured, together, asked.sessions)
        if wanted < together:
            raise UsageError(
                f"--requests {wanted} is fewer than the {together} that --batch {asked.batch} takes together.",
                asked.command(model, requests=together),
            )
    context = asked.context + max(plan.tokens) if asked.context and asked.forced else asked.context
    prompts, notes = lay_out(texts, wanted, together=together, context=context, room=room)
    if not prompts:
        length = f" of {context} tokens" if context else ""
        raise DataError(
            f"the texts give no prompt{length}."
            if together == 1
            else f"the texts give fewer than the {together} prompts{length} that --batch {asked.batch} takes together.",
            asked.command(model, batch=None, context=None),
        )
    rows, ids = [row for row, _ in prompts], [ids for _, ids in prompts]
    forced = [of[asked.context :] for of in ids] if asked.forced else None
    ids = [of[: asked.context] for of in ids] if asked.forced else ids
    return _Prompts(ids, forced, None if asked.prompts is None else rows, source, notes)


def ids_of(tokenizer: Any, prompt: str, asked: Asked, model: str) -> list[int]:
    """Raises DataError for a prompt without a token."""
    mended = asked.command(model, prompt="Once upon a time")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise DataError("the prompt is not UTF-8 text.", mended) from None
    ids = tokenizer(prompt).input_ids
    if not ids:
        raise DataError("the prompt holds no token.", mended)
    return ids
