"""remoe plan MODEL --for decode: what an offloaded decoder would keep, load and take a token, from config.json and headers alone."""

from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch

from remoe_cli import memory
from remoe_cli.console import note
from remoe_cli.delta.stored import dtype_label
from remoe_cli.environment import device_name, pick_device
from remoe_cli.errors import command, FamilyError, HubError, MemoryShortError, RemoeError, UsageError
from remoe_cli.families import family_of, find_gates
from remoe_cli.families.loader import meta_model
from remoe_cli.hub.absent import disk_room, require_disk, weight_files_here
from remoe_cli.hub.headers import fetch_headers, Headers
from remoe_cli.hub.known_deltas import known_deltas
from remoe_cli.hub.resolve import fetch_config, Found, resolve
from remoe_cli.offload import budget, OffloadedDecoder
from remoe_cli.offload.compute import compute_threads, require_known
from remoe_cli.offload.shape import Shape, shape_of
from remoe_cli.report.known_misses import known
from remoe_cli.sizes import show_size
from remoe_cli.train import rates

TOKENS = 2048  # of a request, where nothing else is asked for
_STRETCHES = 3  # of reading, whose slowest and fastest bound the time
_STEPS = 32  # of the demo
_MEGABYTE = 1_000_000


class Measured(NamedTuple):
    """Each stretch, the worst first. disk: bytes a second of reads of an expert, past the page cache unless `io` is "buffered"; link:
    of copies to the device, None where they are no copies; weights: of weights in products with one token. layer_s: seconds of a
    layer that has next to none, quartiles."""

    disk: list[float]
    io: str
    link: float | None
    weights: list[float]
    layer_s: list[float]


class _Model(NamedTuple):
    """layers: of which moe_layers hold experts; width: of the hidden state; context: bytes of a request."""

    shape: Shape
    layers: int
    moe_layers: int
    n_experts: int
    top_k: int
    width: int
    context: int

    def needed(self, capacity: int, device: str) -> int:
        """Bytes of the memory that computes, as the decoder itself asks for them."""
        shape, cuda = self.shape, device.startswith("cuda")
        dense, slots = shape.elements * shape.dtype.itemsize, capacity * self.moe_layers * shape.slot_bytes
        beside = (0, 0) if cuda else (shape.loading, shape.host(device))
        return budget.decoder_bytes(dense, slots, *beside, self.context)

    def most(self, nbytes: int, device: str) -> int | None:
        """Slots a layer that so much memory holds, None where it holds not even the experts of one token."""
        every = range(self.n_experts, self.top_k - 1, -1)
        return next((capacity for capacity in every if self.needed(capacity, device) <= nbytes), None)


def plan(
    name: str, memories: Sequence[int] = (), *, tokens: int | None = None, device: str | None = None
) -> dict[str, Any]:
    """memories: bytes that a decoder may take, each planned for; by default what is free. tokens: of the longest request, prompt
    and answer; by default 2048, or as many as the model was made for.

    The result has "refusal" (message and hint) where no memory is enough. Raises RemoeError for a model that cannot be decoded
    with its experts on disk.
    """
    found = fetch_config(name)
    family = family_of(found.config, found.id)
    tokens = _tokens(found.config, tokens, name)
    where = pick_device(device)
    headers = fetch_headers(found)
    model = _sized(name, headers, family.model_type, where, tokens)
    here, absent = weight_files_here(found, headers)
    disk = disk_room(found, absent)
    free = memory.gpu(where) if where.startswith("cuda") else memory.available()
    rooms = [
        {"bytes": size, "asked": bool(memories), "capacity": model.most(size, where)}
        for size in dict.fromkeys(memories or [free.nbytes])
    ]
    refusal: RemoeError | None = None
    try:
        capacity = _largest(name, model, rooms, where, free)
        require_disk(name, disk)
    except (MemoryShortError, HubError) as error:
        refusal = error
    measured = _measure(model, where, Path(disk["folder"]), [] if absent else here)
    near = known(family.model_type, model.width, model.n_experts, model.moe_layers)
    capacities = _ladder(model, [room["capacity"] for room in rooms])
    return {
        "model": name,
        "commit": found.commit,
        "model_type": family.model_type,
        "layers": model.layers,
        "moe_layers": model.moe_layers,
        "n_experts": model.n_experts,
        "top_k": model.top_k,
        "expert_bytes": model.shape.one,
        "experts_bytes": model.shape.one * model.n_experts * model.moe_layers,
        "outside_bytes": model.shape.outside,
        "dtype": dtype_label(model.shape.dtype),
        "tokens": tokens,
        "device": device_name(where),
        "free": free.nbytes,
        "memory": rooms,
        "rows": [_row(model, near.hits(one, model.n_experts, model.top_k), one, where, measured) for one in capacities],
        "known": {"of": near.of, "rows": [_named(row) for row in near.rows], "gains": near.gains},
        "measured": measured._asdict(),
        "deltas": _deltas(found),
        "disk": disk,
        "absent": headers.absent,
        "next": None if refusal else command("decode", name, cache=capacity),
        "refusal": {"message": refusal.message, "hint": refusal.hint} if refusal else None,
    }


