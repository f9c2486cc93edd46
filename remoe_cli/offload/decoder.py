"""OffloadedDecoder: a model whose routed experts stay in their safetensors files, C of them a layer in memory."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from remoe_cli.cache import choose, ExpertCache
from remoe_cli.errors import CacheError, DeltaError, UsageError
from remoe_cli.families import family_of, find_gates
from remoe_cli.families.loader import compute_dtype, gate_disk_names, kept_cache, load_without_experts
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload.block import ExpertBlock, Ledger
from remoe_cli.offload.slots import SlotPool
from remoe_cli.offload.store import ExpertStore, IO, IoCount, storage_bytes
from remoe_cli.offload.timing import Clock, Latency
from remoe_cli.routing import RoutingTrace


@dataclass(frozen=True)
class Counts:
    """One request's experts, summed over layers. accesses = hits + misses = K x layers x decode steps, and misses =
    decode.reads, evictions: decode steps only; prefill: the experts that the prompt streamed past the cache."""

    accesses: int
    hits: int
    misses: int
    evictions: int
    decode: IoCount
    prefill: IoCount
    io: str = IO


@dataclass(frozen=True)
class Decoded:
    """ids: the n new tokens (the forced ones where they were given). trace: the prompt's tokens, flagged prefill, then
    the n - 1 tokens that were fed one by one (the last new token is not fed). logits: [n, vocabulary], what each new
    token was (or would have been) chosen from, where asked for."""

    ids: list[int]
    trace: RoutingTrace
    latency: Latency
    counts: Counts
    logits: torch.Tensor | None = None


class OffloadedDecoder:
    """capacity: expert slots a layer (more than E is E: `requested` keeps the number asked for); policy: NAME or
    NAME:PARAMETER of POLICIES; admission: "forced" | "bypass"; dtype: compute dtype, by default the checkpoint's own on a CPU and
    bfloat16 on a GPU; threads: compute threads while decoding, by default as they are.

    Memory for experts: capacity x layers + `staging` slots of `slot_bytes`, allocated at once. `layers`: one
    ExpertLayer an MoE layer; `expert_bytes`: one expert's stored bytes; `disk_names`: the gates that apply_gates takes
    -> their on-disk names.
    Raises FamilyError for a model that remoe does not know, CacheError for a capacity below K or an unknown policy,
    CheckpointError for damaged files.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        capacity: int,
        policy: str = "lru",
        *,
        admission: str = "forced",
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        threads: int | None = None,
    ) -> None:
        family_of(checkpoint.config, checkpoint.id)
        self.checkpoint = checkpoint
        self.top_k = checkpoint.config["num_experts_per_tok"]
        self.device = torch.device(device)
        self.dtype = dtype or compute_dtype(checkpoint, device)
        self.threads = threads
        self._check(capacity, policy, admission)  # before minutes of loading; again below with what the model says
        self._model, self.layers = load_without_experts(checkpoint, self.dtype, device)
        self.top_k, self.n_experts = self.layers[0].top_k, self.layers[0].n_experts
        self.n_layers = len(self.layers)
        self.disk_names = gate_disk_names(self._model, checkpoint)
        self._gates = {name: p for gate in find_gates(self._model) for name, p in gate.parameters.items()}
        self._base = {name: parameter.detach().clone() for name, parameter in self._gates.items()}
        self._store = ExpertStore(self.layers)
        self._pool = SlotPool(self._store, self.layers[0], self.dtype, self.device)
        self.expert_bytes, self.slot_bytes = self._store.expert_bytes, self._pool.slot_bytes
        self.configure(capacity, policy, admission=admission)
        routers = [gate.router for gate in find_gates(self._model)]
        pairs = zip(self.layers, routers, strict=True)
        self._blocks = [ExpertBlock(i, layer, router, self._pool) for i, (layer, router) in enumerate(pairs)]

    def __enter__(self) -> "OffloadedDecoder":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the expert files."""
        self._store.close()

    def configure(self, capacity: int, policy: str = "lru", *, admission: str = "forced") -> None:
        """Another cache for the requests to come; the loaded model stays. Raises CacheError as the constructor does."""
        self._check(capacity, policy, admission)
        self.requested, self.capacity = capacity, min(capacity, self.n_experts)
        self.policy, self.admission = policy, admission
        # with bypass all K of a step may be strangers to the cache; a step of forced admission fits into the C slots,
        # and prefill needs one slot to stream through
        self.staging = self.top_k if admission == "bypass" else 1
        self._pool.resize(self.capacity * self.n_layers + self.staging)

    def apply_gates(self, gates: Mapping[str, torch.Tensor]) -> None:
        """The base's gates, with these (in-memory name -> tensor) in place of their own; `{}` restores the base.

        Values are cast to the dtype in which the family keeps its gates. Raises DeltaError for a name that is no gate
        of this model, or another shape.
        """
        for name, tensor in gates.items():
            if name not in self._base:
                raise DeltaError(f"{name} is not a gate of {self.checkpoint.id}.", "a delta of this model: remoe runs")
            if tensor.shape != self._base[name].shape:
                raise DeltaError(
                    f"{name} is {list(tensor.shape)}, but {list(self._base[name].shape)} in {self.checkpoint.id}.",
                    "a delta of this model: remoe runs",
                )
        with torch.no_grad():
            for name, parameter in self._gates.items():
                parameter.copy_(gates.get(name, self._base[name]))

    def decode(
        self,
        prompt_ids: Sequence[int],
        n_new: int,
        *,
        forced: Sequence[int] | None = None,
        future: RoutingTrace | None = None,
        keep_logits: bool = False,
        keep_probabilities: bool = False,
    ) -> Decoded:
        """One request with a cold cache: prefill of the prompt, then n_new - 1 passes of one token.

        forced: n_new ids that are fed whatever the model would say; without them decoding is greedy, and an end token
        is a token like any other. future: a trace of this very request (one request), which oracle policies need.
        keep_probabilities: the trace holds the router's probabilities; it does so anyway where the policy needs them.
        """
        prompt = [int(i) for i in prompt_ids]
        if not prompt or n_new < 1 or (forced is not None and len(forced) < n_new):
            raise UsageError(
                f"cannot decode {n_new} tokens after a prompt of {len(prompt)}"
                + ("." if forced is None else f" with {len(forced)} forced ids."),
                "remoe eval --help",
            )
        ledger = self._start(future, keep_probabilities)
        clock = Clock(self.device)
        read_before = storage_bytes()
        kept: list[torch.Tensor] = []
        chosen: list[torch.Tensor] = []
        ids = torch.tensor([prompt], device=self.device)
        fed = None if forced is None else torch.tensor([list(forced)[:n_new]], device=self.device)
        with torch.inference_mode(), _running(self.device, self.threads):
            clock.mark()
            out = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
            for step in range(n_new):
                if step:
                    out = self._model(input_ids=chosen[-1], use_cache=True, **kept_cache(out))
                logits_V = out.logits[0, -1]
                if keep_logits:
                    kept.append(logits_V.clone())
                chosen.append(logits_V.argmax().view(1, 1) if fed is None else fed[:, step : step + 1])
                if not step:
                    ledger.in_prefill = False
                    ledger.prefill.storage_bytes, read_before = _since(read_before), storage_bytes()
                clock.mark()
        latency = clock.latency()
        ledger.decode.storage_bytes = _since(read_before)
        new_ids = torch.cat(chosen, 1)[0].tolist()
        return Decoded(
            new_ids,
            self._trace(len(prompt), n_new, "greedy" if fed is None else "forced"),
            latency,
            self._counts(ledger),
            torch.stack(kept) if keep_logits else None,
        )

    def _check(self, capacity: int, policy: str, admission: str) -> None:
        choose(policy)
        ExpertCache(max(capacity, 1), n_experts=1, admission=admission)
        if capacity < self.top_k:
            raise CacheError(
                f"a cache of {capacity} experts a layer is too small to decode {self.checkpoint.id}: each token runs "
                f"{self.top_k} experts in each layer, so {self.top_k} or more are needed.",
                f"remoe eval --cache {self.top_k}",
            )

    def _start(self, future: RoutingTrace | None, keep_probabilities: bool) -> Ledger:
        ledger = Ledger()
        self._pool.reset()
        for index, block in enumerate(self._blocks):
            accesses = None if future is None else future.decode().experts[:, index, ::-1].ravel().tolist()
            cache = ExpertCache(
                self.capacity, self.policy, n_experts=self.n_experts, admission=self.admission, future=accesses
            )
            block.start(cache, ledger, keep_probabilities=keep_probabilities)
        return ledger

    def _trace(self, n_prompt: int, n_new: int, kind: str) -> RoutingTrace:
        n_tokens = n_prompt + n_new - 1
        return RoutingTrace(
            experts=np.stack([np.concatenate(block.experts) for block in self._blocks], 1),
            borders=np.array([0, n_tokens]),
            prefill=np.arange(n_tokens) < n_prompt,
            n_experts=self.n_experts,
            weights=np.stack([np.concatenate(block.weights) for block in self._blocks], 1),
            probabilities=(
                np.stack([np.concatenate(block.probabilities) for block in self._blocks], 1)
                if self._blocks[0].probabilities
                else None
            ),
            provenance={"model": self.checkpoint.id, "revision": self.checkpoint.commit, "kind": kind},
        )

    def _counts(self, ledger: Ledger) -> Counts:
        caches = [block.cache for block in self._blocks]
        hits, misses = sum(cache.hits for cache in caches), sum(cache.misses for cache in caches)
        evictions = sum(cache.evictions for cache in caches)
        return Counts(hits + misses, hits, misses, evictions, ledger.decode, ledger.prefill)


def _since(before: int | None) -> int | None:
    now = storage_bytes()
    return None if before is None or now is None else now - before


@contextmanager
def _running(device: torch.device, threads: int | None) -> Iterator[None]:
    """Streams and events belong to this device; compute threads are as asked for, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    finally:
        torch.set_num_threads(before)
