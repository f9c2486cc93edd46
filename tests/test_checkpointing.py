"""Gradient checkpointing runs layers twice: the routing that counts is the first pass's, also where experts nearly tie."""

from itertools import islice

import pytest
import torch
from tiny_models import MODEL_TYPES, TOP_K
from training import endless, load, recipe_of, TERMS

from remoe_cli.errors import FamilyError
from remoe_cli.families import find_gates, probabilities, RouterTap
from remoe_cli.train.prepare import checkpointed
from remoe_cli.train.trainer import train

DTYPES = [torch.float32, torch.bfloat16]


@torch.no_grad()
def tie(model) -> None:
    """Three groups of experts; within a group the gate rows are one unit of the last place apart, or equal after it."""
    for gate in find_gates(model):
        group = torch.arange(gate.n_experts) // 3
        step = torch.finfo(gate.router.weight.dtype).eps * (torch.arange(gate.n_experts) % 3)
        for parameter in gate.parameters.values():
            scale = (1 + step).view(-1, *[1] * (parameter.ndim - 1))
            parameter.copy_(parameter[3 * group] * scale)


def trained(model_type, dtype, on, *, flip=False):
    """(what two steps of near-ties gave, the choices of each router call in order)."""
    model = load(model_type, dtype)
    tie(model)
    calls = {gate.layer: [] for gate in find_gates(model)}

    def watch(layer):
        def hook(_module, _inputs, outputs):
            again = on and len(calls[layer]) % 2  # the second pass of each micro-batch comes in its backward
            calls[layer].append(outputs[2].clone())
            return (*outputs[:2], outputs[2].flip(0)) if flip and again else None

        return hook

    gates = find_gates(model)
    for gate in gates:  # before the tap's own hook, which so sees what this one returns
        gate.router.register_forward_hook(watch(gate.layer))
    return train(model, gates, endless(20, 50), recipe_of(steps=2, checkpointing=on)), calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_near_ties_choose_alike_with_checkpointing_and_without(model_type, dtype):
    off, calls = trained(model_type, dtype, False)
    on, twice = trained(model_type, dtype, True)
    for layer in calls:
        assert len(calls[layer]) == 4 and len(twice[layer]) == 8, "two steps of two micro-batches"
        for first, second, alone in zip(twice[layer][::2], twice[layer][1::2], calls[layer], strict=True):
            assert torch.equal(first, second) and torch.equal(first, alone)
    for one, other in zip(off.steps, on.steps, strict=True):
        for name in (*TERMS, "loss", "grad_norm"):
            assert one.row()[name] == pytest.approx(other.row()[name], rel=1e-6, abs=1e-7), name
    for name, gate in off.gates.items():
        torch.testing.assert_close(on.gates[name], gate, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_second_pass_that_flips_does_not_reach_the_trace(model_type, dtype):
    """The first step's terms depend on the recorded choice only; its update already has the flipped gradient."""
    off, _ = trained(model_type, dtype, False)
    flipped, _ = trained(model_type, dtype, True, flip=True)
    for name in TERMS:
        assert flipped.steps[0].row()[name] == pytest.approx(off.steps[0].row()[name], rel=1e-6, abs=1e-7), name
    assert any(not torch.equal(gate, flipped.gates[name]) for name, gate in off.gates.items()), "nothing was flipped"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_token_is_recorded_once(model_type, dtype):
    model = load(model_type, dtype)
    tie(model)
    gates = find_gates(model)
    (batch,) = islice(endless(20, 50, tokens=24, rows=2), 1)
    model.eval().requires_grad_(False)
    for gate in gates:
        gate.router.requires_grad_(True)
    with checkpointed(model, True), RouterTap(gates) as tap:
        logits = model(input_ids=batch.ids_BT, use_cache=False).logits
        routed = tap.take()
        logits.float().sum().backward()
        with pytest.raises(FamilyError, match="recorded nothing"):
            tap.take()
    for layer in routed:
        assert layer.choice_NK.shape == (batch.ids_BT.numel(), TOP_K)
        best = probabilities(layer.logits_NE).topk(TOP_K + 1).values
        gap = (best[:, TOP_K - 1] - best[:, TOP_K]).min()
        assert gap <= (1e-6 if dtype == torch.float32 else 1e-2), "no near-tie at the border of the choice"
    assert all(parameter.grad is not None for gate in gates for parameter in gate.parameters.values())
