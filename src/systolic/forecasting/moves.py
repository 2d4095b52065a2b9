"""Arrays that a program moves outside of jit between two steps: their seconds, and a line for each cause."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from systolic.capture.program import ArrayMoves, MovedBytes
from systolic.chips import Slice
from systolic.core.units import duration, gibibytes, plural
from systolic.sim.calibration import Calibration
from systolic.sim.cost_kinds import PriceCorrection
from systolic.sim.gpu_ops import gpu_device
from systolic.sim.rates import rates_of
from systolic.sim.timeline import PricedBy, Resource, Span, Timeline

MOVED = 0.01
"""Share of a step that its moves outside of jit take, above which it is told."""
CAUSES = {
    "put": ("device_put", "jax.device_put outside of jit moves arrays"),
    "spread": (
        "arguments on one device",
        "jit copies arguments that lie on one device, committed to none, to those of the call",
    ),
    "read": ("arrays read", "the program reads arrays on the host"),
}
"""For each cause of moves their name in the timeline, and what a line begins with."""
FED = "fed"
"""Arrays of the host, such as batches: an input pipeline hides them, so that they are no part of the time."""
WAYS = {
    "host": "between device and host",
    "devices": "between devices",
    "slices": "between slices",
}


@dataclass(frozen=True)
class Links:
    """Bytes/s of the ways that arrays are moved outside of jit, that of the host as calibrated."""

    host: float
    devices: float
    slices: float

    @classmethod
    def of(cls, on: Slice, calibration: Calibration | None) -> "Links":
        """Rates of a slice's device; of a GPU NVLink's, and its share of its host's network for other hosts."""
        if on.platform == "gpu":
            device, chip = gpu_device(on, range(on.num_devices)), on.chip
            network = (chip.dcn_bytes_per_second_per_host or 0.0) / (chip.chips_per_host or 1)
            return cls(host=device.host, devices=device.link, slices=network)
        rates = rates_of(on)
        host = rates.host if calibration is None else PriceCorrection(calibration).host(rates.host)
        # A device at a corner has a link along each axis, and two along one that is closed to a ring.
        links = sum(
            2 if closed and size > 2 else 1
            for size, closed in zip(on.topology, on.wrap, strict=True)
            if size > 1
        )
        return cls(host=host, devices=max(links, 1) * rates.link, slices=rates.dcn)

    def spans(self, moves: MovedBytes, name: str) -> list[Span]:
        """Seconds of what is moved between two steps, at the rates of the links: a lower bound."""
        ways = (
            (moves.host, Resource.host, self.host),
            (moves.devices, Resource.ici, self.devices),
            (moves.slices, Resource.dcn, self.slices),
        )
        return [
            Span(
                name=name,
                opcode="copy",
                layer=name,
                start=0.0,
                seconds=size / rate,
                resource=resource,
                bytes=round(size),
                priced_by=PricedBy.bytes,
            )
            for size, resource, rate in ways
            if size and rate
        ]


def with_moves(timeline: Timeline, moved: Sequence[Span]) -> Timeline:
    """A step with what is moved outside of its programs behind it."""
    for span in moved:
        timeline = replace(
            timeline,
            seconds=timeline.seconds + span.seconds,
            spans=(*timeline.spans, replace(span, start=timeline.seconds)),
            most=timeline.most and with_moves(timeline.most, [span]),
            least=timeline.least and with_moves(timeline.least, [span]),
        )
    return timeline


def lines_of(
    moves: Mapping[str, ArrayMoves],
    moved: Mapping[str, Sequence[Span]],
    step: float,
    links: Links,
) -> list[str]:
    """The lines of what is moved outside of the step's programs, which take ``step`` seconds."""
    lines = []
    for cause, mean in moves.items():
        if cause == FED:
            continue
        seconds = sum(span.seconds for span in moved[cause])
        if seconds <= MOVED * step:
            continue
        name, begin = CAUSES[cause]
        rates = "at the rates of the links, counted behind the step's programs and not beside them"
        some = mean.some
        if some is None:
            lines.append(
                f"{begin} {_times(mean.times)} a step, {_sizes(mean)} one after the other: {duration(seconds)} {rates}"
            )
            continue
        taken = sum(span.seconds for span in links.spans(some, name))
        rare = f"every {some.every:.3g} steps ({some.steps:,} of {some.of:,} that were recorded), {_sizes(some)} one after the other, {duration(taken)} {rates}: {duration(taken / some.every)} of a step on average"
        always = mean.without(some)
        if max(always.host, always.devices, always.slices) >= 1:
            lines.append(
                f"{begin} {_times(always.times)} a step, {_sizes(always)} one after the other; and more {rare}, {duration(seconds)} with the others"
            )
        else:
            lines.append(f"{begin} with some steps alone, {rare}")
    return lines


def notes_of(moves: Mapping[str, ArrayMoves], step: float, links: Links) -> list[str]:
    """The line of what a step takes from the host, where that is not little beside ``step`` seconds."""
    fed = moves.get(FED)
    if fed is None or not links.host or fed.host / links.host <= MOVED * step:
        return []
    seconds = duration(fed.host / links.host)
    return [
        f"a step takes {gibibytes(round(fed.host))} of arrays from the host, such as batches: {seconds} at the rate of the link, which is not in the time; without an input pipeline that puts them ahead, the step waits for it"
    ]


def _times(number: float) -> str:
    """How often, with a decimal where it is no whole number."""
    return plural(round(number) if abs(number - round(number)) < 0.05 else round(number, 1), "time")


def _sizes(moves: MovedBytes) -> str:
    """Bytes of moves by the links that they take."""
    sizes = ((moves.host, "host"), (moves.devices, "devices"), (moves.slices, "slices"))
    return ", ".join(f"{gibibytes(round(size))} {WAYS[kind]}" for size, kind in sizes if size >= 1)
