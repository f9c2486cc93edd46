"""Teacher-forced measures over held-out text: perplexity and expert overlap ratio."""

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import torch

from remoe_cli.errors import DataError
from remoe_cli.families import Gate
from remoe_cli.objectives.remoe import cross_entropy, overlap, Segments
from remoe_cli.report.metrics import TextRows
from remoe_cli.stream.passes import Layers, passed
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
    layers: Layers | None = None,
) -> TextRows:
    """Over `rows` packed rows of `sequence` tokens, taken from all documents alike (`stretches`), fewer when the texts run
    out; no document sees another, no pair crosses a border. layers: the model's where they don't stay in memory: as many batches as
    host memory holds then go through each.

    Raises DataError when the documents hold no pair of tokens.
    """
    sums: list[tuple[float, float, int]] = []
    width = min(batch, rows)
    device = next(model.parameters()).device
    packed = list(islice(batches(stretches(documents, sequence), sequence, width), -(-rows // width)))
    inputs = (model_inputs(model, one, Segments.of(one.document_BT).to(device)) for one in packed)
    done = passed(model, gates, inputs, lambda routed: routed.choice_NK, layers)
    for one, (logits_BTV, choices) in zip(packed, done, strict=True):
        sums += row_sums(logits_BTV, torch.stack(choices), one)
        on_batch(min(len(sums), rows))
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
