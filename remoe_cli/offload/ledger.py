"""What a request did, as its layers write it down."""

from dataclasses import dataclass, field

from remoe_cli.cache import choose
from remoe_cli.cache.policy import SCORES
from remoe_cli.cache.prefetch import SEEN
from remoe_cli.families import Heads
from remoe_cli.offload.store import IoCount, storage_bytes


@dataclass
class InPlaceCount:
    """in_ram: misses of the decode steps that the RAM tier held; computed: those of them that were computed there; spared: those
    of these that never came into a slot, the others came later; seconds: what the arithmetic took, and brought_s: what bringing
    and computing them would have, by the costs that were measured."""

    in_ram: int = 0
    computed: int = 0
    spared: int = 0
    seconds: float = 0.0
    brought_s: float = 0.0


@dataclass
class Ledger:
    """What one request (or batch of them) did. loads: for each decode step, (layer, expert) of all that was read for it, in
    order; step: which of them runs, -1 in the prompt; guesses: reads ahead of the router; guessed: misses that such a read
    had brought or begun; rerouted: experts that ran in place of the router's own; light: misses that came in fewer
    bits than others."""

    loads: list[list[tuple[int, int]]]
    step: int = -1
    prefill: IoCount = field(default_factory=IoCount)
    decode: IoCount = field(default_factory=IoCount)
    guesses: int = 0
    guessed: int = 0
    rerouted: int = 0
    light: int = 0
    in_place: InPlaceCount = field(default_factory=InPlaceCount)

    @property
    def in_prefill(self) -> bool:
        return self.step < 0

    @property
    def count(self) -> IoCount:
        return self.prefill if self.in_prefill else self.decode


def doubt_direct(io: str, ledger: Ledger) -> str:
    """Why reads past the page cache may not have been that, "" where nothing says so: some file systems take O_DIRECT and serve it
    from memory all the same."""
    stored = [part.storage_bytes for part in (ledger.prefill, ledger.decode)]
    read = ledger.prefill.read_bytes + ledger.decode.read_bytes
    if io == "direct" and None not in stored and sum(map(int, filter(None, stored))) < read / 2:
        return "the kernel counts far fewer bytes from storage than were read: some may come from memory"
    return ""


def since(before: int | None) -> int | None:
    """Bytes from storage since then; None where the kernel does not say."""
    now = storage_bytes()
    return None if before is None or now is None else now - before


def noted(policy: str, heads: Heads | None, everything: bool) -> list[str]:
    """Which scores of all experts the blocks note at each token: those that the policy and its prefetcher read, and with `everything`
    all that routers and heads give."""
    there = ("probabilities", *(heads.kinds if heads is not None else ()))
    chosen = choose(policy)
    ahead = chosen.prefetch.kind.reads if chosen.prefetch is not None else ()
    wanted = {*chosen.policy.needs, *(there if everything else ()), *ahead}
    return [kind for kind in (*SCORES, *SEEN[1:]) if kind in wanted]
