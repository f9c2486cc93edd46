"""A missing expert that the RAM tier holds is computed on the CPU, where it lies, if that takes less time than bringing it to the
device and computing it there (the rule of Fiddler, arXiv 2402.07033).

The cache sees none of it: an expert that it admits comes into its slot behind what is needed now, one that it does not admit
need not come at all. Shape letters: H hidden.
"""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple, TYPE_CHECKING

import torch

from remoe_cli.offload.compute import run_expert, running
from remoe_cli.offload.slots import SlotPool
from remoe_cli.offload.tiers import Tiers

if TYPE_CHECKING:
    from remoe_cli.offload.decoder import OffloadedDecoder

_TIMES = 7  # of each measurement, the first for nothing: kernels are chosen in it


class Costs(NamedTuple):
    """Seconds. host, device: of one expert's arithmetic, for 1, 2, 4, ... rows; copy: from the RAM tier into a slot."""

    host: tuple[float, ...]
    device: tuple[float, ...]
    copy: float

    def there(self, rows: int) -> float:
        """On the CPU, where the expert lies."""
        return self.host[_place(rows, self.host)]

    def brought(self, rows: int) -> float:
        """On the device, copy included."""
        return self.copy + self.device[_place(rows, self.device)]


class InPlace:
    """What decides, for all layers. costs: as `measure` found them."""

    def __init__(self, tiers: Tiers, costs: Costs) -> None:
        self._tiers, self.costs = tiers, costs

    @classmethod
    def of(cls, decoder: "OffloadedDecoder", tiers: Tiers, pool: SlotPool, costs: Costs | None) -> "InPlace":
        """costs: None: they are measured, and what the slots hold is lost."""
        return cls(tiers, costs or measure(decoder, tiers, pool))

    def take(self, layer: int, missing: Sequence[tuple[int, int]]) -> tuple[dict[int, torch.Tensor], int]:
        """Those that are to be computed where they lie, each with its row of the RAM tier, which is held until `let_go`; and how
        many lay there. missing: (expert, rows that it serves), in the order in which they would be loaded.

        Each goes where it would be done first, after what of this layer went there before; a single one stays in RAM if t_cpu <
        t_copy + t_device.
        """
        taken: dict[int, torch.Tensor] = {}
        cpu = link = 0.0  # seconds that they are taken for already
        lay = 0
        for expert, rows in missing:
            row = self._tiers.lying(layer, expert)
            if row is None:
                link += self.costs.copy
                continue
            lay += 1
            if cpu + self.costs.there(rows) < link + self.costs.brought(rows):
                cpu += self.costs.there(rows)
                taken[expert] = row
            else:
                link += self.costs.copy
                self._tiers.let_go(layer, expert)
        return taken, lay

    def let_go(self, layer: int, expert: int) -> None:
        self._tiers.let_go(layer, expert)


@torch.inference_mode()
def measure(decoder: "OffloadedDecoder", tiers: Tiers, pool: SlotPool) -> Costs:
    """What one expert takes on this machine, whatever its bytes say: medians over several rows of RAM tier and slots; what the
    slots hold is lost. With a throttle, bringing takes what that allows."""
    module = decoder.gates[0].experts
    last = next(part for part in decoder.layers[0].parts if part.name == "down_proj")
    hidden = last.shape[1 if module.is_transposed else 0]
    sizes = [1 << n for n in range((decoder.batch - 1).bit_length() + 1)]
    rows = tiers.ram_memory[: min(_TIMES, len(tiers.ram_memory), len(pool.rows))]
    slots = pool.rows[: len(rows)]

    def seconds(work: Callable[[int], object]) -> float:
        taken = []
        for turn in range(_TIMES + 1):
            begin = perf_counter()
            work(turn % len(rows))
            if pool.device.type == "cuda":
                torch.cuda.synchronize(pool.device)
            taken.append(perf_counter() - begin)
        return median(taken[1:])

    def arithmetic(memory: torch.Tensor, n_rows: int) -> float:
        x = torch.ones(n_rows, hidden, dtype=decoder.dtype, device=memory.device)
        parts = [tiers.layout.tensors(row, 0, 0) for row in memory]
        return seconds(lambda turn: run_expert(module, parts[turn], x))

    with running(decoder.device, decoder.threads):
        copy, throttle = seconds(lambda turn: slots[turn].copy_(rows[turn])), decoder.settings.throttle
        return Costs(
            tuple(arithmetic(rows, size) for size in sizes),
            tuple(arithmetic(slots, size) for size in sizes),
            copy if throttle is None else max(copy, decoder.expert_bytes / throttle),
        )


def _place(rows: int, of: tuple[float, ...]) -> int:
    return min((rows - 1).bit_length(), len(of) - 1)
