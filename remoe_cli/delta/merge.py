"""Several deltas of one base as one: the weighted average of their gates."""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from remoe_cli.delta.delta import Delta
from remoe_cli.environment import versions
from remoe_cli.errors import DeltaError, UsageError

if TYPE_CHECKING:
    import torch

_HINT = "remoe inspect DELTA, for each of them"


def merged(deltas: Sequence[Delta], weights: Sequence[float], names: Sequence[str]) -> Delta:
    """Each gate the sum of weight x gate, the weights scaled to sum 1; computed in float64 and rounded once, to the
    deltas' dtype (float32 where any keeps that). Heads too, where all have them. names: of the deltas, for messages.

    The same delta several times gives its own gates. Raises UsageError for weights that cannot be, DeltaError where the
    deltas are not of one base, or do not change the same tensors.
    """
    if len(deltas) < 2:
        raise UsageError("merge takes two deltas or more.", "remoe merge A B --out DIR")
    if len(weights) != len(deltas):
        raise UsageError(
            f"--weights takes one number a delta: {len(deltas)}, not {len(weights)}.",
            f"--weights {','.join(['1'] * len(deltas))}",
        )
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not 0 < sum(weights) < math.inf:
        raise UsageError("--weights are numbers of 0 or more, not all 0.", f"--weights {','.join(['1'] * len(deltas))}")
    for other, name in zip(deltas[1:], names[1:], strict=True):
        if why := apart(deltas[0], other):
            raise DeltaError(f"{names[0]} and {name} cannot be averaged: {why}.", _HINT)
    shares = [weight / sum(weights) for weight in weights]
    first = next((delta for delta in deltas if delta.commit), deltas[0])
    recipes = ", ".join(f"{delta.recipe} {share:.4g}" for delta, share in zip(deltas, shares, strict=True))
    return Delta(
        _average([delta.tensors for delta in deltas], shares),
        first.base,
        first.commit,
        first.model_type,
        first.base_sha256,
        None,
        f"merge of {recipes}",
        versions(),
        _average([delta.heads for delta in deltas], shares),
        {name: first.base_dtype(name) for name in first.tensors},
        {name: found for delta in deltas for name, found in delta.base_sha256_f16.items()},
    )


def apart(one: Delta, other: Delta) -> str:
    """Why they cannot be averaged, empty where they can: another base, other tensors, heads in one of them only."""
    if one.model_type != other.model_type:
        return f"one is of a {one.model_type}, the other of a {other.model_type}"
    if one.base_sha256 != other.base_sha256:
        names = one.base_sha256.keys() & other.base_sha256.keys()
        if moved := sorted(name for name in names if one.base_sha256[name] != other.base_sha256[name]):
            return f"they were made from different bases, {one.base} and {other.base} (gate {moved[0]})"
        further = min(one.base_sha256.keys() ^ other.base_sha256.keys())
        return f"only one of them changes {further}"
    for name, tensor in one.tensors.items():
        if tensor.shape != other.tensors[name].shape or one.base_dtype(name) != other.base_dtype(name):
            return f"{name} differs in shape or dtype"
    if one.heads.keys() != other.heads.keys():
        return f"only one of them has the head {min(one.heads.keys() ^ other.heads.keys())}"
    if any(head.shape != other.heads[name].shape for name, head in one.heads.items()):
        return "their heads differ in shape"
    return ""


def _average(parts: Sequence[Mapping[str, "torch.Tensor"]], shares: Sequence[float]) -> dict[str, "torch.Tensor"]:
    import torch

    found = {}
    for name in parts[0]:
        tensors = [part[name] for part in parts]
        dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
        terms = [share * tensor.double() for share, tensor in zip(shares, tensors, strict=True) if share]
        found[name] = reduce(add, terms).to(dtype)
    return found
