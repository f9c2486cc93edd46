"""Routed experts that do not learn: gradients for what goes into them and for the routing weights, none for their own.

Autograd keeps a token's input once for each of its experts, what each puts out, and what lies between. Here the up-projection's output is
kept, once for each of a token's experts, and nothing else of that size. With y_t = sum_k w_tk W2 a_tk, where a = act(W1 x), and the
output's gradient g: z = W2' g is needed for the input's gradient anyway, and dL/dw_tk = g . (W2 a_tk) = z . a_tk, so that no
expert's output is.

Shape letters: T tokens, K experts a token, S = T K places in the order of experts, H hidden size, I inner size, E experts, O, N a
product's outputs and inputs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from remoe_cli.families.base import Gate
from remoe_cli.families.spread import is_spread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "remoe_frozen"
_FLAGS = ("is_transposed", "has_bias", "has_gate", "_apply_gate")


def can_be_frozen(gates: Sequence[Gate], dtype: torch.dtype) -> bool:
    """Whether the experts compute up, activation, down as their flags say, in a dtype that products by groups take."""
    experts: Any = gates[0].experts
    known = all(hasattr(experts, flag) for flag in _FLAGS) and not getattr(experts, "has_post_expert_norm", False)
    return known and dtype in (torch.bfloat16, torch.float16, torch.float32)


def use_frozen_experts(model: "PreTrainedModel", gates: Sequence[Gate]) -> bool:
    """Runs experts whose own weights get no gradient by `frozen_experts`, those of a module that does learn by the stock product of
    all groups. False, and nothing is changed, for experts or a dtype that it does not take."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    dtype = next(gates[0].experts.parameters(), gates[0].weight).dtype
    if not can_be_frozen(gates, dtype):
        return False

    def forward(module: Any, x_TH: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Tensor:
        learns = any(parameter.requires_grad for parameter in module.parameters())
        run = ALL_EXPERTS_FUNCTIONS["grouped_mm"] if learns else frozen_experts
        return run(module, x_TH, choice_TK, weight_TK)

    try:
        ALL_EXPERTS_FUNCTIONS.register(NAME, forward)
        model.set_experts_implementation(NAME)
    except (ValueError, ImportError):  # the class brings its own experts
        return False
    return True


def frozen_experts(module: Any, x_TH: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """[T, H], as transformers calls a way to run experts. module: decorated by its use_experts_implementation; none of its
    parameters gets a gradient. choice: experts from its number on are on other devices."""
    return _FrozenExperts.apply(x_TH, weight_TK, choice_TK, module)


class _Places(NamedTuple):
    """order [S]: the places among T x K, those of one expert together; ends [E]; counts: how many each expert has, on the host
    where products run one by one."""

    order_S: Tensor
    ends_E: Tensor
    counts: list[int] | None

    @classmethod
    def of(cls, choice_TK: Tensor, n_experts: int, *, grouped: bool) -> "_Places":
        chosen_S, order_S = torch.sort(choice_TK.reshape(-1), stable=True)
        edges_E = torch.arange(1, n_experts + 1, device=chosen_S.device)
        ends_E = torch.searchsorted(chosen_S, edges_E).to(torch.int32)  # places beyond belong to other devices
        return cls(order_S, ends_E, None if grouped else ends_E.diff(prepend=ends_E.new_zeros(1)).tolist())


class _FrozenExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_TK: Tensor, choice_TK: Tensor, module: Any) -> Tensor:
        top_k = choice_TK.shape[1]
        places = _Places.of(choice_TK, module.num_experts, grouped=_grouped(x_TH))
        up_SI = _project(module, _up(module), x_TH[places.order_S // top_k], places)
        out_SH = _project(module, "down_proj", _activated(module, up_SI), places)
        out_SH = out_SH * weight_TK.reshape(-1)[places.order_S, None]
        ctx.module, ctx.places = module, places
        ctx.save_for_backward(x_TH[:0], weight_TK, up_SI)
        return _by_token(out_SH, places.order_S, top_k).to(x_TH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        like_0H, weight_TK, up_SI = ctx.saved_tensors
        module, places, (grad_TH,) = ctx.module, ctx.places, grads
        top_k, order_S = weight_TK.shape[1], places.order_S
        grad_SH = grad_TH[order_S // top_k]
        inner_SI = _project(module, "down_proj", grad_SH, places, back=True)
        with torch.enable_grad():
            leaf_SI = up_SI.detach().requires_grad_()
            act_SI = _activated(module, leaf_SI)
        weight_grad_TK = x_grad_TH = None
        if ctx.needs_input_grad[1]:
            share_S = (act_SI.detach().float() * inner_SI.float()).sum(-1)
            if module.has_bias:
                share_S += (grad_SH.float() * _rows(_own(module, "down_proj_bias"), places).float()).sum(-1)
            weight_grad_TK = torch.empty_like(share_S).scatter(0, order_S, share_S).view(-1, top_k).to(weight_TK.dtype)
        if ctx.needs_input_grad[0]:
            inner_SI = (inner_SI * weight_TK.reshape(-1)[order_S, None]).to(act_SI.dtype)
            (up_grad_SI,) = torch.autograd.grad(act_SI, leaf_SI, inner_SI)
            x_grad_SH = _project(module, _up(module), up_grad_SI, places, back=True)
            x_grad_TH = _by_token(x_grad_SH, order_S, top_k).to(like_0H.dtype)
        return x_grad_TH, weight_grad_TK, None, None


def _up(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _activated(module: Any, up_SI: Tensor) -> Tensor:
    return module._apply_gate(up_SI) if module.has_gate else module.act_fn(up_SI)


def _by_token(rows_SH: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """[T, H], the sum over each token's experts, always in the same order."""
    inverse_S = torch.empty_like(order_S).scatter(0, order_S, torch.arange(len(order_S), device=order_S.device))
    return rows_SH[inverse_S].view(-1, top_k, rows_SH.shape[-1]).sum(1)


def _project(module: Any, name: str, rows_SN: Tensor, places: _Places, *, back: bool = False) -> Tensor:
    """[S, O]: each expert's rows times its own weight; back: the other way, from the gradient of what it puts out."""
    weight = _own(module, name)
    out_SO = _products(rows_SN, weight if module.is_transposed != back else weight.transpose(-2, -1), places)
    if module.has_bias and not back:
        out_SO = out_SO + _rows(_own(module, f"{name}_bias"), places)
    return out_SO


def _own(module: Any, name: str) -> Tensor:
    """This process' experts: with expert parallel a backward pass finds them as its part of a spread parameter."""
    held = getattr(module, name)
    if not is_spread(held):
        return held
    local = held.to_local()
    if len(local) != module.num_experts:
        raise RuntimeError(f"{name}: {len(local)} of {module.num_experts} experts are here in a backward pass")
    return local


def _rows(bias_EO: Tensor, places: _Places) -> Tensor:
    """[S, O], each place's own; 0 of experts on other devices."""
    at_S = torch.arange(len(places.order_S), device=bias_EO.device, dtype=torch.int32)
    expert_S = torch.searchsorted(places.ends_E, at_S, right=True)
    return bias_EO[expert_S.clamp(max=len(bias_EO) - 1)] * (expert_S < len(bias_EO))[:, None]


def _grouped(rows: Tensor) -> bool:
    """Whether torch has one product for all groups there that is as quick as one by one."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")


def _products(rows_SN: Tensor, weight_ENO: Tensor, places: _Places) -> Tensor:
    if places.counts is None:
        found = F.grouped_mm(rows_SN, weight_ENO, offs=places.ends_E)
        beyond_S = torch.arange(len(found), device=found.device) >= places.ends_E[-1]
        return found.masked_fill(beyond_S[:, None], 0)  # they are left as they were in memory
    out_SO = rows_SN.new_empty(len(rows_SN), weight_ENO.shape[-1])
    start = 0
    for expert, count in enumerate(places.counts):
        if count:
            torch.mm(rows_SN[start : start + count], weight_ENO[expert], out=out_SO[start : start + count])
        start += count
    out_SO[start:] = 0
    return out_SO
