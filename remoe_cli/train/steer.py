"""Steering: how the weight of locality follows a limit on perplexity. The control law, as pure functions.

The locality terms have a factor, 1 at first. At regular steps the perplexity of held-out texts that serve this alone is
measured, and the factor moves: by the distance from the limit (so that it ends there), and against what perplexity did since
the last measurement (so that it does not overshoot, since gates take tens of steps to follow). Everything is measured while
the learning rate falls too; where it is nearly 0 neither the factor nor perplexity moves any more.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

MEASUREMENTS = 30  # a run; on the demo they cost a quarter of its time, on larger runs far less
START = 1.0
LEAST, MOST = 0.02, 50.0
PATIENCE = 4  # measurements over which a distance is made up
LEAST_UNIT = 0.005


class Point(NamedTuple):
    """step: completed ones. change: of the perplexity against the base's (.01 is 1 %). steer: the factor of the locality
    terms from there on; None at the run's end."""

    step: int
    change: float
    steer: float | None


def interval(steps: int) -> int:
    """Steps from one measurement to the next."""
    return max(1, round(steps / MEASUREMENTS))


def next_factor(points: Sequence[Point], change: float, limit: float) -> float:
    """The factor after `points`, where the perplexity now differs by `change`. limit: as a change too.

    A distance of one unit for PATIENCE measurements, or a rise by it, is a factor of e. The unit is the limit: what an e-fold
    weight adds to perplexity there is about that, or more.
    """
    if not points or points[-1].steer is None:
        return START
    last, unit = points[-1], max(limit, LEAST_UNIT)
    exponent = ((limit - change) / PATIENCE - (change - last.change)) / unit
    return min(MOST, max(LEAST, points[-1].steer * math.exp(max(-0.5, min(0.5, exponent)))))
