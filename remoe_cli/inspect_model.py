"""remoe inspect MODEL: what a model is made of, from config.json and the headers of its files; no weights are read."""

from collections.abc import Iterable, Sequence
from typing import Any, TYPE_CHECKING

import torch

from remoe_cli.delta.stored import dtype_label
from remoe_cli.errors import CacheError, command, FamilyError, HubError
from remoe_cli.families import FAMILIES, family_of, find_gates, Gate, WRAPPERS
from remoe_cli.families.loader import DTYPES, gate_disk_names, meta_model
from remoe_cli.families.refuse import counts, quant_method
from remoe_cli.hub.headers import fetch_headers, Headers
from remoe_cli.hub.resolve import fetch_config
from remoe_cli.offload import budget
from remoe_cli.offload.compute import require_known
from remoe_cli.offload.shape import Shape, shape_of
from remoe_cli.sizes import show_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER_KEYS = ("num_hidden_layers", "n_layers", "num_layers")
_SHARED_KEYS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")


def inspect(name: str, capacities: Sequence[int] = ()) -> dict[str, Any]:
    """name: "demo", a folder with a config.json, or a Hub id. capacities: slots a layer; without any a quarter, half and all.

    A model that remoe can't tune is inspected as far as its config goes, with the reason. Raises HubError, CheckpointError for
    damaged or lacking files, CacheError for a capacity that the model can't have.
    """
    found = fetch_config(name)
    reason = decode_reason = sizes = None
    headers, gates, on_disk = Headers(found.folder, found.id, found.commit, found.config), [], {}
    config = found.config.get("text_config") or found.config
    n_layers = _first(config, _LAYER_KEYS)
    try:
        family_of(found.config, found.id)
        headers = fetch_headers(found)
    except FamilyError as error:
        reason = error.message.partition(" Supported families:")[0]
    except HubError as error:
        if found.files is None or any(file.endswith(".safetensors") for file in found.files):
            raise
        reason = error.message
    n_experts, top_k = counts(found.config)
    if found.config.get("model_type") in {*FAMILIES, *WRAPPERS} and 0 < (top_k or 0) <= n_experts:
        model = meta_model(headers, torch.float32)
        n_layers = getattr(model.config.get_text_config(), "num_hidden_layers", n_layers)
        try:
            gates = find_gates(model)
            n_experts, top_k = gates[0].n_experts, gates[0].top_k
            on_disk = {} if reason else _stored_gates(model, gates, headers)
        except FamilyError as error:
            reason = error.message
    if on_disk:
        try:
            require_known(gates[0].experts, gates[0].family.model_type)
            sizes = shape_of(headers, model, gates)
        except FamilyError as error:
            decode_reason = error.message
    if gates and top_k:
        _check(capacities, name, n_experts, top_k)
    slots = capacities or sorted({max(top_k or 1, n_experts // part) for part in (4, 2, 1)})
    delta_bytes = sum(gate["bytes"] for gate in on_disk.values()) if headers.tensors and on_disk else None
    if sizes and not headers.tensors:
        delta_bytes = sum(torch.Size(gate["shape"]).numel() for gate in on_disk.values()) * sizes.dtype.itemsize
    return {
        "model": name,
        "commit": found.commit,
        "model_type": found.config.get("model_type"),
        "supported": reason is None,
        "reason": reason,
        "decode_reason": decode_reason,
        "layers": n_layers,
        "moe_layers": len(gates) or (None if n_experts else 0),
        "experts": n_experts,
        "top_k": top_k,
        "shared_experts": _shared(config, gates),
        "expert_bytes": sizes and sizes.one,
        "experts_bytes": sizes and sizes.one * n_experts * len(gates),
        "outside_bytes": sizes and sizes.outside,
        "quantised": quant_method(found.config),
        "dtype": sizes and dtype_label(sizes.dtype),
        "gates": on_disk,
        "delta_bytes": delta_bytes,
        "memory": {str(c): _memory(sizes, c * len(gates)) for c in slots} if sizes else {},
        "absent": headers.absent,
    }


def _stored_gates(model: "PreTrainedModel", gates: Sequence[Gate], headers: Headers) -> dict[str, dict]:
    """On-disk name -> shape, dtype, bytes; dtype and bytes None where no header is here."""
    if not headers.tensors:
        return {
            gate.family.disk_name(gate.layer, tensor): {"shape": list(p.shape), "dtype": None, "bytes": None}
            for gate in gates
            for tensor, p in zip(gate.family.tensors, gate.parameters.values(), strict=True)
        }
    names = gate_disk_names(model, headers)
    infos = {names[name]: headers.tensors[names[name]] for gate in gates for name in gate.names}
    return {
        name: {"shape": list(info.shape), "dtype": dtype_label(DTYPES[info.dtype]), "bytes": info.nbytes}
        for name, info in infos.items()
    }


def _memory(sizes: Shape, slots: int) -> int:
    """Bytes of a decoder with so many slots in all, before any token, as `remoe decode` counts them."""
    return budget.decoder_bytes(sizes.elements * sizes.dtype.itemsize, slots * sizes.slot, sizes.loading)


def _check(capacities: Sequence[int], name: str, n_experts: int, top_k: int) -> None:
    for capacity in capacities:
        if not top_k <= capacity <= n_experts:
            raise CacheError(
                f"--cache {capacity}: a layer of {name} holds {top_k} (those of one token) to {n_experts} experts.",
                command("inspect", name, cache=f"{top_k},{n_experts}"),
            )


def _shared(config: dict, gates: Sequence[Gate]) -> int | None:
    """Experts that every token runs, of a layer; None where only the config could tell and does not."""
    told = _first(config, _SHARED_KEYS)
    if not gates:
        return told
    beside = any(gate.shared is not None for gate in gates) or bool(config.get("shared_intermediate_size"))
    return max(told or 0, 1) if beside else 0


def _first(config: dict, keys: Iterable[str]) -> int | None:
    return next((config[key] for key in keys if type(config.get(key)) is int), None)


def summary(found: dict[str, Any]) -> str:
    """The same for a person, and the next command."""
    pinned = found["model"].partition("@")[0] + f"@{found['commit']}" if found["commit"] else found["model"]
    moe, top_k, shared = (_shown(found[key]) for key in ("moe_layers", "top_k", "shared_experts"))
    lines = [
        f"{pinned}: {found['model_type']}, {'supported' if found['supported'] else 'not supported: ' + found['reason']}",
        f"{_shown(found['layers'])} layers, {moe} of them MoE: {found['experts']} experts, {top_k} a token, {shared} shared",
    ]
    if gates := found["gates"]:
        kinds: dict[str, int] = {}
        for gate in gates.values():
            kind = f"{gate['shape']} {gate['dtype'] or 'of unknown dtype'}"
            kinds[kind] = kinds.get(kind, 0) + 1
        size = "" if found["delta_bytes"] is None else f"; a delta takes {show_size(found['delta_bytes'])}"
        lines.append(f"{len(gates)} gates: {', '.join(f'{n} of {kind}' for kind, n in kinds.items())}{size}")
    if found["absent"]:
        told = f"sizes take {found['dtype']} for all" if found["dtype"] else "sizes are unknown"
        told += f" but the {found['quantised']} experts" if found["dtype"] and found["quantised"] else ""
        lines.append(f"From config.json alone ({found['absent']}): how tensors are stored is unknown, {told}")
    if found["expert_bytes"] is not None:
        one, every, rest = (show_size(found[key]) for key in ("expert_bytes", "experts_bytes", "outside_bytes"))
        lines.append(f"One expert {one}, all {every}; outside the experts {rest}")
        held = ", ".join(f"{show_size(size)} at {slots}" for slots, size in found["memory"].items())
        lines.append(f"Memory by experts kept a layer (--cache), {found['dtype']}, before any token: {held}")
    if found["decode_reason"]:
        lines.append(f"Its experts cannot be left on disk: {found['decode_reason']}")
    return "\n".join([*lines, *([f"Next: {command('finetune', pinned)}"] if found["supported"] else [])])


def _shown(value: int | None) -> str:
    return "?" if value is None else str(value)
