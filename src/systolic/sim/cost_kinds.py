"""The kind of a priced op, by which profiles correct its price, and the correction."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from systolic.chips import Slice
from systolic.core.errors import OptionError
from systolic.core.units import plural, si
from systolic.hlo import Instruction
from systolic.sim.calibration import Calibration, CostKind
from systolic.sim.price import FEW_BYTES, DevicePrices, OpPrice
from systolic.sim.rates import Rates
from systolic.sim.timeline import PricedBy, Resource, Span, Timeline

FORMATTING = ("copy", "transpose", "reshape")
"""Opcodes of ops on the core that give an array another layout, and beginnings of the names of such fusions."""
LANES = ("core", "ici", "host")
_BETWEEN_CHIPS = {
    kind.value: kind
    for kind in (
        CostKind.all_reduce,
        CostKind.all_gather,
        CostKind.reduce_scatter,
        CostKind.all_to_all,
        CostKind.permute,
    )
}
COLLECTIVES = frozenset((*_BETWEEN_CHIPS.values(), CostKind.dies))
_MATRIX = (PricedBy.cycles, PricedBy.estimate)


def cost_kind(
    name: str,
    opcode: str,
    priced_by: PricedBy | None,
    resource: Resource,
    lane: str,
    *,
    has_matmul: bool = False,
    within_chip: bool = False,
    hbm_bytes: float = 0.0,
) -> CostKind | None:
    """The kind of an op; None of one that no kind of measured op stands for.

    ``hbm_bytes`` are those of device memory, of an op on the core: a pass over arrays in vector memory is of another kind.

    Those are gathers, sorts and other ops that a rule prices with a range of its own, copies between memories that run
    beside compute, what crosses slices, what the user gave, and bookkeeping.
    """
    opcode = opcode.removeprefix("wait ")
    if lane not in LANES:
        return None
    if resource is Resource.host:
        return CostKind.host if priced_by in (PricedBy.bytes, PricedBy.network) else None
    if priced_by is PricedBy.network:
        kind = _BETWEEN_CHIPS.get(opcode) if resource is Resource.ici else None
        return CostKind.dies if kind is not None and within_chip else kind
    if priced_by is PricedBy.kernel:
        return CostKind.kernel
    if has_matmul:
        return CostKind.matmul if priced_by in _MATRIX else None
    if priced_by is not PricedBy.bytes or opcode.endswith("-start"):
        return None
    shown = name if opcode == "fusion" else opcode
    if hbm_bytes > FEW_BYTES:
        return CostKind.formatting if shown.startswith(FORMATTING) else CostKind.elementwise
    return CostKind.vmem_formatting if shown.startswith(FORMATTING) else CostKind.vmem_elementwise


def kind_of_span(span: Span) -> CostKind | None:
    """:func:`cost_kind` of a span."""
    return cost_kind(
        span.name,
        span.opcode,
        span.priced_by,
        span.resource,
        span.lane,
        has_matmul=bool(span.flops or span.vector_flops),
        within_chip=span.within_chip,
        hbm_bytes=span.bytes,
    )


def least_seconds(paid: OpPrice, rates: DevicePrices | Rates) -> float:
    """Seconds of an op's work at the published peaks of the matrix units and of device memory.

    Of a kernel only the matrix work: it may touch any part of its arrays.
    """
    matrix = paid.flops / rates.peaks.get(paid.number_format, rates.peaks["bf16"])
    return matrix if paid.by is PricedBy.kernel else max(matrix, paid.bytes / rates.hbm)


@dataclass(frozen=True)
class PriceCorrection:
    """Corrected prices, and which of them would be faster than the chip."""

    calibration: Calibration
    held: dict[CostKind, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    """Names of the ops that a factor would make faster than published peaks, by kind."""

    def seconds(self, kind: CostKind | None, name: str, seconds: float, least: float) -> float:
        """Corrected seconds of an op; no fewer than ``least``, its work at published peaks."""
        if kind is not None and self.calibration.holds(kind, seconds, least):
            self.held[kind][name] = None
        return self.calibration.seconds(kind, seconds, least)

    def of(self, paid: OpPrice, instruction: Instruction, rates: DevicePrices) -> OpPrice:
        """The price of an op on the core as the calibration of its kind has it."""
        kind = cost_kind(
            instruction.name,
            instruction.opcode,
            paid.by,
            paid.resource,
            "core",
            has_matmul=bool(paid.flops or paid.vector_flops),
            hbm_bytes=paid.bytes,
        )
        least = least_seconds(paid, rates)
        return replace(paid, seconds=self.seconds(kind, instruction.name, paid.seconds, least))

    def host(self, published: float) -> float:
        """Bytes/s of copies between a device and its host: as measured, at most as published."""
        return min(self.calibration.host_bytes_per_second or published, published)

    def notes(self, published: float) -> list[str]:
        """A line for each kind whose factor goes beyond what the chip can do.

        Args:
            published: Bytes/s of the host link.
        """
        name, measured = self.calibration.name, self.calibration.host_bytes_per_second or 0.0
        notes = []
        if measured > published:
            notes.append(
                f"the calibration {name} has host copies at {si(measured, 'B/s')}, and the host link carries {si(published, 'B/s')}: they are taken at that"
            )
        for kind, ops in self.held.items():
            what = (
                "the links carry their bytes"
                if kind in COLLECTIVES
                else "the peaks of the matrix units and of device memory allow"
            )
            notes.append(
                f"the factor {self.calibration.factors[kind].value:.2f} of {kind.value} would make {plural(len(ops), 'op')} faster than {what}: they take what that does ({', '.join(list(ops)[:3])})"
            )
        return notes


def check_chip(calibration: Calibration, on: Slice) -> None:
    """Refuses corrections of another generation of chips.

    Raises:
        OptionError: the slice's chip is another.
    """
    if on.chip.name != calibration.chip:
        raise OptionError(
            f"the calibration {calibration.name} is of {calibration.chip} and {on.name} is {on.chip.name}; leave it out, or make one of a profile of {on.chip.name}: systolic calibrate PROFILE --name NAME"
        )


def corrected_seconds(timeline: Timeline) -> Mapping[CostKind, float]:
    """Seconds of the core in each kind of op that the timeline's calibration corrects."""
    seconds: dict[CostKind, float] = defaultdict(float)
    factors = timeline.calibration.factors if timeline.calibration is not None else {}
    for span, times in timeline.leaves():
        kind = kind_of_span(span) if span.lane == "core" else None
        if kind is not None and kind in factors:
            seconds[kind] += span.seconds * times
    return seconds
