"""What a prefetcher lists before each step of a trace, in the order in which a replay serves it.

Shape letters: N tokens that are served, L MoE layers, M experts that are listed for a step, at most.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from remoe_cli.cache.prefetch.base import Seen, Shape, Wanted, Watch
from remoe_cli.cache.schedule import schedule
from remoe_cli.routing import RoutingTrace


@lru_cache(maxsize=32)
def listed(
    trace: RoutingTrace, wanted: Wanted, warm: str, reset: str, sessions: int, predictor=None
) -> tuple[np.ndarray, int]:
    """[N, L, M] int16, best first, filled up with -1; and the bytes that the prefetcher holds in the end. warm, reset, sessions: as
    `replay` takes them. One prefetcher serves the whole trace, fresh caches or not. A prompt that does not go through the cache is
    watched all the same, before the request's first token."""
    plan = schedule(trace, warm, reset, sessions)
    made = wanted.make(Shape(trace.n_layers, trace.n_experts, trace.top_k), predictor)
    found = np.full((plan.n_tokens, trace.n_layers, max(1, min(made.most, trace.n_experts))), -1, np.int16)
    rows = plan.tokens_N if len(plan.tokens_N) else np.arange(plan.n_tokens)
    last = {owner: at for at, owner in enumerate(plan.owner_N.tolist())}
    watches: dict[int, Watch] = {}
    ready: dict[int, dict[int, list[int]]] = {}
    arrays = [getattr(trace, name) if name in wanted.kind.reads else None for name in Seen._fields[1:]]

    def seen(row: int, layer: int) -> Seen:
        return Seen(trace.experts[row, layer], *(None if one is None else one[row, layer] for one in arrays))

    def tokens(low: int, high: int) -> list[list[Seen]]:
        return [[seen(row, layer) for layer in range(trace.n_layers)] for row in range(low, high)]

    unserved = sorted({*range(trace.n_requests)} - {*last})  # prompts alone
    for at, (row, owner) in enumerate(zip(rows.tolist(), plan.owner_N.tolist())):
        if owner not in watches:
            while unserved and unserved[0] < owner:
                watch = Watch(made)
                watch.prompt(tokens(*trace.borders[unserved.pop(0) :][:2]))
                watch.end()
            watches[owner] = Watch(made)
            ready[owner] = dict(watches[owner].prompt(tokens(trace.borders[owner], row)))
        for layer in range(trace.n_layers):
            own = ready[owner].pop(layer, [])
            found[at, layer, : len(own)] = own
            target, ids = watches[owner].passed(layer, seen(row, layer))
            ready[owner][target] = ids
        if at == last[owner]:
            watches.pop(owner).end()
            del ready[owner]
    found.flags.writeable = False
    return found, made.held_bytes
