"""A loaded model made ready for training: what acts only in training is off, and activations may be recomputed."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from remoe_cli.families import Gate
from remoe_cli.families.frozen import use_frozen_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare(model: "PreTrainedModel", gates: Sequence[Gate], scope: str) -> list[str]:
    """Switches off what acts only in training; returns notes for the run's summary."""
    model.eval()
    notes = []
    config = model.config
    if getattr(config, "router_aux_loss_coef", 0):
        notes.append(f"the model's own load-balance loss is off (its coefficient was {config.router_aux_loss_coef})")
    for holder in (model, config):
        if hasattr(holder, "router_aux_loss_coef"):
            holder.router_aux_loss_coef = 0.0
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    if scope == "gates" and gates[0].top_k == 1 and gates[0].renormalised:
        notes.append("top_k is 1 and its weight is renormalised to 1: cross entropy gives the gates no gradient")
    use_quick_experts(model, gates)
    return notes


def use_quick_experts(model: "PreTrainedModel", gates: Sequence[Gate]) -> None:
    """The fastest experts for whole rows, where the class and the dtype have them (fp64 has not)."""
    if use_frozen_experts(model, gates) or next(model.parameters()).dtype == torch.float64:
        return
    if hasattr(model, "set_experts_implementation"):
        with suppress(ValueError, ImportError):  # the class brings its own experts
            model.set_experts_implementation("grouped_mm")


@contextmanager
def checkpointed(model: "PreTrainedModel", on: bool) -> Iterator[None]:
    """Activation checkpointing while open. transformers checkpoints only layers in training mode: the layers alone are
    put there, their parts (dropout, router jitter) stay in eval. Non-reentrant: else recorded logits have no gradient.
    """
    if not on:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its new name is not in every version that we support
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_disable()
