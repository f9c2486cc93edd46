"""Routing traces of decoding, many requests at once: forced continuations and greedy ones.

Shape letters: R requests, P prompt tokens, S counted one-token steps, L MoE layers, E routed experts, K experts a token.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from remoe_cli.families import Gate, Routed, RouterTap
from remoe_cli.families.experts import recorded_order
from remoe_cli.families.loader import kept_cache
from remoe_cli.families.tap import probabilities as softmax
from remoe_cli.report.figures import Decoded
from remoe_cli.routing.trace import RoutingTrace

Arrays = list[np.ndarray]  # experts [..., L, K] int16, weights [..., L, K] float16 and, where asked for, probabilities


@torch.no_grad()
def decode(
    model: torch.nn.Module,
    gates: list[Gate],
    prompts: Sequence[torch.Tensor] | torch.Tensor,
    steps: int,
    forced_RS: torch.Tensor | None = None,
    *,
    prefill: bool = False,
    probabilities: bool = False,
    batch: int = 32,
    provenance: dict | None = None,
    on_batch: Callable[[int], None] = lambda done: None,
    on_tokens: Callable[[int], None] = lambda done: None,
) -> Decoded:
    """Prefills each prompt, then feeds `steps` tokens one by one: forced_RS, or the model's own greedy choice.

    prompts: [P] ids each, or [R, P]. Those of one length go together, so no row is padded. The end token is ignored, so
    that all requests count `steps` steps (ReMoE's protocol). prefill: whether the routing of the prompts is in the trace
    too; probabilities: whether each router's are. on_batch, on_tokens: called with the requests, and with the tokens of
    prompts and steps, that are done.
    """
    device = next(model.parameters()).device
    traced: list[Arrays] = [[]] * len(prompts)
    fed = np.empty((len(prompts), steps), dtype=np.int64)
    done = tokens = 0

    def count(passed: int) -> None:
        nonlocal tokens
        tokens += passed
        on_tokens(tokens)

    for rows in _of_one_length(prompts, batch):
        prompts_RP = torch.stack([prompts[row] for row in rows]).to(device)
        forced = None if forced_RS is None else forced_RS[rows].to(device)
        with RouterTap(gates) as tap:
            fed[rows], arrays = _batch(model, tap, prompts_RP, steps, forced, prefill, probabilities, count)
        for number, row in enumerate(rows):
            traced[row] = [array[number] for array in arrays]
        done += len(rows)
        on_batch(done)
    lengths = np.array([len(prompt) if prefill else 0 for prompt in prompts])
    phases = [np.arange(length + steps) < length for length in lengths]
    experts_TLK, weights_TLK, *probabilities_TLE = (np.concatenate(parts) for parts in zip(*traced, strict=True))
    trace = RoutingTrace(
        experts_TLK,
        np.concatenate([[0], np.cumsum(lengths + steps)]),
        np.concatenate(phases),
        gates[0].n_experts,
        weights_TLK,
        {"kind": "greedy" if forced_RS is None else "forced", **(provenance or {})},
        probabilities_TLE[0] if probabilities else None,
    )
    return Decoded(trace, fed)


def _of_one_length(prompts: Sequence[torch.Tensor] | torch.Tensor, batch: int) -> list[list[int]]:
    """Row numbers of each batch, in order of length, then of place."""
    of_length: dict[int, list[int]] = {}
    for row in range(len(prompts)):
        of_length.setdefault(len(prompts[row]), []).append(row)
    return [rows[at : at + batch] for _, rows in sorted(of_length.items()) for at in range(0, len(rows), batch)]


def _batch(
    model: torch.nn.Module,
    tap: RouterTap,
    prompts_RP: torch.Tensor,
    steps: int,
    forced_RS: torch.Tensor | None,
    prefill: bool,
    probabilities: bool,
    count: Callable[[int], None],
) -> tuple[np.ndarray, Arrays]:
    """Ids that were fed [R, S], and what was routed: [R, P + S, ...] with the prompt, [R, S, ...] without."""
    rows = len(prompts_RP)
    tap.start()
    out = model(prompts_RP, use_cache=True, logits_to_keep=1)
    passes = [_taken(tap, rows, probabilities)] if prefill else []
    count(prompts_RP.numel())
    fed = []
    next_R = out.logits[:, -1].argmax(-1)
    for step in range(steps):
        ids_R = next_R if forced_RS is None else forced_RS[:, step]
        tap.start()
        out = model(ids_R[:, None], use_cache=True, **kept_cache(out))
        passes.append(_taken(tap, rows, probabilities))
        count(rows)
        fed.append(ids_R.cpu().numpy())
        next_R = out.logits[:, -1].argmax(-1)
    return np.stack(fed, 1), [np.concatenate(parts, 1) for parts in zip(*passes, strict=True)]


def _taken(tap: RouterTap, rows: int, probabilities: bool) -> Arrays:
    """Of the pass that the tap recorded, each [rows, tokens of a row, ...]."""
    routed = tap.take()
    arrays = [*canonical(routed), *([_probabilities(routed)] if probabilities else [])]
    return [array.reshape(rows, -1, *array.shape[1:]) for array in arrays]


def canonical(routed: list[Routed]) -> tuple[np.ndarray, np.ndarray]:
    """experts [N, L, K] int16 and weights [N, L, K] float16, each token's experts in the recorded order."""
    experts, weights = [], []
    for layer in routed:
        weight_NK, choice_NK = layer.weight_NK.float().cpu().numpy(), layer.choice_NK.cpu().numpy()
        order = recorded_order(choice_NK, weight_NK)
        experts.append(np.take_along_axis(choice_NK, order, -1).astype(np.int16))
        weights.append(np.take_along_axis(weight_NK, order, -1).astype(np.float16))
    return np.stack(experts, 1), np.stack(weights, 1)


def _probabilities(routed: list[Routed]) -> np.ndarray:
    """[N, L, E] float16."""
    return np.stack([softmax(layer.logits_NE).cpu().numpy().astype(np.float16) for layer in routed], 1)
