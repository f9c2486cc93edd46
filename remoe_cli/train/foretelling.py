"""Training of the networks that foretell experts from hidden states, all layers at once.

Shape letters: N tokens, L MoE layers, H hidden, W width, E routed experts, K experts a token.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from remoe_cli.cache.prefetch.predictor import SHAPES
from remoe_cli.routing import RoutingTrace

BATCH, RATE = 256, 1e-3


class Foretold(NamedTuple):
    """weights: as Predictor takes them. recall: of held-out tokens' experts, the share among the K that are foretold, [L]; before: the same of
    those of the token before, the mean; pairs, held_out: tokens."""

    weights: dict[str, np.ndarray]
    recall: list[float]
    before: float
    pairs: int
    held_out: int


def train(
    trace: RoutingTrace, ahead: int, width: int, epochs: int, seed: int, on_epoch: Callable[[int, float], None]
) -> Foretold:
    """Adam on the binary cross entropy of every expert. The last tenth of the requests (of a single one: of its tokens) is held out.

    on_epoch: called with the epochs done and the mean loss of the last one.
    """
    assert trace.hidden is not None
    n_layers, n_experts, top_k = trace.n_layers, trace.n_experts, trace.top_k
    rows = np.setdiff1d(np.arange(trace.n_tokens), trace.borders[:-1])  # with a token before them
    first = trace.borders[-2] if trace.n_requests > 1 else trace.n_tokens
    first = trace.borders[min(trace.n_requests - 1, int(trace.n_requests * 0.9))] if trace.n_requests > 9 else first
    if trace.n_requests == 1:
        first = int(trace.n_tokens * 0.9)
    known, held_out = rows[rows < first], rows[rows >= first]
    draw = torch.Generator().manual_seed(seed)
    H = trace.hidden.shape[-1]
    shapes = {
        "into": (n_layers, H, width),
        "into_bias": (n_layers, width),
        "out": (n_layers, width, n_experts),
        "out_bias": (n_layers, n_experts),
    }
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, fan in (("into", H), ("out", width)):
        weights[name].normal_(0, fan**-0.5, generator=draw)
    for one in weights.values():
        one.requires_grad_()
    assert [*weights] == [*SHAPES]
    optimizer = torch.optim.Adam(weights.values(), RATE)

    def logits(rows: np.ndarray) -> torch.Tensor:
        """[L, N, E]"""
        states = [trace.hidden[rows - (layer < ahead), layer - ahead] for layer in range(n_layers)]  # type: ignore[index]
        x_LNH = torch.from_numpy(np.stack(states).astype(np.float32))
        inner = torch.baddbmm(weights["into_bias"][:, None], x_LNH, weights["into"]).relu()
        return torch.baddbmm(weights["out_bias"][:, None], inner, weights["out"])

    def chosen(rows: np.ndarray) -> torch.Tensor:
        """[L, N, K]"""
        return torch.from_numpy(trace.experts[rows].astype(np.int64)).transpose(0, 1)

    for epoch in range(epochs):
        order = known[torch.randperm(len(known), generator=draw).numpy()]
        total = 0.0
        for at in range(0, len(order), BATCH):
            batch = order[at : at + BATCH]
            target = torch.zeros(n_layers, len(batch), n_experts).scatter_(-1, chosen(batch), 1.0)
            loss = F.binary_cross_entropy_with_logits(logits(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        on_epoch(epoch + 1, total / max(1, len(order)))
    with torch.no_grad():
        told = logits(held_out).topk(top_k).indices
        own = chosen(held_out)
        right = (told[..., None] == own[..., None, :]).any(-1).float()
        stayed = (chosen(held_out - 1)[..., None] == own[..., None, :]).any(-1).float()
    return Foretold(
        {name: one.detach().numpy() for name, one in weights.items()},
        right.mean((1, 2)).tolist(), stayed.mean().item(), len(known), len(held_out),
    )  # fmt: skip
