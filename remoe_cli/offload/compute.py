"""One expert, and one dense linear layer, for few tokens: near the memory floor, with the stock modules' own arithmetic.

Shape letters: M rows, H hidden.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from remoe_cli.errors import FamilyError
from remoe_cli.offload.small import Small

Parts = dict[str, list[torch.Tensor | Small]]
_HALF = (torch.bfloat16, torch.float16)


@contextmanager
def without_onednn(x: torch.Tensor) -> Iterator[None]:
    """For products of few rows with transposed weights in half precision on a CPU: torch's own kernels stream those
    weights at twice oneDNN's speed."""
    if x.dtype not in _HALF or x.device.type != "cpu":
        yield
        return
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def linear(x_MH: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear, near the memory floor for a single row."""
    if x_MH.numel() == x_MH.shape[-1]:
        with without_onednn(x_MH):
            return F.linear(x_MH, weight, bias)
    return F.linear(x_MH, weight, bias)


def compute_threads(asked: int | None) -> int:
    """As asked for, else all that torch would take but one: two teams on the same cores slow each other down many times."""
    return asked or max(1, torch.get_num_threads() - 1)


@contextmanager
def running(device: torch.device, threads: int | None) -> Iterator[None]:
    """Streams and events belong to this device; compute threads are as asked for, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    finally:
        torch.set_num_threads(before)


def quicken(model: nn.Module) -> None:
    """Every nn.Linear of a model takes `linear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, module.weight, module.bias)


def require_known(module: Any, model_type: str) -> None:
    """Raises FamilyError for an experts module whose arithmetic is not gate, up, down as its flags describe it."""
    known = all(hasattr(module, name) for name in ("is_transposed", "has_bias", "has_gate", "_apply_gate"))
    if not known or getattr(module, "has_post_expert_norm", False):
        raise FamilyError(
            f"{model_type}: remoe does not know how {type(module).__name__} computes an expert.",
            "pip install -U remoe-cli",
        )


def run_expert(module: Any, parts: Parts, x_MH: torch.Tensor) -> torch.Tensor:
    """[M, H]: what the stock module's own loop computes for one expert, before the routing weight.

    module: the experts module, decorated by transformers' use_experts_implementation, whose flags say how it computes.
    parts: the expert's tensors under the names of the module's parameters; pieces of one part that do not lie side by side
    are several, joined along what they put out.
    """
    n_rows = len(x_MH)
    if n_rows > 1 and x_MH.dtype in _HALF and x_MH.device.type == "cpu":
        # oneDNN compiles and keeps .6 MB for every number of rows that it meets
        x_MH = F.pad(x_MH, (0, 0, 0, _rounded(n_rows) - n_rows))
    hidden = _project(module, parts, "gate_up_proj" if module.has_gate else "up_proj", x_MH)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    return _project(module, parts, "down_proj", hidden)[:n_rows]


class SingleToken:
    """The experts of one token, of a module whose projections are plain weights: products go straight to their rows, and
    the activations of all experts at hand are computed at once. The same arithmetic as `run_expert`, whatever is at hand."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._into = "gate_up_proj" if module.has_gate else "up_proj"

    @staticmethod
    def serves(module: Any) -> bool:
        return not module.is_transposed and not module.has_bias

    def run(self, experts: Sequence[Parts], x_H: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """rows: [H] an expert, filled with what it puts out."""
        width = sum(len(piece) for piece in experts[0][self._into])
        inner_GI = x_H.new_empty(len(experts), width)
        with without_onednn(x_H):
            for parts, inner_I in zip(experts, inner_GI.unbind(), strict=True):
                _products(parts[self._into], x_H, inner_I)
            module = self._module
            act_GI = module._apply_gate(inner_GI) if module.has_gate else module.act_fn(inner_GI)
            for parts, act_I, row in zip(experts, act_GI.unbind(), rows, strict=True):
                _products(parts["down_proj"], act_I, row)


def _products(pieces: Sequence[torch.Tensor | Small], x: torch.Tensor, out: torch.Tensor) -> None:
    start = 0
    for piece in pieces:
        rows = out[start : start + len(piece)] if len(pieces) > 1 else out
        if isinstance(piece, Small):
            rows.copy_(piece.linear(x))
        else:
            torch.mv(piece, x, out=rows)
        start += len(piece)


def _rounded(n_rows: int) -> int:
    """Up to a power of two, beyond 32 to a multiple of it."""
    return min(1 << (n_rows - 1).bit_length(), -(-n_rows // 32) * 32)


def _project(module: Any, parts: Parts, name: str, x: torch.Tensor) -> torch.Tensor:
    pieces = parts[name]
    out = [_product(piece, x, module.is_transposed) for piece in pieces]
    joined = out[0] if len(out) == 1 else torch.cat(out, -1)
    if not module.has_bias:
        return joined
    (bias,) = parts[f"{name}_bias"]
    assert isinstance(bias, torch.Tensor)
    return joined + bias


def _product(piece: torch.Tensor | Small, x: torch.Tensor, transposed: bool) -> torch.Tensor:
    if isinstance(piece, Small):
        return piece.linear(x)
    if transposed:
        return x @ piece
    return linear(x, piece)
