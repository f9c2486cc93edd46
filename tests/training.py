"""Tiny models, rows and recipes for the tests of training."""

import copy
import tempfile
from functools import cache

import tiny_models
import torch
from transformers import AutoModelForCausalLM

from remoe_cli.families import find_gates
from remoe_cli.recipe import Objective, Recipe, Train
from remoe_cli.train.packing import Batch, batches
from remoe_cli.train.trainer import _Loop

CE_ONLY = Objective(trust=0.0, reuse=0.0, smooth=0.0, lag=0.0, window=0.0)
TERMS = ("ce", "trust", "reuse", "smooth", "lag", "window", "eor")


@cache
def _read(model_type: str, config: tuple):
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.make(model_type, folder, **{"max_position_embeddings": 4096, **dict(config)})
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def load(model_type: str, dtype=torch.float32, **config):
    """A fresh tiny model, read from a real checkpoint once in this process."""
    return copy.deepcopy(_read(model_type, tuple(sorted(config.items())))).to(dtype)


def recipe_of(objective: Objective | None = None, **train_settings) -> Recipe:
    defaults = {"steps": 3, "sequence": 32, "micro_batch": 1, "accumulation": 2, "lr": 1e-3, "lr_warmup": 0.0}
    return Recipe(objective=objective or Objective(), train=Train(**{**defaults, **train_settings}))


def documents_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 120, (n,), generator=generator).tolist() for n in lengths]


def endless(*lengths: int, tokens: int = 32, rows: int = 1):
    return batches(documents_of(*lengths), tokens, rows, repeat=True)


def step_gradients(model, micro: list[Batch], recipe: Recipe, step: int = 1):
    """(stats, master gradients) of one step without its update."""
    gates = find_gates(model)
    model.eval().requires_grad_(False)
    for gate in gates:
        for parameter in gate.parameters.values():
            parameter.requires_grad_(True)
    loop = _Loop(model, gates, recipe)
    stats = loop.gradients(micro, step)
    return {**stats.pop("terms"), **stats}, {name: master.grad.clone() for name, master in loop.masters.tensors.items()}


def assert_same(first: dict, second: dict, **tolerance) -> None:
    for name in first:
        torch.testing.assert_close(first[name], second[name], **tolerance)
