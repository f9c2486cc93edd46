"""Experts of a checkpoint as 8- or 4-bit blocks: what is written of each, and where it lies in a packed file."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from remoe_cli.families.experts import ExpertLayer, ExpertPart, Piece, SCALES
from remoe_cli.offload.arena import PAGE
from remoe_cli.offload.layout import Layout, round_up, Window
from remoe_cli.offload.small import group_for, INT4, int4, INT8, int8, shapes, Small

Read = Callable[[Path, int, memoryview], None]
_CODES = {INT4: "U8", INT8: "I8"}


def small_layers(layers: Sequence[ExpertLayer], precision: str, group: int, files: Sequence[Path]) -> list[ExpertLayer]:
    """The same layers with their weights in `precision`, in these files (one a layer); biases as they are stored.

    group: inputs that share a scale of int4, at most.
    """
    return [_moved(layer, precision, group, file) for layer, file in zip(layers, files, strict=True)]


def blocks(layers: Sequence[ExpertLayer], precision: str, group: int, read: Read) -> Iterator[Iterator[bytes]]:
    """Of each layer each expert's bytes in `precision`, without the padding. read: fills memory from an offset of a file."""
    layout = Layout(layers, torch.float32, direct=False)
    row = torch.empty(layout.row_bytes, dtype=torch.uint8)
    slot = torch.empty(layout.slot_bytes, dtype=torch.uint8) if layout.convert else row

    def expert_bytes(index: int, expert: int) -> bytes:
        layer, image = layers[index], layout.images[index][expert]
        for window in image.windows:
            _fill(window, row, read)
        if layout.convert:
            layout.copy(row, slot, index, expert)
        found = []
        for part in layer.parts:
            if len(part.shape) == 1:
                for piece in part.pieces[expert]:
                    raw = bytearray(piece.nbytes)
                    read(piece.file, piece.offset, memoryview(raw))
                    found.append(bytes(raw))
                continue
            pieces = layout.tensors(slot, index, expert)[part.name]
            dim = part.pieces[expert][0].dim
            weight = torch.cat([piece for piece in pieces if isinstance(piece, torch.Tensor)], dim)
            weight_OI = (weight.t() if _transposed(layer) else weight).contiguous()
            made = int8(weight_OI) if precision == INT8 else int4(weight_OI, group_for(weight_OI.shape[1], group))
            found += [_bytes(made.codes), _bytes(made.scales)]
        return b"".join(found)

    for index, layer in enumerate(layers):
        yield (expert_bytes(index, expert) for expert in range(layer.n_experts))


def error_of(made: Small, weight_OI: torch.Tensor) -> float:
    """Root of the mean squared error, against that of the weights themselves."""
    return (
        ((made.weight(torch.float32)[:, : weight_OI.shape[1]] - weight_OI).square().sum() / weight_OI.square().sum())
        .sqrt()
        .item()
    )


def _moved(layer: ExpertLayer, precision: str, group: int, file: Path) -> ExpertLayer:
    placed: list[list[Piece]] = []  # of each part the pieces of an expert that begins at 0
    end = 0
    for part in layer.parts:
        pieces = []
        for dtype, shape, start, role in _pieces(layer, part, precision, group):
            nbytes = torch.Size(shape).numel() * {"U8": 1, "I8": 1, "F32": 4}.get(dtype, 2)
            pieces.append(Piece(file, end, nbytes, dtype, tuple(shape), 0, start, role))
            end += nbytes
        placed.append(pieces)
    parts, size = [], round_up(end, PAGE)
    for part, pieces in zip(layer.parts, placed, strict=True):
        every = tuple(
            tuple(piece._replace(offset=piece.offset + expert * size) for piece in pieces)
            for expert in range(layer.n_experts)
        )
        parts.append(part._replace(pieces=every))
    return layer._replace(parts=tuple(parts))


def _pieces(layer: ExpertLayer, part: ExpertPart, precision: str, group: int) -> Iterator[tuple[str, tuple, int, str]]:
    """(dtype, shape, start, role) of each piece of one expert's part."""
    if len(part.shape) == 1:
        for piece in part.pieces[0]:
            yield piece.dtype, piece.shape, piece.start, piece.role
        return
    outputs, inputs = reversed(part.shape) if _transposed(layer) else part.shape
    codes, scales = shapes((outputs, inputs), precision, group if precision == INT8 else group_for(inputs, group))
    yield _CODES[precision], codes, outputs, precision
    yield "BF16", scales, 0, SCALES


def _transposed(layer: ExpertLayer) -> bool:
    return bool(getattr(layer.module, "is_transposed", False))


def _fill(window: Window, row: torch.Tensor, read: Read) -> None:
    read(window.file, window.offset, row[window.start : window.start + window.nbytes].numpy().data)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
