"""Replay of a RoutingTrace through caches: hits and loads without a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import NamedTuple, TYPE_CHECKING

import numpy as np

from remoe_cli.cache.ahead import rows_before, scores_ahead
from remoe_cli.cache.counts import Counts, Replay
from remoe_cli.cache.expert_cache import ADMISSIONS, ExpertCache, unfit
from remoe_cli.cache.policies import choose, Chosen, lacks
from remoe_cli.cache.policy import SCORES
from remoe_cli.cache.prefetch import unserved
from remoe_cli.cache.prefetch.listed import listed
from remoe_cli.cache.schedule import batches, HINT, Schedule, schedule, Steps, WARMS
from remoe_cli.cache.threads import each
from remoe_cli.errors import CacheError
from remoe_cli.routing import RoutingTrace
from remoe_cli.routing.trace import FLOATS

if TYPE_CHECKING:
    from remoe_cli.cache.prefetch.predictor import Predictor

OPTIONS: dict[str, tuple] = {  # each with its default first
    "step": ("atomic", "sequential"),
    "reset": ("request", "never"),
    "touch_order": ("weight", "listed"),
    "warm": WARMS,
    "pool": (False, True, "bytes"),
}
ENGINES = ("compiled", "python")


class _Job(NamedTuple):
    """What all units share. experts: the trace's, contiguous; floats: FLOATS, as bits, those that the policy does not need
    empty.
    foreseen: [N, L, M] what a prefetcher lists before each step, or empty. scratch: a worker's room for what an oracle foresees."""

    chosen: Chosen
    experts: np.ndarray
    floats: dict[str, np.ndarray]
    foreseen: np.ndarray
    trace: RoutingTrace
    plan: Schedule
    forced: bool
    sequential: bool
    backwards: bool
    batched: bool
    fill: bool
    scratch: SimpleQueue[np.ndarray]


