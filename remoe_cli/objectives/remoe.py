"""ReMoE's losses (arXiv 2605.27081, section 3 and appendix E) as pure functions.

Every loss returns a *sum* over the micro-batch, its mean over MoE layers already taken; divided by the same term of
`weights`, added up over the whole optimiser step, it is the mean that the paper defines. Natural logarithm throughout.
Padding never counts, and nothing reaches over a document's border.

Shape letters: L MoE layers, B rows, T slots a row, N = B*T slots, E routed experts, K experts a token, V vocabulary,
S documents in the micro-batch, W tokens a window, M windows in the micro-batch.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from remoe_cli.recipe import Objective

EPSILON = 1e-8  # inside the logarithm of the reuse loss, as published
PADDING = -1


class Segments(NamedTuple):
    """Where the documents of a micro-batch lie. document_N: 0..S-1, or -1 for padding; position_N: place inside the
    document (0 for padding); length_S: tokens of each document. A document is one unbroken stretch of one row."""

    document_N: Tensor
    position_N: Tensor
    length_S: Tensor

    @classmethod
    def of(cls, document_BT: Tensor) -> "Segments":
        """From document numbers [B, T] (any that differ between neighbours in a row; negative = padding, anywhere)."""
        real_BT = document_BT >= 0
        first_BT = real_BT.clone()
        first_BT[:, 1:] &= document_BT[:, 1:] != document_BT[:, :-1]
        real_N, first_N = real_BT.flatten(), first_BT.flatten()
        document_N = (first_N.cumsum(0) - 1).masked_fill(~real_N, PADDING)
        slot_N = torch.arange(len(real_N), device=document_BT.device)
        start_N = slot_N.masked_fill(~first_N, 0).cummax(0).values
        position_N = (slot_N - start_N).masked_fill(~real_N, 0)
        return cls(document_N, position_N, torch.bincount(document_N[real_N]))

    def to(self, device: torch.device) -> "Segments":
        return Segments(*(part.to(device) for part in self))

    def pairs(self, lag: int) -> Tensor:
        """[N - lag] bool (empty when lag >= N): slot n + lag and slot n hold tokens of the same document."""
        return (self.document_N >= 0)[lag:] & (self.position_N[lag:] >= lag)


class Routing(NamedTuple):
    """What the gates did in one pass. logp_LNE: log P of the model; reference_LNE: log Pref, of the base gates on the
    same hidden states; choice_LNK: the experts that the model really executed, int64. temporal_LNE, spatio_LNE:
    probabilities of the heads on the same hidden states, None where there is no such head."""

    logp_LNE: Tensor
    reference_LNE: Tensor
    choice_LNK: Tensor
    temporal_LNE: Tensor | None = None
    spatio_LNE: Tensor | None = None


def cross_entropy(logits_BTV: Tensor, ids_BT: Tensor, segments: Segments, learned_BT: Tensor | None = None) -> Tensor:
    """Sum of -log p over every learned token that follows another one of its document; a document's first is not
    predicted. learned_BT: bool, True where a token is a target; None: all are."""
    dtype = torch.promote_types(logits_BTV.dtype, torch.float32)
    target_N = ids_BT.flatten()[1:].masked_fill(~_targets(segments, learned_BT), -100)
    return F.cross_entropy(logits_BTV.flatten(0, 1)[:-1].to(dtype), target_N, ignore_index=-100, reduction="sum")


def distillation(logits_BTV: Tensor, base_BTV: Tensor, segments: Segments, learned_BT: Tensor | None = None) -> Tensor:
    """Sum of KL(base || model) over the next-token distributions whose tokens `cross_entropy` counts. On texts that the base
    wrote, both have the same mean gradient; this one does not depend on which token was drawn."""
    dtype = torch.promote_types(logits_BTV.dtype, torch.float32)
    target_N = _targets(segments, learned_BT)
    logp_MV = F.log_softmax(logits_BTV.flatten(0, 1)[:-1][target_N].to(dtype), -1)
    base_MV = F.log_softmax(base_BTV.flatten(0, 1)[:-1][target_N].to(dtype), -1)
    return F.kl_div(logp_MV, base_MV, reduction="sum", log_target=True)


def trust(logp_LNE: Tensor, reference_LNE: Tensor, segments: Segments) -> Tensor:
    """Sum over tokens of KL(P || Pref). No gradient reaches the reference."""
    divergence_LN = (logp_LNE.exp() * (logp_LNE - reference_LNE.detach())).sum(-1)
    return (divergence_LN.mean(0) * (segments.document_N >= 0)).sum()


def reuse(logp_LNE: Tensor, choice_LNK: Tensor, segments: Segments, tokens: int = 1) -> Tensor:
    """Sum over documents of pairs * -log(rho + 1e-8), where rho, one for each document and layer, is the mean over
    t >= 2 of (1/K) sum of P_t over the experts that token t-1 executed, or any of the `tokens` before t (1: the paper).
    The choice is a constant; rho is at most 1/K, so the mean is at least log K."""
    return minus_log_mean(_recent_mass(logp_LNE, choice_LNK, segments, tokens), segments)


def minus_log_mean(mass_LN: Tensor, segments: Segments) -> Tensor:
    """Sum over documents of pairs * -log(rho + 1e-8), rho the mean of mass over a document's t >= 2. mass: [L, N - 1], from
    the second slot on."""
    pairs_S = segments.length_S - 1
    mass_LN = mass_LN * segments.pairs(1)
    total_LS = mass_LN.new_zeros(len(mass_LN), len(pairs_S))
    total_LS = total_LS.index_add(1, segments.document_N[1:].clamp_min(0), mass_LN) if len(pairs_S) else total_LS
    rho_LS = total_LS / pairs_S.clamp_min(1)
    return -((rho_LS + EPSILON).log().mean(0) * pairs_S).sum()


def _recent_mass(logp_LNE: Tensor, choice_LNK: Tensor, segments: Segments, tokens: int) -> Tensor:
    """[L, N - 1], from the second slot on: (1/K) sum of P over the experts of any of the `tokens` before it."""
    if tokens == 1:
        return logp_LNE[:, 1:].gather(-1, choice_LNK[:, :-1]).exp().mean(-1)
    chosen_LNE = torch.zeros_like(logp_LNE, dtype=torch.bool).scatter_(-1, choice_LNK, True)
    recent_LNE = torch.zeros_like(chosen_LNE)
    for d in range(1, tokens + 1):
        recent_LNE[:, d:] |= chosen_LNE[:, :-d] & segments.pairs(d)[:, None]
    return (logp_LNE.exp() * recent_LNE)[:, 1:].sum(-1) / choice_LNK.shape[-1]


def smooth(logp_LNE: Tensor, segments: Segments) -> Tensor:
    """Sum over pairs of neighbours of SymKL(P_t, P_{t-1}), with gradient on both sides."""
    return lag(logp_LNE, segments, (1,))


def lag(logp_LNE: Tensor, segments: Segments, lags: Sequence[int]) -> Tensor:
    """Sum over t >= 2 of 1/|lags| * sum of SymKL(P_t, P_{t-d}) over the d in lags that stay inside the document.
    The divisor stays |lags| for early t."""
    p_LNE = logp_LNE.exp()
    total = logp_LNE.new_zeros(())
    for d in lags:
        # SymKL = 1/2 sum (p - q)(log p - log q): no term is negative, so nearly equal distributions lose nothing
        difference_LNE = (p_LNE[:, d:] - p_LNE[:, :-d]) * (logp_LNE[:, d:] - logp_LNE[:, :-d])
        total = total + (difference_LNE.sum(-1).mean(0) * segments.pairs(d)).sum() / 2
    return total / len(lags)


def window(logp_LNE: Tensor, segments: Segments, tokens: int) -> Tensor:
    """Sum over documents of pairs * mean over the document's full windows of H(mean P in the window), in nats.
    Windows do not overlap and start with the document; the remainder is left out, and so is a document without a full
    window."""
    length_S = segments.length_S if len(segments.length_S) else segments.length_S.new_zeros(1)
    length_N = length_S[segments.document_N]
    inside_N = (segments.document_N >= 0) & (segments.position_N < length_N // tokens * tokens)
    first_N = inside_N & (segments.position_N % tokens == 0)
    length_M = length_N[first_N]
    window_N = (first_N.cumsum(0) - 1).masked_fill(~inside_N, len(length_M))  # one more for what is left out
    p_LNE = logp_LNE.exp()
    total_LME = p_LNE.new_zeros(len(p_LNE), len(length_M) + 1, p_LNE.shape[-1]).index_add(1, window_N, p_LNE)
    p_LME = total_LME[:, :-1] / tokens
    entropy_LM = -(p_LME * p_LME.clamp_min(torch.finfo(p_LME.dtype).tiny).log()).sum(-1)
    return (entropy_LM.mean(0) * (length_M - 1) / (length_M // tokens)).sum()


def overlap(choice_LNK: Tensor, segments: Segments) -> Tensor:
    """Sum over pairs of neighbours of |E_t & E_{t-1}| / K; divided by the pairs it is the EOR (teacher-forced)."""
    shared_LNK = (choice_LNK[:, 1:, :, None] == choice_LNK[:, :-1, None, :]).any(-1)
    return (shared_LNK.double().mean(-1).mean(0) * segments.pairs(1)).sum()


def weights(segments: Segments, settings: Objective, learned_BT: Tensor | None = None) -> dict[str, float]:
    """What a micro-batch brings to each term: learned tokens for ce, all tokens for trust, else pairs of the documents
    long enough for it."""
    length_S = segments.length_S
    pairs_S = (length_S - 1).double()
    pairs = float(pairs_S.sum())
    return {
        "ce": float(_targets(segments, learned_BT).sum()),
        "trust": float(length_S.sum()),
        "reuse": pairs,
        "smooth": pairs,
        "lag": pairs,
        "window": float(pairs_S[length_S >= settings.window_tokens].sum()),
    }


def _targets(segments: Segments, learned_BT: Tensor | None) -> Tensor:
    """[N - 1] bool: slot n + 1 is predicted, from slot n."""
    pair_N = segments.pairs(1)
    return pair_N if learned_BT is None else pair_N & learned_BT.flatten()[1:]


def terms(settings: Objective) -> dict[str, Callable[[Routing, Segments], Tensor]]:
    """Each term's sum over a micro-batch, by name."""
    return {
        "trust": lambda routing, segments: trust(routing.logp_LNE, routing.reference_LNE, segments),
        "reuse": lambda routing, segments: reuse(routing.logp_LNE, routing.choice_LNK, segments, settings.reuse_tokens),
        "smooth": lambda routing, segments: smooth(routing.logp_LNE, segments),
        "lag": lambda routing, segments: lag(routing.logp_LNE, segments, settings.lags),
        "window": lambda routing, segments: window(routing.logp_LNE, segments, settings.window_tokens),
    }


