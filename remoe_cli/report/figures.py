"""The figures of the arms on one sample of held-out text, as docs/report.md lists them.

What varies from request to request is a ratio of sums over requests (or over rows of text): the pooled figure, its interval,
its change against the base and the figure of each draw all come from the same sums.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from remoe_cli.cache import Replay
from remoe_cli.report import locality, metrics
from remoe_cli.report.cells import BOOTSTRAP_SEED, cache_cells, REFERENCES, replays
from remoe_cli.report.concentration import concentration_figures
from remoe_cli.report.drawn import drawn
from remoe_cli.report.metrics import TextRows
from remoe_cli.routing import RoutingTrace

RANKS = (2, 4, 8)


class Decoded(NamedTuple):
    """trace: decode steps only, S a request. ids_RS: the token fed at each counted step."""

    trace: RoutingTrace
    ids_RS: np.ndarray


class Measured(NamedTuple):
    """One arm on one sample. decoded: "forced" and "greedy", the same requests in the same order."""

    text: TextRows
    decoded: dict[str, Decoded]


def figures(
    arms: Mapping[str, Measured],
    capacities: Sequence[int],
    policies: Sequence[str],
    expert_bytes: int,
    draws: int = 1,
    on_arm: Callable[[int], None] = lambda done: None,
    with_routing: bool = False,
) -> Iterator[dict[str, Any]]:
    """text, decode, cache, draws and spread of one arm after the other. The first arm is the base; draws: equal parts of
    the requests and of the rows, in their order. with_routing: with what pictures show of the forced trace."""
    base, *_ = arms.values()
    reference = replays(_traces(base), capacities, list(dict.fromkeys([*policies, *REFERENCES])))
    for number, arm in enumerate(arms.values(), 1):
        before = None if arm is base else base
        done = replays(_traces(arm), capacities, policies) if before else reference
        each = _draws(arm, [done["forced", c, "lru", "forced"] for c in capacities], expert_bytes, draws)
        yield {
            "text": text_figures(arm.text, before.text if before else None),
            "decode": {
                kind: decode_figures(decoded, before.decoded[kind] if before else None)
                for kind, decoded in arm.decoded.items()
            },
            "cache": cache_cells(done, reference, policies, expert_bytes),
            "draws": each,
            "spread": _spread(each),
            **({"routing": drawn(arm.decoded["forced"].trace)} if with_routing else {}),
        }
        on_arm(number)


def text_figures(text: TextRows, base: TextRows | None = None) -> dict[str, Any]:
    """Perplexity and overlap, with intervals over rows; base: to pair with, None for the base itself."""
    found = text.measures()
    loss = metrics.bootstrap(text.loss_N, text.pairs_N, seed=BOOTSTRAP_SEED)
    change = change_95 = None
    if base is not None:
        change = float(_growth(base.measures().loss, found.loss))
        change_95 = metrics.bootstrap_change(
            (base.loss_N, base.pairs_N), (text.loss_N, text.pairs_N), _growth, seed=BOOTSTRAP_SEED
        )
    shared = (text.shared_N, text.pairs_N)
    return {
        "perplexity": found.perplexity,
        "perplexity_95": loss and [metrics.perplexity(end) for end in loss],
        "perplexity_change": change,
        "perplexity_change_95": change_95,
        "loss": found.loss,
        **_eor(shared, base and (base.shared_N, base.pairs_N)),
        "tokens": found.tokens,
    }


def decode_figures(decoded: Decoded, base: Decoded | None = None) -> dict[str, Any]:
    """Overlap, usage and repetition of one decode trace; base: to pair with, None for the base itself."""
    trace, usage = decoded.trace, locality.usage(decoded.trace)
    return {
        "requests": trace.n_requests,
        "steps": trace.n_tokens,
        **_eor(locality.overlap(trace), base and locality.overlap(base.trace)),
        "usage": usage._asdict(),
        "concentration": concentration_figures(trace),
        "distinct_experts_request": locality.distinct_experts(trace),
        "distinct_experts_64": locality.distinct_experts(trace, 64),
        "parallel_load": {str(ranks): locality.parallel_load(trace, ranks) for ranks in RANKS},
        "distinct_4": _mean([metrics.distinct_n(row.tolist(), 4) for row in decoded.ids_RS]),
        "repetition": _mean([metrics.repetition_rate(row.tolist()) for row in decoded.ids_RS]),
    }


def _eor(shared: metrics.Sums, base: metrics.Sums | None) -> dict[str, Any]:
    eor, change, change_95 = _ratio(shared), None, None
    if base is not None and eor is not None and (before := _ratio(base)) is not None:
        change = eor - before
        change_95 = metrics.bootstrap_change(base, shared, metrics.difference, seed=BOOTSTRAP_SEED)
    eor_95 = metrics.bootstrap(*shared, seed=BOOTSTRAP_SEED)
    return {"eor": eor, "eor_95": eor_95, "eor_change": change, "eor_change_95": change_95}


def _draws(arm: Measured, lru: Sequence[Replay], expert_bytes: int, draws: int) -> list[dict[str, Any]]:
    """The headline figures of each draw; lru: of the forced trace, one a capacity."""
    text, overlaps = arm.text, {kind: locality.overlap(decoded.trace) for kind, decoded in arm.decoded.items()}
    loss, eor = (_by_draw((sums, text.pairs_N), draws) for sums in (text.loss_N, text.shared_N))
    figures = {
        "perplexity": [None if one is None else metrics.perplexity(one) for one in loss],
        "eor": eor,
        **{f"eor_{kind}": _by_draw(shared, draws) for kind, shared in overlaps.items()},
        "lru_hit_ratio": _together([_by_draw((one.request_hits, one.request_accesses), draws) for one in lru]),
        "lru_mb_a_token": _together(
            [_by_draw((one.request_misses * (expert_bytes / 1e6), one.request_tokens), draws) for one in lru]
        ),
    }
    return [dict(zip(figures, values, strict=True)) for values in zip(*figures.values(), strict=True)]


def _by_draw(sums: metrics.Sums, draws: int) -> list[float | None]:
    over, under = (np.array_split(np.asarray(part, dtype=np.float64), draws) for part in sums)
    return [_ratio(part) for part in zip(over, under, strict=True)]


def _together(columns: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """One list a draw, of one value a capacity."""
    return [list(row) for row in zip(*columns, strict=True)]


def _spread(draws: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The sample standard deviation of each figure over the draws; None for a single draw."""
    if len(draws) < 2:
        return None
    return {
        key: np.std(np.array([draw[key] for draw in draws], dtype=np.float64), axis=0, ddof=1).tolist()
        for key in draws[0]
    }


def _traces(arm: Measured) -> dict[str, RoutingTrace]:
    return {kind: decoded.trace for kind, decoded in arm.decoded.items()}


def _growth(before: Any, after: Any) -> Any:
    """Of the perplexity, from mean losses."""
    with np.errstate(over="ignore"):
        return np.expm1(after - before)


def _ratio(sums: metrics.Sums) -> float | None:
    return metrics.ratio(np.sum(sums[0]), np.sum(sums[1]))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
