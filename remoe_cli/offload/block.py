"""One MoE layer whose experts are on disk: routing first, then the loads, then what is there while the rest is on its way.

The stock block stays in charge. Before it runs, its router is asked and the misses are begun; its shared experts run next;
then its calls of router and shared experts find these results, and its call of the experts runs those that are
in their slots, and the others as they land.

Shape letters: B requests, N tokens of a pass (B x its length), H hidden, K experts a token.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from remoe_cli.cache import ExpertCache
from remoe_cli.cache.together import touch_order
from remoe_cli.families import Gate, probabilities
from remoe_cli.families.experts import ExpertLayer, recorded_order
from remoe_cli.offload.compute import Parts, run_expert, SingleToken
from remoe_cli.offload.layout import Layout
from remoe_cli.offload.readers import Load
from remoe_cli.offload.slots import SlotPool
from remoe_cli.offload.store import IoCount
from remoe_cli.offload.tiers import Tiers
from remoe_cli.offload.timing import Timeline


@dataclass
class Ledger:
    """What one request (or batch of them) did. loads: for each decode step, (layer, expert) of all that was read, in order;
    guesses: reads ahead of the router; guessed: misses that such a read had brought or begun."""

    in_prefill: bool = True
    prefill: IoCount = field(default_factory=IoCount)
    decode: IoCount = field(default_factory=IoCount)
    guesses: int = 0
    guessed: int = 0
    loads: list[list[tuple[int, int]]] = field(default_factory=list)

    @property
    def count(self) -> IoCount:
        return self.prefill if self.in_prefill else self.decode


class Strays:
    """Guesses that nobody wants, still on their way: their slots are free again once they have landed. One for all layers."""

    def __init__(self, tiers: Tiers, pool: SlotPool) -> None:
        self._tiers, self._pool = tiers, pool
        self._loads: list[Load] = []

    def __len__(self) -> int:
        return len(self._loads)

    def add(self, load: Load) -> None:
        self._loads.append(load)

    def sweep(self, *, wait: bool = False) -> None:
        """Gives back the slots of those that have landed; with `wait`, of the first in any case."""
        for load in [load for i, load in enumerate(self._loads) if load.finished or (wait and not i)]:
            self._loads.remove(load)
            self._tiers.wait(load)
            self._pool.release(load.slot)

    def clear(self) -> None:
        self._loads.clear()


class ExpertBlock:
    """index: the layer's number among the MoE layers. `next`: the following MoE layer's block, for guesses."""

    def __init__(
        self,
        index: int,
        layer: ExpertLayer,
        gate: Gate,
        layout: Layout,
        pool: SlotPool,
        tiers: Tiers,
        strays: Strays,
        timeline: Timeline,
    ) -> None:
        self._index, self._experts = index, layer.module
        self._layout, self._pool, self._tiers, self._to = layout, pool, tiers, timeline.to
        self._strays = strays
        self.next: ExpertBlock | None = None
        self.guess = 0
        self._single = SingleToken(layer.module) if SingleToken.serves(layer.module) else None
        self._slots: dict[int, int] = {}
        self._parts: dict[int, Parts] = {}  # of the experts in slots, as far as they have run
        self._coming: dict[int, Load] = {}  # begun, not yet waited for
        self._waiting: deque[int] = deque()  # not begun, for want of a free slot
        self._guesses: dict[int, Load] = {}
        self._leaving: set[int] = set()
        self._touched: list[int] = []
        self._choice_NK = np.empty((0, 0), np.int64)
        self._route = gate.router.forward
        self._routed: Any = None
        gate.router.forward = lambda *_: self._routed
        layer.module.forward = self._run
        self._share = gate.shared.forward if gate.shared is not None else None
        self._shared: torch.Tensor | None = None
        if gate.shared is not None:
            gate.shared.forward = lambda x: self._shared.view(x.shape)  # type: ignore[union-attr]
        gate.block.register_forward_pre_hook(self._before)

    def start(self, cache: ExpertCache | None, ledger: Ledger, *, through: bool, keep_probabilities: bool) -> None:
        """A new request; nothing is under way. cache: a new one, for which the pool has been reset, or None for the one from
        before. through: whether the prompt goes through it."""
        if cache is not None:
            self.cache = cache
            self._slots.clear()
            self._parts.clear()
        self._ledger, self._through = ledger, through
        self._keeps_probabilities = keep_probabilities or "probabilities" in self.cache.policy.needs
        self.experts: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        self.probabilities: list[np.ndarray] = []
        for pending in (self._coming, self._waiting, self._guesses, self._leaving):
            pending.clear()

    def cache_counts(self) -> tuple[int, int, int]:
        """Hits, misses and evictions of its cache so far."""
        return self.cache.hits, self.cache.misses, self.cache.evictions

    def _before(self, _module: torch.nn.Module, args: tuple) -> None:
        x_NH = args[0].reshape(-1, args[0].shape[-1])
        self._to("router")
        self._routed = self._route(x_NH)
        logits, *routing = self._routed[:3]
        ahead = None if self.next is None or not self.guess or self._ledger.in_prefill else self.next
        if ahead is not None:  # what the next layer's gate would choose for this layer's hidden state
            routing += ahead._route(x_NH)[1:3]
        # one transfer, so that a GPU is waited for once a layer; float64 holds ids and weights exactly
        weight_NK, choice_NK, *foreseen = torch.stack([part.double() for part in routing]).cpu().numpy()
        if self._keeps_probabilities:
            self.probabilities.append(probabilities(logits).half().cpu().numpy())
        self._to("bookkeeping")
        order_NK = recorded_order(choice_NK, weight_NK)
        experts_NK = np.take_along_axis(choice_NK, order_NK, -1).astype(np.int16)
        # caches see what the trace holds: float16
        weights_NK = np.take_along_axis(weight_NK, order_NK, -1).astype(np.float16)
        self.experts.append(experts_NK)
        self.weights.append(weights_NK)
        self._choice_NK = choice_NK.astype(np.int64)
        if self._ledger.in_prefill and not self._through:
            self._touched = np.unique(self._choice_NK).tolist()
            self._leaving = {expert for expert in self._touched if expert not in self._slots}
            self._begin([expert for expert in self._touched if expert not in self._slots])
        else:
            self._serve(experts_NK, weights_NK)
        if ahead is not None:
            ahead._foresee(*foreseen)
        if self._share is not None:
            self._to("dense")
            self._shared = self._share(x_NH)
        self._to("dense")

    def _serve(self, experts_NK: np.ndarray, weights_NK: np.ndarray) -> None:
        """One step of the cache."""
        touched = touch_order(experts_NK, weights_NK)
        chances = self.probabilities[-1][0].tolist() if self.probabilities else None
        step = self.cache.step(list(touched), list(touched.values()), chances)
        self._release([expert for expert in step.evicted if expert not in touched])
        self._touched = sorted(touched)
        self._leaving = {expert for expert in touched if expert not in self.cache.resident}
        guesses, self._guesses = self._guesses, {}
        misses = []
        for expert in step.misses:
            load = guesses.pop(expert, None)
            if load is None:
                misses.append(expert)
            elif self._tiers.withdraw(load):  # not begun: a load on demand like any other
                self._forget_guess(load)
                misses.append(expert)
            else:
                self._ledger.guessed += 1
                self._slots[expert], self._coming[expert] = load.slot, load
        for load in guesses.values():
            if self._tiers.withdraw(load):
                self._forget_guess(load)
            else:
                self._strays.add(load)
        self._strays.sweep()
        self._begin(misses)

    def _foresee(self, weight_NK: np.ndarray, choice_NK: np.ndarray) -> None:
        """Reads ahead, the likeliest first, as far as slots are set aside and free."""
        ranked = choice_NK.ravel()[(-weight_NK.ravel()).argsort(kind="stable")].astype(int).tolist()
        wanted = [e for e in dict.fromkeys(ranked) if e not in self._slots]
        room = max(0, min(self.guess - len(self._strays), self._pool.n_free))
        for expert in wanted[:room]:
            load = self._tiers.begin(self._index, expert, self._pool.acquire(), self._ledger.count, guess=True)
            self._guesses[expert] = load
            self._ledger.guesses += 1
            self._ledger.loads[-1].append((self._index, expert))

    def _forget_guess(self, load: Load) -> None:
        self._pool.release(load.slot)
        self._ledger.guesses -= 1
        self._ledger.loads[-1].remove((self._index, load.expert))

    def _begin(self, experts: list[int]) -> None:
        self._waiting.extend(experts)
        self._feed()

    def _feed(self) -> None:
        """Begins loads as long as there are slots."""
        while self._waiting and self._pool.n_free:
            expert = self._waiting.popleft()
            slot = self._slots[expert] = self._pool.acquire()
            keep = not self._ledger.in_prefill
            self._coming[expert] = self._tiers.begin(self._index, expert, slot, self._ledger.count, keep=keep)
            if not self._ledger.in_prefill:
                self._ledger.loads[-1].append((self._index, expert))

    def _run(self, x_NH: torch.Tensor, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """What the stock experts module returns: resident experts first, the others as they come. Their outputs are added
        up in the stock module's own order and dtype, whatever came when."""
        self._to("experts")
        index_NK, weight_NK = (*args, *kwargs.values())
        plan = _Plan(self._choice_NK, x_NH.device)
        out_RH = x_NH.new_empty(plan.n_rows, x_NH.shape[-1])
        here = [expert for expert in self._touched if expert in self._slots and expert not in self._coming]
        self._compute(here, plan, x_NH, out_RH)
        while self._coming or self._waiting:
            if not self._coming:
                if not len(self._strays):
                    raise RuntimeError(f"no slot is free for experts {list(self._waiting)}")
                self._to("wait")
                self._strays.sweep(wait=True)
                self._feed()
                continue
            landed = [expert for expert, load in self._coming.items() if load.finished] or [next(iter(self._coming))]
            self._to("wait")
            for expert in landed:
                self._tiers.wait(self._coming.pop(expert))
            self._to("experts")
            self._compute(landed, plan, x_NH, out_RH)
        done = plan.total(out_RH, index_NK, weight_NK)
        self._strays.sweep()
        self._to("dense")
        return done

    def _compute(self, experts: list[int], plan: "_Plan", x_NH: torch.Tensor, out_RH: torch.Tensor) -> None:
        for expert in experts:
            if expert not in self._parts:
                row = self._pool.rows[self._slots[expert]]
                self._parts[expert] = self._layout.tensors(row, self._index, expert)
        if not experts:
            return
        if self._single is not None and len(x_NH) == 1:
            rows = [out_RH[plan.of(expert)[1]][0] for expert in experts]
            self._single.run([self._parts[expert] for expert in experts], x_NH[0], rows)
        else:
            for expert in experts:
                tokens, rows = plan.of(expert)
                x_MH = x_NH if tokens is None else x_NH[tokens]
                out_RH[rows] = run_expert(self._experts, self._parts[expert], x_MH)
        left = [expert for expert in experts if expert in self._leaving]
        if left:
            self._release(left)
            self._feed()

    def _release(self, experts: list[int]) -> None:
        for expert in experts:
            self._parts.pop(expert, None)
            self._pool.release(self._slots.pop(expert))


