"""Timing the offloaded decoder on held-out requests, and checking it: counts against the simulator, tokens against residency."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from remoe_cli import memory
from remoe_cli.cache import choose, live_policies, replay
from remoe_cli.cache.reroute import Rule
from remoe_cli.console import progress
from remoe_cli.errors import UsageError
from remoe_cli.families import Heads, KINDS
from remoe_cli.families.loader import experts_on_disk
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.measure.decoded import figures
from remoe_cli.measure.requests import Requests
from remoe_cli.offload import budget, Decoded, Floor, OffloadedDecoder, Settings
from remoe_cli.offload.layout import Layout
from remoe_cli.offload.pack import packed
from remoe_cli.offload.settings import HINT
from remoe_cli.offload.small import unpacked
from remoe_cli.offload.tiers import host_bytes
from remoe_cli.routing import RoutingTrace
from remoe_cli.sizes import show_size


class Offloaded(NamedTuple):
    """rows: arm -> one dict a policy and capacity, as in docs/report.md; requests: how many were timed. io: "direct" or "buffered",
    None where nothing was timed."""

    rows: dict[str, list[dict[str, Any]]]
    requests: int
    notes: list[str]
    io: str | None = None


def check_decoder(
    checkpoint: Checkpoint, dtype: torch.dtype, device: str, capacity: int, settings: Settings, pack: Path | None,
    tokens: int,
) -> None:  # fmt: skip
    """Before other long work: raises what the OffloadedDecoder would for too little memory, a RAM tier that is too small, or
    packed experts of something else."""
    layers = experts_on_disk(checkpoint)
    layout, n_experts = Layout(layers, dtype, direct=settings.io == "direct"), layers[0].n_experts
    size = layout.slot_bytes
    if 0 < settings.ram < size:
        raise UsageError(f"a RAM tier of {settings.ram} bytes holds no expert; one takes {size}.", HINT)
    budget.require(
        checkpoint, layers, dtype, device, min(capacity, n_experts), row_bytes=size, rows=lambda _: settings.guess,
        ram=min(settings.ram, len(layers) * n_experts * size), top_k=layers[0].top_k,
        host=host_bytes(layout, settings.readers, torch.device(device)), tokens=tokens,
    )  # fmt: skip
    if pack is not None:
        packed(layers, checkpoint, pack)


def measure_offloaded(
    decoder: OffloadedDecoder,
    arms: Mapping[str, Mapping[str, torch.Tensor]],
    requests: Requests,
    capacities: Sequence[int],
    *,
    heads: Mapping[str, Heads | None] | None = None,
    policies: Sequence[str] = ("lru",),
    floor: bool = False,
    reroute: Rule | None = None,
) -> Offloaded:
    """Forced continuations of every request, arms taken in turn request by request, so that a noisy machine is noisy for
    all alike. A capacity below K is not run and says so. heads: of the arms that have some. policies: each for the arms that
    it can serve, see `runs`. floor: also load the same experts without computing. reroute: bends choices towards residents;
    then no cell is compared with the resident model, which says something else."""
    heads = heads or {}
    serving = {policy: [arm for arm in arms if runs(policy, heads.get(arm), decoder.settings)] for policy in policies}
    served = {policy: its for policy, its in serving.items() if its}
    runnable = [capacity for capacity in capacities if capacity >= decoder.top_k]
    rows: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for arm in arms:
        rows[arm] += [
            {"capacity": c, "skipped": f"needs C >= {decoder.top_k}"} for c in capacities if c < decoder.top_k
        ]
    settings = decoder.settings
    exact, notes = _exactness(decoder, arms, heads, served, requests, [] if reroute else runnable)
    total = len(runnable) * len(requests.prompts_RP) * sum(map(len, served.values()))
    with progress("measure offloaded", total) as bar:
        done = 0
        for policy, capacity in product(served, runnable):
            decoder.configure(capacity, settings=settings)
            decoder.decode(requests.prompts_RP[0].tolist(), 3)  # warm-up: first calls allocate
            decoder.configure(capacity, policy, settings=settings, reroute=reroute)
            decoded: dict[str, list[Decoded]] = {arm: [] for arm in served[policy]}
            floors: dict[str, list[Floor]] = {arm: [] for arm in served[policy]}
            for prompt, forced in zip(requests.prompts_RP.tolist(), requests.continuations_RS.tolist(), strict=True):
                for arm in served[policy]:
                    decoder.apply_gates(arms[arm], heads.get(arm))
                    decoded[arm].append(decoder.decode(prompt, len(forced), forced=forced))
                    if floor:
                        floors[arm].append(decoder.floor(decoded[arm][-1]))
                    done += 1
                    bar.update(done)
            for arm in served[policy]:
                row = _row(decoded[arm], floors[arm], capacity, policy, decoder)
                rows[arm].append({**row, "exact": exact.get((policy, arm, capacity))})
    decoder.apply_gates({})
    if not runnable:
        return Offloaded(rows, 0, notes)
    notes += unpacked(decoder.small, decoder.device.type, decoder.dtype)
    if decoder.io_reason:
        how = "past" if decoder.io == "direct" else "through"
        notes.append(f"experts were read {how} the page cache: {decoder.io_reason}")
    return Offloaded(rows, len(requests.prompts_RP), notes, decoder.io)


def runs(policy: str, heads: Heads | None, settings: Settings) -> bool:
    """Whether a decoder with these heads runs a policy with forced admission."""
    chosen = choose(policy)
    there = heads.kinds if heads is not None else ()
    return (
        chosen.name in live_policies()
        and chosen.policy.admits
        and not (chosen.policy.refines and settings.guess)
        and {*chosen.policy.needs} & {*KINDS} <= {*there}
    )


def _row(
    decoded: Sequence[Decoded], floors: Sequence[Floor], capacity: int, policy: str, decoder: OffloadedDecoder
) -> dict[str, Any]:
    found = figures(decoder, decoded, floors)
    simulated = replay(RoutingTrace.concat([one.trace for one in decoded]), policy, capacity)
    counted = [found[name] for name in ("hits", "misses", "evictions", "proactive", "steps", "reads", "bytes")]
    loads = simulated.loads - found["guessed"] + found["guesses"]
    expected = [
        simulated.hits, simulated.misses, simulated.evictions, simulated.proactive, simulated.tokens, loads,
        loads * decoder.expert_bytes,
    ]  # fmt: skip
    return {
        "capacity": capacity,
        "policy": policy,
        "admission": "forced",
        "skipped": None,
        **found,
        "counts_match": counted == expected,
    }


def _exactness(
    decoder: OffloadedDecoder,
    arms: Mapping[str, Mapping[str, torch.Tensor]],
    heads: Mapping[str, Heads | None],
    served: Mapping[str, Sequence[str]],
    requests: Requests,
    capacities: Sequence[int],
) -> tuple[dict[tuple[str, str, int], bool], list[str]]:
    """Greedy logits of the first request with C slots and with all E, bit for bit, on the same path. served: policy -> its
    arms."""
    if not capacities:
        return {}, []
    needed, room = decoder.n_experts * decoder.n_layers * decoder.slot_bytes, _room(decoder)
    given_back = (decoder.capacity * decoder.n_layers + decoder.staging) * decoder.slot_bytes
    if decoder.device.type == "cpu":
        needed += decoder.settings.ram  # its memory is taken when experts come in, not before
    if needed > 0.8 * (room.nbytes + given_back):
        shown = f"all experts need {show_size(needed)}, {room.limit} leaves {show_size(room.nbytes)}"
        return {}, [f"exactness not checked: {shown}"]
    prompt, n_new = requests.prompts_RP[0].tolist(), min(16, requests.continuations_RS.shape[1])
    resident: dict[str, torch.Tensor | None] = {}
    exact: dict[tuple[str, str, int], bool] = {}

    def logits(arm: str) -> torch.Tensor | None:
        decoder.apply_gates(arms[arm], heads.get(arm))
        return decoder.decode(prompt, n_new, keep_logits=True).logits

    settings = replace(decoder.settings, throttle=None)
    decoder.configure(decoder.n_experts, settings=settings)
    for arm in arms:
        resident[arm] = logits(arm)
    for policy, capacity in product(served, capacities):
        decoder.configure(capacity, policy, settings=settings)
        for arm in served[policy]:
            exact[policy, arm, capacity] = bool(torch.equal(logits(arm), resident[arm]))  # type: ignore[arg-type]
    return exact, []


def _room(decoder: OffloadedDecoder) -> memory.Room:
    return memory.gpu(str(decoder.device)) if decoder.device.type == "cuda" else memory.available()
