"""The I/O floor: a request's loads once more, layer by layer at the same pace, without the model between them."""

from itertools import groupby
from time import perf_counter, sleep

from remoe_cli.offload.decoded import Decoded, DecodedBatch, Floor
from remoe_cli.offload.readers import Load
from remoe_cli.offload.slots import SlotPool
from remoe_cli.offload.store import IoCount
from remoe_cli.offload.tiers import Tiers


def replay_loads(tiers: Tiers, pool: SlotPool, done: Decoded | DecodedBatch, n_layers: int) -> Floor:
    """Each layer's loads are begun together and waited for; between layers the storage rests as long as the model computed
    (shared and virtual disks give more to whoever asks less), which is not counted.

    All of the pool's slots are used; nothing may be in them.
    """
    count, seconds = IoCount(), []
    busy_before = tiers.busy_s
    for token, loads in enumerate(done.loads):
        computed = done.latency.itl_s[token] - done.split.tokens["wait"][token]
        waited = 0.0
        for _, group in groupby(loads, key=lambda load: load[0]):
            since = perf_counter()
            waiting = [(layer, expert) for layer, expert in group]
            begun: list[Load] = []
            while waiting or begun:
                while waiting and pool.n_free:
                    begun.append(tiers.begin(*waiting.pop(0), pool.acquire(), count))
                load = begun.pop(0)
                tiers.arrive(load)
                pool.release(load.slot)
            waited += perf_counter() - since
            sleep(computed / n_layers)
        seconds.append(waited)
    return Floor(tuple(seconds), count.bytes, tiers.busy_s - busy_before)
