"""remoe decode: continue prompts with the experts left on disk, once or in a sweep of settings."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import product, repeat
from math import lcm
from time import monotonic
from typing import Any, NamedTuple

from remoe_cli import __version__
from remoe_cli.apply import find_delta
from remoe_cli.cache import choose, live_policies
from remoe_cli.console import note, progress
from remoe_cli.delta import gates_for
from remoe_cli.environment import check_threads, device_name, pick_device, versions
from remoe_cli.errors import CacheError, DataError, instead, UsageError
from remoe_cli.families import family_of
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.hub.resolve import fetch_config, resolve
from remoe_cli.measure.decode_options import Asked, check_for_model, fitted, Plan, plan_of, PROMPT, shorter_of
from remoe_cli.measure.decoded import figures
from remoe_cli.measure.prompts import default_recipe, lay_out, load_in_order
from remoe_cli.offload import DecodedBatch, Floor, OffloadedDecoder
from remoe_cli.offload.compute import compute_threads
from remoe_cli.sizes import show_size
from remoe_cli.train.data import load_tokenizer

FORMAT = 1
_WARM_UP = 2  # tokens of prompt: enough for first calls to allocate, few enough to touch few experts


class _Prompts(NamedTuple):
    """ids: of each request. rows: of the source, from 1 on, in which they begin, None for --prompt. source: for display.
    notes: what is not as it was asked for."""

    ids: list[list[int]]
    rows: list[int] | None
    source: str
    notes: list[str]


def decode(model: str, asked: Asked) -> dict[str, Any]:
    """Texts, counts and times of every combination of settings, as docs/decode.md lists them.

    Raises RemoeError for every mistake, most of them before anything is loaded.
    """
    with instead(asked.command(model, policy=None)):
        check_live(asked.policy)
    plan = plan_of(asked, model)
    with instead(asked.command(model, threads=None)):
        check_threads(asked.threads)
    with instead(asked.command(model, device="cpu")):
        where = pick_device(asked.device)
    found = fetch_config(model)
    family_of(found.config, model)
    check_for_model(plan, found.config["num_experts_per_tok"], asked, model)
    room = _room(found.config, plan, asked, model)
    checkpoint = resolve(found)
    change = find_delta(asked.delta) if asked.delta is not None else None
    if change is not None and change.is_applied(checkpoint):
        change = None
    tokenizer = load_tokenizer(checkpoint)
    prompts = _prompts(asked, plan, model, checkpoint, tokenizer, room)
    longest = max(map(len, prompts.ids)) + max(plan.tokens)
    threads = compute_threads(asked.threads)

    def again(**changes: Any) -> str:
        return asked.command(model, **changes)

    with fitted(again, plan.capacities, shorter_of(plan, longest)), instead(again(ram=None), UsageError):
        decoder = OffloadedDecoder(
            checkpoint, max(plan.capacities), asked.policy, admission=asked.admission, device=where, threads=threads,
            settings=plan.settings, pack=asked.pack, batch=max(plan.batches), tokens=longest * max(plan.batches),
        )  # fmt: skip
    with decoder:
        if change is not None:
            decoder.apply_gates(gates_for(decoder.disk_names, change))
        notes = [*prompts.notes, *_taken(decoder, plan)]
        for sentence in notes:
            note(f"Note: {sentence}")
        rows = list(_rows(decoder, plan, asked, prompts.ids, tokenizer))
        known = versions()
        return {
            "format": FORMAT,
            "remoe": __version__,
            "requested": {"model": model, **asdict(asked), "pack": asked.pack and str(asked.pack)},
            "model": {
                "id": checkpoint.id, "commit": checkpoint.commit, "moe_layers": decoder.n_layers,
                "n_experts": decoder.n_experts, "top_k": decoder.top_k, "expert_bytes": decoder.expert_bytes,
            },
            "conditions": {
                "device": where, "device_name": device_name(where), "dtype": str(decoder.dtype).removeprefix("torch."),
                "threads": threads, "torch": known["torch"],
                "transformers": known["transformers"], "prompts": prompts.source,
                "prompt_rows": prompts.rows, "prompt_tokens": [len(ids) for ids in prompts.ids],
                "sampling": plan.sampling and asdict(plan.sampling), "io": decoder.io, "io_reason": decoder.io_reason,
            },
            "notes": notes,
            "rows": rows,
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


def _rows(
    decoder: OffloadedDecoder, plan: Plan, asked: Asked, prompts: list[list[int]], tokenizer: Any
) -> Iterator[dict[str, Any]]:
    """One row a combination: throttle by throttle, then batch, tokens, cache."""
    capacities = list(dict.fromkeys(min(capacity, decoder.n_experts) for capacity in plan.capacities))
    combinations = list(product(plan.throttles, plan.batches, plan.tokens, capacities))
    if len(combinations) > 1:
        decoder.decode(prompts[0][:_WARM_UP], 2)
    jobs = len(prompts) * len(combinations)
    total = len(prompts) * sum(n_new for _, _, n_new, _ in combinations)
    tokens, begin = 0, monotonic()
    with progress("decode", total) if jobs > 1 else nullcontext() as bar:
        for throttle, batch, n_new, capacity in combinations:
            settings = replace(decoder.settings, throttle=throttle)
            decoder.configure(capacity, asked.policy, admission=asked.admission, batch=batch, settings=settings)
            done: list[DecodedBatch] = []
            floors: list[Floor] = []
            ids: list[list[int]] = []
            for at in range(0, len(prompts), batch):
                group = prompts[at : at + batch]
                one = decoder.decode_batch(group, n_new, sampling=plan.sampling)
                done.append(one)
                ids += one.ids
                if asked.floor:
                    floors.append(decoder.floor(one))
                tokens += batch * n_new
                if bar is not None:
                    bar.update(tokens, f"  {tokens / max(monotonic() - begin, 1e-3):.1f} tokens/s")
            yield {
                "capacity": decoder.capacity, "policy": asked.policy, "admission": asked.admission, "batch": batch,
                "new_tokens": n_new, **asdict(decoder.settings), **figures(decoder, done, floors),
                "texts": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
            }  # fmt: skip


def _taken(decoder: OffloadedDecoder, plan: Plan) -> Iterator[str]:
    """Where there is no use for as much as was asked for."""
    if (most := max(plan.capacities)) > decoder.n_experts:
        yield f"--cache {most} is taken as {decoder.n_experts}: these are all experts of a layer"
    if (ram := decoder.settings.ram) < plan.settings.ram:
        yield f"--ram is taken as {show_size(ram)}: that holds all experts"


def _room(config: dict, plan: Plan, asked: Asked, model: str) -> int | None:
    """Tokens that the model's positions leave for the prompt; None where it has no limit. Raises UsageError."""
    longest, most = config.get("max_position_embeddings"), max(plan.tokens)
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
        found = _of_text(tokenizer, PROMPT if asked.prompt is None else asked.prompt, asked, model)
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
        texts, source = load_in_order(asked.prompts, recipe, tokenizer, asked.command(model, prompts="demo"))
        wanted = asked.requests or max(recipe.evaluate.measured, together)
        if wanted < together:
            raise UsageError(
                f"--requests {wanted} is fewer than the {together} that --batch {asked.batch} takes together.",
                asked.command(model, requests=together),
            )
    prompts, notes = lay_out(texts, wanted, together=together, context=asked.context, room=room)
    if not prompts:
        length = f" of {asked.context} tokens" if asked.context else ""
        raise DataError(
            f"the texts give no prompt{length}."
            if together == 1
            else f"the texts give fewer than the {together} prompts{length} that --batch {asked.batch} takes together.",
            asked.command(model, batch=None, context=None),
        )
    rows, ids = [row for row, _ in prompts], [ids for _, ids in prompts]
    return _Prompts(ids, None if asked.prompts is None else rows, source, notes)


def _of_text(tokenizer: Any, prompt: str, asked: Asked, model: str) -> list[int]:
    mended = asked.command(model, prompt="Once upon a time")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise DataError("the prompt is not UTF-8 text.", mended) from None
    ids = tokenizer(prompt).input_ids
    if not ids:
        raise DataError("the prompt holds no token.", mended)
    return ids
