"""Where each routed expert's bytes lie in a checkpoint's files, and the order in which a token's experts are recorded.

Shape letters: N tokens, E routed experts, K experts a token.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TYPE_CHECKING

import numpy as np

from remoe_cli.errors import CheckpointError, FamilyError
from remoe_cli.families.base import Gate
from remoe_cli.families.quantised import shape_of, weights
from remoe_cli.hub.checkpoint import Checkpoint, TensorInfo

if TYPE_CHECKING:
    from torch import nn


QUANTISED, SCALES = "quantised", "scales"


class Piece(NamedTuple):
    """`nbytes` bytes from `offset` of `file` (dtype as safetensors writes it) are rows `start` to `start + shape[dim]`
    along dimension `dim` of one expert's part. role: QUANTISED (or a precision of offload.small, of a whole
    part whose outputs are then `start`) of a weight whose SCALES are the next piece, "" of any other."""

    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    dim: int
    start: int
    role: str = ""


class ExpertPart(NamedTuple):
    """One parameter of the experts module. name: its attribute; shape: one expert's, without the leading E;
    pieces: [E] tuples of what makes up that expert."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]


class ExpertLayer(NamedTuple):
    """The experts of one MoE layer (decoder layer index `layer`), which stay on disk."""

    layer: int
    module: "nn.Module"
    n_experts: int
    top_k: int
    parts: tuple[ExpertPart, ...]

    def pieces(self, expert: int) -> list[Piece]:
        """Everything that makes up one expert, part by part."""
        return [piece for part in self.parts for piece in part.pieces[expert]]


class Merge(NamedTuple):
    """How the loader merges per-expert tensors into one parameter: stack each source pattern over the experts, then
    concatenate the stacks along `dim` of the expert's own tensor."""

    patterns: tuple[str, ...]
    dim: int


def expert_layers(
    checkpoint: Checkpoint,
    gates: Sequence[Gate],
    module_names: Mapping[int, str],
    renamed: Mapping[str, tuple[str, str | None]],
    merges: Mapping[str, Merge],
) -> list[ExpertLayer]:
    """The place of every expert of a model whose experts modules still hold their (meta) parameters.

    module_names: id(module) -> its name; renamed: on-disk name -> (in-memory name, source pattern or None);
    merges: in-memory parameter -> its Merge. Raises CheckpointError where experts are missing or of another shape.
    """
    sources: dict[str, list[tuple[str, str | None]]] = {}
    for disk in sorted(renamed, key=natural):
        memory, pattern = renamed[disk]
        sources.setdefault(memory, []).append((disk, pattern))
    layers, places = [], weights(checkpoint)
    for gate in gates:
        prefix, parts = module_names[id(gate.experts)], []
        for name, parameter in gate.experts.named_parameters(recurse=False):
            memory, shape = f"{prefix}.{name}", tuple(parameter.shape)
            if shape[0] != gate.n_experts:
                raise FamilyError(
                    f"{gate.family.model_type}: {memory} is {list(shape)}, not one row for each of {gate.n_experts} experts.",
                    "remoe eval demo",
                )
            found = sources.get(memory, [])
            if memory in merges:
                pieces = _merged(checkpoint, places, memory, shape, found, merges[memory])
            else:
                pieces = _fused(checkpoint, places, memory, shape, found)
            parts.append(ExpertPart(name, shape[1:], pieces))
        if not parts:
            raise FamilyError(
                f"{gate.family.model_type}: {prefix} has no parameters of its own, so no expert can be told from the others.",
                "remoe eval demo",
            )
        layers.append(ExpertLayer(gate.layer, gate.experts, gate.n_experts, gate.top_k, tuple(parts)))
    return layers


def recorded_order(choice_NK: np.ndarray, weight_NK: np.ndarray) -> np.ndarray:
    """Indices [N, K] that put each token's experts into the order that traces record: descending routing weight, of
    equal weights the higher id first. The touch order of caches is its reverse: ascending weight, then ascending id."""
    return np.lexsort((-choice_NK.astype(np.int64), -weight_NK.astype(np.float64)), axis=-1)


def _fused(
    checkpoint: Checkpoint, places: dict[str, TensorInfo], memory: str, shape: tuple[int, ...], found: list
) -> tuple[tuple[Piece, ...], ...]:
    """One tensor holds all experts: expert e is the e-th slice of its first dimension."""
    if len(found) != 1:
        raise _lacking(checkpoint, memory, len(found), 1)
    info = places[found[0][0]]
    if shape_of(info) != shape:
        raise _misshapen(checkpoint, found[0][0], shape_of(info), shape)
    sliced = [_slices(info, shape[0], QUANTISED if info.scales else "")]
    if info.scales:
        sliced.append(_slices(info.scales, shape[0], SCALES))
    return tuple(zip(*sliced, strict=True))


def _slices(info: TensorInfo, n_experts: int, role: str) -> list[Piece]:
    """One of the first dimension of a tensor for each expert."""
    size = info.nbytes // n_experts
    offsets = range(info.offset, info.offset + info.nbytes, size)
    return [Piece(info.file, offset, size, info.dtype, info.shape[1:], 0, 0, role) for offset in offsets]


def _merged(
    checkpoint: Checkpoint,
    places: dict[str, TensorInfo],
    memory: str,
    shape: tuple[int, ...],
    found: list,
    merge: Merge,
) -> tuple[tuple[Piece, ...], ...]:
    """One tensor a source pattern and expert; the loader stacks them in the natural order of their names."""
    by_pattern: dict[str, list[str]] = {pattern: [] for pattern in merge.patterns}
    for disk, pattern in found:
        if pattern not in by_pattern:
            raise FamilyError(f"{disk} is none of the tensors that make up {memory}.", "pip install -U transformers")
        by_pattern[pattern].append(disk)
    for names in by_pattern.values():
        if len(names) != shape[0]:
            raise _lacking(checkpoint, memory, len(names), shape[0])
    experts = []
    for expert in range(shape[0]):
        pieces, start = [], 0
        for pattern in merge.patterns:
            name = by_pattern[pattern][expert]
            info = places[name]
            expected = list(shape[1:])
            expected[merge.dim] = info.shape[merge.dim] if len(info.shape) == len(expected) else -1
            if list(info.shape) != expected:
                raise _misshapen(checkpoint, name, info.shape, shape[1:])
            for one, role in ((info, QUANTISED if info.scales else ""), (info.scales, SCALES)):
                if one:
                    pieces.append(Piece(one.file, one.offset, one.nbytes, one.dtype, one.shape, merge.dim, start, role))
            start += info.shape[merge.dim]
        if start != shape[1:][merge.dim]:
            raise _misshapen(checkpoint, by_pattern[merge.patterns[0]][expert], pieces[0].shape, shape[1:])
        experts.append(tuple(pieces))
    return tuple(experts)


def natural(name: str) -> tuple:
    """Sorts layer 10 and expert 10 after 9."""
    return tuple((0, int(word), "") if word.isdigit() else (1, 0, word) for word in name.split("."))


def _lacking(checkpoint: Checkpoint, memory: str, found: int, wanted: int) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.id} holds {found} of the {wanted} tensors of a kind that make up {memory}.",
        "copy or download the model again",
    )


def _misshapen(checkpoint: Checkpoint, disk: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        f"{disk} of {checkpoint.id} is {list(found)}, which does not fit the {list(wanted)} of its config.json.",
        f"cat {checkpoint.folder}/config.json",
    )
