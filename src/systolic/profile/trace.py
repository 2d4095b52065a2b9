"""Content of a profile as plain values, whatever file it came from: planes of lines of events, a device's ops and runs, the host's threads, intervals of seconds."""

import enum
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from systolic.chips import by_device_kind
from systolic.hlo import Module
from systolic.sim.rates import number_format, peaks_of

NANOSECONDS = 1e9
PICOSECONDS = 1e12
DEVICE = re.compile(r"^/device:(?P<kind>TPU|GPU):(?P<number>\d+)(?: SparseCore (?P<sparse>\d+)$)?")
OPS, ASYNC, STEPS, RUNS = "XLA Ops", "Async XLA Ops", "Steps", "XLA Modules"
SPARSE = "Sparse Core Ops"
READ = (OPS, ASYNC, STEPS, RUNS, SPARSE)
"""Lines of a TPU that are read; the names are those of tsl/profiler/utils/xplane_schema.cc."""
Interval = tuple[float, float]


class Backend(enum.Enum):
    """Backends that run a step."""

    tpu = "TPU"
    gpu = "GPU"
    cpu = "CPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEvent:
    """Something on the host; seconds of the trace's clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something on a line of a plane; seconds of the trace's clock."""

    name: str
    start: float
    end: float
    stats: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOp:
    """One run of an op on the device; seconds of the trace's clock."""

    name: str
    """The HLO instruction; a kernel's or a copy's own name where it stands for none."""
    start: float
    end: float
    line: str = ""
    module: str = ""
    program: int | None = None
    run: int | None = None
    """Ops of one run of a program share it, where the profile says so."""
    opcode: str = ""
    text: str = ""
    """The instruction, where the profile has it."""
    category: str = ""
    op_name: str = ""
    source: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    """All that it accesses, wherever."""
    hbm: float | None = None
    """Bytes of device memory among them; None where the profile doesn't say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One run of a program, or a step."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class DeviceTrace:
    """One device of a profile, and its host."""

    path: Path
    backend: Backend
    device: str
    """``TPU:0``; of several hosts ``host TPU:0``."""
    host: str = ""
    """Name of the host, as its file has it."""
    kind: str = ""
    """JAX's name of the device; empty where the profile has none."""
    simulated_by: str = ""
    """The program that wrote a schedule as this profile; empty for a measurement."""
    peak_flops: float | None = None
    """FLOP/s of the matrix units in bf16, as the profile has it."""
    peak_bytes: float | None = None
    """Bytes/s of device memory, as the profile has it."""
    peak_vector_bytes: float | None = None
    """Bytes/s of vector memory, reads and writes together, as the profile has it."""
    ops: Sequence[DeviceOp]
    beside: Sequence[DeviceOp] = ()
    """Asynchronous ops, which run beside the others."""
    sparse: Sequence[DeviceOp] = ()
    """Ops of the device's SparseCores."""
    marks: Sequence[Mark] = ()
    """Steps on the device."""
    runs: Sequence[Mark] = ()
    """Runs of modules on the device, where it has a line of them."""
    steps: Sequence[Mark] = ()
    """``StepTraceAnnotation`` on the host."""
    loop: Sequence[HostEvent] = ()
    """The host's thread that runs the loop."""
    threads: Sequence[Sequence[HostEvent]] = ()
    """The host's other threads."""
    modules: Mapping[int, Module] = field(default_factory=dict)
    """Modules by program id."""
    recorded: tuple[float, float] | None = None
    """Seconds since 1970 at which the profiler began and ended, by the host's clock; None where the file does not say."""
    notes: Sequence[str] = ()

    def peak(self, dtype: str = "bf16") -> float | None:
        """FLOP/s of a matmul with operands of that HLO dtype; None where neither profile nor catalogue has a peak.

        A profile has the peak in bf16 only. The catalogue says by how much another number format is faster.
        """
        chip = by_device_kind(self.kind) if self.kind else None
        peaks = peaks_of(chip) if chip is not None else {}
        known = peaks.get("bf16")
        if chip is None or known is None:
            return self.peak_flops
        bf16 = self.peak_flops or known / (chip.devices_per_chip or 1)
        return bf16 * peaks.get(number_format(dtype), known) / known


@dataclass(frozen=True, kw_only=True)
class Plane:
    """A device or a host."""

    name: str
    stats: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[tuple[str, Sequence[Event]]] = ()
    constants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Stats that all events of a name share."""

    def of(self, *names: str) -> list[Event]:
        """Events of the lines with these names."""
        return [event for name, events in self.lines if name in names for event in events]


def of_jax(plane: Any, constants: Mapping[str, Mapping[str, Any]]) -> Plane:
    """A plane of ``jax.profiler.ProfileData``."""
    tpu = plane.name.startswith("/device:TPU")
    lines = [line for line in plane.lines if not tpu or line.name in READ]
    return Plane(
        name=plane.name,
        stats=dict(plane.stats),
        lines=[(line.name, list(_events(line.events))) for line in lines],
        constants=constants,
    )


def _events(events: Iterable[Any]) -> Iterable[Event]:
    for event in events:
        stats = dict(event.stats)
        start, exact = event.start_ns / NANOSECONDS, stats.get("device_duration_ps")
        end = event.end_ns / NANOSECONDS if exact is None else start + float(exact) / PICOSECONDS
        yield Event(name=event.name, start=start, end=end, stats=stats)


def exclusive(intervals: Sequence[Interval], ranks: Sequence[int]) -> list[float]:
    """Time of each interval that is its own: an instant is shared by those of the lowest rank in it."""
    # An empty one would end before it begins, and stay.
    points = sorted(
        point
        for number, (start, end) in enumerate(intervals)
        if end > start
        for point in ((start, 1, number), (end, 0, number))
    )
    own = [0.0] * len(intervals)
    active: dict[int, set[int]] = defaultdict(set)
    before = points[0][0] if points else 0.0
    for at, begins, number in points:
        now = next((active[rank] for rank in sorted(active) if active[rank]), None)
        if now and at > before:
            for index in now:
                own[index] += (at - before) / len(now)
        before = at
        if begins:
            active[ranks[number]].add(number)
        else:
            active[ranks[number]].discard(number)
    return own


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Union without overlaps, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def missing(busy: Sequence[Interval], within: Interval) -> list[Interval]:
    """Parts of ``within`` that ordered intervals leave."""
    low, high = within
    gaps = []
    for start, end in busy:
        if start > low:
            gaps.append((low, min(start, high)))
        low = max(low, end)
        if low >= high:
            break
    if low < high:
        gaps.append((low, high))
    return [gap for gap in gaps if gap[1] > gap[0]]


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Intersection of two ordered lists of intervals."""
    shared, at = [], 0
    for start, end in first:
        while at < len(second) and second[at][1] <= start:
            at += 1
        number = at
        while number < len(second) and second[number][0] < end:
            shared.append((max(start, second[number][0]), min(end, second[number][1])))
            number += 1
    return shared


def total(intervals: Iterable[Interval]) -> float:
    """Seconds of all of them."""
    return sum(end - start for start, end in intervals)
