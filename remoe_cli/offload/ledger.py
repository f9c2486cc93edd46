"""What a request did, as its layers write it down."""

from dataclasses import dataclass, field

from remoe_cli.offload.store import IoCount


@dataclass
class Ledger:
    """What one request (or batch of them) did. loads: for each decode step, (layer, expert) of all that was read for it, in
    order; step: which of them runs, -1 in the prompt; guesses: reads ahead of the router; guessed: misses that such a read
    had brought or begun; rerouted: experts that ran in place of the router's own."""

    loads: list[list[tuple[int, int]]]
    step: int = -1
    prefill: IoCount = field(default_factory=IoCount)
    decode: IoCount = field(default_factory=IoCount)
    guesses: int = 0
    guessed: int = 0
    rerouted: int = 0

    @property
    def in_prefill(self) -> bool:
        return self.step < 0

    @property
    def count(self) -> IoCount:
        return self.prefill if self.in_prefill else self.decode
