"""Routing traces of decoding, many requests at once: forced continuations and greedy ones.

Shape letters: R requests, P prompt tokens, S counted one-token steps, L MoE layers, E routed experts, K experts a token.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from remoe_cli.families import Gate, guess, Heads, Routed, RouterTap
from remoe_cli.families.experts import recorded_order
from remoe_cli.families.loader import kept_cache
from remoe_cli.report.figures import Decoded
from remoe_cli.routing.trace import RoutingTrace

Arrays = dict[str, np.ndarray]  # experts [..., L, K] int16, and of FLOATS the weights and what was asked for, float16


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
    guesses: bool = False,
    hidden: bool = False,
    heads: Heads | None = None,
    batch: int = 32,
    provenance: dict | None = None,
    on_batch: Callable[[int], None] = lambda done: None,
    on_tokens: Callable[[int], None] = lambda done: None,
) -> Decoded:
    """Prefills each prompt, then feeds `steps` tokens one by one: forced_RS, or the model's own greedy choice.

    prompts: [P] ids each, or [R, P]. Those of one length go together, so no row is padded. The end token is ignored, so
    that all requests count `steps` steps (ReMoE's protocol). prefill: whether the routing of the prompts is in the trace
    too; probabilities: whether each router's are; guesses: whether what the next layer's gate says of a layer's hidden state is; hidden:
    whether these states are; heads: theirs are too, on any device. on_batch, on_tokens: called with the requests, and with the tokens of
    prompts and steps, that are done.
    """
    device = next(model.parameters()).device
    heads = heads.to(device) if heads is not None else None
    traced: list[Arrays] = [{}] * len(prompts)
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
            fed[rows], arrays = _batch(
                model,
                tap,
                prompts_RP,
                steps,
                forced,
                prefill,
                lambda routed: {
                    **recorded(routed, probabilities, heads),
                    **(guessed(routed, gates) if guesses else {}),
                    **({"hidden": _halves([layer.hidden_ND for layer in routed])} if hidden else {}),
                },
                count,
            )
        for number, row in enumerate(rows):
            traced[row] = {name: array[number] for name, array in arrays.items()}
        done += len(rows)
        on_batch(done)
    lengths = np.array([len(prompt) if prefill else 0 for prompt in prompts])
    phases = [np.arange(length + steps) < length for length in lengths]
    trace = RoutingTrace(
        borders=np.concatenate([[0], np.cumsum(lengths + steps)]),
        prefill=np.concatenate(phases),
        n_experts=gates[0].n_experts,
        provenance={"kind": "greedy" if forced_RS is None else "forced", **(provenance or {})},
        **_joined(traced, 0),
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
    record: Callable[[list[Routed]], Arrays],
    count: Callable[[int], None],
) -> tuple[np.ndarray, Arrays]:
    """Ids that were fed [R, S], and what was routed: [R, P + S, ...] with the prompt, [R, S, ...] without."""

    def taken() -> Arrays:
        """Of the pass that the tap recorded, each [rows, tokens of a row, ...]."""
        return {name: array.reshape(rows, -1, *array.shape[1:]) for name, array in record(tap.take()).items()}

    rows = len(prompts_RP)
    tap.start()
    out = model(prompts_RP, use_cache=True, logits_to_keep=1)
    passes = [taken()] if prefill else []
    count(prompts_RP.numel())
    fed = []
    next_R = out.logits[:, -1].argmax(-1)
    for step in range(steps):
        ids_R = next_R if forced_RS is None else forced_RS[:, step]
        tap.start()
        out = model(ids_R[:, None], use_cache=True, **kept_cache(out))
        passes.append(taken())
        count(rows)
        fed.append(ids_R.cpu().numpy())
        next_R = out.logits[:, -1].argmax(-1)
    return np.stack(fed, 1), _joined(passes, 1)


def _joined(parts: Sequence[Arrays], axis: int) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts], axis) for name in parts[0]}


def recorded(routed: list[Routed], probabilities: bool, heads: Heads | None) -> Arrays:
    """What traces hold of one pass, [N, L, ...] each. heads: on the device of the pass."""
    experts, weights = canonical(routed)
    found = {"experts": experts, "weights": weights}
    if probabilities:
        found["probabilities"] = _halves([layer.probabilities_NE for layer in routed])
    for kind in heads.kinds if heads is not None else ():
        assert heads is not None
        scored = [heads.probabilities(kind, i, layer.hidden_ND, layer.score) for i, layer in enumerate(routed)]
        found[kind] = _halves(scored)
    return found


def guessed(routed: list[Routed], gates: list[Gate]) -> Arrays:
    """What traces hold of the guesses of the layer that follows; with the shared experts only where every layer has them."""
    found = {"guess": [guess(gates, i, layer.hidden_ND) for i, layer in enumerate(routed)]}
    if all(gate.shared is not None and gate.family.early for gate in gates):
        found["guess_shared"] = [
            guess(gates, i, layer.hidden_ND + gate.shared(layer.hidden_ND))  # type: ignore[misc]
            for i, (layer, gate) in enumerate(zip(routed, gates))
        ]
    return {kind: _halves(layers) for kind, layers in found.items()}


def canonical(routed: list[Routed]) -> tuple[np.ndarray, np.ndarray]:
    """experts [N, L, K] int16 and weights [N, L, K] float16, each token's experts in the recorded order."""
    experts, weights = [], []
    for layer in routed:
        weight_NK, choice_NK = layer.weight_NK.float().cpu().numpy(), layer.choice_NK.cpu().numpy()
        order = recorded_order(choice_NK, weight_NK)
        experts.append(np.take_along_axis(choice_NK, order, -1).astype(np.int16))
        weights.append(np.take_along_axis(weight_NK, order, -1).astype(np.float16))
    return np.stack(experts, 1), np.stack(weights, 1)


def _halves(layers_NE: list[torch.Tensor]) -> np.ndarray:
    """[N, L, E] float16."""
    return np.stack([layer.float().cpu().numpy().astype(np.float16) for layer in layers_NE], 1)
