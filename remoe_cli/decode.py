"""remoe decode: continue one prompt with the experts left on disk."""

from typing import Any

import torch

from remoe_cli.apply import find_delta
from remoe_cli.cache import choose, live_policies
from remoe_cli.cache.expert_cache import ADMISSIONS
from remoe_cli.delta import gates_for
from remoe_cli.environment import check_threads, device_name, pick_device
from remoe_cli.errors import CacheError, DataError, UsageError
from remoe_cli.families import family_of
from remoe_cli.hub.resolve import fetch_config, resolve
from remoe_cli.offload import OffloadedDecoder
from remoe_cli.report.cells import latency_ms
from remoe_cli.train.data import load_tokenizer


def decode(
    model: str,
    capacity: int,
    *,
    delta: str | None = None,
    prompt: str = "",
    tokens: int = 32,
    policy: str = "lru",
    admission: str = "forced",
    threads: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Text, counts and latency of one greedy continuation, and with which settings it ran.

    Raises RemoeError for every mistake, most of them before anything is loaded.
    """
    check_live(policy)
    if admission not in ADMISSIONS:
        raise UsageError(f"--admission is {' or '.join(ADMISSIONS)}, not {admission!r}.", "remoe decode demo --cache 8")
    if tokens < 1:
        raise UsageError("--tokens is at least 1.", "remoe decode demo --cache 8 --tokens 32")
    check_threads(threads)
    where = pick_device(device)
    found = fetch_config(model)
    family_of(found.config, model)
    top_k = found.config["num_experts_per_tok"]
    if capacity < top_k:
        raise CacheError(
            f"--cache {capacity} is too small for {model}: each token runs {top_k} experts a layer, so the decoder needs at least that.",
            f"remoe decode {model} --cache {top_k}",
        )
    checkpoint = resolve(found)
    change = find_delta(delta) if delta is not None else None
    if change is not None and change.is_applied(checkpoint):
        change = None
    tokenizer = load_tokenizer(checkpoint)
    ids = _prompt_ids(tokenizer, prompt)
    longest = found.config.get("max_position_embeddings")
    if isinstance(longest, int) and len(ids) + tokens > longest:
        raise UsageError(
            f"{len(ids)} tokens of prompt and {tokens} new ones are more than the {longest} that {model} was made for.",
            "the same command with fewer --tokens",
        )
    with OffloadedDecoder(checkpoint, capacity, policy, admission=admission, device=where, threads=threads) as decoder:
        if change is not None:
            decoder.apply_gates(gates_for(decoder.disk_names, change))
        done = decoder.decode(ids, tokens)
    return {
        "text": tokenizer.decode(done.ids, skip_special_tokens=True),
        "prompt_tokens": len(ids),
        "new_tokens": len(done.ids),
        "requested": {"capacity": capacity, "threads": threads, "device": device},
        "capacity": decoder.capacity,
        "policy": policy,
        "admission": admission,
        "hits": done.counts.hits,
        "misses": done.counts.misses,
        "hit_ratio": done.counts.hits / max(1, done.counts.accesses),
        "bytes": done.counts.decode.bytes,
        "prefill_bytes": done.counts.prefill.bytes,
        "mb_a_token": done.counts.decode.bytes / max(1, len(done.ids) - 1) / 1e6,
        "io": done.counts.io,
        "device": device_name(where),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "threads": threads or torch.get_num_threads(),
        **latency_ms([done.latency.ttft_s], [done.latency.itl_s]),
    }


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


def _prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise DataError("the prompt is not UTF-8 text.", "the same command with another --prompt") from None
    ids = tokenizer(prompt).input_ids
    if not ids:
        raise DataError("the prompt holds no token.", "remoe decode MODEL --cache 8 --prompt 'Once upon a time'")
    return ids


def summary(done: dict[str, Any]) -> str:
    tpot = done["tpot_ms"]["mean"] if done["tpot_ms"] else None
    asked = done["requested"]["capacity"]
    slots = f"C = {done['capacity']}" + (f" (all there are; {asked} asked for)" if asked != done["capacity"] else "")
    return "\n".join(
        [
            done["text"],
            "",
            f"{slots}, {done['policy']}, {done['admission']}: hit {done['hit_ratio']:.3f}, {done['misses']:,} loads, "
            f"{done['mb_a_token']:.3f} MB a token (io {done['io']})",
            f"ttft {done['ttft_ms']['mean']:.1f} ms, tpot {'n/a' if tpot is None else f'{tpot:.2f} ms'} "
            f"on {done['device']}, {done['dtype']}, {done['threads']} threads",
        ]
    )
