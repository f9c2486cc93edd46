"""OffloadedDecoder: a model whose routed experts stay in their files, C of them a layer in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch

from remoe_cli.cache import ExpertCache
from remoe_cli.cache.reroute import Rule
from remoe_cli.errors import UsageError
from remoe_cli.families import family_of, find_gates, Heads, top_k_of
from remoe_cli.families.experts import ExpertLayer
from remoe_cli.families.loader import compute_dtype, experts_on_disk, gate_disk_names, kept_cache, load_without_experts
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import budget
from remoe_cli.offload.block import ExpertBlock
from remoe_cli.offload.checks import check_cache, check_gates, check_heads, check_mixed, check_prompts, check_rule
from remoe_cli.offload.compute import quicken, require_known, running
from remoe_cli.offload.decoded import counts_of, Decoded, DecodedBatch, Floor, trace_of
from remoe_cli.offload.floor import replay_loads
from remoe_cli.offload.foresight import Foresight
from remoe_cli.offload.in_place import Costs, InPlace
from remoe_cli.offload.latent import absorb
from remoe_cli.offload.layout import Layout
from remoe_cli.offload.ledger import doubt_direct, Ledger, noted, since
from remoe_cli.offload.pack import packed
from remoe_cli.offload.past import cut, Past, token_of, Told
from remoe_cli.offload.rerouting import Bend
from remoe_cli.offload.sampling import chooser, Sampling
from remoe_cli.offload.settings import Settings
from remoe_cli.offload.slots import SlotPool
from remoe_cli.offload.small import SMALL
from remoe_cli.offload.store import drop_page_cache, expert_files, ExpertStore, one_expert_bytes, storage_bytes
from remoe_cli.offload.tiers import host_bytes, Strays, Tiers
from remoe_cli.offload.timing import ASIDE, mark_attention, Timeline
from remoe_cli.routing import RoutingTrace

if TYPE_CHECKING:
    from remoe_cli.cache.prefetch.predictor import Predictor


class OffloadedDecoder:
    """capacity: expert slots a layer (more than E is E: `requested` keeps the number asked for); policy: NAME or
    NAME:PARAMETER of POLICIES; admission: "forced" | "bypass"; dtype: compute dtype, by default the checkpoint's own on a CPU
    and bfloat16 on a GPU; threads: compute threads while decoding, by default as they are; pack: a folder that `remoe pack`
    wrote of this checkpoint; batch: requests that `decode_batch` takes at once, at most; tokens: of the longest of them
    together, prompts and new ones, for which memory is asked beforehand.

    Memory for experts: capacity x layers + `staging` slots of `slot_bytes`, allocated at once, and settings.ram, which is no
    more than all experts take. `layers`: one ExpertLayer an MoE layer; `expert_bytes`: one expert's stored bytes; `gates`: one Gate an MoE layer; `disk_names`: the gates
    that apply_gates takes -> their on-disk names; `small`: experts are in 8 or 4 bits; `io`: "direct" or "buffered", and `io_reason` why, where direct was asked for.
    Raises FamilyError for a model that remoe does not know, CacheError for a capacity below K, an unknown policy or too little
    memory, CheckpointError for damaged files.
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
        settings: Settings | None = None,
        pack: Path | None = None,
        batch: int = 1,
        tokens: int = 0,
        predictor: "Predictor | None" = None,
    ) -> None:
        family = family_of(checkpoint.config, checkpoint.id)
        self.checkpoint = checkpoint
        self.top_k = top_k_of(checkpoint.config)
        self.device = torch.device(device)
        self.dtype = dtype or compute_dtype(checkpoint, device)
        self.threads = threads
        self.settings = settings or Settings()
        check_cache(self, capacity, policy, admission, batch, self.settings)  # before minutes of loading
        layers = experts_on_disk(checkpoint)
        self.top_k, self.n_experts, self.n_layers = layers[0].top_k, layers[0].n_experts, len(layers)
        check_cache(self, capacity, policy, admission, batch, self.settings)
        found = layers if pack is None else packed(layers, checkpoint, pack)
        self.small = any(piece.role in SMALL for piece in found[0].pieces(0))
        self.layers, self.light = (found, []) if self.settings.heavy is None else (layers, found)
        self.expert_bytes = one_expert_bytes(self.layers)
        self._store = ExpertStore(expert_files([*self.layers, *self.light]), direct=self.settings.io == "direct")
        self.io, self.io_reason = self._store.io, self._store.io_reason
        try:
            self._build(family.model_type, layers, capacity, admission, batch, tokens)
            self.configure(capacity, policy, admission=admission, batch=batch, predictor=predictor)
        except BaseException:
            self.close()
            raise

    def _build(
        self, model_type: str, on_disk: list[ExpertLayer], capacity: int, admission: str, batch: int, tokens: int
    ) -> None:
        layout = Layout(everything := [*self.layers, *self.light], self.dtype, direct=self.io == "direct")
        check_mixed(self, layout)
        self.slot_bytes = layout.slot_bytes
        if 0 < self.settings.ram < self.slot_bytes:
            raise UsageError(
                f"a RAM tier of {self.settings.ram} bytes holds no expert; one takes {self.slot_bytes}.",
                "remoe decode --help",
            )
        self._asked_ram = self.settings.ram
        all_bytes = self.n_layers * self.n_experts * self.slot_bytes
        self.settings = replace(self.settings, ram=min(self.settings.ram, all_bytes))
        budget.require(
            self.checkpoint,
            on_disk,
            self.dtype,
            str(self.device),
            min(capacity, self.n_experts),
            row_bytes=self.slot_bytes,
            rows=lambda slots: self._staging(slots, admission, batch),
            ram=self.settings.ram,
            top_k=self.top_k,
            host=host_bytes(layout, self.settings.readers, self.device),
            tokens=tokens,
        )
        self._model, stock = load_without_experts(self.checkpoint, self.dtype, str(self.device))
        for layer in stock:
            require_known(layer.module, model_type)
        drop_page_cache({info.file for info in self.checkpoint.tensors.values()})
        quicken(self._model)
        absorb(self._model)
        self.disk_names = gate_disk_names(self._model, self.checkpoint)
        self.gates = find_gates(self._model)
        self._gates = {name: p for gate in self.gates for name, p in {**gate.parameters, **gate.biases}.items()}
        self._base = {name: parameter.detach().clone() for name, parameter in self._gates.items()}
        self._timeline = Timeline(self.device)
        mark_attention(self._model, self._timeline.to)
        self._pool = SlotPool(self.slot_bytes, self.device)
        self._tiers = Tiers(
            self._store,
            layout,
            self._pool,
            numbers=[layer.layer for layer in everything],
            expert_bytes=[one_expert_bytes([layer]) for layer in everything],
            readers=self.settings.readers,
            ram=self.settings.ram,
        )
        self._strays = Strays(self._tiers, self._pool)
        self._blocks = [
            ExpertBlock(i, layer, gate, layout, self._pool, self._tiers, self._strays, self._timeline)
            for i, (layer, gate) in enumerate(zip(stock, self.gates, strict=True))
        ]
        for block, following in zip(self._blocks, [*self._blocks[1:], self._blocks[0]], strict=True):
            block.next = following

    def __enter__(self) -> "OffloadedDecoder":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the reader threads and closes the expert files."""
        if hasattr(self, "_tiers"):
            self._tiers.close()
        self._store.close()

    def configure(
        self,
        capacity: int,
        policy: str = "lru",
        *,
        admission: str = "forced",
        batch: int = 1,
        settings: Settings | None = None,
        reroute: Rule | None = None,
        predictor: "Predictor | None" = None,
        costs: Costs | None = None,
    ) -> None:
        """Another cache for the requests to come; the loaded model stays. settings: of these, guess, throttle, warm and in_place may
        differ from those that the decoder was made with. reroute: bends each new token's choice of experts towards those that
        are resident, which changes what the model says; prompts stay as they are. predictor: of a prefetcher that was trained; what a
        prefetcher learns begins anew. costs: in the place of what is measured here for settings.in_place. Raises CacheError as the constructor does,
        and UsageError for a rule that the model can't follow."""
        settings = settings or self.settings
        fixed = (self.settings.readers, self.settings.io)
        if (settings.readers, settings.io) != fixed or settings.ram not in (self._asked_ram, self.settings.ram):
            raise ValueError("readers, io and ram are fixed when a decoder is made")
        settings = replace(settings, ram=self.settings.ram)
        check_cache(self, capacity, policy, admission, batch, settings)
        if reroute is not None:
            check_rule(reroute, self.gates[0], batch)
        self._kept = False
        self._tiers.settle()
        self.settings = settings
        self.requested, self.capacity = capacity, min(capacity, self.n_experts)
        self.policy, self.admission, self.batch = policy, admission, batch
        self.staging = self._staging(capacity, admission, batch)
        self._tiers.throttle = settings.throttle
        self._foresight = Foresight.of(self, self._blocks, predictor)
        self._allocate()
        in_place = InPlace.of(self, self._tiers, self._pool, costs) if settings.in_place else None
        for block in self._blocks:
            block.guess, block.foresight, block.in_place = settings.guess, self._foresight, in_place
            block.heavy, block.light_from = settings.heavy, self.n_layers
            block.bend = None if reroute is None else Bend(reroute, renormalised=self.gates[0].renormalised)

    def _allocate(self) -> None:
        """The slots, all of them free. Raises CacheError where more are needed than memory has left."""
        n_slots = self.capacity * self.n_layers + self.staging
        budget.require_more(self.checkpoint.id, self.device, (n_slots - len(self._pool.rows)) * self.slot_bytes)
        self._pool.resize(n_slots)

    def _staging(self, capacity: int, admission: str, batch: int) -> int:
        """Slots beside the cache. With bypass all experts of a step may be strangers to it; where a step or a prompt can ask
        for more than the cache holds, or the cache is not empty when a prompt comes, those stream through two slots."""
        if admission == "bypass":
            streamed = min(self.n_experts, self.top_k * batch)
        else:
            past = self.settings.warm != "cold" or min(self.n_experts, self.top_k * batch) > capacity
            streamed = 2 if past else 0
        return streamed + self.settings.guess

    def apply_gates(self, gates: Mapping[str, torch.Tensor], heads: Heads | None = None) -> None:
        """The base's gates, with these (in-memory name -> tensor) in place of their own, and these heads beside them; `{}`
        restores the base.

        Values are cast to the dtype in which the family keeps its gates; heads stay as they are. Raises DeltaError for a
        name that is no gate of this model, or another shape.
        """
        check_gates(self.checkpoint.id, self._base, gates, heads, self.n_layers)
        with torch.no_grad():
            for name, parameter in self._gates.items():
                parameter.copy_(gates.get(name, self._base[name]))
        heads = None if heads is None else heads.to(self.device)
        for block in self._blocks:
            block.heads = heads

    def decode(
        self,
        prompt_ids: Sequence[int],
        n_new: int,
        *,
        forced: Sequence[int] | None = None,
        future: RoutingTrace | None = None,
        sampling: Sampling | None = None,
        keep_logits: bool = False,
        keep_scores: bool = False,
    ) -> Decoded:
        """One request: prefill of the prompt, then n_new - 1 passes of one token.

        forced: n_new ids that are fed whatever the model would say. Without them and without `sampling` decoding is greedy; an
        end token is a token like any other. future: a trace of this very request (one request), which oracle policies need.
        keep_scores: the trace holds the probabilities that the routers and their heads gave; it holds those that the policy
        needs anyway. Raises CacheError where the policy needs heads that `apply_gates` was not given.
        """
        done = self._decode(
            [prompt_ids], n_new, None if forced is None else [forced], future, sampling, keep_logits, keep_scores
        )
        return Decoded(done.ids[0], *done[1:-1], None if done.logits is None else done.logits[0])

    def decode_batch(
        self,
        prompts: Sequence[Sequence[int]],
        n_new: int,
        *,
        forced: Sequence[Sequence[int]] | None = None,
        sampling: Sampling | None = None,
        keep_logits: bool = False,
    ) -> DecodedBatch:
        """Requests with prompts of one length, token by token together: a step of a layer asks for the distinct experts of all
        of them. As `decode` otherwise. Raises UsageError for prompts of several lengths or more than `batch`."""
        return self._decode(prompts, n_new, forced, None, sampling, keep_logits, False)

    def go_on(
        self, past: Past, prompt_ids: Sequence[int], n_new: int, told: Told, *, sampling: Sampling | None = None
    ) -> Decoded:
        """As `decode` of a prompt that follows what `past` holds, but each new token is told as soon as it is chosen, in time
        that counts nowhere, and the answer to that may end the request. `past` then holds all but the last new token; after an
        error, nothing."""
        done = self._decode([prompt_ids], n_new, None, None, sampling, False, False, past, told)
        return Decoded(done.ids[0], *done[1:-1])

    def floor(self, done: Decoded | DecodedBatch) -> Floor:
        """The same loads once more, at the same pace, but without the model: what the storage alone takes of each token.

        The cache is cold afterwards. What the RAM tier holds after the request is served from it.
        """
        self._tiers.settle()
        self._pool.reset()
        self._kept = False
        found = replay_loads(self._tiers, self._pool, done, self.n_layers)
        self._pool.reset()
        return found

    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        n_new: int,
        forced: Sequence[Sequence[int]] | None,
        future: RoutingTrace | None,
        sampling: Sampling | None,
        keep_logits: bool,
        keep_scores: bool,
        past: Past | None = None,
        told: Told | None = None,
    ) -> DecodedBatch:
        check_prompts(prompts, n_new, forced, self.batch)
        ledger = self._start(n_new, future, keep_scores)
        choose_ids = chooser(sampling, self.device)
        read_before, busy_before = storage_bytes(), self._tiers.busy_s
        kept: list[torch.Tensor] = []
        chosen: list[torch.Tensor] = []
        ids_BT = torch.tensor([[int(i) for i in prompt] for prompt in prompts], device=self.device)
        fed = None if forced is None else torch.tensor([list(ids)[:n_new] for ids in forced], device=self.device)
        timeline, held = self._timeline, [] if past is None else list(past.ids)
        with torch.inference_mode(), running(self.device, self.threads):
            timeline.start()
            out = self._model(
                input_ids=ids_BT, use_cache=True, logits_to_keep=1, **({} if past is None else past.take())
            )
            for step in range(n_new):
                if step:
                    ledger.step = step - 1
                    out = self._model(input_ids=chosen[-1], use_cache=True, **kept_cache(out))
                logits_BV = out.logits[:, -1]
                if keep_logits:
                    kept.append(logits_BV.clone())
                chosen.append(choose_ids(logits_BV) if fed is None else fed[:, step : step + 1])
                if not step:
                    before = [block.cache_counts() for block in self._blocks]
                    ledger.prefill.storage_bytes, read_before = since(read_before), storage_bytes()
                    ledger.prefill.busy_s, busy_before = self._tiers.busy_s - busy_before, self._tiers.busy_s
                timeline.to(ASIDE)
                ended = told is not None and told(token_of(chosen[-1], self._blocks, before, ledger))
                timeline.to("dense")
                # otherwise a layer sees to the next one while it computes itself
                if not ended and (not step or self.n_layers == 1):
                    self._blocks[-1].refine_next()
                if self._foresight is not None and not ended:
                    self._foresight.token_over(first=not step)
                timeline.token()
                if ended:
                    break
        latency, split = timeline.finish()
        self._tiers.settle(drop=False)  # what was read ahead is paid for, also where nobody asked for it
        for block in self._blocks:
            block.land()
        self._strays.sweep()
        if self._foresight is not None:
            self._foresight.end()
        ledger.decode.storage_bytes = since(read_before)
        ledger.decode.busy_s = self._tiers.busy_s - busy_before
        self.io_reason = doubt_direct(self.io, ledger) or self.io_reason
        self._kept = True
        cut(ledger.loads, len(chosen) - 1)
        ids_BN = torch.cat(chosen, 1).tolist()
        if past is not None:
            past.keep([*held, *prompts[0], *ids_BN[0][:-1]], out)
        kind = "forced" if fed is not None else "greedy" if sampling is None else "sampled"
        return DecodedBatch(
            ids_BN,
            trace_of(self._blocks, len(prompts), ids_BT.shape[1], len(chosen), self.n_experts, self._provenance(kind)),
            latency,
            counts_of(self._blocks, before, ledger, self.io),
            split,
            ledger.loads,
            torch.stack(kept, 1) if keep_logits else None,
        )

    def _provenance(self, kind: str) -> dict[str, Any]:
        return {"model": self.checkpoint.id, "revision": self.checkpoint.commit, "kind": kind}

    def _start(self, n_new: int, future: RoutingTrace | None, keep_scores: bool) -> Ledger:
        ledger = Ledger([[] for _ in range(n_new - 1)])
        heads = self._blocks[0].heads
        check_heads(self, heads)
        scores = noted(self.policy, heads, keep_scores)
        if self._foresight is not None:
            self._foresight.start()
        self._tiers.settle()
        carried = self._kept and self.settings.warm == "carry"
        if carried:
            self._strays.sweep()
        else:
            self._strays.clear()
            self._allocate()  # anew, where `configure` was interrupted
            self._tiers.forget()
        self._kept = False  # until the request is over
        for index, block in enumerate(self._blocks):
            cache = None
            if not carried:
                accesses = None if future is None else future.decode().experts[:, index, ::-1].ravel().tolist()
                cache = ExpertCache(
                    self.capacity, self.policy, n_experts=self.n_experts, admission=self.admission, future=accesses
                )
            block.start(cache, ledger, through=self.settings.warm == "batch", scores=scores)
        return ledger
