"""One MoE layer whose experts are on disk: routing first, then the loads, then what is there while the rest is on its way.

The stock block stays in charge. Before it runs, its router is asked and the misses are begun; its shared experts run next;
then its calls of router and shared experts find these results, and its call of the experts runs those that are
in their slots, and the others as they land.

Shape letters: B requests, N tokens of a pass (B x its length), H hidden, K experts a token.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from remoe_cli.cache import ExpertCache, scores_ahead
from remoe_cli.cache.policy import SCORES
from remoe_cli.cache.prefetch import SEEN, Seen
from remoe_cli.cache.together import touch_order
from remoe_cli.families import Gate, guess, Heads
from remoe_cli.families.experts import ExpertLayer, recorded_order
from remoe_cli.offload.compute import Parts
from remoe_cli.offload.foresight import Foresight
from remoe_cli.offload.in_place import InPlace
from remoe_cli.offload.layout import Layout
from remoe_cli.offload.ledger import Ledger
from remoe_cli.offload.readers import Load
from remoe_cli.offload.rerouting import Bend
from remoe_cli.offload.rows import Arithmetic, light_ones, Plan
from remoe_cli.offload.slots import SlotPool
from remoe_cli.offload.tiers import Strays, Tiers
from remoe_cli.offload.timing import Timeline


class ExpertBlock:
    """index: the layer's number among the MoE layers. `next`: the following MoE layer's block; of the last, the first's.
    `ledger`, `experts`, `weights`, `scores`: what is noted of the request that runs. `heads`: those of all layers, or None.
    `bend`: of its choices towards residents, or None. `foresight`: what a prefetcher makes of its choices, or None. `in_place`: what
    decides which misses are computed in the RAM tier, or None."""

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
        self._index = index
        self._layout, self._pool, self._tiers, self._to = layout, pool, tiers, timeline.to
        self._strays = strays
        self.next = self
        self.guess = 0
        self.heads: Heads | None = None
        self.bend: Bend | None = None
        self.foresight: Foresight | None = None
        self.in_place: InPlace | None = None
        self._lying: dict[int, torch.Tensor] = {}  # rows of the RAM tier that are computed from at this step
        self._arithmetic = Arithmetic(layer.module)
        self.heavy: float | None = None
        self.light_from = 0  # where the layout has this layer's experts in fewer bits
        self._light: set[int] = set()  # that are, or will be, in their slots so
        self._slots: dict[int, int] = {}
        self._parts: dict[int, Parts] = {}  # of the experts in slots, as far as they have run
        self._coming: dict[int, Load] = {}  # begun, not yet waited for
        self._waiting: deque[int] = deque()  # not begun, for want of a free slot
        self._guesses: dict[int, Load] = {}
        self._ahead: dict[int, Load] = {}  # of residents that were loaded ahead, and not yet waited for
        self._leaving: set[int] = set()
        self._touched: list[int] = []
        self._choice_NK = np.empty((0, 0), np.int64)
        self._gate = gate
        self._route = partial(gate.family.call, gate, gate.router.forward)
        self._routed: Any = None
        layer.module.forward = self._run
        self._share: Callable | None = None
        self._shared: torch.Tensor | None = None
        self._own_input: torch.Tensor | None = None
        if gate.input is not gate.router:
            gate.input.register_forward_pre_hook(self._keep_input)
        if not gate.family.early:
            gate.router.forward = self._at_router
            return
        gate.router.forward = lambda *_: self._routed
        if gate.shared is not None:
            self._share = gate.shared.forward
            gate.shared.forward = lambda x: self._shared.view(x.shape)  # type: ignore[union-attr]
        gate.block.register_forward_pre_hook(self._before)

    def start(self, cache: ExpertCache | None, ledger: Ledger, *, through: bool, scores: Sequence[str]) -> None:
        """A new request; nothing is under way. cache: a new one, for which the pool has been reset, or None for the one from
        before. through: whether the prompt goes through it. scores: of cache.policy.SCORES, those that are kept."""
        if cache is not None:
            self.cache = cache
            self._slots.clear()
            self._parts.clear()
            self._light.clear()
        self.ledger, self._through = ledger, through
        self.experts: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        self.scores: dict[str, list[np.ndarray]] = {kind: [] for kind in scores}
        if self.bend is not None:
            self.bend.start()
        for pending in (self._coming, self._waiting, self._guesses, self._ahead, self._leaving, self._lying):
            pending.clear()

    def cache_counts(self) -> tuple[int, int, int, int]:
        """Hits, misses, evictions and loads ahead of need of its cache so far."""
        return self.cache.hits, self.cache.misses, self.cache.evictions, self.cache.proactive

    def _keep_input(self, _module: torch.nn.Module, args: tuple) -> None:
        self._own_input = args[0]

    def _at_router(self, x: torch.Tensor, *_: Any) -> Any:
        """Where the router's input is made inside its block: as late as the stock block asks."""
        self._before(self._gate.router, (x,))
        return self._routed

    def _before(self, _module: torch.nn.Module, args: tuple) -> None:
        x_NH = args[0].reshape(-1, args[0].shape[-1])
        self._to("router")
        self._routed = self._route(x_NH)
        logits, *routing = self._gate.read(self._routed)
        hidden_ND = x_NH if self._own_input is None else self._own_input
        if "guess_shared" in self.scores and self._share is not None:
            self._shared = self._share(x_NH)  # before the loads, since what it puts out says what to load next
        for kind in self.scores:
            routing.append(self._scored(kind, logits, hidden_ND).half())
        if self.bend is not None:
            score = self._gate.score
            routing += [self._gate.ranking(logits), score.log(logits).float(), score.probabilities(logits)]
        guesses = self.guess and not self.ledger.in_prefill and self.next._index > self._index
        if guesses:  # what the next layer's gate would choose for this layer's hidden state
            routing += self.next._gate.read(self.next._route(x_NH))[1:]
        # one transfer, so that a GPU is waited for once a layer; float64 holds ids and weights exactly
        found = torch.cat([part.double() for part in routing], -1).cpu().numpy()
        weight_NK, choice_NK, *others = np.split(found, np.cumsum([part.shape[-1] for part in routing])[:-1], -1)
        self._to("bookkeeping")
        for of_kind, scores_NE in zip(self.scores.values(), others, strict=False):
            of_kind.append(scores_NE.astype(np.float16))
        order_NK = recorded_order(choice_NK, weight_NK)
        experts_NK = np.take_along_axis(choice_NK, order_NK, -1).astype(np.int16)
        # caches see what the trace holds: float16
        weights_NK = np.take_along_axis(weight_NK, order_NK, -1).astype(np.float16)
        if self.bend is not None:
            resident = None if self.ledger.in_prefill else self.cache.resident
            own_NK = np.take_along_axis(weight_NK, order_NK, -1)
            ranked_NE, logs_NE, shares_NE = others[len(self.scores) :][:3]
            bent = self.bend.choose(ranked_NE, logs_NE, shares_NE, experts_NK, own_NK, resident)
            if bent is not None:
                self.ledger.rerouted += len({*bent[0]} - {*experts_NK[0].tolist()})
                experts_NK, weights_NK = np.array([bent[0]], np.int16), bent[1][None].astype(np.float16)
                choice_NK = experts_NK
                _, weight, choice, *rest = self._routed
                bent_weight, bent_choice = torch.from_numpy(bent[1]).to(weight), torch.tensor(bent[0]).to(choice)
                self._routed = (logits, bent_weight[None], bent_choice[None], *rest)
        self.experts.append(experts_NK)
        self.weights.append(weights_NK)
        self._choice_NK = choice_NK.astype(np.int64)
        if self.ledger.in_prefill and not self._through:
            self._touched = np.unique(self._choice_NK).tolist()
            self._leaving = {expert for expert in self._touched if expert not in self._slots}
            self._begin([expert for expert in self._touched if expert not in self._slots])
        else:
            self._serve(experts_NK, weights_NK)
            if self.next is not self:
                self.refine_next()
            if self.foresight is not None:
                self.foresight.passed(self._index)
        if guesses:
            self.next._foresee(*others[-2:])
        if self._share is not None and "guess_shared" not in self.scores:
            self._to("dense")
            self._shared = self._share(x_NH)
        self._to("dense")

    def _serve(self, experts_NK: np.ndarray, weights_NK: np.ndarray) -> None:
        """One step of the cache."""
        touched = touch_order(experts_NK, weights_NK)
        chances, coming = (None if (row := self._last(kind)) is None else row.tolist() for kind in SCORES[:2])
        step = self.cache.step(list(touched), list(touched.values()), chances, coming)
        for expert in step.hits:
            if (early := self._ahead.pop(expert, None)) is not None:
                self._tiers.hasten(early)
                self._coming[expert] = early
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
                self.ledger.guessed += 1
                self._slots[expert], self._coming[expert] = load.slot, load
        for load in guesses.values():
            if self._tiers.withdraw(load):
                self._forget_guess(load)
            else:
                self._strays.add(load)
        self._strays.sweep()
        if self.heavy is not None and not self.ledger.in_prefill:
            light = {*misses} & light_ones(experts_NK[0], weights_NK[0], self.heavy)
            self._light |= light
            self.ledger.light += len(light)
        if self.in_place is not None and not self.ledger.in_prefill:
            misses = self._begin_lying(self.in_place, misses)
        self._begin(misses)

    def _begin_lying(self, in_place: InPlace, misses: list[int]) -> list[int]:
        """Of those that are computed where they lie, the loads of who stays, behind all others; the misses that are waited for."""
        rows = [(expert, int((self._choice_NK == expert).sum())) for expert in misses]
        self._lying, in_ram = in_place.take(self._index, rows)
        self.ledger.in_place.in_ram += in_ram
        free = self._pool.n_free - len(misses) + len(self._lying)  # of slots, when the others have theirs
        for expert in [expert for expert in self._lying if expert not in self._leaving]:
            if (free := free - 1) >= 0:
                self._come([expert], (), self.ledger.step)
            else:
                del self._lying[expert]
                in_place.let_go(self._index, expert)
        self.ledger.in_place.spared += len(self._leaving & {*self._lying})
        return [expert for expert in misses if expert not in self._lying]

    def _foresee(self, weight_NK: np.ndarray, choice_NK: np.ndarray) -> None:
        """Reads ahead, the likeliest first, as far as slots are set aside and free."""
        ranked = choice_NK.ravel()[(-weight_NK.ravel()).argsort(kind="stable")].astype(int).tolist()
        wanted = [e for e in dict.fromkeys(ranked) if e not in self._slots]
        room = max(0, min(self.guess - len(self._strays), self._pool.n_free))
        for expert in wanted[:room]:
            load = self._tiers.begin(self._index, expert, self._pool.acquire(), self.ledger.count, guess=True)
            self._guesses[expert] = load
            self.ledger.guesses += 1
            self.ledger.loads[self.ledger.step].append((self._index, expert))

    def _forget_guess(self, load: Load) -> None:
        self._pool.release(load.slot)
        self.ledger.guesses -= 1
        self.ledger.loads[self.ledger.step].remove((self._index, load.expert))

    def refine_next(self) -> None:
        """Brings into the next layer what its policy foresees there, if it does: at this token or, after the last layer, in
        the first one at the next token, if there is one. The loads run behind those that are needed now."""
        step = self.ledger.step + (self.next._index <= self._index)
        if self.cache.policy.refines and step < len(self.ledger.loads):
            self.next._refine(self._last("spatio"), step)
            self._feed()  # more slots may have come free than that took

    def _refine(self, spatio_E: np.ndarray | None, step: int) -> None:
        scores = scores_ahead(self.cache.policy, self._last("probabilities"), self._last("temporal"), spatio_E)
        if scores is None:
            return
        self._come(*self.cache.refine(scores), step)

    def bring(self, experts: list[int], later: bool) -> None:
        """What a prefetcher lists for the step to come, or with `later` for the next token's, if there is one."""
        step = self.ledger.step + later
        if step < len(self.ledger.loads):
            self._come(*self.cache.bring(experts), step)

    def seen(self) -> Iterator[Seen]:
        """The tokens of the last pass."""
        kinds = [self.scores.get(kind) for kind in SEEN]
        for row, experts in enumerate(self.experts[-1]):
            yield Seen(experts, *(None if kind is None else kind[-1][row] for kind in kinds))

    def _come(self, admitted: Iterable[int], evicted: Iterable[int], step: int) -> None:
        self._release(evicted)
        for expert in admitted:
            while not self._pool.n_free:  # who left is still on its way into its slot
                self._await_stray()
            slot = self._slots[expert] = self._pool.acquire()
            self._ahead[expert] = self._tiers.begin(self._index, expert, slot, self.ledger.decode, guess=True)
            self.ledger.loads[step].append((self._index, expert))

    def _await_stray(self) -> None:
        if not len(self._strays):
            raise RuntimeError(f"no slot is free for experts of MoE layer {self._index}")
        self._to("wait")
        self._strays.sweep(wait=True)
        self._to("bookkeeping")

    def land(self) -> None:
        """Until what was loaded ahead is there. Raises what went wrong with it."""
        while self._ahead:
            self._tiers.wait(self._ahead.popitem()[1])

    def _scored(self, kind: str, logits: torch.Tensor, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, E]"""
        if kind == "probabilities":
            return self._gate.score.probabilities(logits)
        if kind == "hidden":
            return hidden_ND
        if kind in ("guess", "guess_shared"):
            state_ND = hidden_ND if kind == "guess" else hidden_ND + self._shared  # type: ignore[operator]
            return guess([self._gate, self.next._gate][: 1 + (self.next._index > self._index)], 0, state_ND)
        assert self.heads is not None
        return self.heads.probabilities(kind, self._index, hidden_ND, self._gate.score)

    def _last(self, kind: str) -> np.ndarray | None:
        """[E], the scores of the last token that passed; as traces hold them, float16."""
        return self.scores[kind][-1][-1] if self.scores.get(kind) else None

    def _begin(self, experts: list[int]) -> None:
        self._waiting.extend(experts)
        self._feed()

    def _where(self, expert: int) -> int:
        """Of the layout's layers the one that an expert comes from."""
        return self._index + (self.light_from if expert in self._light else 0)

    def _feed(self) -> None:
        """Begins loads as long as there are slots."""
        while self._waiting and self._pool.n_free:
            expert = self._waiting.popleft()
            slot = self._slots[expert] = self._pool.acquire()
            keep = not self.ledger.in_prefill
            self._coming[expert] = self._tiers.begin(self._where(expert), expert, slot, self.ledger.count, keep=keep)
            if not self.ledger.in_prefill:
                self.ledger.loads[self.ledger.step].append((self._index, expert))

    def _run(self, x_NH: torch.Tensor, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """What the stock experts module returns: resident experts first, the others as they come. Their outputs are added
        up in the stock module's own order and dtype, whatever came when."""
        self._to("experts")
        index_NK, weight_NK = (*args, *kwargs.values())
        plan = Plan(self._choice_NK, x_NH.device)
        out_RH = x_NH.new_empty(plan.n_rows, x_NH.shape[-1])
        on_cpu_NH = x_NH.cpu() if self._lying else x_NH  # before work is queued that a GPU would finish first
        apart = {*self._coming, *self._lying}
        here = [expert for expert in self._touched if expert in self._slots and expert not in apart]
        self._compute(here, plan, x_NH, out_RH)
        if self._lying:
            self._compute_lying(on_cpu_NH, out_RH)
        while self._coming or self._waiting:
            if not self._coming:
                if not self._pool.n_free:  # another layer may have waited for the slots that are lacking here
                    self._await_stray()
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

    def _compute(self, experts: list[int], plan: Plan, x_NH: torch.Tensor, out_RH: torch.Tensor) -> None:
        if not experts:
            return
        for expert in experts:
            if expert not in self._parts:
                row = self._pool.rows[self._slots[expert]]
                self._parts[expert] = self._layout.tensors(row, self._where(expert), expert)
        self._arithmetic.put_out({expert: self._parts[expert] for expert in experts}, plan, x_NH, out_RH)
        left = [expert for expert in experts if expert in self._leaving]
        if left:
            self._release(left)
            self._feed()

    def _compute_lying(self, x_NH: torch.Tensor, out_RH: torch.Tensor) -> None:
        """From the RAM tier, on the CPU. x: there, out: on the device."""
        assert self.in_place is not None
        begin, count, plan = perf_counter(), self.ledger.in_place, Plan(self._choice_NK, x_NH.device)
        parts = {expert: self._layout.tensors(row, self._index, expert) for expert, row in self._lying.items()}
        put_out_RH = x_NH.new_empty(plan.n_rows, x_NH.shape[-1])
        self._arithmetic.put_out(parts, plan, x_NH, put_out_RH)
        for expert in parts:
            rows = plan.of(expert)[1]
            out_RH[rows if isinstance(rows, slice) else rows.to(out_RH.device)] = put_out_RH[rows].to(out_RH.device)
            self.in_place.let_go(self._index, expert)
            count.brought_s += self.in_place.costs.brought(int((self._choice_NK == expert).sum()))
        count.computed, count.seconds = count.computed + len(parts), count.seconds + perf_counter() - begin
        self._lying.clear()

    def _release(self, experts: Iterable[int]) -> None:
        for expert in experts:
            self._parts.pop(expert, None)
            self._light.discard(expert)
            slot = self._slots.pop(expert)
            if (early := self._ahead.pop(expert, None)) is None:
                self._pool.release(slot)
            else:
                self._strays.add(early)
