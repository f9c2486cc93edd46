"""Experts that do not learn: the stock outputs bit for bit, the stock gradients, and little kept for them."""

import copy

import pytest
import torch
from training import load

from remoe_cli.families import find_gates
from remoe_cli.families.frozen import frozen_experts, use_frozen_experts

KINDS = (
    "qwen3_moe",
    "gpt_oss",
    "nemotron_h",
    "deepseek_v2",
    "mixtral",
)  # plain; transposed, biased, clamped; without a gate
TOKENS, TOP_K, EXPERTS, HIDDEN = 40, 2, 8, 32


def experts_of(model_type: str, dtype=torch.float64):
    model = load(model_type, dtype)
    experts = find_gates(model)[0].experts
    generator = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype) / 4
    return experts.requires_grad_(False)


def inputs(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    weight_TK, choice_TK = torch.randn(TOKENS, EXPERTS, generator=generator, dtype=dtype).softmax(-1).topk(TOP_K)
    return x_TH, choice_TK, weight_TK.detach().requires_grad_()


def slow(experts, x_TH, choice_TK, weight_TK):
    """A token and an expert at a time, by the class's own activation, with autograd through everything."""
    rows = []
    for t in range(len(x_TH)):
        total = 0
        for k in range(choice_TK.shape[1]):
            e = int(choice_TK[t, k])
            into = experts.gate_up_proj if experts.has_gate else experts.up_proj
            turned = experts.is_transposed
            h = x_TH[t] @ (into[e] if turned else into[e].T)
            if experts.has_bias:
                h = h + experts.gate_up_proj_bias[e]
            a = experts._apply_gate(h[None])[0] if experts.has_gate else experts.act_fn(h)
            out = a @ (experts.down_proj[e] if turned else experts.down_proj[e].T)
            if experts.has_bias:
                out = out + experts.down_proj_bias[e]
            total = total + weight_TK[t, k] * out
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_slow_twin(kind):
    experts = experts_of(kind)
    found, expected = inputs(), inputs()
    out, twin = frozen_experts(experts, *found), slow(experts, *expected)
    torch.testing.assert_close(out, twin, rtol=1e-10, atol=1e-10)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(5))
    out.backward(grad)
    twin.backward(grad)
    for i in (0, 2):
        torch.testing.assert_close(found[i].grad, expected[i].grad, rtol=1e-5, atol=1e-5)  # weights' sums are fp32


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_gradients_equal_differences(kind):
    experts = experts_of(kind)
    x_TH, choice_TK, weight_TK = inputs()
    assert torch.autograd.gradcheck(
        lambda x, w: frozen_experts(experts, x, choice_TK[:6], w),
        (x_TH[:6].detach().requires_grad_(), weight_TK[:6].detach().requires_grad_()),
        atol=1e-5, rtol=1e-4,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_models_put_out_the_stock_bits(kind, dtype):
    model = load(kind, dtype)
    gates = find_gates(model)
    ids = torch.randint(3, 120, (2, 24), generator=torch.Generator().manual_seed(0))
    model.requires_grad_(False).set_experts_implementation("grouped_mm")
    with torch.no_grad():
        expected = model(ids).logits
        assert use_frozen_experts(model, gates)
        assert torch.equal(model(ids).logits, expected)


def test_what_is_kept_for_the_backward_pass():
    experts = experts_of("qwen3_moe", torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        frozen_experts(experts, *inputs(torch.float32))
    places = TOKENS * TOP_K
    width = experts.gate_up_proj.shape[1]
    assert sum(t.numel() for t in kept) <= places * width + 2 * places, (
        "the up-projection's output and the weights alone"
    )


def test_places_of_other_devices_count_for_nothing():
    """Expert parallel: experts from this module's number on are elsewhere."""
    for kind in ("qwen3_moe", "gpt_oss"):
        experts = experts_of(kind)
        x_TH, choice_TK, weight_TK = inputs()
        away = choice_TK.clone()
        away[::3, 1] = EXPERTS
        out = frozen_experts(experts, x_TH, away, weight_TK)
        out.sum().backward()
        here = inputs()
        masked = here[2].masked_fill(away == EXPERTS, 0.0)
        expected = frozen_experts(experts, here[0], choice_TK, masked)
        torch.testing.assert_close(out, expected)
        assert (weight_TK.grad[away == EXPERTS] == 0).all() and (weight_TK.grad[away < EXPERTS] != 0).all()


def test_experts_that_do_learn_run_the_stock_way():
    model = load("qwen3_moe")
    gates = find_gates(model)
    assert use_frozen_experts(model, gates)
    model.requires_grad_(False)
    gates[0].experts.down_proj.requires_grad_(True)
    model(torch.arange(3, 20)[None]).logits.sum().backward()
    assert gates[0].experts.down_proj.grad.abs().sum() > 0


def test_families_with_experts_of_their_own_kind_keep_them():
    model = load("llama4_text")
    before = copy.deepcopy(model.config._experts_implementation)
    assert not use_frozen_experts(model, find_gates(model)) and model.config._experts_implementation == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    experts = experts_of("qwen3_moe", torch.bfloat16).cuda()
    x_TH, choice_TK, weight_TK = (one.detach().cuda() for one in inputs(torch.bfloat16))
    grads = []
    for device in ("cuda", "cpu"):
        module = experts.to(device)
        x, w = x_TH.to(device).requires_grad_(), weight_TK.to(device).requires_grad_()
        frozen_experts(module, x, choice_TK.to(device), w).float().square().sum().backward()
        grads.append((x.grad.cpu().float(), w.grad.cpu().float()))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(other.abs().max()))
