"""Teacher-forced measures over held-out text: perplexity and expert overlap ratio."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from remoe_cli.errors import DataError
from remoe_cli.families import Gate, RouterTap
from remoe_cli.objectives.remoe import cross_entropy, overlap, Segments
from remoe_cli.report.metrics import TextRows
from remoe_cli.train.packing import Batch, batches, model_inputs, stretches


@torch.no_grad()
def measure_rows(
    model: torch.nn.Module,
    gates: list[Gate],
    documents: Sequence[Sequence[int]],
    sequence: int,
    rows: int,
    *,
    batch: int = 4,
    on_batch: Callable[[int], None] = lambda rows_done: None,
) -> TextRows:
    """Over `rows` packed rows of `sequence` tokens, taken from all documents alike (`stretches`), fewer when the texts run
    out; no document sees another, no pair crosses a border.

    Raises DataError when the documents hold no pair of tokens.
    """
    device = next(model.parameters()).device
    sums: list[tuple[float, float, int]] = []
    for packed in batches(stretches(documents, sequence), sequence, min(batch, rows)):
        segments = Segments.of(packed.document_BT).to(device)
        with RouterTap(gates) as tap:
            logits_BTV = model(**model_inputs(model, packed, segments)).logits
            choice_LNK = torch.stack([routed.choice_NK for routed in tap.take()])
        sums += row_sums(logits_BTV, choice_LNK, packed)
        on_batch(min(len(sums), rows))
        if len(sums) >= rows:
            break
    found = TextRows(*(np.array(part, dtype=np.float64) for part in zip(*sums[:rows], strict=True)))
    if not found.pairs_N.sum():
        raise DataError(
            "the held-out texts hold no pair of tokens to measure.", "remoe finetune MODEL --data FILE.jsonl"
        )
    return found


def row_sums(logits_BTV: torch.Tensor, choice_LNK: torch.Tensor, packed: Batch) -> list[tuple[float, float, int]]:
    """Of each row: loss in nats, overlaps, and over how many pairs of neighbours both are."""
    sums = []
    device, sequence = logits_BTV.device, packed.ids_BT.shape[1]
    for b, choice_LTK in enumerate(choice_LNK.split(sequence, 1)):
        row = Segments.of(packed.document_BT[b : b + 1]).to(device)
        loss = cross_entropy(logits_BTV[b : b + 1], packed.ids_BT[b : b + 1].to(device), row)
        sums.append((float(loss), float(overlap(choice_LTK, row)), int(row.pairs(1).sum())))
    return sums
