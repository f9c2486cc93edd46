"""Whose gate is this: the base's, the tuned one, or another's. One answer for every form, safetensors and GGUF alike."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from remoe_cli.delta.stored import digest, dtype_label, dtype_named, FLOATS, stored_bytes
from remoe_cli.errors import DeltaError
from remoe_cli.hub.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

    from remoe_cli.delta.delta import Delta

_PACKED = (
    "q",
    "weight_packed",
    "weight_blocks",
    "weight_scale",
)  # what stands beside or in place of a quantised weight


def state_of(delta: "Delta", name: str, dtype: str, stored: bytes) -> str:
    """ "base", "tuned", "both" (training left this gate as it was, so it tells nothing) or "other".

    dtype: what the bytes hold, as safetensors names it ("BF16", "F16", "F32"). A gate in another dtype than the base's is
    the base's where its values are: they narrow to the base's dtype without loss, to bytes of the same sha256; or they are
    the float16 that a bfloat16 gate rounds to. It is the tuned one in full precision or rounded to the base's dtype.
    """
    kind = dtype_named(dtype)
    tuned = stored in (stored_bytes(delta.tensor(name, kind)), stored_bytes(delta.stored(name, kind)))
    base = _is_base(delta, name, kind, stored)
    return "both" if base and tuned else "base" if base else "tuned" if tuned else "other"


def _is_base(delta: "Delta", name: str, kind: "torch.dtype", stored: bytes) -> bool:
    import torch

    kept = delta.base_dtype(name)
    if kind == kept:
        return digest(stored) == delta.base_sha256[name]
    if kind == torch.float16 and digest(stored) == delta.base_sha256_f16.get(name):
        return True
    if len(stored) != delta.tensors[name].numel() * kind.itemsize:
        return False
    found = torch.frombuffer(bytearray(stored), dtype=kind)
    narrow = found.to(kept)
    return stored_bytes(narrow.to(kind)) == stored and digest(stored_bytes(narrow)) == delta.base_sha256[name]


def applied(delta: "Delta", states: Mapping[str, str], where: str) -> bool:
    """True when the gates are the tuned ones already, False when they are the base's. states: of `state_of`, by gate.

    Raises DeltaError, with the reason, when they are neither. where: the model or file in words.
    """
    for name, state in states.items():
        if state == "other":
            pinned = delta.base + (f"@{delta.commit[:12]}" if delta.commit else "")
            raise DeltaError(
                f"the gate {name} of {where} is not the one this delta was made from ({pinned}): another revision, or gates "
                "rounded to another dtype or changed since (a quantiser may smooth them).",
                _hint(delta),
            )
    told = {state for state in states.values() if state != "both"}
    if len(told) == 2:
        raise DeltaError(f"{where} holds a mix of base gates and tuned gates.", _hint(delta))
    return told == {"tuned"}


def check_form(delta: "Delta", name: str, dtype: str, shape: tuple[int, ...], where: str) -> None:
    """Raises DeltaError unless the gate there can be this delta's by its dtype and shape (as safetensors has it: [E, D])."""
    expected = delta.tensors[name].shape
    if dtype not in FLOATS:
        raise DeltaError(
            f"{name} is stored as {dtype} in {where}, but as {dtype_label(delta.base_dtype(name))} in the delta's base {delta.base}: "
            "that gate is quantised.",
            _hint(delta),
        )
    if shape != tuple(expected):
        raise DeltaError(
            f"{name} is {list(shape)} in {where} but {list(expected)} in the delta of {delta.base}.", _hint(delta)
        )


def is_applied(delta: "Delta", checkpoint: Checkpoint) -> bool:
    """`applied` of a model folder. Raises DeltaError also for another family, and for a gate that is not there."""
    where = checkpoint.id
    if checkpoint.model_type != delta.model_type:
        raise not_this_family(delta, where, checkpoint.model_type)
    for name in delta.tensors:
        if name not in checkpoint.tensors:
            raise no_gate(delta, name, where, _instead(name, checkpoint))
        info = checkpoint.tensors[name]
        check_form(delta, name, info.dtype, info.shape, where)
    found = {
        name: state_of(delta, name, checkpoint.tensors[name].dtype, checkpoint.raw(name)) for name in delta.tensors
    }
    return applied(delta, found, where)


def quantised_note(checkpoint: Checkpoint) -> str | None:
    """What to tell of a base that is stored quantised once `is_applied` let it pass; None of any other."""
    found = checkpoint.config.get("quantization_config")
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    return (
        f"Note: {checkpoint.id} is stored quantised ({method if isinstance(method, str) else 'unknown method'}), but not its "
        "gates: they are those that this delta was made from, so it may be applied"
    )


def not_this_family(delta: "Delta", where: str, model_type: str) -> DeltaError:
    return DeltaError(
        f"this delta belongs to {delta.base} ({delta.model_type}), but {where} is {model_type}.", _hint(delta)
    )


def no_gate(delta: "Delta", name: str, where: str, why: str = "") -> DeltaError:
    return DeltaError(f"this delta belongs to {delta.base}; {where} has no gate {name}{why}.", _hint(delta))


def _instead(name: str, checkpoint: Checkpoint) -> str:
    """What lies there in the gate's place, if it was quantised."""
    stem = name.removesuffix("weight")
    packed = next(
        (other for other in checkpoint.tensors if any(other.startswith(f"{stem}{end}") for end in _PACKED)), None
    )
    return f" (a quantised one, {packed}, stands in its place)" if packed else ""


def _hint(delta: "Delta") -> str:
    base = delta.base + (f"@{delta.commit}" if delta.commit else "")
    return f"remoe apply DELTA {base if '/' in base else 'BASE_FOLDER'} --out DIR"
