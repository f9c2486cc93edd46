"""Where a delta's gates lie in a GGUF, what stands there, and what is to be written."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from remoe_cli.delta import Delta, fingerprint
from remoe_cli.delta.stored import dtype_named, stored_bytes
from remoe_cli.errors import DeltaError
from remoe_cli.gguf.header import damaged, Header, TensorPlace
from remoe_cli.gguf.names import ARCHITECTURES, GATE, gate_names

_MAX_BLOCKS = 10_000


@dataclass(frozen=True)
class GateBytes:
    """One gate in a file: `old` stands at `offset`, `new` is to. tensor: its GGUF name."""

    file: Path
    tensor: str
    offset: int
    old: bytes
    new: bytes


@dataclass(frozen=True)
class Found:
    """is_tuned: the file holds the tuned gates already; else it holds the base's."""

    gates: list[GateBytes]
    is_tuned: bool


def find_gates(delta: Delta, headers: Sequence[Header], cast: bool) -> Found:
    """headers: of all parts. cast: tuned values are first rounded to the dtype of the base's gates.

    Raises DeltaError, with the reason, where the file is not a GGUF of the delta's base, or a gate is quantised.
    """
    where = str(headers[0].file)
    _check_architecture(delta, headers[0], where)
    n_blocks = headers[0].number(f"{ARCHITECTURES[delta.model_type]}.block_count")
    if n_blocks is None or not 0 < n_blocks <= _MAX_BLOCKS:
        raise damaged(headers[0].file, f"its block_count is {n_blocks}")
    names = gate_names(delta.model_type, delta.tensors, n_blocks, delta.base)
    places = {name: (header, place) for header in headers for name, place in header.tensors.items()}
    for on_disk, name in names.items():
        if name is None or name not in places:
            blocks = f", and {n_blocks} blocks"
            raise fingerprint.no_gate(delta, on_disk, where, f" ({name or 'past its last block'}){blocks}")
    further = {name for name in places if GATE.fullmatch(name)} - set(names.values())
    if further:
        raise DeltaError(
            f"{where} has {len(further)} gates that this delta of {delta.base} does not know, such as {min(further)}: "
            f"another model, of {n_blocks} blocks.",
            f"remoe inspect DELTA, then a GGUF of {delta.base}",
        )
    gates, states = [], {}
    for on_disk, name in names.items():
        header, place = places[str(name)]
        fingerprint.check_form(delta, on_disk, place.type, place.shape, where)
        kind, old = dtype_named(place.type), read(header.file, place)
        states[on_disk] = fingerprint.state_of(delta, on_disk, place.type, old)
        new = stored_bytes(delta.stored(on_disk, kind) if cast else delta.tensor(on_disk, kind))
        gates.append(GateBytes(header.file, str(name), place.offset, old, new))
    return Found(gates, fingerprint.applied(delta, states, where))


def read(file: Path, place: TensorPlace) -> bytes:
    """The stored bytes of one tensor of a known type."""
    assert place.nbytes is not None
    with open(file, "rb") as stream:
        stream.seek(place.offset)
        return stream.read(place.nbytes)


def _check_architecture(delta: Delta, header: Header, where: str) -> None:
    found, expected = header.metadata.get("general.architecture"), ARCHITECTURES.get(delta.model_type)
    if expected is None:
        raise DeltaError(
            f"remoe patches no GGUF of {delta.model_type} models, only of {', '.join(sorted(ARCHITECTURES))}.",
            f"remoe apply DELTA {delta.base}",
        )
    if found != expected:
        raise fingerprint.not_this_family(delta, where, f"a GGUF of the architecture {found}")
