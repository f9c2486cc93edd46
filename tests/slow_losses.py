"""The losses once more, as plain loops over layers, documents and tokens, written from the paper's definitions."""

import math
from itertools import pairwise


def kl(p, q) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def symkl(p, q) -> float:
    return (kl(p, q) + kl(q, p)) / 2


def slow_terms(p, ref, choice, documents, recipe) -> dict[str, float]:
    """p, ref [L][N][E], choice [L][N][K] lists; documents: slot numbers of each. The means of the definitions."""
    layers, lags, w = range(len(p)), recipe.lags, recipe.window_tokens
    tokens = [n for slots in documents for n in slots]
    out = {
        "trust": mean_over_layers(layers, lambda a: sum(kl(p[a][n], ref[a][n]) for n in tokens) / max(1, len(tokens)))
    }
    out["reuse"] = by_document(
        documents,
        2,
        lambda s: mean_over_layers(layers, lambda a: -math.log(rho(p[a], choice[a], s, recipe.reuse_tokens) + 1e-8)),
    )
    out["smooth"] = by_document(documents, 2, lambda s: mean_over_layers(layers, lambda a: slow_lag(p[a], s, (1,))))
    out["lag"] = by_document(documents, 2, lambda s: mean_over_layers(layers, lambda a: slow_lag(p[a], s, lags)))
    out["window"] = by_document(documents, w, lambda s: mean_over_layers(layers, lambda a: slow_window(p[a], s, w)))
    return out


def slow_cross_entropy(logits, ids, learned, documents) -> tuple[float, int]:
    """logits [N][V], ids [N], learned [N] lists. The sum over learned tokens that are not a document's first, and how
    many they are."""
    losses = [
        math.log(sum(math.exp(x) for x in logits[before])) - logits[before][ids[now]]
        for slots in documents
        for before, now in pairwise(slots)
        if learned[now]
    ]
    return sum(losses), len(losses)


def mean_over_layers(layers, value) -> float:
    return sum(value(layer) for layer in layers) / len(layers)


def by_document(documents, shortest, value) -> float:
    """Mean over documents of at least `shortest` tokens, weighted by their pairs."""
    long = [slots for slots in documents if len(slots) >= shortest]
    pairs = sum(len(slots) - 1 for slots in long)
    return sum((len(slots) - 1) * value(slots) for slots in long) / pairs if pairs else 0.0


def rho(p, choice, slots, tokens) -> float:
    masses = []
    for t, now in enumerate(slots[1:], 1):
        recent = {e for before in slots[max(0, t - tokens) : t] for e in choice[before]}
        masses.append(sum(p[now][e] for e in recent) / len(choice[now]))
    return sum(masses) / len(masses)


def slow_lag(p, slots, lags) -> float:
    total = 0.0
    for t in range(1, len(slots)):
        total += sum(symkl(p[slots[t]], p[slots[t - d]]) for d in lags if t - d >= 0) / len(lags)
    return total / (len(slots) - 1)


def slow_window(p, slots, w) -> float:
    entropies = []
    for start in range(0, len(slots) - w + 1, w):
        mean = [sum(p[n][e] for n in slots[start : start + w]) / w for e in range(len(p[0]))]
        entropies.append(-sum(x * math.log(x) for x in mean))
    return sum(entropies) / len(entropies)