def scales(settings: Objective, step: int, steps: int) -> dict[str, float]:
    """The factor of each term at this step. Steps count from 1, so that the first step already has 1/(warm-up steps)
    of a_r and a_l, and the last warm-up step has all of it (the paper's min(1, s/400), min(1, s/800))."""
    a_r = settings.scale * ramp(step, steps, settings.reuse_warmup)
    a_l = settings.scale * ramp(step, steps, settings.consistency_warmup)
    return {
        "trust": settings.trust,
        "reuse": a_r * settings.reuse,
        "smooth": a_l * settings.smooth,
        "lag": a_l * settings.lag,
        "window": a_l * settings.window,
    }


def ramp(step: int, steps: int, fraction: float) -> float:
    """min(1, step / (fraction * steps)); 1 where there is no warm-up."""
    warmup = fraction * steps
    return min(1.0, step / warmup) if warmup > 0 else 1.0


def in_place_of_reuse(
    name: str, term: Callable[[Routing, Segments, Objective], Tensor]
) -> tuple[Callable, Callable, Callable]:
    """(weights, terms, scales) of an objective that is ReMoE's with another term over pairs in the place of reuse. name: of
    the term, and of its factor in the settings."""

    def weights_(segments: Segments, settings: Objective, learned_BT: Tensor | None = None) -> dict[str, float]:
        found = weights(segments, settings, learned_BT)
        return {name if other == "reuse" else other: weight for other, weight in found.items()}

    def terms_(settings: Objective) -> dict[str, Callable[[Routing, Segments], Tensor]]:
        found = {other: function for other, function in terms(settings).items() if other != "reuse"}
        return {**found, name: lambda routing, segments: term(routing, segments, settings)}

    def scales_(settings: Objective, step: int, steps: int) -> dict[str, float]:
        found = {other: factor for other, factor in scales(settings, step, steps).items() if other != "reuse"}
        rise = ramp(step, steps, settings.reuse_warmup)
        return {**found, name: settings.scale * rise * getattr(settings, name)}

    return weights_, terms_, scales_
