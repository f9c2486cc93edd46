"""Packing: documents of any length become rows of one length, without one document seeing another.

Positions restart at each document, and transformers' own mask functions turn them into masks that stop at each border
(and, for sliding windows, count the distance inside the document). They are called here, because not every model hands
its positions on to them: gpt_oss, given positions alone, attends over borders. A padding slot has position 0, which
makes it a document of its own: it sees itself only, so no row of the mask is empty, and nothing else sees it.

Shape letters: B rows, T slots a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
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


class Document(NamedTuple):
    """ids: token ids; learned: which of them are targets of the cross entropy, None: all."""

    ids: list[int]
    learned: list[bool] | None = None

    def cut(self, first: int, last: int | None = None) -> "Document":
        return Document(self.ids[first:last], self.learned and self.learned[first:last])


class Position(NamedTuple):
    """Where the next micro-batch begins. round: how often all texts were read before; document: its place in the
    texts' order, left-out ones counted; token: how many of its tokens were read."""

    round: int = 0
    document: int = 0
    token: int = 0


BEGIN = Position()


class Batch(NamedTuple):
    """ids_BT: token ids (0 where padding); document_BT: number of the document inside its row, -1 where padding;
    learned_BT: True where a token is a target of the cross entropy (None: all are); next: what comes after."""

    ids_BT: Tensor
    document_BT: Tensor
    learned_BT: Tensor | None = None
    next: Position = BEGIN


Row = list[Document]
Texts = Iterable[Document | Sequence[int]]


def batches(
    documents: Texts,
    tokens: int,
    rows: int,
    *,
    packed: bool = True,
    repeat: bool = False,
    start: Position = BEGIN,
) -> Iterator[Batch]:
    """Micro-batches of `rows` rows of `tokens` slots. The last has fewer rows when the documents run out.

    packed: rows are full (`pack`), else of one document each (`single`). repeat: start over without end (documents must
    be iterable more than once, such as a list). A document may then lie beside one of the next round, never in one
    piece with it. start: `next` of a batch; what comes is what would have come after it. Raises DataError when there is
    no token at all.
    """
    waiting: list[Row] = []
    empty = True
    for row, after in (pack if packed else single)(_placed(documents, start, repeat), tokens):
        empty = False
        waiting.append(row)
        if len(waiting) == rows:
            yield collate(waiting, tokens)._replace(next=after)
            waiting = []
    if waiting:
        yield collate(waiting, tokens)._replace(next=after)
    if empty and (repeat or start == BEGIN):
        raise DataError("the texts hold no token to train on.", "remoe finetune MODEL --data FILE.jsonl")


def stretches(documents: Sequence[Sequence[int]], length: int) -> Iterator[list[int]]:
    """The first `length` tokens of each document, then the next of each, and so on: a few long documents cannot crowd out
    the others. The last stretch of a document may be shorter."""
    for begin in range(0, max(map(len, documents), default=0), length):
        for document in documents:
            if len(document) > begin:
                yield list(document[begin : begin + length])


def pack(documents: Iterable[tuple[Position, Document]], tokens: int) -> Iterator[tuple[Row, Position]]:
    """Rows of exactly `tokens` ids (the last may be shorter), in the order the documents came, and the place after each.

    A document that reaches over the row's end is cut there; its rest is a new document in the next row. Empty documents
    are skipped.
    """
    row: Row = []
    room, after = tokens, BEGIN
    for begin, document in documents:
        at = 0
        while at < len(document.ids):
            row.append(document.cut(at, at + room))
            at += len(row[-1].ids)
            room -= len(row[-1].ids)
            after = _after(begin, document, at)
            if room == 0:
                yield row, after
                row, room = [], tokens
    if row:
        yield row, after


def single(documents: Iterable[tuple[Position, Document]], tokens: int) -> Iterator[tuple[Row, Position]]:
    """Rows of one document each, for families whose layers carry a state over the row and so cannot be packed."""
    for begin, document in documents:
        for at in range(0, len(document.ids), tokens):
            yield [document.cut(at, at + tokens)], _after(begin, document, at + tokens)


def collate(rows: Sequence[Row | list[list[int]]], tokens: int, *, left: bool = False) -> Batch:
    """Rows, padded at the end (left: at the start) to `tokens` slots."""
    ids_BT = torch.zeros(len(rows), tokens, dtype=torch.int64)
    document_BT = torch.full((len(rows), tokens), PADDING, dtype=torch.int64)
    learned_BT = torch.zeros(len(rows), tokens, dtype=torch.bool)
    for b, row in enumerate(rows):
        documents = [_document(item) for item in row]
        ids = [token for document in documents for token in document.ids]
        slots = slice(tokens - len(ids), tokens) if left else slice(0, len(ids))
        ids_BT[b, slots] = torch.tensor(ids, dtype=torch.int64)
        numbers = [number for number, document in enumerate(documents) for _ in document.ids]
        document_BT[b, slots] = torch.tensor(numbers, dtype=torch.int64)
        learned = [flag for document in documents for flag in document.learned or [True] * len(document.ids)]
        learned_BT[b, slots] = torch.tensor(learned, dtype=torch.bool)
    return Batch(ids_BT, document_BT, learned_BT)


def _placed(documents: Texts, start: Position, repeat: bool) -> Iterator[tuple[Position, Document]]:
    """Each document from `start` on, with the place where it begins (of the first: what is left of it)."""
    while True:
        found = False
        for number, document in _numbered(documents, start.document):
            first = start.token if number == start.document else 0
            found = found or len(document.ids) > 0
            yield Position(start.round, number, first), document.cut(first)
        if not repeat or not (found or start.document or start.token):
            return
        start = Position(start.round + 1)


def _numbered(documents: Texts, start: int) -> Iterator[tuple[int, Document]]:
    if hasattr(documents, "numbered"):
        yield from documents.numbered(start)
    else:
        for number, item in islice(enumerate(documents), start, None):
            yield number, _document(item)


def _after(begin: Position, document: Document, read: int) -> Position:
    """The place after `read` tokens of a document that begins there."""
    if read < len(document.ids):
        return begin._replace(token=begin.token + read)
    return Position(begin.round, begin.document + 1)


def _document(item: Document | Sequence[int]) -> Document:
    return item if isinstance(item, Document) else Document(list(item))


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
