"""What an OffloadedDecoder refuses, each with one line and the next command."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from remoe_cli.cache import choose, ExpertCache
from remoe_cli.cache.expert_cache import unfit
from remoe_cli.cache.policy import SCORES
from remoe_cli.cache.prefetch.base import MOST_AHEAD
from remoe_cli.cache.reroute import Rule
from remoe_cli.errors import CacheError, DeltaError, UsageError
from remoe_cli.families import Gate, Heads, KINDS
from remoe_cli.families.refuse import require_reroutable
from remoe_cli.offload.layout import Layout
from remoe_cli.offload.settings import Settings

if TYPE_CHECKING:
    from remoe_cli.offload.decoder import OffloadedDecoder

_OTHER_POLICY = "remoe decode demo --cache 8 --policy lru"
_OTHER_DELTA = "a delta of this model: remoe runs"


def check_cache(
    decoder: "OffloadedDecoder", capacity: int, policy: str, admission: str, batch: int, settings: Settings
) -> None:
    """Raises CacheError or UsageError for a cache that can't serve the decoder. Of the decoder only the checkpoint and K are
    looked at."""
    model, top_k, chosen = decoder.checkpoint.id, decoder.top_k, choose(policy).policy
    ExpertCache(max(capacity, 1), n_experts=1, admission=admission)
    if why := unfit(chosen, admission, False):
        raise CacheError(f"policy {policy}: {why}.", _OTHER_POLICY)
    if capacity < top_k:
        raise CacheError(
            f"a cache of {capacity} experts a layer is too small to decode {model}: each token runs "
            f"{top_k} experts in each layer, so {top_k} or more are needed.",
            f"remoe eval --cache {top_k}",
        )
    if (prefetch := choose(policy).prefetch) is not None:
        if batch > 1 or settings.warm == "batch" or settings.guess:
            raise UsageError(
                f"{policy} lists experts token by token: it takes neither a batch, nor prompts through the cache, nor a guess.",
                _OTHER_POLICY,
            )
        gates = getattr(decoder, "gates", [])
        if "guess_shared" in prefetch.kind.needs and not all(
            one.shared is not None and one.family.early for one in gates
        ):
            raise UsageError(
                f"{policy} needs shared experts, which {model} has not: gate_next does without.", _OTHER_POLICY
            )
        if prefetch.value("AHEAD") > (layers := getattr(decoder, "n_layers", MOST_AHEAD)):
            raise UsageError(f"{policy} looks further ahead than the {layers} MoE layers of {model}.", _OTHER_POLICY)
    if {*SCORES} & {*chosen.needs} and (batch > 1 or settings.warm == "batch"):
        raise CacheError(
            f"{policy} reads the routers' probabilities once a token: it takes neither a batch nor prompts through the cache.",
            _OTHER_POLICY,
        )
    if settings.heavy is not None and batch > 1:
        raise UsageError(
            "which of a token's experts are heavy is told one token at a time: --heavy takes no batch.", _OTHER_POLICY
        )
    if chosen.refines and settings.guess:
        raise UsageError(f"{policy} reads ahead by its own scores: it takes no guess.", f"{_OTHER_POLICY} --guess 1")
    if settings.guess > top_k:
        raise UsageError(
            f"a guess of {settings.guess} experts is more than the {top_k} that a token runs.",
            f"remoe decode {model} --cache {capacity} --guess {top_k}",
        )


def check_mixed(decoder: "OffloadedDecoder", layout: Layout) -> None:
    """Raises UsageError where experts can't come in two precisions: none is packed in fewer bits, or those of the checkpoint can't
    lie in slots as they are stored."""
    if decoder.settings.heavy is None:
        return
    if not decoder.small:
        raise UsageError(
            "heavy misses come as stored and light ones in fewer bits: --heavy needs a --pack in int8 or int4.",
            f"remoe pack {decoder.checkpoint.id} --experts int4 --out DIR",
        )
    stored = [view for row in layout.images[: decoder.n_layers] for image in row for view in image.views]
    if any(view.scales or view.dtype != decoder.dtype or view.start % view.dtype.itemsize for view in stored):
        raise UsageError(
            f"the experts of {decoder.checkpoint.id} are not stored in the dtype that computes, so slots can't hold them beside smaller "
            "ones: --heavy does not go with this model here.",
            "the same command without --heavy",
        )


def check_rule(rule: Rule, gate: Gate, batch: int) -> None:
    """Raises UsageError for a rule that does not fit the model, or a batch, FamilyError for a model that can't be rerouted."""
    require_reroutable(gate)
    rule.check(gate.top_k, gate.n_experts)
    if batch > 1:
        raise UsageError("rerouting bends one token at a time: it takes no batch.", "remoe decode demo --cache 8")


def check_heads(decoder: "OffloadedDecoder", heads: Heads | None) -> None:
    """Raises CacheError where the decoder's policy needs heads that are not there."""
    there = heads.kinds if heads is not None else ()
    if lacking := [kind for kind in KINDS if kind in choose(decoder.policy).policy.needs and kind not in there]:
        raise CacheError(
            f"policy {decoder.policy} needs the {' and the '.join(lacking)} head, which these gates have not.",
            _OTHER_POLICY,
        )


def check_gates(
    model: str, base: Mapping[str, torch.Tensor], gates: Mapping[str, torch.Tensor], heads: Heads | None, n_layers: int
) -> None:
    """base: the model's own gates by in-memory name, the first of them a weight. Raises DeltaError for gates or heads of
    another model."""
    for name, tensor in gates.items():
        if name not in base:
            raise DeltaError(f"{name} is not a gate of {model}.", _OTHER_DELTA)
        if tensor.shape != base[name].shape:
            raise DeltaError(f"{name} is {list(tensor.shape)}, but {list(base[name].shape)} in {model}.", _OTHER_DELTA)
    shape = next(iter(base.values())).shape
    for weights in () if heads is None else (getattr(heads, kind) for kind in heads.kinds):
        if len(weights) != n_layers or any(weight.shape != shape for weight in weights):
            raise DeltaError(
                f"these heads are not {n_layers} of {list(shape)}, which {model} would take.", _OTHER_DELTA
            )


def check_prompts(
    prompts: Sequence[Sequence[int]], n_new: int, forced: Sequence[Sequence[int]] | None, most: int
) -> None:
    """Raises UsageError for requests that can't be decoded together. most: of them at once."""
    lengths = {len(prompt) for prompt in prompts}
    if not 1 <= len(prompts) <= most or len(lengths) != 1:
        raise UsageError(
            f"a batch is 1 to {most} prompts of one length, not {len(prompts)} of {sorted(lengths)} tokens.",
            "remoe decode --help",
        )
    short = forced is not None and (len(forced) != len(prompts) or min(map(len, forced)) < n_new)
    if not all(lengths) or n_new < 1 or short:
        raise UsageError(
            f"cannot decode {n_new} tokens after a prompt of {max(lengths)}"
            + ("." if forced is None else f" with {min(map(len, forced), default=0)} forced ids."),
            "remoe eval --help",
        )
