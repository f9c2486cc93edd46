"""Teacher-forced text with rerouted experts: what cache-aware rerouting costs in perplexity, and what it saves in loads.

Each document stretch of a packed row is a request with a cold cache in each layer. A layer's cache depends on that layer's
own choices only, so one pass over all tokens gives the perplexity exactly: the hook of a layer's router walks the tokens of
each request in order before anything after it runs.

Shape letters: B rows, T slots a row, N = B * T, L MoE layers, E routed experts, K experts a token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from remoe_cli.cache import ExpertCache
from remoe_cli.cache.policies import choose
from remoe_cli.cache.reroute import Rule, walk, Walked
from remoe_cli.errors import DataError, FamilyError
from remoe_cli.families import Gate
from remoe_cli.families.experts import recorded_order
from remoe_cli.families.refuse import require_reroutable
from remoe_cli.measure.text import row_sums
from remoe_cli.objectives.remoe import PADDING, Segments
from remoe_cli.report.metrics import TextRows
from remoe_cli.routing import RoutingTrace
from remoe_cli.train.packing import batches, model_inputs, stretches

# how far a router's weights may lie from those that its family's rule gives: bf16 rounds to 0.4 %
_RULE_TOLERANCE = 0.02


class Counts(NamedTuple):
    """Of the runner's own caches, over layers and requests."""

    hits: int
    misses: int
    evictions: int

    def __add__(self, other: tuple) -> "Counts":
        return Counts(*(one + more for one, more in zip(self, other, strict=True)))


class Rerouted(NamedTuple):
    """text: as measure_rows, of the rerouted model. trace: what ran, each document stretch a request, no token of it
    prefill. counts: of the caches that steered it. changed: of trace.experts.size choices those that the router itself
    would not have made."""

    text: TextRows
    trace: RoutingTrace
    counts: Counts
    changed: int


