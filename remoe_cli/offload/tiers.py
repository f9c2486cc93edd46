"""From the files to the slots: what a reader thread does with one expert, and the RAM tier in between.

files -> slot                      CPU, stored in the compute dtype
files -> row -> slot               CPU, converted on the way; or GPU, the row pinned and the copy in a stream of its own
files -> RAM tier -> slot          with a RAM tier: an expert that it holds is not read again
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch

from remoe_cli.errors import CheckpointError
from remoe_cli.offload.arena import Arena
from remoe_cli.offload.layout import Layout
from remoe_cli.offload.readers import Load, Readers
from remoe_cli.offload.slots import SlotPool
from remoe_cli.offload.store import ExpertStore, IoCount

_ROWS_A_READER = 2  # one is copied to the GPU while the other is filled

Key = tuple[int, int]  # layer, expert


class Tiers:
    """numbers: the decoder layer of each of the layout's layers, for messages; expert_bytes: stored size of an expert of each.

    `begin` starts a load into an acquired slot, `wait` returns when the compute stream may use it.
    """

    def __init__(
        self,
        store: ExpertStore,
        layout: Layout,
        pool: SlotPool,
        *,
        numbers: Sequence[int],
        expert_bytes: Sequence[int],
        readers: int,
        ram: int,
    ) -> None:
        self._store, self.layout, self._pool = store, layout, pool
        self._numbers, self._expert_bytes = numbers, expert_bytes
        self._cuda = pool.device.type == "cuda"
        self._lock = threading.Lock()
        self.throttle: float | None = None
        self._link_free = 0.0
        self._hurry = threading.Event()  # nobody waits for what is under way
        self._ram = _RamTier(ram // layout.slot_bytes, layout.slot_bytes, pinned=self._cuda) if ram else None
        self.ram_rows = ram // layout.slot_bytes
        # where files are read to before they are converted, one row a thread
        raws, rings = _rows(layout, readers, pool.device)
        self._raw = Arena(raws, layout.row_bytes)
        self._ring = Arena(rings, layout.slot_bytes, pinned=self._cuda)
        self._ring_copied: list[torch.cuda.Event | None] = [None] * rings
        self._turn = [0] * readers
        self._raw_buffers = [self._raw.buffer(row) for row in range(len(self._raw.rows))]
        self._stream = torch.cuda.Stream(pool.device) if self._cuda else None
        self._readers = Readers(readers, self._bring)

    @property
    def busy_s(self) -> float:
        """Seconds during which at least one load was under way, since the start."""
        return self._readers.busy_s

    def begin(
        self, layer: int, expert: int, slot: int, count: IoCount, *, guess: bool = False, keep: bool = True
    ) -> Load:
        """keep: whether the expert may push another out of the RAM tier."""
        load = Load(layer, expert, slot, count, keep)
        self._readers.submit(load, guess=guess)
        return load

    def withdraw(self, load: Load) -> bool:
        """Takes back a guess that is not under way; whether it could."""
        return self._readers.withdraw(load)

    def hasten(self, load: Load) -> None:
        """A guess that is needed now, unless it is under way already."""
        self._readers.hasten(load)

    def wait(self, load: Load) -> None:
        """On a GPU the host waits for the file only, and the compute stream for the copy. Raises what went wrong."""
        self._readers.wait(load)
        if load.copied is not None:
            torch.cuda.current_stream().wait_event(load.copied)

    def arrive(self, load: Load) -> None:
        """As `wait`, but the host waits until the expert is in its slot, on a GPU too."""
        self._readers.wait(load)
        if load.copied is not None:
            load.copied.synchronize()

    def settle(self, *, drop: bool = True) -> None:
        """Until nothing is under way, whatever the throttle; what was queued is dropped, or comes first."""
        self._hurry.set()
        self._readers.drain(drop=drop)
        self._hurry.clear()
        self._link_free = 0.0
        if self._cuda:
            torch.cuda.synchronize(self._pool.device)

    @property
    def ram_memory(self) -> torch.Tensor:
        """[rows, slot_bytes] of the RAM tier, as slots hold experts."""
        return self._pool.rows[:0] if self._ram is None else self._ram.arena.rows

    def lying(self, layer: int, expert: int) -> torch.Tensor | None:
        """The expert's row of the RAM tier, which stays until `let_go`; None where it is not there in full."""
        row = None if self._ram is None else self._ram.find((layer, expert))
        return None if row is None else self.ram_memory[row]

    def let_go(self, layer: int, expert: int) -> None:
        assert self._ram is not None
        self._ram.let_go((layer, expert), None)

    def forget(self) -> None:
        """Empties the RAM tier."""
        if self._ram is not None:
            self._ram.clear()

    def close(self) -> None:
        self._hurry.set()
        self._readers.close()
        if self._stream is not None:
            self._stream.synchronize()  # no copy may outlive the memory it reads

    def _bring(self, load: Load, thread: int) -> None:
        since = perf_counter()
        try:
            if self._ram is not None:
                ram, read, calls = self._through_ram(load, thread)
            elif self._cuda:
                ram, (read, calls) = False, self._through_ring(load, thread)
            else:
                ram, (read, calls) = (
                    False,
                    self._fill(load, self._pool.rows[load.slot], self._pool.buffer(load.slot), thread),
                )
        except CheckpointError as error:
            where = f"expert {load.expert} of layer {self._numbers[load.layer]}"
            raise CheckpointError(f"{where} was not read: {error.message}", error.hint) from None
        self._pace(since, self._expert_bytes[load.layer])
        with self._lock:
            count = load.count
            count.reads += 1
            count.bytes += self._expert_bytes[load.layer]
            count.ram += ram
            count.read_bytes += read
            count.calls += calls

    def _pace(self, since: float, nbytes: int) -> None:
        """With a throttle: until the link, which takes one expert after the other, would have brought this one."""
        if self.throttle is None:
            return
        with self._lock:
            self._link_free = arrival = max(self._link_free, since) + nbytes / self.throttle
        if (rest := arrival - perf_counter()) > 0:
            self._hurry.wait(rest)

    def _fill(self, load: Load, row: torch.Tensor, buffer: memoryview, thread: int) -> tuple[int, int]:
        """One expert from the files into host memory, as slots hold it."""
        image = self.layout.images[load.layer][load.expert]
        if not self.layout.convert:
            return self._store.read(image, buffer)
        done = self._store.read(image, self._raw_buffers[thread])
        self.layout.copy(self._raw.rows[thread], row, load.layer, load.expert)
        return done

    def _through_ring(self, load: Load, thread: int) -> tuple[int, int]:
        row = thread * _ROWS_A_READER + self._turn[thread]
        self._turn[thread] = (self._turn[thread] + 1) % _ROWS_A_READER
        copied = self._ring_copied[row]
        if copied is not None:
            copied.synchronize()  # the row's last copy must be over before the file overwrites it
        done = self._fill(load, self._ring.rows[row], self._ring.buffer(row), thread)
        self._ring_copied[row] = self._copy(load, self._ring.rows[row])
        return done

    def _through_ram(self, load: Load, thread: int) -> tuple[bool, int, int]:
        assert self._ram is not None
        key = (load.layer, load.expert)
        row, had = self._ram.hold(key, load.keep)
        if row is None:
            return (False, *self._around_ram(load, thread))
        read = calls = 0
        try:
            if not had:
                read, calls = self._fill(load, self._ram.arena.rows[row], self._ram.arena.buffer(row), thread)
            self._ram.let_go(key, self._copy(load, self._ram.arena.rows[row]))
        except BaseException:
            self._ram.drop(key)
            raise
        return had, read, calls

    def _around_ram(self, load: Load, thread: int) -> tuple[int, int]:
        if self._cuda:
            return self._through_ring(load, thread)
        return self._fill(load, self._pool.rows[load.slot], self._pool.buffer(load.slot), thread)

    def _copy(self, load: Load, row: torch.Tensor) -> "torch.cuda.Event | None":
        """From host memory into the slot; on a GPU the copy is only begun, after the slot's last use."""
        slot = self._pool.rows[load.slot]
        if not self._cuda:
            np.copyto(slot.numpy(), row.numpy())  # one thread; torch would start a team of them in each reader
            return None
        with torch.cuda.device(self._pool.device), torch.cuda.stream(self._stream):
            used = self._pool.last_use(load.slot)
            if used is not None:
                self._stream.wait_event(used)  # type: ignore[union-attr]
            slot.copy_(row, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        load.copied = event
        return event


class Strays:
    """Loads that nobody wants, still on their way: their slots are free again once they have landed. One for all layers."""

    def __init__(self, tiers: Tiers, pool: SlotPool) -> None:
        self._tiers, self._pool = tiers, pool
        self._loads: list[Load] = []

    def __len__(self) -> int:
        return len(self._loads)

    def add(self, load: Load) -> None:
        self._loads.append(load)

    def sweep(self, *, wait: bool = False) -> None:
        """Gives back the slots of those that have landed; with `wait`, of one in any case."""
        for load in [load for load in self._loads if load.finished] or self._loads[:wait]:
            self._loads.remove(load)
            self._tiers.wait(load)
            self._pool.release(load.slot)

    def clear(self) -> None:
        self._loads.clear()


def host_bytes(layout: Layout, readers: int, device: torch.device) -> int:
    """Host memory that loads pass through, beside slots and RAM tier."""
    raws, rings = _rows(layout, readers, device)
    return raws * layout.row_bytes + rings * layout.slot_bytes


def _rows(layout: Layout, readers: int, device: torch.device) -> tuple[int, int]:
    """To convert from, and to copy to a GPU from."""
    return (readers if layout.convert else 0), (_ROWS_A_READER * readers if device.type == "cuda" else 0)


class _RamTier:
    """The experts that were loaded last, least recently used out, one row each; rows that a thread is at are kept."""

    def __init__(self, n_rows: int, row_bytes: int, *, pinned: bool) -> None:
        self.arena = Arena(n_rows, row_bytes, pinned=pinned)
        self._lock = threading.Condition()
        self.clear()

    def clear(self) -> None:
        self._row: OrderedDict[Key, int] = OrderedDict()
        self._users: dict[Key, int] = {}
        self._filled: set[Key] = set()
        self._copied: dict[int, list[torch.cuda.Event]] = {}  # copies that may still read a row
        self._free = list(range(len(self.arena.rows)))

    def hold(self, key: Key, keep: bool) -> tuple[int | None, bool]:
        """The expert's row and whether it is filled; an empty one is the caller's to fill. Hold it until `let_go`. None where
        it is not here, and no row is free or (with `keep`) can be made free."""
        with self._lock:
            while key in self._row and key not in self._filled:
                self._lock.wait()  # another thread is filling it
            row = self._row.get(key)
            if row is not None:
                self._row.move_to_end(key)
                self._users[key] = self._users.get(key, 0) + 1
                return row, True
            row = self._free.pop() if self._free else self._evict() if keep else None
            if row is None:
                return None, False
            self._row[key], self._users[key] = row, 1
            copies = self._copied.pop(row, [])
        for copied in copies:
            copied.synchronize()
        return row, False

    def find(self, key: Key) -> int | None:
        """As `hold`, of an expert that is here already."""
        with self._lock:
            if key not in self._filled:
                return None
            self._row.move_to_end(key)
            self._users[key] += 1
            return self._row[key]

    def let_go(self, key: Key, copied: "torch.cuda.Event | None") -> None:
        with self._lock:
            self._filled.add(key)
            self._users[key] -= 1
            if copied is not None:
                begun = self._copied.get(self._row[key], [])
                self._copied[self._row[key]] = [*(event for event in begun if not event.query()), copied]
            self._lock.notify_all()

    def drop(self, key: Key) -> None:
        """After an error."""
        with self._lock:
            self._users[key] -= 1
            if key not in self._filled:
                self._free.append(self._row.pop(key))
            self._lock.notify_all()

    def _evict(self) -> int | None:
        for key in self._row:
            if not self._users[key]:
                self._filled.discard(key)
                return self._row.pop(key)
        return None
