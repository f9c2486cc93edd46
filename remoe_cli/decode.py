"""remoe decode: continue one prompt with the experts left on disk."""

from typing import Any

from remoe_cli.apply import find_delta
from remoe_cli.cache import POLICIES
from remoe_cli.cache.expert_cache import ADMISSIONS
from remoe_cli.delta import gates_for
from remoe_cli.environment import device_name, pick_device
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
    """Text, counts and latency of one greedy continuation. Raises CacheError for C < K before anything is loaded."""
    live = [name for name in POLICIES if name != "belady"]
    if policy not in live:
        raise UsageError(
            f"a running decoder takes the policies {', '.join(live)}, not {policy!r}.", "remoe decode demo --cache 8"
        )
    if admission not in ADMISSIONS:
        raise UsageError(f"--admission is {' or '.join(ADMISSIONS)}, not {admission!r}.", "remoe decode demo --cache 8")
    if tokens < 1:
        raise UsageError("--tokens is at least 1.", "remoe decode demo --cache 8 --tokens 32")
    found = fetch_config(model)
    family_of(found.config, model)
    top_k = int(found.config["num_experts_per_tok"])
    if capacity < top_k:
        raise CacheError(
            f"--cache {capacity} is too small for {model}: each token runs {top_k} experts a layer, so the decoder needs at least that.",
            f"remoe decode {model} --cache {top_k}",
        )
    where = pick_device(device)
    checkpoint = resolve(found)
    tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer(prompt).input_ids
    if not ids:
        raise DataError("the prompt holds no token.", "remoe decode MODEL --cache 8 --prompt 'Once upon a time'")
    with OffloadedDecoder(checkpoint, capacity, policy, admission=admission, device=where, threads=threads) as decoder:
        if delta is not None:
            change = find_delta(delta)
            if not change.is_applied(checkpoint):
                decoder.apply_gates(gates_for(decoder.disk_names, change))
        done = decoder.decode(ids, tokens)
    return {
        "text": tokenizer.decode(done.ids, skip_special_tokens=True),
        "prompt_tokens": len(ids),
        "new_tokens": len(done.ids),
        "capacity": capacity,
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
        **latency_ms([done.latency.ttft_s], [done.latency.itl_s]),
    }


def summary(done: dict[str, Any]) -> str:
    tpot = done["tpot_ms"]["mean"] if done["tpot_ms"] else None
    return "\n".join(
        [
            done["text"],
            "",
            f"C = {done['capacity']}, {done['policy']}, {done['admission']}: hit {done['hit_ratio']:.3f}, {done['misses']:,} loads, "
            f"{done['mb_a_token']:.3f} MB a token (io {done['io']})",
            f"ttft {done['ttft_ms']['mean']:.1f} ms, tpot {'n/a' if tpot is None else f'{tpot:.2f} ms'} on {done['device']}",
        ]
    )
