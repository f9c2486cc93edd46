"""Cache-aware rerouting: a token's choice of experts, bent towards those that are resident. It changes what a model says.

Three rules, all of which leave the K - or fewer - best experts to the router where nothing better is resident:

- cache-prior: a bonus on the logits of residents and of the top J, in units of the mean range of the layer's logits.
- max-rank: residents among the top M are taken ahead of non-residents; the top J are always kept.
- threshold: max-rank with M = the fewest experts whose probabilities sum to the threshold.

Whatever is chosen is mixed with the router's own weights, not with the raised ones.
Source: "Mixture of Cache-Conditional Experts for Efficient Mobile Device Inference" (arXiv 2412.00099).

Shape letters: T tokens of one request, E routed experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from remoe_cli.cache.expert_cache import ExpertCache
from remoe_cli.errors import CacheError, UsageError

AGAIN = "remoe reroute demo --cache 8"


class Method(NamedTuple):
    """title: what a strength is. highest: of a strength, None where nothing bounds it. whole: it is a count of experts.
    shown: strengths to show where none is named; those of a count in units of K."""

    title: str
    highest: float | None
    whole: bool
    shown: tuple[float, ...]


METHODS: dict[str, Method] = {
    "cache-prior": Method("bonus of a resident, in mean ranges of the logits", None, False, (0.1, 0.2, 0.5)),
    "max-rank": Method("M: residents among the top M come first", None, True, (1.5, 2.0, 4.0)),
    "threshold": Method("probability that the considered experts hold together", 1.0, False, (0.5, 0.7, 0.9)),
}


@dataclass(frozen=True)
class Rule:
    """method: a name of METHODS. strength: lambda, M or the threshold. keep: J, the heaviest experts that always stay.

    Raises UsageError for an unknown method or a strength out of its range.
    """

    method: str
    strength: float
    keep: int

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"--method is {', '.join(METHODS)}, not {self.method!r}.", AGAIN)
        method, strength = METHODS[self.method], self.strength
        if not 0 <= strength < np.inf or strength > (method.highest or np.inf):
            most = "at least 0" if method.highest is None else f"0 to {method.highest:g}"
            raise UsageError(f"a strength of {self.method} is {most}, not {strength:g}.", AGAIN)
        if method.whole and strength != int(strength):
            raise UsageError(f"a strength of {self.method} is a whole number, not {strength:g}.", AGAIN)

    @classmethod
    def parse(cls, text: str, top_k: int) -> Rule:
        """METHOD:STRENGTH or METHOD:STRENGTH:KEEP. Raises UsageError."""
        method, *numbers = text.split(":")
        try:
            strength, keep = float(numbers[0]), int(numbers[1]) if len(numbers) > 1 else default_keep(top_k)
        except (IndexError, ValueError):
            keep = -1
        if not 0 <= keep <= top_k or len(numbers) > 2:
            raise UsageError(
                f"rerouting is METHOD:STRENGTH or METHOD:STRENGTH:KEEP, with 0 to {top_k} to keep, not {text!r}.", AGAIN
            )
        return cls(method, strength, keep)

    def check(self, top_k: int, n_experts: int) -> None:
        """Raises UsageError for a count of experts below a token's own, or above those that there are."""
        if METHODS[self.method].whole and not top_k <= self.strength <= n_experts:
            raise UsageError(
                f"a strength of {self.method} is {top_k} (the experts a token) to {n_experts} (those of a layer), "
                f"not {self.strength:g}.",
                AGAIN,
            )

    def choose(
        self,
        order: Sequence[int],
        logits: Sequence[float],
        probabilities: Sequence[float],
        resident: Set[int],
        top_k: int,
        mean_range: float,
    ) -> list[int]:
        """The K experts of one token. order: all experts by rank, the router's own K first; logits, probabilities: [E] by
        expert; resident: before the token; mean_range: of the layer's logits so far, the running mean of max - min."""
        if self.method == "cache-prior":
            return cache_prior(order, logits, resident, top_k, self.keep, self.strength * mean_range)
        ranks = int(self.strength)
        if self.method == "threshold":
            ranks = prefix([probabilities[expert] for expert in order], self.strength)
        return max_rank(order, resident, top_k, self.keep, ranks)


def cache_prior(
    order: Sequence[int], logits: Sequence[float], resident: Set[int], top_k: int, keep: int, bonus: float
) -> list[int]:
    """The top K of logits + bonus x [resident or among the top `keep`]; of equals the better rank."""
    if bonus == 0:
        return list(order[:top_k])
    raised = resident | {*order[:keep]}
    return sorted(order, key=lambda expert: -(logits[expert] + (bonus if expert in raised else 0.0)))[:top_k]


def max_rank(order: Sequence[int], resident: Set[int], top_k: int, keep: int, ranks: int) -> list[int]:
    """The top `keep`, then residents among the top `ranks`, then all others, each part by rank: the first K of these."""
    chosen = list(order[:keep])
    chosen += [expert for expert in order[keep:ranks] if expert in resident]
    chosen += [expert for expert in order[keep:] if expert not in chosen]
    return chosen[:top_k]


def prefix(probabilities: Sequence[float], threshold: float) -> int:
    """How many of these, from the first on, it takes to sum to the threshold; all where rounding keeps them below."""
    total = 0.0
    for count, probability in enumerate(probabilities, 1):
        total += probability
        if total >= threshold:
            return count
    return len(probabilities)


