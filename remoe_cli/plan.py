"""remoe plan MODEL --for finetune: what training would take on this machine or another, from config.json and headers alone."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from remoe_cli import memory
from remoe_cli.console import note
from remoe_cli.delta.stored import dtype_label
from remoe_cli.environment import device_name, pick_device
from remoe_cli.errors import command, HubError, MemoryShortError, RemoeError
from remoe_cli.families import family_of
from remoe_cli.families.loader import compute_dtype, DTYPES
from remoe_cli.hub.absent import disk_room, require_disk, weight_files_here
from remoe_cli.hub.headers import fetch_headers, Headers
from remoe_cli.hub.resolve import fetch_config
from remoe_cli.recipe import Recipe
from remoe_cli.train import rates
from remoe_cli.train.asked import Asked, choose_recipe
from remoe_cli.train.needs import (
    choose,
    fits,
    Needs,
    RESIDENT,
    resident,
    SHARDED,
    sharded,
    spare,
    STREAMED,
    streamed,
    that_fit,
)
from remoe_cli.train.rates import Rates
from remoe_cli.train.shape import Shape, shape_of

_WORLDS = (2, 4, 8, 16, 32, 64)
_LINK = 12e9  # bytes a second to a device that is not here: PCIe 3 with 16 lanes, or 4 with 8
_EXPERTS = 16  # whose weights a measurement of the arithmetic goes through, so that no cache holds them


class _Room(NamedTuple):
    """Bytes. host: None where it is the device's own memory; here: whether the device is one of this machine's."""

    device: int
    host: int | None
    where: str
    here: bool


def plan(
    name: str,
    asked: Asked = Asked(),  # noqa: B008  immutable
    *,
    device: str | None = None,
    device_memory: int | None = None,
    ram: int | None = None,
    devices: int | None = None,
) -> dict[str, Any]:
    """name, asked: as of `remoe finetune`. device_memory: bytes of a device that need not be here, ram: bytes of host memory;
    by default what is free here. devices: to spread the layers over; by default the fewest that fit.

    The result has "refusal" (message and hint) where no mode on one device fits. Raises RemoeError for a model that cannot
    be tuned.
    """
    found = fetch_config(name)
    family = family_of(found.config, found.id)
    settings = choose_recipe(name, family.model_type, asked)
    headers = fetch_headers(found)
    where = pick_device(device)
    room = _room(where, device_memory, ram)
    apart = room.host is not None
    dtype = _dtype(headers, "cuda" if apart else "cpu", settings.train.dtype)
    shape = shape_of(headers, dtype, "cuda" if apart else "cpu")
    here, absent = weight_files_here(found, headers)
    disk = disk_room(found, absent)
    measured = _measure(shape, settings, room, where, Path(disk["folder"]), [] if absent else here)
    refusal: RemoeError | None = None
    chosen = None
    try:
        chosen = choose(shape, settings, room.device, room.host)
        require_disk(name, disk)
    except (MemoryShortError, HubError) as error:
        refusal = error
    tokens = settings.train.micro_batch * settings.train.accumulation * settings.train.sequence
    modes = [
        _mode(RESIDENT, lambda recipe: resident(shape, recipe), settings, room, measured),
        _mode(STREAMED, lambda recipe: _streamed(shape, recipe, room), settings, room, measured),
        _spread(shape, settings, room, measured, devices),
    ]
    return {
        "model": name,
        "commit": found.commit,
        "model_type": family.model_type,
        "layers": len(shape.layers),
        "weights": shape.weights,
        "layer_bytes": sum(shape.layers),
        "largest_layer": max(shape.layers),
        "stored": sum(shape.stored) + shape.stored_outside,
        "gate_parameters": shape.gates,
        "dtype": dtype_label(dtype),
        "recipe": settings.name,
        "scope": settings.train.scope,
        "steps": settings.train.steps,
        "tokens_a_step": tokens,
        "sequence": settings.train.sequence,
        "micro_batch": settings.train.micro_batch,
        "device": room.where,
        "device_free": room.device,
        "host_free": room.host,
        "disk": disk,
        "absent": headers.absent,
        "measured": measured._asdict(),
        "link_assumed": _LINK if apart and measured.link is None else None,
        "modes": modes,
        "chosen": chosen.mode if chosen and not refusal else None,
        "next": _next(name, asked, chosen) if chosen and not refusal else None,
        "refusal": {"message": refusal.message, "hint": refusal.hint} if refusal else None,
    }


def _room(where: str, device_memory: int | None, ram: int | None) -> _Room:
    cuda = where.startswith("cuda")
    host = memory.available().nbytes if ram is None else ram
    if cuda or device_memory is not None:
        of = f"{device_name(where)}" if cuda else "a device that is not here"
        return _Room(memory.gpu(where).nbytes if device_memory is None else device_memory, host, of, cuda)
    return _Room(host, None, device_name(where), True)


def _dtype(headers: Headers, device: str, wanted: str) -> torch.dtype:
    """As training picks it; without headers config.json says how weights are stored."""
    if headers.tensors or wanted != "auto" or device == "cuda":
        return compute_dtype(headers, device, wanted)
    told = headers.config.get("dtype") or headers.config.get("torch_dtype")
    return next((dtype for dtype in DTYPES.values() if dtype_label(dtype) == told), torch.bfloat16)


def _measure(shape: Shape, settings: Recipe, room: _Room, where: str, folder: Path, files: list[Path]) -> Rates:
    note(f"Measuring this machine, about {3 * rates.SECONDS + 1:.0f} s: disk, memory, arithmetic")
    disk, io = rates.disk_rate(folder, files, rates.SECONDS)
    if not room.here:
        return Rates(disk, io, None, None)
    rows = settings.train.micro_batch * settings.train.sequence * shape.top_k // shape.n_experts
    expert = shape.experts // shape.dtype.itemsize // (shape.moe_layers * shape.n_experts)
    n_weights = min(shape.n_experts, _EXPERTS)
    inner = expert // (2 * shape.hidden)  # there and back have as many weights as the expert
    flops = rates.flop_rate(shape.hidden, inner, max(rows, 1), n_weights, shape.dtype, where, rates.SECONDS)
    return Rates(disk, io, rates.copy_rate(where, rates.SECONDS), flops)


def _streamed(shape: Shape, settings: Recipe, room: _Room) -> Needs:
    """With as many layers in host memory as are kept there by default."""
    bare = streamed(shape, settings)
    free = (room.device,) if room.host is None else (room.device, room.host)
    return streamed(shape, settings, spare(bare, *free)) if fits(bare, *free) else bare


def _spread(shape: Shape, settings: Recipe, room: _Room, measured: Rates, devices: int | None) -> dict[str, Any]:
    """On so many devices, by default the fewest that fit."""
    for world in _WORLDS if devices is None else (devices,):
        mode = _mode(SHARDED, lambda recipe: sharded(shape, recipe, world), settings, room, measured)  # noqa: B023
        if mode["fits"] or mode["why"]:
            break
    return {**mode, "devices": world}


def _mode(
    mode: str, count: Callable[[Recipe], Needs], settings: Recipe, room: _Room, measured: Rates
) -> dict[str, Any]:
    """One row of the table. with: changes with which it fits, None where there are none; why: what forbids the mode, "" where memory alone decides."""
    try:
        needs = count(settings)
    except MemoryShortError as error:
        return {"mode": mode, "fits": False, "why": error.message}
    seconds = _seconds(needs, room, measured)
    return {
        "mode": mode,
        "fits": (fit := fits(needs, room.device, room.host)),
        "with": [] if fit else that_fit(count, settings, room.device, room.host),
        "why": "",
        "device": needs.pool if room.host is None else needs.device,
        "host": None if room.host is None else needs.host,
        "on_device": needs.on_device,
        "in_host": needs.in_host,
        "layers_in_ram": needs.ram,
        "read_a_step": needs.read,
        "copied_a_step": needs.copied,
        "flops_a_step": needs.flops,
        "seconds_a_step": seconds,
        "hours": settings.train.steps * max(seconds.values()) / 3600 if seconds else None,
    }


def _seconds(needs: Needs, room: _Room, measured: Rates) -> dict[str, float]:
    """Of a step, by what takes it: the longest decides, since reads, copies and arithmetic overlap."""
    seconds = {"arithmetic": needs.flops / measured.flops} if measured.flops else {}
    if needs.mode == STREAMED:
        seconds["disk"] = needs.read / measured.disk
        if room.host is not None:
            seconds["copies"] = needs.copied / (measured.link or _LINK)
    return seconds


def _next(name: str, asked: Asked, chosen: Needs) -> str:
    """The command that does it."""
    options: dict[str, Any] = {
        "recipe": asked.recipe,
        "data": asked.data,
        "steps": asked.steps,
        "max_ppl": asked.max_ppl,
    }
    if chosen.mode == STREAMED:
        options |= {"stream": "on", "ram": f"{chosen.ram // 1_000_000}MB" if chosen.ram else None}
    return command("finetune", name, **options) + "".join(f" --set {shlex.quote(one)}" for one in asked.overrides)
