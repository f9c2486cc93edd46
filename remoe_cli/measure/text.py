"""Teacher-forced measures over held-out text: perplexity and expert overlap ratio."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch

from remoe_cli.errors import DataError
from remoe_cli.families import Gate, RouterTap
from remoe_cli.objectives.remoe import cross_entropy, overlap, Segments
from remoe_cli.report.metrics import TextRows
from remoe_cli.stream.passes import forward, Layers, wave
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
    packed = islice(batches(stretches(documents, sequence), sequence, width), -(-rows // width))
    for one, logits_BTV, choice_LNK in _passed(model, gates, packed, width, sequence, layers):
        sums += row_sums(logits_BTV, choice_LNK, one)
        on_batch(min(len(sums), rows))
    found = TextRows(*(np.array(part, dtype=np.float64) for part in zip(*sums[:rows], strict=True)))
    if not found.pairs_N.sum():
        raise DataError(
            "the held-out texts hold no pair of tokens to measure.", "remoe finetune MODEL --data FILE.jsonl"
        )
    return found


def _passed(
    model: torch.nn.Module, gates: list[Gate], packed: Iterable[Batch], rows: int, sequence: int, layers: Layers | None
) -> Iterator[tuple[Batch, torch.Tensor, torch.Tensor]]:
    """Each batch, its logits [B, T, V] and the experts that its tokens chose [L, N, K]."""
    if layers is None:
        for one in packed:
            with RouterTap(gates) as tap:
                logits_BTV = model(**_inputs(model, one)).logits
                choice_LNK = torch.stack([routed.choice_NK for routed in tap.take()])
            yield one, logits_BTV, choice_LNK
        return
    hidden_size = layers.model.config.get_text_config().hidden_size
    size = wave(hidden_size, layers.model.dtype, rows, sequence)
    rest = iter(packed)
    while waves := list(islice(rest, size)):
        inputs = [_inputs(model, one) for one in waves]
        for one, (logits_BTV, choices) in zip(
            waves, forward(layers, gates, inputs, lambda routed: routed.choice_NK), strict=True
        ):
            yield one, logits_BTV, torch.stack(choices)


def _inputs(model: torch.nn.Module, packed: Batch) -> dict:
    return model_inputs(model, packed, Segments.of(packed.document_BT).to(next(model.parameters()).device))


def row_sums(logits_BTV: torch.Tensor, choice_LNK: torch.Tensor, packed: Batch) -> list[tuple[float, float, int]]:
    """Of each row: loss in nats, overlaps, and over how many pairs of neighbours both are."""
    sums = []
    device, sequence = logits_BTV.device, packed.ids_BT.shape[1]
    for b, choice_LTK in enumerate(choice_LNK.split(sequence, 1)):
        row = Segments.of(packed.document_BT[b : b + 1]).to(device)
        loss = cross_entropy(logits_BTV[b : b + 1], packed.ids_BT[b : b + 1].to(device), row)
        sums.append((float(loss), float(overlap(choice_LTK, row)), int(row.pairs(1).sum())))
    return sums
