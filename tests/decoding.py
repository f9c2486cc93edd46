"""What the tests of the offloaded decoder share."""

import pytest
import torch
from slow_policies import foreseen, History, slow_cache

from remoe_cli.cache import choose
from remoe_cli.families import Heads, KINDS
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder
from remoe_cli.routing import RoutingTrace

PROMPT = [5, 17, 80, 3, 3, 99, 41, 64, 12, 110, 27]
NEW = 16
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
BOTH = [torch.float32, torch.bfloat16]


def dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    return getattr(torch, checkpoint.config["dtype"])


def heads_of(decoder: OffloadedDecoder) -> Heads:
    """The gates and as much noise again, so that no head equals a gate and some of what they foresee is right."""
    heads, draw = Heads.of_gates(decoder.gates, KINDS), torch.Generator().manual_seed(0)
    for kind in KINDS:
        for weight in getattr(heads, kind):
            weight += torch.randn(weight.shape, generator=draw) * weight.std().cpu()
    return heads


def slow_counts(trace: RoutingTrace, asked: str, capacity: int, admission: str) -> tuple[int, int, int, int]:
    """Hits, misses, evictions and loads ahead of need of one request, by the slow twins."""
    name, policy, parameter, second, _ = choose(asked)
    totals = [0, 0, 0, 0]
    rows = [row for row in range(trace.n_tokens) if not trace.prefill[row]]
    for layer in range(trace.n_layers):
        scores, heads = (
            None if array is None else array[rows, layer].tolist() for array in (trace.probabilities, trace.temporal)
        )
        past = History(
            trace.experts[rows, layer, ::-1].tolist(), 1, trace.n_experts, trace.weights[rows, layer, ::-1].tolist(), scores,
            parameter=parameter, second=second, heads=heads,
            ahead=[foreseen(name, trace, row, layer) for row in rows] if policy.refines else None,
        )  # fmt: skip
        done, _ = slow_cache(name, capacity, admission, past)
        for step, came, went in zip(done, past.came, past.went, strict=True):
            for place, number in enumerate(
                (len(step.hits), len(step.misses), len(step.evicted) + len(went), len(came))
            ):
                totals[place] += number
    return tuple(totals)