class _Plan:
    """Which rows of a pass each expert serves. An output has a row for each token and choice, the choices of a token by
    ascending expert, which is the order in which the stock module adds them up."""

    def __init__(self, choice_NK: np.ndarray, device: torch.device) -> None:
        self._n_tokens, self._top_k = choice_NK.shape
        self.n_rows = choice_NK.size
        order_NK = choice_NK.argsort(-1, kind="stable")
        if self._n_tokens == 1:
            self._row = {int(choice_NK[0, k]): rank for rank, k in enumerate(order_NK[0].tolist())}
        else:
            # the stock module takes an expert's tokens by place among the choices, then by token
            rank_NK = order_NK.argsort(-1, kind="stable")
            chosen = choice_NK.T.ravel()
            by_expert = chosen.argsort(kind="stable")
            tokens = by_expert % self._n_tokens
            rows = tokens * self._top_k + rank_NK.T.ravel()[by_expert]
            self._tokens, self._rows = torch.from_numpy(np.stack((tokens, rows))).to(device)
            experts, starts = np.unique(chosen[by_expert], return_index=True)
            ends = [*starts[1:].tolist(), self.n_rows]
            self._span = {int(e): slice(a, b) for e, a, b in zip(experts, starts.tolist(), ends)}

    def of(self, expert: int) -> tuple[torch.Tensor | None, Any]:
        """Its tokens (None: the only one), and its rows of the output."""
        if self._n_tokens == 1:
            row = self._row[expert]
            return None, slice(row, row + 1)
        span = self._span[expert]
        return self._tokens[span], self._rows[span]

    def total(self, out_RH: torch.Tensor, index_NK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """[N, H]; a choice at a time, so that no more than one is held in the weights' wider dtype."""
        out_NKH = out_RH.view(self._n_tokens, self._top_k, -1)
        weight_NK1 = weight_NK.gather(-1, index_NK.argsort(-1))[..., None]
        if self._n_tokens == 1:
            first, *others = (out_NKH[0] * weight_NK1[0]).to(out_RH.dtype).unbind()
            for other in others:
                first += other
            return first[None]
        total_NH = (out_NKH[:, 0] * weight_NK1[:, 0]).to(out_RH.dtype)
        for k in range(1, self._top_k):
            total_NH += (out_NKH[:, k] * weight_NK1[:, k]).to(out_RH.dtype)
        return total_NH
