"""Random: whoever may leave is equally likely to."""

from __future__ import annotations

from remoe_cli.cache.policy import Memory, Policy


def key(m: Memory, expert: int) -> float:
    """A number drawn from (seed, token, expert); whole numbers below 2^62, so that it is the same for Python and int64."""
    prime = 2147483647
    drawn = int(m.table[0])
    for part in range(2):
        mixed = (drawn + (m.now[0] if part == 0 else expert) + 1) % prime
        # x^5 permutes the numbers below this prime, and has no pattern in neighbours.
        square = mixed * mixed % prime
        drawn = (square * square % prime * mixed + 48271) % prime
    return float(drawn)


POLICY = Policy(
    title="any expert may leave, each as likely as the other; PARAMETER is the seed",
    key=key,
    parameter=0.0,
    allowed=(0.0, 1e9),
    whole=True,
    source="the usual control; a seed makes it the same again",
)
