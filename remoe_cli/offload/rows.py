"""Which rows of a pass each expert serves, and which of a token's experts weigh least.

Shape letters: N tokens, K experts a token, R = N x K rows, H hidden.
"""

from typing import Any

import numpy as np
import torch

from remoe_cli.offload.compute import Parts, run_expert, SingleToken


def light_ones(experts_K: np.ndarray, weights_K: np.ndarray, heavy: float) -> set[int]:
    """Of a token's experts, heaviest first, those that come after the share `heavy` of its routing weight."""
    weights = weights_K.astype(np.float64)
    before_K = np.cumsum(weights) - weights
    return {*experts_K[before_K >= heavy * weights.sum()].astype(int).tolist()}


class Arithmetic:
    """Of one layer's experts, wherever they lie."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._single = SingleToken(module) if SingleToken.serves(module) else None

    def put_out(self, parts: dict[int, Parts], plan: "Plan", x_NH: torch.Tensor, out_RH: torch.Tensor) -> None:
        """Each expert's output into its rows. All tensors are on one device."""
        if self._single is not None and len(x_NH) == 1:
            self._single.run([*parts.values()], x_NH[0], [out_RH[plan.of(expert)[1]][0] for expert in parts])
            return
        for expert, its in parts.items():
            tokens, rows = plan.of(expert)
            out_RH[rows] = run_expert(self._module, its, x_NH if tokens is None else x_NH[tokens])


class Plan:
    """Which rows of a pass each expert serves. An output has a row for each token and choice, the choices of a token by
    ascending expert, which is the order in which the stock module adds them up."""

    def __init__(self, choice_NK: np.ndarray, device: torch.device) -> None:
        self._n_tokens, self._top_k = choice_NK.shape
        self.n_rows = choice_NK.size
        order_NK = choice_NK.argsort(-1, kind="stable")
        if self._n_tokens == 1:
            self._row = {int(choice_NK[0, k]): rank for rank, k in enumerate(order_NK[0].tolist())}
        else:
            # the stock module takes an expert's tokens by place among the choices, then by token
            rank_NK = order_NK.argsort(-1, kind="stable")
            chosen = choice_NK.T.ravel()
            by_expert = chosen.argsort(kind="stable")
            tokens = by_expert % self._n_tokens
            rows = tokens * self._top_k + rank_NK.T.ravel()[by_expert]
            self._tokens, self._rows = torch.from_numpy(np.stack((tokens, rows))).to(device)
            experts, starts = np.unique(chosen[by_expert], return_index=True)
            ends = [*starts[1:].tolist(), self.n_rows]
            self._span = {int(e): slice(a, b) for e, a, b in zip(experts, starts.tolist(), ends)}

    def of(self, expert: int) -> tuple[torch.Tensor | None, Any]:
        """Its tokens (None: the only one), and its rows of the output."""
        if self._n_tokens == 1:
            row = self._row[expert]
            return None, slice(row, row + 1)
        span = self._span[expert]
        return self._tokens[span], self._rows[span]

    def total(self, out_RH: torch.Tensor, index_NK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """[N, H]; a choice at a time, so that no more than one is held in the weights' wider dtype."""
        out_NKH = out_RH.view(self._n_tokens, self._top_k, -1)
        weight_NK1 = weight_NK.gather(-1, index_NK.argsort(-1))[..., None]
        if self._n_tokens == 1:
            first, *others = (out_NKH[0] * weight_NK1[0]).to(out_RH.dtype).unbind()
            for other in others:
                first += other
            return first[None]
        total_NH = (out_NKH[:, 0] * weight_NK1[:, 0]).to(out_RH.dtype)
        for k in range(1, self._top_k):
            total_NH += (out_NKH[:, k] * weight_NK1[:, k]).to(out_RH.dtype)
        return total_NH
