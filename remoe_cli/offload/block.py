"""One MoE layer whose experts are on disk: the stock experts module keeps its own arithmetic and asks for one expert's
part at a time, which the layer's ExpertCache and the slots provide.

Shape letters: N tokens of a pass, E routed experts, K experts a token.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from remoe_cli.cache import ExpertCache
from remoe_cli.families import probabilities
from remoe_cli.families.experts import ExpertLayer, recorded_order
from remoe_cli.offload.slots import SlotPool
from remoe_cli.offload.store import IoCount


@dataclass
class Ledger:
    """What one request did: the phase it is in, and its reads, apart for the two phases."""

    in_prefill: bool = True
    prefill: IoCount = field(default_factory=IoCount)
    decode: IoCount = field(default_factory=IoCount)


class ExpertBlock:
    """index: the layer's number among the MoE layers; router: of this layer.

    Decode: each token's experts are one step of the cache, misses are loaded before the experts run; an expert that
    the cache does not keep leaves after the step. Prefill: each expert that the prompt needs is streamed once through
    a slot past the cache, which is not touched.
    """

    def __init__(self, index: int, layer: ExpertLayer, router: torch.nn.Module, pool: SlotPool) -> None:
        self._index = index
        self._pool = pool
        self._slots: dict[int, int] = {}
        self._leaving: list[int] = []
        for part in layer.parts:
            setattr(layer.module, part.name, _Part(self, part.name))
        router.register_forward_hook(self._routed)
        layer.module.register_forward_pre_hook(self._before, with_kwargs=True)
        layer.module.register_forward_hook(self._after)

    def start(self, cache: ExpertCache, ledger: Ledger, *, keep_probabilities: bool = False) -> None:
        """A new request, cold. The pool has been reset: none of its slots is this layer's any more."""
        self.cache, self._ledger = cache, ledger
        self._keeps_probabilities = keep_probabilities or "probabilities" in cache.policy.needs
        self.experts: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        self.probabilities: list[np.ndarray] = []
        self._slots.clear()
        self._leaving = []

    def part(self, name: str, expert: int) -> torch.Tensor:
        """One part of one expert, which the running pass asked for."""
        if expert not in self._slots:
            if not self._ledger.in_prefill:
                raise RuntimeError(f"expert {expert} runs without having been chosen by the router")
            self._release(list(self._slots))
            self._load(expert, self._ledger.prefill)
        return self._pool.part(name, self._slots[expert])

    def _routed(self, _module: torch.nn.Module, _inputs: tuple, outputs: tuple) -> None:
        if self._keeps_probabilities:
            self.probabilities.append(probabilities(outputs[0]).half().cpu().numpy())

    def _before(self, _module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        _, choice, weight = (*args, *kwargs.values())
        # one transfer, so that a GPU is waited for once a layer; float64 holds ids and weights exactly
        choice_NK, weight_NK = torch.stack((choice.double(), weight.double())).cpu().numpy()
        order_NK = recorded_order(choice_NK, weight_NK)
        experts_NK = np.take_along_axis(choice_NK, order_NK, -1).astype(np.int16)
        self.experts.append(experts_NK)
        # caches see what the trace holds: float16
        weights_NK = np.take_along_axis(weight_NK, order_NK, -1).astype(np.float16)
        self.weights.append(weights_NK)
        if not self._ledger.in_prefill:
            if len(experts_NK) != 1:
                raise ValueError(f"a decode step is one token, not {len(experts_NK)}")
            self._serve(experts_NK[0, ::-1].tolist(), weights_NK[0, ::-1].tolist())

    def _serve(self, touched: list[int], weights: list[float]) -> None:
        step = self.cache.step(touched, weights, self.probabilities[-1][0].tolist() if self.probabilities else None)
        self._release([expert for expert in step.evicted if expert not in touched])
        for expert in step.misses:
            self._load(expert, self._ledger.decode)
        self._leaving = [expert for expert in touched if expert not in self.cache.resident]

    def _after(self, *_: object) -> None:
        self._release(list(self._slots) if self._ledger.in_prefill else self._leaving)

    def _load(self, expert: int, count: IoCount) -> None:
        slot = self._pool.acquire()
        self._slots[expert] = slot
        self._pool.load(self._index, expert, slot, count)

    def _release(self, experts: list[int]) -> None:
        for expert in experts:
            self._pool.release(self._slots.pop(expert))


class _Part:
    """Stands where the stock module had a parameter [E, ...]; row e is expert e's part."""

    def __init__(self, block: ExpertBlock, name: str) -> None:
        self._block = block
        self._name = name

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        return self._block.part(self._name, int(expert))
