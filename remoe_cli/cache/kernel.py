"""The compiled replay of one cache over many steps: ExpertCache.step, in machine code, for any policy.

numba compiles one kernel a policy and keeps it on disk, next to this file or in the user's cache folder, so that the
compiling (about half a second each) is paid once. A changed policy file is noticed by the hash of its text.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib.util import resolve_name
from typing import Any

import numpy as np
from numba.extending import register_jitable

from remoe_cli.cache import policy as contract
from remoe_cli.cache.arrays import arrays, frozen, halves_as_floats
from remoe_cli.cache.compiled import compiled
from remoe_cli.cache.expert_cache import NOTHING_PROTECTED
from remoe_cli.cache.next_use import next_use
from remoe_cli.cache.policy import Memory, Policy
from remoe_cli.cache.refining import bring_in, bring_listed

KNOWN = {*sys.stdlib_module_names, "numpy", "numba"}  # packages whose texts do not change between runs


@cache
def kernel(policy: Policy) -> Callable[..., None]:
    """serve(...) of this policy: see `_build`."""
    hooks: list[Callable] = [policy.start, policy.observe, policy.touch, policy.key or contract.key]
    hooks += [policy.victim or contract.victim, policy.leave, bring_in, bring_listed]
    stamp = _stamp(hooks)
    ranked = policy.key is not None
    steady = ranked and policy.leave is contract.leave  # no key changes while experts leave
    needs = [need in policy.needs for need in ("probabilities", "temporal", "weights", "future")]
    sums = [name in policy.refines for name in contract.SCORES]
    serve = _build([_jitable(hook) for hook in hooks], ranked, steady, needs, sums, policy.admits, stamp or 0)
    return compiled(serve, keep=stamp is not None)


@cache
def prepare(policy: Policy) -> float | None:
    """Compiles the kernel, or loads it: the seconds of compiling, None where none was needed. Later calls: None or as the
    first."""
    start = time.perf_counter()
    serve: Any = kernel(policy)
    nothing, none_of, bits = (
        frozen(np.empty(0, np.int64)),
        frozen(np.empty(0, np.int32)),
        np.empty((0, 0, 0), np.uint16),
    )
    experts, ids, uncounted = frozen(np.empty((0, 1, 1), np.int16)), frozen(np.empty(0, np.int16)), np.empty(0, bool)
    runs, where = frozen(np.zeros(1, np.int64)), (experts, none_of, True)
    if "future" in policy.needs:
        next_use(*where, ids, nothing, runs, frozen(uncounted), 0, 1, 1, np.empty(0, np.int32))
    loads = np.zeros((0, 1), np.int64)
    serve(
        arrays(1, 1, 1, [0.0, 0.0], [0.0]), *where, False, ids, nothing, *[frozen(bits)] * 4, frozen(np.empty((0, 0, 0), np.int16)), halves_as_floats(), none_of,
        runs, none_of, runs, frozen(uncounted), False, 0, 1, 1, nothing, nothing, True, np.zeros((0, 1), np.uint16), loads,
        loads, np.zeros(1, np.int64),
    )  # fmt: skip
    return None if serve.stats.cache_hits else time.perf_counter() - start


@cache
def _jitable(hook: Callable) -> Callable:
    return register_jitable(hook)


def _stamp(hooks: list[Callable]) -> int | None:
    """A hash of the texts that the hooks come from, with all that these import of the same kind; None where one has no
    text, as in a notebook."""
    texts: dict[str, str] = {}
    waiting = [hook.__module__ for hook in hooks]
    while waiting:
        name = waiting.pop()
        if name in texts or name.partition(".")[0] in KNOWN or name not in sys.modules:
            continue
        try:
            texts[name] = inspect.getsource(sys.modules[name])
        except (OSError, TypeError):
            return None
        for node in ast.walk(ast.parse(texts[name])):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                package = sys.modules[name].__package__ or ""
                base = (
                    resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
                )
                waiting += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return int(hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:12], 16)


def _build(hooks, ranked, steady, needs, sums, admits, stamp):
    start, observe, touch, key, victim, leave, bring_in, bring_listed = hooks
    observes, heeds_head, weighted, foreseeing = needs
    sums_probabilities, sums_temporal, sums_spatio = sums
    refines = sums_probabilities or sums_temporal or sums_spatio

    def serve(
        m: Memory,
        experts: np.ndarray,
        tokens: np.ndarray,
        backwards: bool,
        sequential: bool,
        ids: np.ndarray,
        offsets: np.ndarray,
        weights: np.ndarray,
        probabilities: np.ndarray,
        temporal: np.ndarray,
        spatio: np.ndarray,
        foreseen: np.ndarray,
        floats: np.ndarray,
        ahead: np.ndarray,
        runs: np.ndarray,
        owner: np.ndarray,
        borders: np.ndarray,
        uncounted: np.ndarray,
        fill_first: bool,
        first_layer: int,
        capacity: int,
        slots_at_least: int,
        sizes: np.ndarray,
        preload: np.ndarray,
        forced: bool,
        missed: np.ndarray,
        request_misses: np.ndarray,
        request_ahead: np.ndarray,
        evictions: np.ndarray,
    ) -> None:
        """Serves some runs of N tokens through one cache of m.now[2] layers from first_layer on, with a reset at the start of
        each run.

        experts: [T, L, K]; tokens: [N] rows of it, or empty for all in order; backwards: touch each row from its end.
        sequential: each expert is a step of its own. Or ids, offsets: the touched experts of step token * layers + layer
        are ids[offsets[step] : offsets[step + 1]]; else both empty.
        weights: [T, L, K]; probabilities, temporal, spatio: [T, L, E]; all float16 as uint16 for `floats`, or empty. foreseen:
        [N, L, M] experts to bring in before each step, filled up with -1, or empty. ahead:
        next uses in service order, or empty. runs: their borders. owner: [N]. borders: [R + 1] of the trace. uncounted:
        [N] bool, or empty. sizes: [ids], or empty for slots; slots_at_least: as many surely fit.
        Adds to missed [tokens of these runs, layers], and of counted tokens to request_misses, request_ahead [R, layers]
        and evictions [1].
        """
        version = stamp  # a changed policy must not be served from the disk cache
        end = len(m.last) - 1
        n_layers = m.now[2]
        n_experts = m.now[3]
        top_k = experts.shape[2]
        slot = np.empty(end, np.int64)
        slots = np.empty(end + 1, np.uint32)  # unsigned: no place is counted from the end
        entered = np.empty(end, np.int64)
        leavers = np.empty(end, np.int64)
        ranks = np.empty(end, np.float64)
        marked = np.zeros(end, np.int64)
        row_scores = np.empty(n_experts, np.float64)
        best_first = np.empty(n_experts, np.int64)
        sized = len(sizes) > 0
        listed = len(offsets) > 0
        parts = top_k if sequential else 1
        access = 0
        for run in range(len(runs) - 1):
            for expert in range(end + 1):
                m.last[expert] = 0
                m.count[expert] = 0
                m.stamp[expert] = 0
                m.state[expert] = 0
                m.link[expert] = 0
                m.score[expert] = 0.0
                m.head[expert] = 0.0
            for register in range(len(m.reg)):
                m.reg[register] = 0
            for expert in range(end):
                slot[expert] = -1
                entered[expert] = -1
                marked[expert] = 0
            clock = 0
            held = 0
            used = 0
            step = 0
            for expert in preload:
                slot[expert] = held
                slots[held] = expert
                held += 1
                used += sizes[expert] if sized else 1
                request_ahead[owner[runs[run]], expert // n_experts] += 1
            start(m, slots_at_least)
            for token in range(runs[run], runs[run + 1]):
                count = len(uncounted) == 0 or not uncounted[token]
                row = tokens[token] if len(tokens) > 0 else token
                for layer in range(n_layers):
                    base = layer * n_experts
                    in_trace = first_layer + layer
                    for part in range(parts):
                        m.now[0] = step // n_layers if sequential else token - runs[run]
                        m.now[1] = layer
                        step += 1
                        if refines:
                            # as rows_before and scores_ahead
                            earlier = row > borders[owner[token]]
                            row_scores[:] = 0.0
                            if earlier and sums_probabilities:
                                for expert in range(n_experts):
                                    row_scores[expert] += floats[probabilities[row - 1, in_trace, expert]]
                            if earlier and sums_temporal:
                                for expert in range(n_experts):
                                    row_scores[expert] += floats[temporal[row - 1, in_trace, expert]]
                            if sums_spatio and (earlier or in_trace > 0):
                                at = row if in_trace > 0 else row - 1
                                for expert in range(n_experts):
                                    row_scores[expert] += floats[spatio[at, in_trace - 1, expert]]
                            if earlier or (sums_spatio and in_trace > 0):
                                most, before = min(n_experts, int(m.table[0])), held
                                held, came, gone = bring_in(
                                    m.last, row_scores, best_first, most, m.table[1], base, slot, slots, held, capacity
                                )
                                used += held - before
                                if count:
                                    request_ahead[owner[token], layer] += came
                                    evictions[0] += gone
                        if len(foreseen) > 0:
                            for place in range(held):
                                ranks[slots[place]] = key(m, np.int64(slots[place]))
                            before = held
                            held, came, gone = bring_listed(
                                m.last,
                                ranks,
                                foreseen[token, in_trace],
                                marked,
                                step,
                                base,
                                slot,
                                slots,
                                held,
                                capacity,
                            )
                            used += held - before
                            if count:
                                request_ahead[owner[token], layer] += came
                                evictions[0] += gone
                        if observes:
                            for expert in range(n_experts):
                                row_scores[expert] = floats[probabilities[row, in_trace, expert]]
                            observe(m, row_scores, base)
                        if heeds_head:
                            for expert in range(n_experts):
                                m.head[base + expert] = floats[temporal[row, in_trace, expert]]
                        first = clock
                        low, high = (part, part + 1) if sequential else (0, top_k)
                        if listed:
                            low, high = offsets[token * n_layers + layer], offsets[token * n_layers + layer + 1]
                        misses = 0
                        for at in range(low, high):
                            value = 0.0
                            if listed:
                                expert = np.uint32(base + ids[at])  # type: ignore[assignment]
                                if weighted:
                                    value = floats[weights[0, 0, at]]
                            else:
                                place = top_k - 1 - at if backwards else at
                                expert = np.uint32(base + experts[row, in_trace, place])  # type: ignore[assignment]
                                if weighted:
                                    value = floats[weights[row, in_trace, place]]
                            if foreseeing:
                                value = ahead[access]
                                access += 1
                            hit = slot[expert] >= 0
                            touch(m, expert, hit, value)
                            clock += 1
                            m.last[expert] = clock
                            if not hit:
                                misses += 1
                            if not hit and admits:
                                slot[expert] = held
                                slots[held] = expert
                                held += 1
                                used += sizes[expert] if sized else 1
                                entered[expert] = step
                        missed[token - runs[0], layer] += misses
                        if count:
                            request_misses[owner[token], layer] += misses
                        if fill_first and token == runs[run] and not count and not sized:
                            # the layer's share of free slots, by the highest keys
                            own = 0
                            for expert in range(base, base + n_experts):
                                own += slot[expert] >= 0
                            while own < capacity // n_layers:
                                best = -1
                                for expert in range(base, base + n_experts):
                                    if slot[expert] < 0 and (best < 0 or key(m, expert) > key(m, best)):
                                        best = expert
                                if best < 0:
                                    break
                                slot[best] = held
                                slots[held] = best
                                held += 1
                                used += sizes[best] if sized else 1
                                own += 1
                        free_from = first if forced else NOTHING_PROTECTED
                        chosen = 0
                        taken = 0
                        if steady and not sized and used > capacity:
                            # all who leave in one pass: the lowest so far, in ascending order
                            wanted = used - capacity
                            for place in range(held):
                                expert = slots[place]
                                last = m.last[expert]
                                if last > free_from:
                                    continue
                                rank = key(m, expert)
                                if chosen == wanted:
                                    if rank > ranks[chosen - 1]:
                                        continue
                                    if rank == ranks[chosen - 1]:
                                        other = leavers[chosen - 1]
                                        if last > m.last[other] or (last == m.last[other] and expert > other):
                                            continue
                                    at = chosen - 1
                                else:
                                    at = chosen
                                    chosen += 1
                                while at > 0:
                                    other = leavers[at - 1]
                                    if rank > ranks[at - 1]:
                                        break
                                    if rank == ranks[at - 1] and (
                                        last > m.last[other] or (last == m.last[other] and expert > other)
                                    ):
                                        break
                                    ranks[at] = ranks[at - 1]
                                    leavers[at] = other
                                    at -= 1
                                ranks[at] = rank
                                leavers[at] = expert
                        while used > capacity:
                            leaving = -1
                            if taken < chosen:
                                leaving = leavers[taken]
                                taken += 1
                            elif ranked and not (steady and not sized):
                                lowest = 0.0
                                for place in range(held):
                                    expert = slots[place]
                                    last = m.last[expert]
                                    if last > free_from:
                                        continue
                                    rank = key(m, expert)
                                    if leaving < 0 or rank < lowest:
                                        leaving = expert
                                        lowest = rank
                                    elif rank == lowest and (
                                        last < m.last[leaving] or (last == m.last[leaving] and expert < leaving)
                                    ):
                                        leaving = expert
                            elif not ranked:
                                leaving = victim(m, slots, held, free_from)
                            if leaving < 0:
                                if sized:
                                    break
                                for place in range(held):
                                    if leaving < 0 or m.last[slots[place]] < m.last[leaving]:
                                        leaving = slots[place]
                            place = slot[leaving]
                            held -= 1
                            slots[place] = slots[held]
                            slot[slots[held]] = place
                            slot[leaving] = -1
                            used -= sizes[leaving] if sized else 1
                            leave(m, leaving)
                            if count and entered[leaving] != step:
                                evictions[0] += 1
        if version < 0:
            evictions[0] = 0

    return serve
