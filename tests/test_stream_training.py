"""Streamed training leaves the gradients and gates that resident training leaves, for every objective, head and scope."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from training import documents_of, load, recipe_of

from remoe_cli.errors import UsageError
from remoe_cli.families import find_gates
from remoe_cli.recipe import load as load_recipe
from remoe_cli.recipe import Objective, Recipe
from remoe_cli.stream.passes import Resident
from remoe_cli.train.packing import batches, Document
from remoe_cli.train.trainer import _Loop, train

RECIPES = (
    "remoe", "ce-only", "remoe-plus", "cacherouter-temporal", "cacherouter-spatio-temporal", "resident-mass", "decayed-coverage", "heads-only",
)  # fmt: skip


class Counting(Resident):
    """Layers that are always there, and what was asked of them."""

    def __init__(self, model, gates) -> None:
        super().__init__(model, gates)
        self.asked: list[int] = []
        self.announced: list[int] = []

    @contextmanager
    def layer(self, index, ahead=()):
        if self.announced:
            wanted = next(one for one in self.announced if one != self.asked[-1])
            assert index in (wanted, self.asked[-1]), "the next layer is the one that was announced"
        self.asked.append(index)
        self.announced = list(ahead)
        yield


def both(recipe: Recipe, rows, model_type="deepseek_v2", dtype=torch.float32, steps=2):
    """(gradients, stats) of a step after another one, resident and streamed; and the streamed layers."""
    found = []
    for streamed in (False, True):
        model = load(model_type, dtype)
        gates = find_gates(model)
        layers = Counting(model, gates) if streamed else None
        loop = _Loop(model, gates, recipe, layers)
        stats = []
        for step in range(1, steps + 1):
            stats.append(loop.gradients(list(rows), step))
            loop.update(step)
        found.append(({name: master.grad.clone() for name, master in loop.masters.tensors.items()}, stats, loop))
    return found[0], found[1], layers


def shrunk(name: str) -> Recipe:
    recipe = load_recipe(name, "deepseek_v2")
    scope = "gates+heads" if recipe.train.scope == "full" else recipe.train.scope
    train = replace(
        recipe.train, scope=scope, steps=4, sequence=32, micro_batch=2, accumulation=3, lr=1e-2, max_ppl="off"
    )
    return replace(recipe, train=train, objective=replace(recipe.objective, window_tokens=4))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe(name):
    rows = list(batches(documents_of(32, 20, 44, 9, 50, 37), 32, 2))
    (resident, told, _), (streamed, said, _), layers = both(shrunk(name), rows)
    assert told == said
    for key in resident:
        assert torch.equal(resident[key], streamed[key]), key
    assert any(grad.abs().sum() > 0 for grad in resident.values())
    assert layers is not None and layers.asked[:3] == [0, 1, 2]
    back = [2, 1] if name != "heads-only" else []
    assert layers.asked == [*range(3), *back] * 2, "once each way a step, and none below the lowest gate"


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen2_moe", "mixtral"])
def test_bfloat16(model_type):
    rows = list(batches(documents_of(32, 20, 44, 9), 32, 1))
    (resident, told, _), (streamed, said, _), _ = both(recipe_of(Objective()), rows, model_type, torch.bfloat16)
    assert told == said and all(torch.equal(resident[key], streamed[key]) for key in resident)


def test_tokens_that_are_not_learned():
    documents = [Document(one, [i % 3 > 0 for i in range(len(one))]) for one in documents_of(30, 25, 32)]
    rows = list(batches(documents, 32, 1))
    (resident, told, _), (streamed, said, _), _ = both(recipe_of(Objective(target="base")), rows)
    assert told == said and all(torch.equal(resident[key], streamed[key]) for key in resident)


def test_a_whole_run_and_one_that_goes_on_in_the_other_mode():
    recipe = recipe_of(Objective(), steps=4, lr=1e-2)
    ended = []
    for first, second in ((False, False), (True, True), (True, False), (False, True)):
        states = []
        for streamed, steps in ((first, 2), (second, 4)):
            model = load("deepseek_v2")
            gates = find_gates(model)
            layers = Resident(model, gates) if streamed else None
            state = states[-1] if states else None
            shorter = recipe_of(Objective(), steps=4, lr=1e-2)
            start = {"start": state.position} if state else {}
            rows = batches(documents_of(32, 20, 44, 9), 32, 1, repeat=True, **start)

            def stop(stats, last=steps):
                if stats.step == last and last < 4:
                    raise KeyboardInterrupt

            done = train(model, gates, rows, shorter, state=state, layers=layers, on_step=stop, save=states.append)
        assert done.step == recipe.train.steps
        ended.append(done.gates)
    for gates in ended[1:]:
        assert all(torch.equal(gates[name], ended[0][name]) for name in gates)


def test_steering_scales_locality_alike():
    rows = list(batches(documents_of(32, 20), 32, 1))
    grads = []
    for streamed in (False, True):
        model = load("deepseek_v2")
        gates = find_gates(model)
        loop = _Loop(model, gates, recipe_of(Objective()), Resident(model, gates) if streamed else None)
        loop.gradients(rows, 1, steer=3.5)
        grads.append({name: master.grad.clone() for name, master in loop.masters.tensors.items()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


@pytest.mark.parametrize("scope", ["full", "gates+lora"])
def test_what_trains_the_layers_themselves_is_refused(scope):
    model = load("deepseek_v2")
    gates = find_gates(model)
    rows = batches(documents_of(32), 32, 1, repeat=True)
    with pytest.raises(UsageError, match="--stream off"):
        train(model, gates, rows, recipe_of(scope=scope), layers=Resident(model, gates))