class Rerouter:
    """`with Rerouter(...) as rerouter: rerouter.start(requests); model(...); walked = rerouter.take()`.

    rule: None leaves the model as it is. new_cache: a cold cache for a MoE layer (0 is the first), called for each request. Where a token's set of
    experts is the router's own, so are its weights, bit for bit.
    """

    def __init__(
        self, gates: Sequence[Gate], rule: Rule | None, new_cache: Callable[[int], ExpertCache], *, renormalised: bool
    ) -> None:
        if rule is not None:
            require_reroutable(gates[0])
        self._gates, self._rule, self._new_cache, self._renormalised = gates, rule, new_cache, renormalised
        self._handles: list = []

    def __enter__(self) -> "Rerouter":
        self._handles = [
            gate.router.register_forward_hook(self._hook(gate, place)) for place, gate in enumerate(self._gates)
        ]
        return self

    def __exit__(self, *_exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def start(self, requests: Sequence[slice]) -> None:
        """The next pass. requests: the tokens of each in the flattened batch [N]; others (padding) stay as they are."""
        self._requests = requests
        self._walked: dict[int, Walked] = {}
        self._probabilities: dict[int, np.ndarray] = {}
        self.counts = Counts(0, 0, 0)
        self.changed = 0

    def take(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the last pass: experts [N, L, K] int16 and weights [N, L, K] float16 as traces record them, and the router's
        probabilities [N, L, E] float16. Raises FamilyError when a router was not reached."""
        missing = [gate.layer for gate in self._gates if gate.layer not in self._walked]
        if missing:
            raise FamilyError(
                f"the routers of layers {missing} did nothing in this pass: the model does not call them as modules.",
                "pip install -U transformers",
            )
        found = [self._walked[gate.layer] for gate in self._gates]
        chances = [self._probabilities[gate.layer].astype(np.float16) for gate in self._gates]
        return (
            np.stack([one.experts for one in found], 1),
            np.stack([one.weights.astype(np.float16) for one in found], 1),
            np.stack(chances, 1),
        )

    def _hook(self, gate: Gate, place: int):
        layer = gate.layer

        def reroute(_module, _inputs, outputs):
            logits, weight, choice = gate.read(outputs)
            chances_NE = gate.score.probabilities(logits).cpu().numpy()
            logits_NE, weight_NK = gate.ranking(logits).cpu().numpy(), weight.float().cpu().numpy()
            logs_NE = gate.score.log(logits).float().cpu().numpy()
            order_NK = recorded_order(choice.cpu().numpy(), weight_NK)
            stock_NK = np.take_along_axis(choice.cpu().numpy(), order_NK, -1)
            weight_NK = np.take_along_axis(weight_NK, order_NK, -1)
            self._check_rule(layer, weight_NK, chances_NE, stock_NK)
            done = Walked(stock_NK.astype(np.int16), weight_NK.copy(), np.zeros(len(stock_NK), dtype=bool))
            for request in self._requests:
                cache = self._new_cache(place)
                walked = walk(
                    self._rule, cache, logits_NE[request], chances_NE[request], stock_NK[request], weight_NK[request],
                    renormalised=self._renormalised, logs_TE=logs_NE[request],
                )  # fmt: skip
                for whole, part in zip(done, walked, strict=True):
                    whole[request] = part
                self.counts += (cache.hits, cache.misses, cache.evictions)
            self._walked[layer], self._probabilities[layer] = done, chances_NE
            places = np.flatnonzero(done.changed)
            if not len(places):
                return None
            own = (done.experts[places, :, None] == stock_NK[places, None, :]).any(-1)
            self.changed += int(own.size - own.sum())
            where = torch.from_numpy(places).to(choice.device)
            return (
                logits,
                weight.index_copy(0, where, torch.from_numpy(done.weights[places]).to(weight)),
                choice.index_copy(0, where, torch.from_numpy(done.experts[places].astype(np.int64)).to(choice)),
            )

        return reroute

    def _check_rule(self, layer: int, weight_NK: np.ndarray, chances_NE: np.ndarray, stock_NK: np.ndarray) -> None:
        """New weights are made by the family's rule, so the router must follow it."""
        own_NK = np.take_along_axis(chances_NE, stock_NK, -1)
        share_NK = own_NK / own_NK.sum(-1, keepdims=True)
        off = np.abs(weight_NK / weight_NK.sum(-1, keepdims=True) - share_NK).max()
        factors = weight_NK.sum(-1) / (1 if self._renormalised else own_NK.sum(-1))
        if off > _RULE_TOLERANCE or factors.max() - factors.min() > _RULE_TOLERANCE * factors.max():
            rule = "shares of one sum" if self._renormalised else "probabilities times one factor"
            raise FamilyError(
                f"the router of layer {layer} does not weigh its experts by {rule}, as its family should.",
                "pip install -U remoe-cli transformers",
            )


@torch.no_grad()
def measure_rerouted(
    model: torch.nn.Module,
    gates: list[Gate],
    documents: Sequence[Sequence[int]],
    sequence: int,
    rows: int,
    rule: Rule | None,
    *,
    capacity: int | Sequence[int],
    policy: str = "lru",
    admission: str = "forced",
    batch: int = 4,
    on_batch: Callable[[int], None] = lambda rows_done: None,
) -> Rerouted:
    """Over the rows that measure_rows takes, with `capacity` expert slots a layer, or one number for each.

    The trace holds the router's probabilities where the policy needs them. Raises DataError when the documents hold no pair
    of tokens, CacheError for a policy that a running model can't serve.
    """
    n_experts, device = gates[0].n_experts, next(model.parameters()).device
    keep_probabilities = "probabilities" in choose(policy).policy.needs

    slots = [capacity] * len(gates) if isinstance(capacity, int) else capacity

    def new_cache(place: int) -> ExpertCache:
        return ExpertCache(slots[place], policy, n_experts=n_experts, admission=admission)

    sums: list[tuple[float, float, int]] = []
    parts: list[tuple[np.ndarray, ...]] = []
    lengths: list[int] = []
    counts, changed = Counts(0, 0, 0), 0
    with Rerouter(gates, rule, new_cache, renormalised=gates[0].renormalised) as rerouter:
        for packed in batches(stretches(documents, sequence), sequence, min(batch, rows)):
            packed = packed._replace(
                ids_BT=packed.ids_BT[: rows - len(sums)], document_BT=packed.document_BT[: rows - len(sums)]
            )
            requests = requests_of(packed.document_BT)
            rerouter.start(requests)
            inputs = model_inputs(model, packed, Segments.of(packed.document_BT).to(device))
            logits_BTV = model(**inputs).logits
            experts_NLK, weights_NLK, chances_NLE = rerouter.take()
            choice_LNK = torch.from_numpy(experts_NLK.astype(np.int64)).transpose(0, 1).to(device)
            sums += row_sums(logits_BTV, choice_LNK, packed)
            kept = np.concatenate([np.arange(part.start, part.stop) for part in requests])
            found = (experts_NLK, weights_NLK, *([chances_NLE] if keep_probabilities else []))
            parts.append(tuple(part[kept] for part in found))
            lengths += [part.stop - part.start for part in requests]
            counts, changed = counts + rerouter.counts, changed + rerouter.changed
            on_batch(len(sums))
            if len(sums) >= rows:
                break
    text = TextRows(*(np.array(part, dtype=np.float64) for part in zip(*sums, strict=True)))
    if not text.pairs_N.sum():
        raise DataError("the texts hold no pair of tokens to measure.", "remoe reroute MODEL --prompts FILE --cache 8")
    experts, weights, *chances = (np.concatenate(part) for part in zip(*parts, strict=True))
    trace = RoutingTrace(
        experts,
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.zeros(len(experts), dtype=bool),
        n_experts,
        weights,
        {"kind": "text"},
        **({"probabilities": chances[0]} if chances else {}),
    )
    return Rerouted(text, trace, counts, changed)


def requests_of(document_BT: torch.Tensor) -> list[slice]:
    """The slots of each document in the flattened batch, in order; padding belongs to none."""
    found = []
    width = document_BT.shape[1]
    for row, numbers_T in enumerate(document_BT.numpy()):
        ends = np.flatnonzero(np.diff(numbers_T)) + 1
        for begin, end in zip([0, *ends], [*ends, width], strict=True):
            if numbers_T[begin] != PADDING:
                found.append(slice(row * width + int(begin), row * width + int(end)))
    return found
