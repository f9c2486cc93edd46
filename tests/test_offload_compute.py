"""One token's experts, computed together, against one at a time."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from remoe_cli.offload.compute import run_expert, SingleToken

H, INNER, EXPERTS = 24, 16, 3


def experts(dtype, has_gate: bool, split: bool):
    """A module's flags, and for each expert its parts: whole, or in pieces of unequal length."""
    torch.manual_seed(0)
    module = SimpleNamespace(
        is_transposed=False, has_bias=False, has_gate=has_gate, act_fn=F.silu,
        _apply_gate=lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    )  # fmt: skip
    into, rows = ("gate_up_proj", 2 * INNER) if has_gate else ("up_proj", INNER)
    found = []
    for _ in range(EXPERTS):
        parts = {into: torch.randn(rows, H, dtype=dtype), "down_proj": torch.randn(H, INNER, dtype=dtype)}
        found.append({name: list(part.split([5, len(part) - 5])) if split else [part] for name, part in parts.items()})
    return module, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("together", [1, EXPERTS])
def test_a_single_token_is_computed_as_one_expert_after_the_other(dtype, has_gate, split, together):
    module, parts = experts(dtype, has_gate, split)
    x = torch.randn(1, H, dtype=dtype)
    out = torch.full((EXPERTS, H), float("nan"), dtype=dtype)
    single = SingleToken(module)
    assert SingleToken.serves(module)
    for first in range(0, EXPERTS, together):
        some = slice(first, first + together)
        single.run(parts[some], x[0], out[some].unbind())
    wanted = torch.cat([run_expert(module, one, x) for one in parts])
    torch.testing.assert_close(
        out, wanted, rtol=0 if dtype == torch.bfloat16 else 1e-5, atol=0 if dtype == torch.bfloat16 else 1e-5
    )


@pytest.mark.parametrize("flag", ["is_transposed", "has_bias"])
def test_other_projections_are_left_to_the_general_way(flag):
    assert not SingleToken.serves(SimpleNamespace(**{"is_transposed": False, "has_bias": False, flag: True}))
