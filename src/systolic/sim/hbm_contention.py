"""Device memory beside itself: transfers into the chip's vector memory run beside ops that read device memory too.

The schedule has them on two lanes. Together they take no less than their bytes at the rate that copies reach, which binds a
step that does little else than read weights: a token of a server.
"""

from systolic.sim.calibration import constant
from systolic.sim.rates import Rates
from systolic.sim.timeline import PricedBy, Resource, Span, Timeline

DMA_SHARE: float = constant("hbm_contention.dma_share")
LANES = ("core", "dma")
"""Lanes whose spans read and write device memory."""


def memory_seconds(timeline: Timeline, rates: Rates) -> float:
    """Seconds of device memory in a step: of each span its bytes at the rate of copies, and no more than the span takes."""
    rate = rates.hbm * DMA_SHARE
    return sum(
        times * min(span.seconds, span.bytes / rate)
        for span, times in timeline.leaves()
        if span.lane in LANES and span.resource not in (Resource.ici, Resource.dcn, Resource.host)
    )


def shared(start: float, seconds: float) -> Span:
    """The wait for the memory, at the end of a step."""
    return Span(
        name="memory",
        opcode="wait memory",
        start=start,
        seconds=seconds,
        resource=Resource.hbm,
        priced_by=PricedBy.rule,
    )
