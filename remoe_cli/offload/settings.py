"""How experts reach a decoder's slots."""

from dataclasses import dataclass

from remoe_cli.errors import UsageError

IO = ("direct", "buffered")
WARMS = ("cold", "batch", "carry")
MOST_READERS = 64
HINT = "remoe decode --help"


@dataclass(frozen=True)
class Settings:
    """readers: threads that read files. io: "direct" reads past the page cache (O_DIRECT) where the file system lets it,
    "buffered" through it. ram: bytes of a second tier in memory between the files and the slots, 0 for none; it is as
    fresh as the cache. guess: so many
    experts of the next layer, at most, are read before its router has chosen. throttle: bytes a second at which experts
    come into the slots, to emulate a slower link. warm: "cold": a fresh cache a request, which the prompt goes past;
    "batch": a fresh one, through which the prompt goes as one step a layer; "carry": one cache lives on from request to
    request and prompts go past it (the words of `replay`). in_place: a missing expert that the RAM tier holds is computed on the
    CPU where that takes less time than bringing it. heavy: of a token's routing weight, the share whose experts, the
    heaviest first, are read as the checkpoint stores them when they miss, the others in fewer bits; None: all alike.

    Raises UsageError for values outside of these.
    """

    readers: int = 2
    io: str = "direct"
    ram: int = 0
    guess: int = 0
    throttle: float | None = None
    warm: str = "cold"
    in_place: bool = False
    heavy: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.readers <= MOST_READERS:
            raise UsageError(f"{self.readers} reader threads: from 1 to {MOST_READERS}.", HINT)
        if self.io not in IO:
            raise UsageError(f"io is {' or '.join(IO)}, not {self.io!r}.", HINT)
        if self.warm not in WARMS:
            raise UsageError(f"warm is one of {', '.join(WARMS)}, not {self.warm!r}.", HINT)
        if self.ram < 0 or self.guess < 0:
            raise UsageError("neither the RAM tier nor a guess can be negative.", HINT)
        if self.in_place and not self.ram:
            raise UsageError("experts are computed in place where a RAM tier holds them, and there is none.", HINT)
        if self.in_place and self.heavy is not None:
            raise UsageError("experts in two precisions are not computed in place: leave out one of the two.", HINT)
        if self.heavy is not None and not 0 <= self.heavy <= 1:
            raise UsageError(f"heavy is a share of the routing weight, from 0 to 1, not {self.heavy}.", HINT)
        if self.throttle is not None and not 0 < self.throttle < float("inf"):
            raise UsageError(f"a throttle is a positive number of bytes a second, not {self.throttle}.", HINT)
