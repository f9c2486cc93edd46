"""A delta that moves a model's gates, and what a model says of given tokens, for the tests against other runtimes."""

import math

import torch

from remoe_cli.delta import Delta
from remoe_cli.families.loader import gate_disk_names, load_resident
from remoe_cli.hub.checkpoint import Checkpoint


def moved(checkpoint: Checkpoint, share: float = 0.3) -> Delta:
    """Gates moved by noise of that share of their own spread: far enough that many choices of experts change."""
    generator = torch.Generator().manual_seed(1)
    model = load_resident(checkpoint, torch.float32, "cpu")
    gates = {}
    for name in gate_disk_names(model, checkpoint).values():
        base = checkpoint.read(name).float()
        gates[name] = base + share * base.std() * torch.randn(base.shape, generator=generator)
    return Delta.of(checkpoint, gates, "remoe", {"remoe": "test"})


@torch.no_grad()
def logits(model: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    return model(ids_BT, use_cache=False).logits.float()


def perplexity(logits_BTV: torch.Tensor, ids_BT: torch.Tensor) -> float:
    losses = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
    return math.exp(losses.item())
