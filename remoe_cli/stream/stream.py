"""Stream: a model whose decoder layers lie in files, two of them in memory at a time (and as many more as there is room for)."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch
from torch import nn

from remoe_cli import memory
from remoe_cli.families import find_gates
from remoe_cli.families.base import decoder_layers
from remoe_cli.families.loader import load_without_layers
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload.arena import Arena, PAGE
from remoe_cli.offload.store import drop_page_cache, ExpertStore
from remoe_cli.stream.chunks import Chunk, LayerPlan
from remoe_cli.stream.passes import require_streamable
from remoe_cli.train.prepare import use_quick_experts

READERS = 2  # one reads while the other copies


@dataclass
class Traffic:
    """layers: brought in; read_bytes: from files; waited_s: how long computing stood still for a layer."""

    layers: int = 0
    read_bytes: int = 0
    waited_s: float = 0.0


@dataclass
class _Arrival:
    """A layer that is in memory or on its way. buffer: number of one of the two, None of a layer that stays."""

    views: list[torch.Tensor]
    buffer: int | None
    jobs: list[Future] = field(default_factory=list)
    bound: bool = False


class Stream:
    """See stream/passes.py's Layers. ram: bytes of layers that stay in host memory once they are read, the first ones that fit;
    io: "direct" or "buffered". Close it, or use it as a context.

    The model is in eval mode; a plain call of it works too: each layer is fetched as it is called. Raises FamilyError for
    layouts that cannot be read tensor by tensor, or layers that share more than hidden states, CheckpointError for damaged files.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: str = "cpu", *, ram: int = 0) -> None:
        # a product's code for every number of rows would take .5 GB; making it anew costs 8 % of the experts' time
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        self.model, held = load_without_layers(checkpoint, dtype, device)
        self.gates = find_gates(self.model)
        require_streamable(self.gates)
        use_quick_experts(self.model, self.gates)
        self.layers = decoder_layers(self.model, self.gates)
        self.traffic = Traffic()
        self._device = torch.device(device)
        self._cuda = self._device.type == "cuda"
        files = {piece.file for layer in held for one in layer for unit in one.units for piece in unit.pieces}
        self._store = ExpertStore(files)
        self.io = self._store.io
        drop_page_cache({info.file for info in checkpoint.tensors.values()})
        self._plans = [LayerPlan(tensors, direct=self.io == "direct") for tensors in held]
        self.layer_bytes = [plan.nbytes for plan in self._plans]
        self._kept: dict[int, Arena | None] = dict.fromkeys(memory.first_that_fit(self.layer_bytes, ram))
        passing = [size for i, size in enumerate(self.layer_bytes) if self._cuda or i not in self._kept]
        self._buffers = [self._allocate(max(passing, default=0)) for _ in range(min(2, len(passing)))]
        self._rows = Arena(READERS, max(plan.row_bytes for plan in self._plans), pinned=self._cuda)
        self._free: SimpleQueue[int] = SimpleQueue()
        for row in range(READERS):
            self._free.put(row)
        self._readers = ThreadPoolExecutor(READERS, "layers")
        self._copies = torch.cuda.Stream(self._device) if self._cuda else None
        self._here: dict[int, _Arrival] = {}
        self._counting = Lock()
        self._bare = 0
        self._hooks = [
            layer.register_forward_pre_hook(partial(self._on_call, index)) for index, layer in enumerate(self.layers)
        ]

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the reader threads and closes the files."""
        self._readers.shutdown(cancel_futures=True)
        self._store.close()

    @property
    def kept(self) -> int:
        """How many layers stay in host memory."""
        return len(self._kept)

    @contextmanager
    def layer(self, index: int, ahead: Sequence[int] = ()) -> Iterator[None]:
        """The layer's weights are there while open; the next ones of `ahead` are on their way as far as there is room."""
        self._bring(index, ahead)
        yield

    def give(self, index: int) -> None:
        """The layer that is there becomes the module's own, in memory of its own; the stream forgets it."""
        for held in self._plans[index].tensors:
            module, name = self._owner(index, held.name)
            whole = getattr(module, name).detach().clone()
            if held.buffer:
                module._buffers[name] = whole
            else:
                module._parameters[name] = nn.Parameter(whole, requires_grad=False)
        self._here.pop(index)

    def unhook(self) -> None:
        """Layers are no longer fetched as they are called."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def bare(self) -> Iterator[None]:
        """Layers may be called for nothing while open: none is fetched."""
        self._bare += 1
        try:
            yield
        finally:
            self._bare -= 1

    def _on_call(self, index: int, _layer: nn.Module, _inputs: Any) -> None:
        arrival = self._here.get(index)
        if not self._bare and (arrival is None or not arrival.bound):
            self._bring(index, (*range(index + 1, len(self.layers)), *range(index)))

    def _bring(self, index: int, ahead: Iterable[int]) -> None:
        arrival = self._here.get(index) or self._begin(index, beside=None)
        start = time.perf_counter()
        try:
            for job in arrival.jobs:
                job.result()
        except BaseException:
            self._forget(index)
            raise
        self.traffic.waited_s += time.perf_counter() - start
        arrival.jobs = []
        memory.give_back()
        if self._copies is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._copies)
        if not arrival.bound:
            self._bind(index, arrival)
        for following in ahead:
            found = self._here.get(following)
            if following == index or (found is not None and found.buffer is None):
                continue
            if found is None:
                self._begin(following, beside=index)
            break

    def _begin(self, index: int, beside: int | None) -> _Arrival:
        """Starts to bring a layer into memory of its own, or into a buffer that does not hold the layer `beside`."""
        plan = self._plans[index]
        if index in self._kept and not self._cuda:
            arena = self._kept[index] = Arena(1, max(PAGE, plan.nbytes))
            arrival = _Arrival(plan.views(arena.rows[0]), None)
        else:
            taken = self._here[beside].buffer if beside is not None else None
            number = next(n for n in self._by_age() if n != taken)
            for other, found in [*self._here.items()]:
                if found.buffer == number:
                    self._forget(other)
            arrival = _Arrival(plan.views(self._buffers[number]), number)
        self._here[index] = arrival
        self.traffic.layers += 1
        after = torch.cuda.current_stream(self._device).record_event() if self._cuda else None
        host = self._kept.get(index)
        if self._cuda and host is not None:
            arrival.jobs = [self._readers.submit(self._from_host, index, host.rows[0], after)]
            return arrival
        views = arrival.views
        if self._cuda and index in self._kept:
            host = Arena(1, max(PAGE, plan.nbytes), pinned=True)
            views = plan.views(host.rows[0])
        jobs = [self._readers.submit(self._read, plan, chunk, views, after) for chunk in plan.chunks]
        if self._cuda and host is not None:
            jobs.append(self._readers.submit(self._keep, index, host, [*jobs], after))
        arrival.jobs = jobs
        return arrival

    def _by_age(self) -> list[int]:
        """The buffers, one that holds nothing first, then the one whose layer came first."""
        held = [found.buffer for found in self._here.values() if found.buffer is not None]
        return [*(n for n in range(len(self._buffers)) if n not in held), *held]

    def _read(self, plan: LayerPlan, chunk: Chunk, views: list[torch.Tensor], after: Any) -> None:
        row = self._free.get()
        try:
            read, _ = self._store.read(chunk.image, self._rows.buffer(row))
            with self._counting:
                self.traffic.read_bytes += read
            with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self._copies):
                if self._copies is not None and views[0].is_cuda:
                    self._copies.wait_event(after)
                plan.place(chunk, self._rows.rows[row], views)
                if self._copies is not None:
                    self._copies.synchronize()  # the row is read into again
        finally:
            self._free.put(row)

    def _keep(self, index: int, host: Arena, reads: list[Future], after: Any) -> None:
        for read in reads:
            read.result()
        self._kept[index] = host
        self._from_host(index, host.rows[0], after)

    def _from_host(self, index: int, source: torch.Tensor, after: Any) -> None:
        arrival, nbytes = self._here[index], self._plans[index].nbytes
        assert self._copies is not None and arrival.buffer is not None
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self._copies):
            self._copies.wait_event(after)
            self._buffers[arrival.buffer][:nbytes].copy_(source[:nbytes], non_blocking=True)

    def _bind(self, index: int, arrival: _Arrival) -> None:
        for held, view in zip(self._plans[index].tensors, arrival.views, strict=True):
            module, name = self._owner(index, held.name)
            if held.buffer:
                module._buffers[name] = view
            else:
                module._parameters[name] = nn.Parameter(view, requires_grad=False)
        arrival.bound = True

    def _forget(self, index: int) -> None:
        """The layer is no longer there: its buffer is another's, or reading it failed."""
        arrival = self._here.pop(index)
        for job in arrival.jobs:
            job.cancel()
        for job in arrival.jobs:
            if not job.cancelled():
                job.exception()  # until nobody writes there
        for held in self._plans[index].tensors if arrival.bound else ():
            module, name = self._owner(index, held.name)
            (module._buffers if held.buffer else module._parameters)[name] = None

    def _owner(self, index: int, name: str) -> tuple[nn.Module, str]:
        path, _, last = name.rpartition(".")
        return self.layers[index].get_submodule(path), last

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self._cuda:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return Arena(1, max(PAGE, nbytes)).rows[0]