class _Unit(NamedTuple):
    """One cache's work: some of a schedule's runs over one layer, or over all layers of a pool."""

    layers: slice
    runs: np.ndarray
    capacity: int
    sizes: np.ndarray
    fit: np.ndarray

    @property
    def n_layers(self) -> int:
        return self.layers.stop - self.layers.start

    @property
    def slots_at_least(self) -> int:
        return max(1, self.capacity // int(self.sizes.max())) if len(self.sizes) else self.capacity

    @property
    def n_tokens(self) -> int:
        return int(self.runs[-1] - self.runs[0])


def replay(
    trace: RoutingTrace,
    policy: str,
    capacity: int | Sequence[int],
    *,
    admission: str = "forced",
    step: str = "atomic",
    reset: str = "request",
    touch_order: str = "weight",
    warm: str = "cold",
    pool: bool | str = False,
    sessions: int = 1,
    fit: RoutingTrace | None = None,
    expert_bytes: int | Sequence[int] | None = None,
    predictor: Predictor | None = None,
    engine: str = "compiled",
    threads: int | None = None,
) -> Replay:
    """Replays the decode tokens of a trace.

    policy: NAME or NAME:PARAMETER of POLICIES, and +PREFETCHER of PREFETCHERS. capacity: slots a layer, or one number for each layer.
    admission: "forced" | "bypass", see ExpertCache.
    step: "atomic": a token's experts are one step, protected until it is over; "sequential": each is a step of its
    own, without protection. reset: "request": a fresh cache each request; "never": one cache over the whole trace.
    touch_order: "weight": the reverse of the recorded order, so that the heaviest expert ends most recent; "listed":
    as recorded, for traces of others.
    warm: "cold": prompts do not touch the cache; "prefill": they go through it first, token by token; "carry": the cache lives
    on from request to request (as reset="never"); "batch": a prompt goes through it as one step a layer.
    sessions: so many requests at a time take turns, token by token; only where the cache lives on.
    pool: one cache of capacity x layers slots for all layers; "bytes": capacity is its size in bytes.
    expert_bytes: of an expert, or of one of each layer, for a pool in bytes; None: as the trace's provenance says.
    fit: the trace that a `static` cache is fitted on; an oracle of that kind takes this trace itself.
    predictor: of a prefetcher that was trained. engine: "python" is the slow reference: the same counts. threads: at most so many; all cores by default.

    Raises CacheError for an unknown option, a capacity below 1, a trace without a decode token, or one that lacks what the
    policy needs.
    """
    given = {"step": step, "reset": reset, "touch_order": touch_order, "warm": warm, "pool": pool}
    allowed = {**OPTIONS, "admission": ADMISSIONS, "engine": ENGINES}
    for name, value in {**given, "admission": admission, "engine": engine}.items():
        if value not in allowed[name]:
            raise CacheError(f"no replay option {value!r}: {' or '.join(map(str, allowed[name]))}", HINT)
    chosen = choose(policy)
    missing = lacks(policy, trace, fit)
    if missing is not None:
        raise CacheError(f"policy {chosen.name} can't replay this trace: {missing}", HINT)
    if (why := clash(policy, step, warm, bool(pool), admission)) is not None:
        raise CacheError(
            f"policy {chosen.name}: {why}", f"{HINT} --policy {chosen.name} --step atomic --warm cold --no-pool"
        )
    if step == "sequential" and warm == "batch":
        raise CacheError(
            "--warm batch serves a prompt as one step, so it goes with --step atomic", f"{HINT} --warm batch"
        )
    plan = schedule(trace, warm, reset, sessions)
    needs = chosen.policy.needs
    if engine == "compiled":
        prepare(policy)
    fitted = (trace if "future" in needs else fit) if "fit" in needs else None
    threads = threads or os.cpu_count() or 1
    sizes = _sizes(trace, expert_bytes) if pool == "bytes" else np.empty(0, np.int64)
    units = _units(trace, plan, capacity, pool, sizes, fitted, threads)
    scratch = SimpleQueue[np.ndarray]()
    workers = min(len(units), threads)
    if "future" in needs:
        workers = max(1, min(workers, len(units) // 4))  # each holds a number for every access of its unit
        # a batch asks for at most what its prompt's tokens ask for
        tokens = trace.n_tokens if warm == "batch" else max(unit.n_tokens for unit in units)
        longest = tokens * units[0].n_layers * trace.top_k
        if longest + trace.n_layers * trace.n_experts > np.iinfo(np.int32).max:
            raise CacheError(
                f"{longest:,} accesses are more than policy {chosen.name} can foresee in one cache (2^31)",
                f"{HINT} --policy lru",
            )
        for _ in range(workers):
            scratch.put(np.empty(longest, np.int32))
    experts = np.ascontiguousarray(trace.experts)
    floats = {name: _bits(getattr(trace, name) if name in needs else None) for name in FLOATS}
    foreseen, prefetch_bytes = np.empty((0, 0, 0), np.int16), 0
    if chosen.prefetch is not None:
        if (why := unserved(chosen.prefetch, trace, predictor)) is not None:
            raise CacheError(f"{why}.", f"{HINT} --policy lru")
        foreseen, prefetch_bytes = listed(trace, chosen.prefetch, warm, reset, sessions, predictor)
    job = _Job(
        chosen, experts, floats, foreseen, trace, plan, admission == "forced", step == "sequential", touch_order == "weight",
        bool((plan.tokens_N < 0).any()), warm == "prefill" and chosen.policy.fill, scratch,
    )  # fmt: skip
    serve = _compiled if engine == "compiled" else _plain
    counts = Counts(trace, plan)
    each(lambda unit: serve(job, unit, counts), units, workers)
    slots = sum({unit.layers.start: unit.capacity for unit in units}.values())
    staging = trace.top_k if admission == "bypass" else max(0, trace.top_k - min(unit.capacity for unit in units))
    return counts.replay(slots, staging, prefetch_bytes)


def clash(policy: str, step: str, warm: str, pool: bool = False, admission: str | None = None) -> str | None:
    """Why a policy does not go with these options; None where it does. admission: None leaves it open."""
    prefetch, chosen = choose(policy).prefetch, choose(policy).policy
    if prefetch is not None and (step == "sequential" or warm == "batch" or pool):
        return "a prefetcher lists experts of one layer, once a token: it takes no --step sequential, --warm batch or --pool"
    if {*SCORES} & {*chosen.needs} and (step == "sequential" or warm == "batch"):
        return "it reads the scores of all experts once a token: it takes neither --step sequential nor --warm batch"
    return unfit(chosen, admission or "bypass", pool)


def prepare(policy: str) -> float | None:
    """Compiles the kernel of a policy, or loads it from disk: the seconds of compiling, None where it was there already."""
    try:
        from remoe_cli.cache.kernel import prepare
    except ImportError as error:
        raise CacheError(
            f"replay is compiled by numba, which cannot be loaded here ({error})", "pip install -U numba"
        ) from None

    return prepare(choose(policy).policy)


def _units(
    trace: RoutingTrace,
    plan: Schedule,
    capacity: int | Sequence[int],
    pool: bool | str,
    sizes: np.ndarray,
    fitted: RoutingTrace | None,
    threads: int,
) -> list[_Unit]:
    """One a layer, or one for the pool; where these are few, runs are spread over several of them."""
    each = [capacity] * trace.n_layers if isinstance(capacity, int | np.integer) else [*capacity]
    if len(each) != trace.n_layers:
        raise CacheError(f"{len(each)} budgets for {trace.n_layers} layers; one a layer is needed", HINT)
    if min(each) < 1:
        raise CacheError(f"a cache needs at least 1 slot a layer, not {min(each)}", HINT)
    fit = np.zeros((trace.n_layers, trace.n_experts))
    if fitted is not None:
        if (fitted.n_layers, fitted.n_experts) != fit.shape:
            raise CacheError(
                f"the fitted trace has {fitted.n_layers} layers of {fitted.n_experts} experts, this one {trace.n_layers} of "
                f"{trace.n_experts}",
                HINT,
            )
        fit = fitted.decode().uses().astype(np.float64)
    everything = slice(0, trace.n_layers)
    runs = plan.runs
    whole = [_Unit(slice(layer, layer + 1), runs, int(slots), sizes, fit[layer]) for layer, slots in enumerate(each)]
    if pool:
        whole = [_Unit(everything, runs, int(min(each) if pool == "bytes" else sum(each)), sizes, fit.ravel())]
    parts = min(len(runs) - 1, -(-2 * threads // len(whole)))
    cuts = np.linspace(0, len(runs) - 1, parts + 1).astype(int)
    return [unit._replace(runs=runs[low : high + 1]) for unit in whole for low, high in zip(cuts, cuts[1:])]


def _sizes(trace: RoutingTrace, expert_bytes: int | Sequence[int] | None) -> np.ndarray:
    """[L * E] bytes of each expert of a pool."""
    given = trace.provenance.get("expert_bytes") if expert_bytes is None else expert_bytes
    by_layer = np.atleast_1d(np.asarray(given if given is not None else 0))
    if by_layer.dtype.kind not in "iu" or by_layer.min() < 1 or by_layer.shape not in ((1,), (trace.n_layers,)):
        raise CacheError("a pool in bytes needs the bytes of an expert, one whole number or one for each layer", HINT)
    return np.repeat(np.broadcast_to(by_layer.astype(np.int64), trace.n_layers), trace.n_experts)


def _preload(chosen: Chosen, unit: _Unit) -> np.ndarray:
    if not chosen.policy.preload:
        return np.empty(0, np.int64)
    order = np.lexsort((np.arange(len(unit.fit)), -unit.fit))
    if len(unit.sizes):
        return order[np.cumsum(unit.sizes[order]) <= unit.capacity]
    return order[: unit.capacity]


def _compiled(job: _Job, unit: _Unit, counts: Counts) -> None:
    from remoe_cli.cache.arrays import arrays, frozen, halves_as_floats
    from remoe_cli.cache.kernel import kernel
    from remoe_cli.cache.next_use import next_use

    trace, plan, needs, n_layers, first = job.trace, job.plan, job.chosen.policy.needs, unit.n_layers, unit.layers.start
    ids, offsets, weights = np.empty(0, np.int16), np.empty(0, np.int64), job.floats["weights"]
    if job.batched:
        ids, batch_weights, offsets = batches(trace, plan, unit.layers, job.backwards)
        weights = _bits(batch_weights[None, None] if "weights" in needs else None)
    missed = np.zeros((unit.n_tokens, n_layers), np.uint16)
    request_misses, request_ahead = np.zeros((2, trace.n_requests, n_layers), np.int64)
    evictions = np.zeros(1, np.int64)
    preload = _preload(job.chosen, unit)
    where = frozen(job.experts), frozen(plan.tokens_N), job.backwards
    listed, runs, uncounted = (frozen(ids), frozen(offsets)), frozen(unit.runs), frozen(plan.uncounted_N)
    scratch = job.scratch.get() if "future" in needs else np.empty(0, np.int32)
    try:
        ahead = scratch[: unit.n_tokens * n_layers * trace.top_k]
        if job.batched:
            ahead = scratch[: offsets[unit.runs[-1] * n_layers] - offsets[unit.runs[0] * n_layers]]
        if "future" in needs:
            next_use(*where, *listed, runs, uncounted, first, n_layers, trace.n_experts, ahead)
        kernel(job.chosen.policy)(
            arrays(len(unit.fit), n_layers, trace.n_experts, job.chosen.constants, unit.fit),
            *where, job.sequential, *listed, frozen(weights), *(frozen(job.floats[name]) for name in SCORES),
            frozen(job.foreseen), halves_as_floats(), frozen(ahead), runs, frozen(plan.owner_N), frozen(trace.borders), uncounted, job.fill, first,
            unit.capacity, unit.slots_at_least, frozen(unit.sizes), frozen(preload), job.forced, missed, request_misses,
            request_ahead, evictions,
        )  # fmt: skip
    finally:
        job.scratch.put(scratch)
    lengths = None
    if job.batched:
        lengths = np.diff(offsets).reshape(-1, n_layers)[unit.runs[0] : unit.runs[-1]]
    counts.add(unit.layers, unit.runs, missed, request_misses, int(evictions[0]), request_ahead, lengths)


def _bits(halves: np.ndarray | None) -> np.ndarray:
    return np.empty((0, 0, 0), np.uint16) if halves is None else np.ascontiguousarray(halves).view(np.uint16)


def _plain(job: _Job, unit: _Unit, counts: Counts) -> None:
    trace, plan, chosen = job.trace, job.plan, job.chosen
    found = batches(trace, plan, unit.layers, job.backwards) if job.batched else None
    missed = np.zeros((unit.n_tokens, unit.n_layers), np.uint16)
    lengths = np.zeros((unit.n_tokens, unit.n_layers), np.int64)
    request_misses, request_ahead = np.zeros((2, trace.n_requests, unit.n_layers), np.int64)
    evictions = 0
    for low, high in zip(unit.runs.tolist(), unit.runs[1:].tolist()):
        steps = [step for token in range(low, high) for step in _steps(job, unit, token, found)]
        cache = ExpertCache(
            unit.capacity, chosen.word, n_experts=trace.n_experts, admission="forced" if job.forced else "bypass",
            n_layers=unit.n_layers, future=[one for step in steps for one in step.future], fit=unit.fit.tolist(),
            sizes=unit.sizes.tolist() if len(unit.sizes) else None,
        )  # fmt: skip
        for expert in cache.resident:
            request_ahead[plan.owner_N[low], expert // trace.n_experts] += 1
        for token, layer, ids, weights, probabilities, temporal, ahead, counted in steps:
            foreseen = job.foreseen[token, unit.layers.start + layer].tolist() if len(job.foreseen) else None
            if foreseen is not None or ahead is not None:
                came = (
                    cache.refine(ahead or [], layer)
                    if foreseen is None
                    else cache.bring([e for e in foreseen if e >= 0], layer)
                )
                request_ahead[plan.owner_N[token], layer] += counted * len(came.admitted)
                evictions += counted * len(came.evicted)
            done = cache.step(ids, weights, probabilities, temporal, layer=layer)
            missed[token - unit.runs[0], layer] += len(done.misses)
            lengths[token - unit.runs[0], layer] += len(ids)
            if counted:
                request_misses[plan.owner_N[token], layer] += len(done.misses)
                evictions += len(done.evicted)
            elif job.fill and token == low and not len(unit.sizes):
                cache.fill(layer)
    counts.add(unit.layers, unit.runs, missed, request_misses, evictions, request_ahead, lengths)


class _Step(NamedTuple):
    """ahead: what the cache is refined by before it, None where it is not."""

    token: int
    layer: int
    ids: list[int]
    weights: list[float] | None
    probabilities: list[float] | None
    temporal: list[float] | None
    ahead: list[float] | None
    counted: bool

    @property
    def future(self) -> list[int]:
        return self.ids if self.counted else [~one for one in self.ids]


def _steps(job: _Job, unit: _Unit, token: int, found: Steps | None) -> Iterator[_Step]:
    """The steps of one token, in service order."""
    trace, n_experts, policy = job.trace, job.trace.n_experts, job.chosen.policy
    row = int(job.plan.tokens_N[token]) if len(job.plan.tokens_N) else token
    turn = slice(None, None, -1 if job.backwards else 1)
    counted = not (len(job.plan.uncounted_N) and job.plan.uncounted_N[token])
    for layer in range(unit.n_layers):
        where = row, unit.layers.start + layer
        probabilities, temporal = (
            array[where].tolist() if name in policy.needs and array is not None else None
            for name, array in (("probabilities", trace.probabilities), ("temporal", trace.temporal))
        )
        ahead = None
        if policy.refines:
            first = int(trace.borders[job.plan.owner_N[token]])
            ahead = scores_ahead(policy, *rows_before(trace, *where, first))
        if found is None:
            ids, weights = trace.experts[where][turn], None if trace.weights is None else trace.weights[where][turn]
        else:
            part = slice(*found.offsets[token * unit.n_layers + layer :][:2])
            ids, weights = found.ids[part], found.weights[part]
        listed = [layer * n_experts + expert for expert in ids.tolist()]
        worth = None if weights is None else weights.tolist()
        if not job.sequential:
            yield _Step(token, layer, listed, worth, probabilities, temporal, ahead, counted)
            continue
        for at, expert in enumerate(listed):
            yield _Step(token, layer, [expert], None if worth is None else [worth[at]], None, None, None, counted)
