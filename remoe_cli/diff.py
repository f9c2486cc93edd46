"""remoe diff: how far apart two deltas are."""

import math
from collections.abc import Mapping
from typing import Any, TYPE_CHECKING

from remoe_cli.apply import find_delta
from remoe_cli.delta import Delta
from remoe_cli.delta.merge import apart
from remoe_cli.errors import command

if TYPE_CHECKING:
    import torch

_FACTS = ("base", "commit", "model_type", "recipe", "changed", "report", "environment")
_SHOWN = 12  # gates in the table for a person


def diff(first: str, second: str) -> dict[str, Any]:
    """first, second: as `remoe apply` finds a delta. Raises DeltaError or HubError.

    gates, heads: name -> what differs (`_distance`), null where the shapes do. apart: why they cannot be merged, else "".
    """
    one, other = find_delta(first), find_delta(second)
    gates, heads = _distances(one.tensors, other.tensors), _distances(one.heads, other.heads)
    why = apart(one, other)
    return {
        "first": first,
        "second": second,
        "same": not why and not any(_moved(entry) for entry in (*gates.values(), *heads.values())),
        "apart": why,
        "facts": {key: pair for key in _FACTS if (pair := _pair(one, other, key)) is not None},
        "only_first": sorted((one.tensors.keys() - other.tensors.keys()) | (one.heads.keys() - other.heads.keys())),
        "only_second": sorted((other.tensors.keys() - one.tensors.keys()) | (other.heads.keys() - one.heads.keys())),
        "gates": gates,
        "heads": heads,
    }


def _pair(one: Delta, other: Delta, key: str) -> list[Any] | None:
    values = [getattr(delta, key) for delta in (one, other)]
    return values if values[0] != values[1] else None


def _distances(
    one: Mapping[str, "torch.Tensor"], other: Mapping[str, "torch.Tensor"]
) -> dict[str, dict[str, float | None] | None]:
    return {
        name: _distance(tensor, other[name]) if tensor.shape == other[name].shape else None
        for name, tensor in one.items()
        if name in other
    }


def _distance(one: "torch.Tensor", other: "torch.Tensor") -> dict[str, float | None]:
    """different: share of the elements; largest: greatest absolute difference; relative: norm of the difference over the
    first one's. null where that is not finite."""
    before, apart_by = one.double(), (one.double() - other.double())
    norm = float(before.norm())
    figures = {
        "different": float((one != other).double().mean()),
        "largest": float(apart_by.abs().max()),
        "relative": float(apart_by.norm()) / norm if norm else math.nan,
    }
    return {key: value if math.isfinite(value) else None for key, value in figures.items()}


def summary(found: dict[str, Any]) -> str:
    """The same for a person, the gates that differ most first."""
    lines = []
    for what in ("gates", "heads"):
        entries = found[what]
        if not entries:
            continue
        unlike = sorted((name for name in entries if _moved(entries[name])), key=lambda name: -_relative(entries[name]))
        lines.append(f"{len(unlike)} of {len(entries)} {what} that both have differ")
        lines += [f"  {name}  {_told(entries[name])}" for name in unlike[:_SHOWN]]
        if len(unlike) > _SHOWN:
            lines.append(f"  and {len(unlike) - _SHOWN} more (--json has all)")
    for key, which in (("only_first", "first"), ("only_second", "second")):
        if names := found[key]:
            lines.append(f"{len(names)} only in {found[which]}, such as {names[0]}")
    for key, (one, other) in found["facts"].items():
        lines.append(f"{key}: {_unlike(one, other) if isinstance(one, dict) else f'{_shown(one)} | {_shown(other)}'}")
    if found["apart"]:
        lines.append(f"They cannot be merged: {found['apart']}")
    elif not found["same"]:
        lines.append(f"Next: {command('merge', found['first'], found['second'], out='DIR')}")
    return "\n".join(lines if not found["same"] or found["facts"] else [*lines, "They are the same."])


def _moved(one: dict[str, float | None] | None) -> bool:
    return one is None or one["different"] != 0


def _relative(one: dict[str, float | None] | None) -> float:
    return math.inf if one is None or one["relative"] is None else one["relative"]


def _told(one: dict[str, float | None] | None) -> str:
    if one is None:
        return "of another shape"
    share = 100 * (one["different"] or 0)
    largest, relative = ("n/a" if one[key] is None else f"{one[key]:.3g}" for key in ("largest", "relative"))
    return f"{share:.1f} % of its elements, by {largest} at most, {relative} of its norm"


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> str:
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    return ", ".join(f"{key} {_shown(one.get(key))} | {_shown(other.get(key))}" for key in keys)


def _shown(value: float | str | None) -> str:
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