def _sized(name: str, headers: Headers, model_type: str, device: str, tokens: int) -> _Model:
    net = meta_model(headers, torch.float32)
    gates = find_gates(net)
    require_known(gates[0].experts, model_type)
    shape = shape_of(headers, net, gates, device)
    if shape is None:
        raise FamilyError(
            f"{name}: neither a weight file is here nor does config.json name a dtype, so its sizes are unknown.",
            command("inspect", name),
        )
    text, context = net.config.get_text_config(), budget.request_bytes(headers.config, shape.dtype, tokens)
    first = gates[0]
    return _Model(shape, text.num_hidden_layers, len(gates), first.n_experts, first.top_k, text.hidden_size, context)


def _tokens(config: dict[str, Any], tokens: int | None, name: str) -> int:
    longest = (config.get("text_config") or config).get("max_position_embeddings")
    most = longest if isinstance(longest, int) else tokens or TOKENS
    if tokens is not None and tokens > most:
        raise UsageError(
            f"--tokens {tokens} is more than the {most} that {name} was made for.",
            command("plan", name, **{"for": "decode"}, tokens=most),
        )
    return tokens or min(TOKENS, most)


def _largest(name: str, model: _Model, rooms: Sequence[dict[str, Any]], device: str, free: memory.Room) -> int:
    """Slots a layer of the largest memory that holds any. Raises MemoryShortError where none does."""
    largest = max(rooms, key=lambda room: room["bytes"])
    if largest["capacity"] is not None:
        return largest["capacity"]
    least = model.needed(model.top_k, device)
    has = "--memory is" if largest["asked"] else f"{free.limit} has"
    raise MemoryShortError(
        f"{name} with {model.top_k} slots a layer, the least, needs {show_size(least)}; {has} {show_size(largest['bytes'])}.",
        command("plan", name, **{"for": "decode"}, memory=f"{-(-least // _MEGABYTE)}MB"),
    )


def _ladder(model: _Model, fitting: Sequence[int | None]) -> list[int]:
    """Cache sizes from the least to all experts, those that fit among them."""
    steps = [model.top_k, *(model.n_experts // part for part in (8, 4, 2, 1)), *(one for one in fitting if one)]
    return sorted({max(step, model.top_k) for step in steps})


def _row(model: _Model, hits: tuple[float, float], capacity: int, device: str, measured: Measured) -> dict[str, Any]:
    """Ranges, the better end first: of most hits and the best rates, and of fewest and the worst."""
    accesses = model.top_k * model.moe_layers
    misses = [accesses * (1 - hit) for hit in reversed(hits)]
    loads = [one * model.shape.one for one in misses]
    best, worst = (_seconds(model, nbytes, end, measured) for nbytes, end in zip(loads, (-1, 0)))
    return {
        "capacity": capacity,
        "memory": model.needed(capacity, device),
        "hit": [*reversed(hits)],
        "misses_a_token": misses,
        "mb_a_token": [nbytes / 1e6 for nbytes in loads],
        "tpot_ms": [1e3 * (best.rest + max(best.experts, best.loads)), 1e3 * sum(worst)],
    }


class _Seconds(NamedTuple):
    """Of a token. experts: the arithmetic of the routed ones, which alone can hide loads."""

    rest: float
    experts: float
    loads: float


def _seconds(model: _Model, loads: float, end: int, measured: Measured) -> _Seconds:
    """At that end of what was measured."""
    shape, rate = model.shape, measured.weights[end]
    met = (shape.elements - shape.looked_up) * shape.dtype.itemsize
    disk = min(measured.disk[end], measured.link or measured.disk[end])
    experts = model.top_k * model.moe_layers * shape.slot
    return _Seconds(met / rate + model.layers * measured.layer_s[end], experts / rate, loads / disk)


def _measure(model: _Model, where: str, folder: Path, files: list[Path]) -> Measured:
    seconds = rates.SECONDS
    note(f"Measuring this machine, about {2 * seconds + 2:.0f} s: disk, memory, the decoder on the demo")
    shape = model.shape
    disk, io = rates.disk_rates(folder, files, seconds, shape.one // shape.reads, _STRETCHES)
    link = rates.copy_rate(where, seconds / 2) if where.startswith("cuda") else None
    weights = rates.weight_rates(model.width, shape.dtype, where, seconds / 2, _STRETCHES)
    return Measured(sorted(disk), io, link, sorted(weights), _layer_seconds(where))


def _layer_seconds(device: str) -> list[float]:
    """Of the demo, whose weights are next to nothing, without its waits for experts."""
    checkpoint = resolve("demo")
    with OffloadedDecoder(checkpoint, 64, device=device, threads=compute_threads(None)) as decoder:
        split = decoder.decode([1, 2], _STEPS).split.tokens
    steps = zip(*(seconds for phase, seconds in split.items() if phase != "wait"))
    n_layers = checkpoint.config["num_hidden_layers"]
    return [step / n_layers for step in reversed(quantiles(map(sum, steps), n=4))]


def _named(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "hits"}


def _deltas(found: Found) -> dict[str, Any]:
    """found: None where nobody could be asked, and why."""
    if found.commit is None:
        return {"found": None, "why": "a folder does not say which model of the Hub it is"}
    if found.files is None:
        return {"found": None, "why": "the Hub is out of reach"}
    try:
        return {"found": known_deltas(found.id, found.commit), "why": ""}
    except HubError as error:
        return {"found": None, "why": error.message.rstrip(".")}
