"""Packing: documents of any length become rows of one length, without one document seeing another.

Positions restart at each document, and transformers' own mask functions turn them into masks that stop at each border
(and, for sliding windows, count the distance inside the document). They are called here, because not every model hands
its positions on to them: gpt_oss, given positions alone, attends over borders. A padding slot has position 0, which
makes it a document of its own: it sees itself only, so no row of the mask is empty, and nothing else sees it.

Shape letters: B rows, T slots a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TYPE_CHECKING

import torch
from torch import Tensor

from remoe_cli.errors import DataError, FamilyError
from remoe_cli.objectives.remoe import PADDING, Segments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Attention that reads the block mask; flash kernels would take only one packed row at a time.
PACKABLE_ATTENTION = ("sdpa", "eager")
# Layers that see the past only through that mask; any other kind may carry a state along the row.
PACKABLE_LAYERS = ("full_attention", "sliding_attention")


class Batch(NamedTuple):
    """ids_BT: token ids (0 where padding); document_BT: number of the document inside its row, -1 where padding."""

    ids_BT: Tensor
    document_BT: Tensor


def pack(documents: Iterable[Sequence[int]], tokens: int) -> Iterator[list[list[int]]]:
    """Rows of exactly `tokens` ids (the last may be shorter), each a list of documents, in the order they came.

    A document that reaches over the row's end is cut there; its rest is a new document in the next row. Empty documents
    are skipped.
    """
    row: list[list[int]] = []
    room = tokens
    for document in documents:
        rest = list(document)
        while rest:
            row.append(rest[:room])
            rest = rest[room:]
            room -= len(row[-1])
            if room == 0:
                yield row
                row, room = [], tokens
    if row:
        yield row


def single(documents: Iterable[Sequence[int]], tokens: int) -> Iterator[list[list[int]]]:
    """Rows of one document each, for families whose layers carry a state over the row and so cannot be packed."""
    for document in documents:
        for start in range(0, len(document), tokens):
            yield [list(document[start : start + tokens])]


def collate(rows: Sequence[list[list[int]]], tokens: int) -> Batch:
    """Rows, padded at the end to `tokens` slots."""
    ids_BT = torch.zeros(len(rows), tokens, dtype=torch.int64)
    document_BT = torch.full((len(rows), tokens), PADDING, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids = [token for document in row for token in document]
        ids_BT[b, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        numbers = [number for number, document in enumerate(row) for _ in document]
        document_BT[b, : len(ids)] = torch.tensor(numbers, dtype=torch.int64)
    return Batch(ids_BT, document_BT)


def batches(
    documents: Iterable[Sequence[int]], tokens: int, rows: int, *, packed: bool = True, repeat: bool = False
) -> Iterator[Batch]:
    """Micro-batches of `rows` rows of `tokens` slots. The last has fewer rows when the documents run out.

    repeat: start over without end (documents must be iterable more than once, such as a list). A document may then lie
    beside one of the next round, never in one piece with it. Raises DataError when there is no token at all.
    """
    source = _rounds(documents) if repeat else iter(documents)
    waiting: list[list[list[int]]] = []
    empty = True
    for row in (pack if packed else single)(source, tokens):
        empty = False
        waiting.append(row)
        if len(waiting) == rows:
            yield collate(waiting, tokens)
            waiting = []
    if waiting:
        yield collate(waiting, tokens)
    if empty:
        raise DataError("the texts hold no token to train on.", "remoe finetune MODEL --data FILE.jsonl")


def require_packable(model: "PreTrainedModel") -> None:
    """Raises FamilyError when the model's attention, or a layer that carries a state along the row, ignores borders."""
    config = model.config
    attention = config._attn_implementation
    if attention not in PACKABLE_ATTENTION:
        raise FamilyError(
            f"packed rows need attention of the kind {' or '.join(PACKABLE_ATTENTION)}, not {attention!r}.",
            "model.set_attn_implementation('sdpa')",
        )
    others = set(getattr(config, "layer_types", None) or ()) - set(PACKABLE_LAYERS)
    if others:
        raise FamilyError(
            f"{config.model_type}: layers of the kind {', '.join(sorted(others))} may carry a state over borders.",
            "batches(..., packed=False)",
        )


def model_inputs(model: "PreTrainedModel", batch: Batch, segments: Segments) -> dict:
    """Keyword arguments of the model's forward for a packed batch, on the model's device. The attention mask is what
    transformers gives this model in `generate`: 4-D, None, or one of these for each kind of layer."""
    from transformers.masking_utils import create_masks_for_generate

    ids_BT = batch.ids_BT.to(model.device)
    position_BT = segments.position_N.view(batch.ids_BT.shape).to(model.device)
    like_BT0 = torch.empty(*ids_BT.shape, 0, dtype=model.dtype, device=model.device)
    mask = create_masks_for_generate(model.config, like_BT0, None, None, position_BT)
    return {"input_ids": ids_BT, "position_ids": position_BT, "attention_mask": mask, "use_cache": False}


def _rounds(documents: Iterable[Sequence[int]]) -> Iterator[Sequence[int]]:
    found = True
    while found:
        found = False
        for document in documents:
            found = found or len(document) > 0
            yield document
