"""One arm of a sweep: what its gates cost in perplexity and load from every cache, on one pass over held-out rows for all
policies, and one more for each rerouted cell.

Each document stretch of a row is a request with a cold cache, as in rerouted.py; no token of it is prefill.

Shape letters: N slots of a batch, L MoE layers, E routed experts, K experts a token.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from remoe_cli.cache import choose, live_policies, Replay, replay
from remoe_cli.cache.budgets import equal_memory
from remoe_cli.cache.policies import lacks
from remoe_cli.cache.replay import clash
from remoe_cli.cache.reroute import default_keep, Rule
from remoe_cli.errors import CacheError
from remoe_cli.families import Gate, Heads, RouterTap
from remoe_cli.measure.decode_traces import recorded
from remoe_cli.measure.rerouted import measure_rerouted, requests_of
from remoe_cli.measure.text import row_sums
from remoe_cli.objectives.remoe import Segments
from remoe_cli.report import metrics
from remoe_cli.report.cells import BOOTSTRAP_SEED
from remoe_cli.report.metrics import TextRows
from remoe_cli.routing import RoutingTrace
from remoe_cli.train.packing import batches, model_inputs, stretches


class Place(NamedTuple):
    """A cell of one arm. bonus: of residents, as --method cache-prior of remoe reroute; 0: the model as it is."""

    capacity: int
    policy: str
    admission: str
    bonus: float = 0.0


class Texts(NamedTuple):
    """`rows` rows of `sequence` tokens of the documents, `batch` at once."""

    documents: Sequence[Sequence[int]]
    sequence: int
    rows: int
    batch: int


def hindrance(place: Place, trace: RoutingTrace) -> str | None:
    """Why a cell cannot be; None where nothing is in the way."""
    chosen = choose(place.policy)
    if place.bonus and chosen.name not in live_policies():
        return "rerouting needs a policy that a running model can use"
    if place.bonus and ({"temporal", "spatio"} & set(chosen.policy.needs) or chosen.policy.refines):
        return "rerouting serves caches without heads and without loads ahead"
    missing = lacks(place.policy, trace) or clash(place.policy, "atomic", "cold", False, place.admission)
    if missing is not None:
        return missing
    try:
        _slots(place, trace.n_layers, trace.top_k)
    except CacheError as error:
        return error.message
    return None


@torch.no_grad()
def record_text(
    model: torch.nn.Module,
    gates: list[Gate],
    heads: Heads | None,
    texts: Texts,
    probabilities: bool = False,
    on_batch: Callable[[int], None] = lambda rows_done: None,
) -> tuple[TextRows, RoutingTrace]:
    """What the model does on the rows as it is. The trace holds the routers' probabilities where asked for, and the scores
    of the heads that are there."""
    device = next(model.parameters()).device
    heads = heads.to(device) if heads is not None else None
    sums: list[tuple[float, float, int]] = []
    parts: list[dict[str, np.ndarray]] = []
    lengths: list[int] = []
    for packed in batches(stretches(texts.documents, texts.sequence), texts.sequence, min(texts.batch, texts.rows)):
        left = texts.rows - len(sums)
        packed = packed._replace(ids_BT=packed.ids_BT[:left], document_BT=packed.document_BT[:left])
        requests = requests_of(packed.document_BT)
        with RouterTap(gates) as tap:
            logits_BTV = model(**model_inputs(model, packed, Segments.of(packed.document_BT).to(device))).logits
            routed = tap.take()
        sums += row_sums(logits_BTV, torch.stack([layer.choice_NK for layer in routed]), packed)
        kept = np.concatenate([np.arange(part.start, part.stop) for part in requests])
        parts.append({name: array[kept] for name, array in recorded(routed, probabilities, heads).items()})
        lengths += [part.stop - part.start for part in requests]
        on_batch(len(sums))
        if len(sums) >= texts.rows:
            break
    text = TextRows(*(np.array(part, dtype=np.float64) for part in zip(*sums, strict=True)))
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    prefill = np.zeros(borders[-1], dtype=bool)
    trace = RoutingTrace(
        **arrays, borders=borders, prefill=prefill, n_experts=gates[0].n_experts, provenance={"kind": "text"}
    )
    return text, trace


def replayed(trace: RoutingTrace, place: Place, expert_bytes: int) -> dict[str, Any]:
    """The loads of a cell without rerouting."""
    done = replay(trace, place.policy, _slots(place, trace.n_layers, trace.top_k), admission=place.admission)
    return _loads(done, expert_bytes)


def rerouted(
    model: torch.nn.Module,
    gates: list[Gate],
    texts: Texts,
    place: Place,
    expert_bytes: int,
    on_batch: Callable[[int], None] = lambda rows_done: None,
) -> tuple[TextRows, dict[str, Any]]:
    """The perplexity and the loads of a cell with rerouting; one pass over the rows."""
    top_k = gates[0].top_k
    slots = _slots(place, len(gates), top_k)
    done = measure_rerouted(
        model, gates, texts.documents, texts.sequence, texts.rows, Rule("cache-prior", place.bonus, default_keep(top_k)),
        capacity=slots, policy=place.policy, admission=place.admission, batch=texts.batch, on_batch=on_batch,
    )  # fmt: skip
    return done.text, _loads(replay(done.trace, place.policy, slots, admission=place.admission), expert_bytes)


def _slots(place: Place, n_layers: int, top_k: int) -> list[int]:
    """At equal memory: with bypass the staging buffer is taken from the slots."""
    return equal_memory(place.capacity, n_layers, top_k, place.admission)


def _loads(done: Replay, expert_bytes: int) -> dict[str, Any]:
    moved = (done.request_misses + done.request_proactive) * (expert_bytes / 1e6)
    return {
        "accesses": done.accesses,
        "misses": done.misses,
        "proactive": done.proactive,
        "hit_ratio": done.hit_ratio,
        "adjusted_hit_ratio": metrics.adjusted_hit_ratio(done.accesses, done.misses, done.proactive),
        "loads_a_token": metrics.ratio(done.loads, done.tokens),
        "mb_a_token": metrics.load_mb(done.misses, done.proactive, expert_bytes, done.tokens),
        "mb_a_token_95": metrics.bootstrap(moved, done.request_tokens, seed=BOOTSTRAP_SEED),
    }
