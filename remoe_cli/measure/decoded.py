"""What decoded requests did, as the rows of `remoe decode` and the measured cells of `remoe eval` hold it (docs/decode.md)."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from remoe_cli.offload import Decoded, DecodedBatch, Floor, InPlaceCount, IoCount, OffloadedDecoder
from remoe_cli.report import metrics
from remoe_cli.report.cells import latency_ms
from remoe_cli.report.drawn import token_times


def figures(
    decoder: OffloadedDecoder, done: Sequence[Decoded | DecodedBatch], floors: Sequence[Floor] = ()
) -> dict[str, Any]:
    """Sums over the requests, and their times. floors: of each of them, where they were measured."""
    counts = [one.counts for one in done]
    hits, misses, evictions, proactive, guesses, guessed, rerouted = (
        sum(getattr(one, name) for one in counts)
        for name in ("hits", "misses", "evictions", "proactive", "guesses", "guessed", "rerouted")
    )
    steps = sum(len(one.latency.itl_s) for one in done)
    tokens = sum(len(one.latency.itl_s) * _rows(one) for one in done)
    decode, prefill = (_sum([getattr(one, phase) for one in counts]) for phase in ("decode", "prefill"))
    split = _split(done, steps)
    return {
        "requests": sum(map(_rows, done)),
        "steps": steps,
        "staging": decoder.staging,
        "accesses": hits + misses,
        "hits": hits,
        "misses": misses,
        "evictions": evictions,
        "proactive": proactive,
        "hit_ratio": metrics.ratio(hits, hits + misses),
        "adjusted_hit_ratio": metrics.adjusted_hit_ratio(hits + misses, misses - guessed, proactive + guesses),
        "guesses": guesses,
        "guessed": guessed,
        "rerouted": rerouted,
        "in_place": _in_place(done) if decoder.settings.in_place else None,
        "light": sum(one.light for one in counts),
        **_read("", decode),
        **_read("prefill_", prefill),
        "mb_a_token": metrics.ratio(decode.bytes / 1e6, tokens),
        "io": counts[0].io,
        "split_ms": split,
        "tokens_ms": token_times(
            [s for one in done for s in one.split.tokens["wait"]],
            [s for one in done for s in one.split.tokens["experts"]],
            [s for one in done for s in one.latency.itl_s],
        ),
        "prefill_split_ms": _prefill_split(done),
        "requests_ms": [one.latency.tpot_s and 1e3 * one.latency.tpot_s for one in done],
        "limit": _limit(split, decode, decoder),
        "floor": _floor(done, floors),
        **latency_ms([one.latency.ttft_s for one in done], [one.latency.itl_s for one in done]),
    }


def _in_place(done: Sequence[Decoded | DecodedBatch]) -> dict[str, Any]:
    """won_ms: what bringing these experts would have taken by the measured costs, less what computing them there took."""
    its = [one.counts.in_place for one in done]
    in_ram, computed, spared, seconds, brought_s = (
        sum(getattr(one, field.name) for one in its) for field in fields(InPlaceCount)
    )
    return {
        "in_ram": in_ram, "computed": computed, "spared": spared, "ms": 1e3 * seconds, "won_ms": 1e3 * (brought_s - seconds)
    }  # fmt: skip


def by_session(done: Sequence[Decoded | DecodedBatch], sessions: int) -> list[dict[str, Any]] | None:
    """What each place in the turn had of the shared cache: place s served the requests s, s + sessions, ... None for a single one."""
    if sessions == 1:
        return None
    found = []
    for place in range(min(sessions, len(done))):
        its = done[place::sessions]
        hits, misses = sum(one.counts.hits for one in its), sum(one.counts.misses for one in its)
        waits = metrics.summary([1e3 * second for one in its for second in one.latency.itl_s])
        steps = sum(len(one.latency.itl_s) for one in its)
        found.append({
            "requests": len(its), "steps": steps, "hits": hits, "misses": misses, "hit_ratio": metrics.ratio(hits, hits + misses),
            "mb_a_token": metrics.ratio(sum(one.counts.decode.bytes for one in its) / 1e6, steps),
            "itl_ms": waits and waits._asdict(),
        })  # fmt: skip
    return found


def nll(logits_BNV: torch.Tensor, ids_BN: Sequence[Sequence[int]]) -> torch.Tensor:
    """[B * N] fp32 on the CPU, nats: the loss of each token that was fed, or would have been next."""
    ids = torch.tensor(ids_BN, device=logits_BNV.device).flatten()
    return torch.nn.functional.cross_entropy(logits_BNV.float().flatten(0, 1), ids, reduction="none").cpu()


def _rows(one: Decoded | DecodedBatch) -> int:
    return len(one.ids) if isinstance(one, DecodedBatch) else 1


def _sum(parts: Sequence[IoCount]) -> IoCount:
    """storage_bytes is None where one of them does not know."""
    total = IoCount()
    for field in fields(IoCount):
        values = [getattr(part, field.name) for part in parts]
        setattr(total, field.name, None if None in values else sum(values))
    return total


def _read(phase: str, count: IoCount) -> dict[str, Any]:
    return {
        f"{phase}reads": count.reads,
        f"{phase}read_calls": count.calls,
        f"{phase}bytes": count.bytes,
        f"{phase}read_bytes": count.read_bytes,
        f"{phase}storage_bytes": count.storage_bytes,
        f"{phase}ram_loads": count.ram,
        f"{phase}busy_s": count.busy_s,
        # with loads from RAM, whose time is in busy_s too, it would be no rate of the disk
        f"{phase}bandwidth": None if count.ram else metrics.ratio(count.read_bytes, count.busy_s),
    }


def _split(done: Sequence[Decoded | DecodedBatch], steps: int) -> dict[str, float] | None:
    """Mean ms of a step; None where there is no step."""
    if not steps:
        return None
    return {name: 1e3 * sum(sum(one.split.tokens[name]) for one in done) / steps for name in done[0].split.tokens}


def _prefill_split(done: Sequence[Decoded | DecodedBatch]) -> dict[str, float]:
    """Mean ms of a request's (or a batch's) prompt."""
    return {name: 1e3 * sum(one.split.prefill[name] for one in done) / len(done) for name in done[0].split.prefill}


def _limit(split: dict[str, float] | None, decode: IoCount, decoder: OffloadedDecoder) -> dict[str, Any] | None:
    """by: what most of a step's time goes to, `compute` or what experts are waited for from; share: of the step waited."""
    if split is None or not (step := sum(split.values())):
        return None
    share = split["wait"] / step
    source = "throttle" if decoder.settings.throttle else "RAM" if 2 * decode.ram > decode.reads else "storage"
    return {"by": source if share >= 0.5 else "compute", "wait_share": share}


def _floor(done: Sequence[Decoded | DecodedBatch], floors: Sequence[Floor]) -> dict[str, Any] | None:
    """share: time of the loads alone over the time of the same steps; 1 would be a decoder that only loads."""
    if not floors:
        return None
    alone, whole = sum(sum(one.token_s) for one in floors), sum(sum(one.latency.itl_s) for one in done)
    steps = metrics.summary([1e3 * second for one in floors for second in one.token_s])
    return {
        "step_ms": steps and steps._asdict(),
        "bandwidth": metrics.ratio(sum(one.bytes for one in floors), sum(one.busy_s for one in floors)),
        "share": metrics.ratio(alone, whole),
    }
