"""How training ends: by itself, by Ctrl-C, by a loss that is not finite; and what it leaves behind each time."""

import os
import signal
from itertools import islice

import pytest
import torch
from training import assert_same, endless, load, recipe_of

from remoe_cli.errors import DataError, TrainingError
from remoe_cli.families import find_gates
from remoe_cli.train.packing import collate
from remoe_cli.train.trainer import Diverged, train


def snapshots_of(model, gates):
    """(on_step callback, list): the model's gates after each completed step."""
    kept: list[dict] = []
    names = [name for gate in gates for name in gate.names]
    return (lambda _: kept.append({n: model.get_parameter(n).detach().clone() for n in names})), kept


def test_nan_stops_and_keeps_the_last_gates_that_gave_a_finite_loss():
    model = load("deepseek_v2")
    with torch.no_grad():
        model.get_input_embeddings().weight[125] = float("nan")  # a token that no other document holds
    good = list(islice(endless(20, 50), 6))
    gates = find_gates(model)
    on_step, kept = snapshots_of(model, gates)
    bad = collate([[[5, 125, 6, 7]]], 32)
    with pytest.raises(Diverged, match="step 4") as stopped:
        train(model, gates, [*good, bad, *good], recipe_of(steps=9), on_step=on_step)
    assert isinstance(stopped.value, TrainingError) and stopped.value.hint
    trained = stopped.value.trained
    assert len(trained.steps) == trained.step == 2 and len(kept) == 3
    assert_same(trained.gates, kept[1], atol=0, rtol=0)  # the third step's loss proved the gates after the second
    for name, tensor in trained.gates.items():
        assert torch.equal(model.get_parameter(name), tensor) and torch.isfinite(tensor).all()


def test_nan_in_the_first_step_leaves_the_base():
    model = load("mixtral")
    base = {
        name: parameter.detach().clone() for gate in find_gates(model) for name, parameter in gate.parameters.items()
    }
    with torch.no_grad():
        model.get_input_embeddings().weight[125] = float("inf")
    with pytest.raises(Diverged) as stopped:
        train(model, find_gates(model), [collate([[[5, 125, 6]]], 8)], recipe_of())
    assert stopped.value.trained.steps == []
    assert_same(stopped.value.trained.gates, base, atol=0, rtol=0)


def test_sigint_between_steps_keeps_what_was_trained():
    model = load("qwen3_moe")
    gates = find_gates(model)
    on_step, kept = snapshots_of(model, gates)

    def interrupt(stats):
        on_step(stats)
        if stats.step == 4:  # not yet reported, so not yet complete
            os.kill(os.getpid(), signal.SIGINT)

    trained = train(model, gates, endless(20, 50), recipe_of(steps=100), on_step=interrupt)
    assert trained.interrupted and len(trained.steps) == trained.step == 3
    assert_same(trained.gates, kept[2], atol=0, rtol=0)
    assert not any("ended" in note for note in trained.notes)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_ctrl_c_inside_a_backward_pass_leaves_whole_steps_only(checkpointing):
    model = load("gpt_oss")
    gates = find_gates(model)
    on_step, kept = snapshots_of(model, gates)

    def interrupt(grad):
        if len(kept) == 2:
            raise KeyboardInterrupt
        return grad

    gates[0].router.weight.requires_grad_(True).register_hook(interrupt)
    trained = train(model, gates, endless(20, 50), recipe_of(steps=9, checkpointing=checkpointing), on_step=on_step)
    assert trained.interrupted and len(trained.steps) == 2
    assert_same(trained.gates, kept[-1], atol=0, rtol=0)
    assert all(torch.equal(model.get_parameter(n), t) for n, t in trained.gates.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    assert not any(gate.router._forward_hooks for gate in gates)


def test_ctrl_c_before_the_first_step_returns_the_base():
    model = load("mixtral")
    base = {
        name: parameter.detach().clone() for gate in find_gates(model) for name, parameter in gate.parameters.items()
    }

    def stream():
        raise KeyboardInterrupt
        yield

    trained = train(model, find_gates(model), stream(), recipe_of())
    assert trained.interrupted and trained.steps == []
    assert_same(trained.gates, base, atol=0, rtol=0)


def test_texts_that_end_early_end_the_run_with_a_note():
    model = load("mixtral")
    rows = list(islice(endless(20, 50), 3))
    trained = train(model, find_gates(model), rows, recipe_of(steps=7))
    assert len(trained.steps) == 2  # the second step from one micro-batch
    assert trained.steps[1].tokens == 32
    assert any("step 2 of 7" in note for note in trained.notes)
    with pytest.raises(DataError):
        train(model, find_gates(model), [], recipe_of())


def test_documents_of_one_token_are_survived():
    model = load("deepseek_v2")
    trained = train(model, find_gates(model), endless(1), recipe_of(steps=2))
    last = trained.steps[-1]
    assert last.terms["ce"] == last.terms["reuse"] == last.terms["lag"] == last.terms["window"] == last.eor == 0.0
    assert last.tokens == 64
    assert all(torch.isfinite(tensor).all() for tensor in trained.gates.values())
