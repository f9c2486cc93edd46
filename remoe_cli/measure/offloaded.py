"""Timing the offloaded decoder on held-out requests, and checking it: counts against the simulator, tokens against residency."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from remoe_cli.cache import replay
from remoe_cli.console import progress
from remoe_cli.measure.requests import Requests
from remoe_cli.offload import Decoded, OffloadedDecoder
from remoe_cli.report.cells import latency_ms
from remoe_cli.routing import RoutingTrace


class Offloaded(NamedTuple):
    """rows: arm -> one dict a capacity, as in docs/report.md; requests: how many were timed."""

    rows: dict[str, list[dict[str, Any]]]
    requests: int
    notes: list[str]


def measure_offloaded(
    decoder: OffloadedDecoder,
    arms: Mapping[str, Mapping[str, torch.Tensor]],
    requests: Requests,
    capacities: Sequence[int],
    *,
    policy: str = "lru",
) -> Offloaded:
    """Forced continuations of every request, arms taken in turn request by request, so that a noisy machine is noisy for
    all alike. A capacity below K is not run and says so."""
    runnable = [capacity for capacity in capacities if capacity >= decoder.top_k]
    rows: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for arm in arms:
        rows[arm] += [
            {"capacity": c, "skipped": f"needs C >= {decoder.top_k}"} for c in capacities if c < decoder.top_k
        ]
    exact, notes = _exactness(decoder, arms, requests, runnable)
    total = len(runnable) * len(requests.prompts_RP) * len(arms)
    with progress("measure offloaded", total) as bar:
        done = 0
        for capacity in runnable:
            decoder.configure(capacity, policy)
            decoder.decode(requests.prompts_RP[0].tolist(), 3)  # warm-up: first calls allocate
            decoded: dict[str, list[Decoded]] = {arm: [] for arm in arms}
            for prompt, forced in zip(requests.prompts_RP.tolist(), requests.continuations_RS.tolist(), strict=True):
                for arm, gates in arms.items():
                    decoder.apply_gates(gates)
                    decoded[arm].append(decoder.decode(prompt, len(forced), forced=forced))
                    done += 1
                    bar.update(done)
            for arm in arms:
                rows[arm].append(_row(decoded[arm], capacity, policy, decoder, exact.get((arm, capacity))))
    decoder.apply_gates({})
    return Offloaded(rows, len(requests.prompts_RP) if runnable else 0, notes)


def _row(
    decoded: Sequence[Decoded], capacity: int, policy: str, decoder: OffloadedDecoder, exact: bool | None
) -> dict[str, Any]:
    trace = RoutingTrace.concat([one.trace for one in decoded])
    simulated = replay(trace, policy, capacity)
    hits, misses, evictions, reads, read_bytes, calls, storage = (
        sum(values)
        for values in zip(
            *(
                (d.counts.hits, d.counts.misses, d.counts.evictions, d.counts.decode.reads, d.counts.decode.bytes,
                 d.counts.decode.calls, d.counts.decode.storage_bytes or 0)
                for d in decoded
            ), strict=True
        )
    )  # fmt: skip
    counts_match = (hits, misses, evictions) == (simulated.hits, simulated.misses, simulated.evictions) and (
        reads,
        read_bytes,
    ) == (misses, misses * decoder.expert_bytes)
    return {
        "capacity": capacity,
        "policy": policy,
        "admission": "forced",
        "staging": decoder.staging,
        "skipped": None,
        "steps": simulated.tokens,
        "hits": hits,
        "misses": misses,
        "evictions": evictions,
        "hit_ratio": hits / (hits + misses),
        "reads": reads,
        "read_calls": calls,
        "bytes": read_bytes,
        "storage_bytes": storage if decoded[0].counts.decode.storage_bytes is not None else None,
        "prefill_reads": sum(d.counts.prefill.reads for d in decoded),
        "prefill_bytes": sum(d.counts.prefill.bytes for d in decoded),
        "mb_a_token": read_bytes / simulated.tokens / 1e6,
        "io": decoded[0].counts.io,
        "counts_match": counts_match,
        "exact": exact,
        **latency_ms([d.latency.ttft_s for d in decoded], [d.latency.itl_s for d in decoded]),
    }


def _exactness(
    decoder: OffloadedDecoder,
    arms: Mapping[str, Mapping[str, torch.Tensor]],
    requests: Requests,
    capacities: Sequence[int],
) -> tuple[dict[tuple[str, int], bool], list[str]]:
    """Greedy logits of the first request with C slots and with all E, bit for bit, on the same path."""
    if not capacities:
        return {}, []
    needed, free = decoder.n_experts * len(decoder.layers) * decoder.slot_bytes, _free_memory(decoder)
    if needed > 0.8 * free:
        return {}, [f"exactness not checked: all experts need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"]
    prompt, n_new = requests.prompts_RP[0].tolist(), min(16, requests.continuations_RS.shape[1])
    logits: dict[tuple[str, int], torch.Tensor] = {}
    for capacity in [decoder.n_experts, *capacities]:
        decoder.configure(capacity)
        for arm, gates in arms.items():
            decoder.apply_gates(gates)
            logits[arm, capacity] = decoder.decode(prompt, n_new, keep_logits=True).logits  # type: ignore[assignment]
    return {
        (arm, c): bool(torch.equal(logits[arm, c], logits[arm, decoder.n_experts])) for arm in arms for c in capacities
    }, []


def _free_memory(decoder: OffloadedDecoder) -> int:
    if decoder.device.type == "cuda":
        return torch.cuda.mem_get_info(decoder.device)[0]
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
