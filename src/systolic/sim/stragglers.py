"""Waiting for the slowest slice: an allowance, since no schedule shows it.

Published steps at equal work per slice grow with the number of slices by more than what they exchange: each
step ends when the slowest slice has ended. The growth is about as much for each doubling.
"""

import math

from systolic.sim.calibration import constant
from systolic.sim.timeline import PricedBy, Resource, Span

SHARE_PER_DOUBLING: float = constant("waits.share_per_doubling")


def wait_for_slices(seconds: float, num_slices: int) -> float:
    """Seconds that a step of ``seconds`` waits for the slowest of the slices that it exchanges with."""
    return SHARE_PER_DOUBLING * math.log2(num_slices) * seconds


def slowest_slice(start: float, seconds: float) -> Span:
    """The wait for the slowest slice, at the end of a step."""
    return Span(
        name="slowest-slice",
        opcode="wait slices",
        start=start,
        seconds=seconds,
        resource=Resource.dcn,
        priced_by=PricedBy.allowance,
    )