def default_keep(top_k: int) -> int:
    """J where none is named: 2, but at most half of K."""
    return min(2, top_k // 2)


def default_strengths(method: str, top_k: int, n_experts: int) -> list[float]:
    """Strengths to show where none are named."""
    if not METHODS[method].whole:
        return list(METHODS[method].shown)
    return [float(min(round(one * top_k), n_experts)) for one in METHODS[method].shown]


class Walked(NamedTuple):
    """experts: [T, K] int16 in recorded order (descending weight); weights: [T, K] float32, their routing weights;
    changed: [T] bool, tokens whose set of experts is not the router's own. Of the others both are the router's, exactly."""

    experts: np.ndarray
    weights: np.ndarray
    changed: np.ndarray


def walk(
    rule: Rule | None,
    cache: ExpertCache,
    logits_TE: np.ndarray,
    probabilities_TE: np.ndarray,
    stock_TK: np.ndarray,
    weights_TK: np.ndarray,
    *,
    renormalised: bool,
    logs_TE: np.ndarray | None = None,
) -> Walked:
    """One request's tokens in order, in one layer: each chooses, then the cache serves what it chose.

    rule: None leaves every choice as it is. cache: of this layer, cold. stock_TK, weights_TK: the router's own choice in
    recorded order. logits: what the router ranks by; logs: the logarithms of its scores, None: the logits. renormalised: whether the router scales its K weights to one sum. Weights and probabilities reach the
    cache's policy as float16, as traces store them. Raises CacheError for a policy that reads heads or refines.
    """
    if {"temporal", "spatio"} & {*cache.policy.needs} or cache.policy.refines:
        raise CacheError(
            "rerouted text serves caches that read no heads and load nothing ahead of a step",
            f"{AGAIN} --policy decayed",
        )
    experts, weights = stock_TK.astype(np.int16), weights_TK.astype(np.float32)
    changed = np.zeros(len(experts), dtype=bool)
    seen = probabilities_TE.astype(np.float16).tolist() if "probabilities" in cache.policy.needs else None
    ranges = logits_TE.max(axis=1) - logits_TE.min(axis=1)
    means = np.cumsum(ranges, dtype=np.float64) / np.arange(1, len(ranges) + 1)
    top_k = stock_TK.shape[1]
    for token, order in enumerate(rank(logits_TE, stock_TK).tolist()):
        chosen = order[:top_k]
        if rule is not None:
            found = reroute(
                rule, cache.resident, order, logits_TE[token], probabilities_TE[token], stock_TK[token], weights[token],
                float(means[token]), renormalised=renormalised, logs_E=None if logs_TE is None else logs_TE[token],
            )  # fmt: skip
            if found is not None:
                chosen, weights[token] = found
                experts[token], changed[token] = chosen, True
        cache.step(
            chosen[::-1],
            weights[token, ::-1].astype(np.float16).tolist() if "weights" in cache.policy.needs else None,
            seen[token] if seen else None,
        )
    return Walked(experts, weights, changed)


def reroute(
    rule: Rule,
    resident: Set[int],
    order: Sequence[int],
    logits_E: np.ndarray,
    probabilities_E: np.ndarray,
    stock_K: np.ndarray,
    weights_K: np.ndarray,
    mean_range: float,
    *,
    renormalised: bool,
    logs_E: np.ndarray | None = None,
) -> tuple[list[int], np.ndarray] | None:
    """One token's experts in recorded order (descending weight), and their weights [K] float32; None where they are the
    router's own. order: all experts by `rank`; resident, mean_range: as `Rule.choose` takes them; the others as `walk` does."""
    own = order[: len(stock_K)]
    if resident >= {*own}:
        return None
    scores = logits_E.tolist()
    chosen = rule.choose(order, scores, probabilities_E.tolist(), resident, len(own), mean_range)
    if {*chosen} == {*own}:
        return None
    logs_E = logits_E if logs_E is None else logs_E
    chosen.sort(key=lambda expert: (-logs_E[expert], -expert))  # by weight
    return chosen, mixed(logs_E, probabilities_E, stock_K, weights_K, chosen, renormalised).astype(np.float32)


def rank(logits_TE: np.ndarray, stock_TK: np.ndarray) -> np.ndarray:
    """[T, E], the experts of each token by rank: the router's own K as given, then by logit, of equals the lower id."""
    rest = logits_TE.astype(np.float64)
    np.put_along_axis(rest, stock_TK.astype(np.int64), np.inf, axis=-1)
    ranked = np.argsort(-rest, axis=-1, kind="stable")
    ranked[:, : stock_TK.shape[1]] = stock_TK
    return ranked


def mixed(
    logs_E: np.ndarray,
    probabilities_E: np.ndarray,
    stock_K: np.ndarray,
    weights_K: np.ndarray,
    chosen_K: Sequence[int],
    renormalised: bool,
) -> np.ndarray:
    """[K] float32, the weights that the router would give these experts, judged by those that it gave its own choice:
    probabilities times a factor, or shares of their sum."""
    total = weights_K.sum()
    if renormalised:
        powers = np.exp(logs_E[chosen_K] - logs_E[chosen_K].max())
        return total * powers / powers.sum()
    return total / probabilities_E[stock_K].sum() * probabilities_E[chosen_K]
