"""Teacher-forced measures over held-out text: perplexity and expert overlap ratio."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from remoe_cli.errors import DataError
from remoe_cli.families import Gate, RouterTap
from remoe_cli.measure.requests import stretches
from remoe_cli.objectives.remoe import cross_entropy, overlap, Segments
from remoe_cli.train.packing import batches, model_inputs


class TextMeasures(NamedTuple):
    """perplexity: exp of the mean loss over `tokens` predicted tokens. eor: mean over adjacent pairs and MoE layers."""

    perplexity: float
    loss: float
    eor: float
    tokens: int


@torch.no_grad()
def measure_text(
    model: torch.nn.Module,
    gates: list[Gate],
    documents: Sequence[Sequence[int]],
    sequence: int,
    rows: int,
    *,
    batch: int = 4,
    on_batch: Callable[[int], None] = lambda rows_done: None,
) -> TextMeasures:
    """Over `rows` packed rows of `sequence` tokens, taken from all documents alike (`stretches`); no document sees another,
    no pair crosses a border.

    Raises DataError when the documents hold no pair of tokens.
    """
    device = next(model.parameters()).device
    loss = shared = 0.0
    pairs = done = 0
    for packed in batches(stretches(documents, sequence), sequence, min(batch, rows)):
        packed = type(packed)(packed.ids_BT[: rows - done], packed.document_BT[: rows - done])
        segments = Segments.of(packed.document_BT).to(device)
        with RouterTap(gates) as tap:
            logits_BTV = model(**model_inputs(model, packed, segments)).logits
            choice_LNK = torch.stack([routed.choice_NK for routed in tap.take()])
        loss += float(cross_entropy(logits_BTV, packed.ids_BT.to(device), segments))
        shared += float(overlap(choice_LNK, segments))
        pairs += int(segments.pairs(1).sum())
        done += len(packed.ids_BT)
        on_batch(done)
        if done >= rows:
            break
    if not pairs:
        raise DataError(
            "the held-out texts hold no pair of tokens to measure.", "remoe finetune MODEL --data FILE.jsonl"
        )
    mean = loss / pairs
    return TextMeasures(math.exp(mean) if mean < 700 else math.inf, mean, shared / pairs, pairs)
