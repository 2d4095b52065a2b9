"""A measured step: which part of a profile it is, what the device did in it, where it idled, and the rates that its units can reach.

A step ends where a run of the program that takes most of the time ends (on a TPU, where its line of
steps says so; elsewhere with the last run of a ``StepTraceAnnotation``, where such hold several), so that waiting before
a run counts to its step. Programs of one name that were compiled for other shapes are programs of their own. The median step stands for all. Where
several ops run at a time (threads of a CPU, streams of a GPU), each instant is shared among them; what
moves data between chips or to the host counts only while nothing computes, and a loop only while
nothing in it does.
"""

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from systolic.chips import Chip, by_device_kind, known
from systolic.chips import chip as by_name
from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.units import Origin, si
from systolic.profile.ops import LINKS, Activity, Describer, OpTraffic, ProfiledOp
from systolic.profile.trace import DeviceOp, DeviceTrace, Interval, Mark, exclusive, missing, union
from systolic.profile.xplane import load_all
from systolic.sim.timeline import PricedBy, Span, Timeline

MATRIX, MEMORY, VECTOR_MEMORY = "matrix units", "device memory", "vector memory"
HOST_LINK, DIES = "host link", "links between dies"
ONE_LINK, ALL_LINKS = "one link between chips", "all links of a chip"
_NAMED = {
    MATRIX: "the matrix units",
    MEMORY: MEMORY,
    VECTOR_MEMORY: VECTOR_MEMORY,
    HOST_LINK: "the host link",
    DIES: "the links between dies",
    ONE_LINK: ONE_LINK,
    ALL_LINKS: ALL_LINKS,
}
__all__ = ["Profile", "ProfiledOp", "name_of", "open_profile", "timeline"]
ROUNDING = 2e-9
"""Seconds: runs of programs are known to a nanosecond, ops to a picosecond."""
WAITED = 1e-6
"""Seconds of waiting from which the end of an asynchronous op is known: it ended then, not before."""
Versions = Mapping[tuple[str, str], str]
"""Name and number of a program, to its name among those of the profile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Rate of an op on the unit that bounds it."""

    unit: str
    work: float
    """Bytes, or FLOPs of the matrix units."""
    peak: float | None
    """Peak of the unit, bytes/s or FLOP/s; None where neither profile nor catalogue has it."""

    @property
    def measure(self) -> str:
        """``FLOP`` or ``B``."""
        return "FLOP" if self.unit == MATRIX else "B"

    def share(self, seconds: float) -> float | None:
        """Share of the peak; None where there is none."""
        return self.work / seconds / self.peak if self.peak and seconds > 0 else None

    def text(self, seconds: float) -> str:
        """``5.37 GB at 29.4 GB/s, 46 % of the peak of the host link``; the work alone where it took no time."""
        rate = si(self.work, self.measure)
        if seconds <= 0:
            return rate
        rate += f" at {si(self.work / seconds, f'{self.measure}/s')}"
        share = self.share(seconds)
        return rate if share is None else f"{rate}, {share:.0%} of the peak of {_NAMED[self.unit]}"


@dataclass(frozen=True)
class Ceilings:
    """Peaks of one device: the profile's own, else the catalogue's."""

    trace: DeviceTrace

    @cached_property
    def chip(self) -> Chip | None:
        """The chip in the catalogue."""
        return by_device_kind(self.trace.kind) if self.trace.kind else None

    @property
    def devices(self) -> int:
        """Devices of a chip."""
        return (self.chip.devices_per_chip or 1) if self.chip else 1

    @cached_property
    def memory(self) -> float | None:
        """Bytes/s of device memory."""
        held = self.chip.hbm_bytes_per_second if self.chip else None
        return self.trace.peak_bytes or (held / self.devices if held else None)

    @cached_property
    def host(self) -> float | None:
        """Bytes/s between a device and its host, one way."""
        if self.chip is None or self.chip.kind.value != "tpu":
            return None
        try:
            return float(known(self.chip, "pcie_bytes_per_second_per_chip")) / self.devices
        except (NotFoundError, KeyError):
            return None

    def links(self, group: Sequence[int]) -> tuple[str, float | None]:
        """The links that a collective can use at most, and their bytes/s, one way.

        Two devices share one link (the program's order of devices is taken for the torus's); more may use all
        links of a chip, which is at most what their axes have.
        """
        chip = self.chip
        if chip is None:
            return (ONE_LINK if len(group) == 2 else ALL_LINKS), None
        if self.devices > 1 and len(group) > 1 and len({n // self.devices for n in group}) == 1:
            return DIES, chip.die_to_die_bytes_per_second
        rate = chip.ici_bytes_per_second_per_link
        if chip.num_ici_links is None:
            return ALL_LINKS, rate  # a GPU's figure is of all its links
        if len(group) == 2 and self.devices == 1:
            return ONE_LINK, rate
        return ALL_LINKS, rate * chip.num_ici_links if rate else None

    def rate(
        self, kind: Activity, flops: float, dtype: str, moved: OpTraffic, seconds: float
    ) -> Rate | None:
        """The work of one run of an op on the unit that bounds it; None where the profile tells no work.

        Args:
            kind: The op's.
            flops: FLOPs of the matrix units; a vector unit's count only for other kinds, and are left out.
            dtype: HLO dtype of a matmul's operands; empty where it is not known.
            moved: Its bytes.
            seconds: Its time. A kernel whose arrays are more than device memory moves in it touches parts of them, and
                its bytes are not known.
        """
        if kind is Activity.host:
            return Rate(unit=HOST_LINK, work=moved.host, peak=self.host) if moved.host else None
        if kind is Activity.collective:
            unit, peak = self.links(moved.devices)
            return Rate(unit=unit, work=moved.link, peak=peak) if moved.link else None
        rates = []
        if kind in (Activity.matmul, Activity.kernel) and flops:
            rates.append(Rate(unit=MATRIX, work=flops, peak=self.trace.peak(dtype or "bf16")))
        unknown = kind is Activity.kernel and moved.hbm > (self.memory or math.inf) * seconds
        if moved.hbm and not unknown:
            rates.append(Rate(unit=MEMORY, work=moved.hbm, peak=self.memory))
        elif moved.vmem and not unknown:
            rates.append(
                Rate(unit=VECTOR_MEMORY, work=moved.vmem, peak=self.trace.peak_vector_bytes)
            )
        # The unit that needs the longest; one without a peak only where no other is known.
        return max(
            rates, key=lambda bound: bound.work / bound.peak if bound.peak else -1.0, default=None
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Steps and ops of one device, with the other devices beside it. Times in seconds of the trace's clock."""

    trace: DeviceTrace
    steps: Sequence[Interval]
    runs: Sequence[Mark]
    """Runs of the step's program."""
    programs: Sequence[Mark] = ()
    """Runs of all programs, in order."""
    others: Sequence["Profile"] = ()
    """Profiles of the other devices."""

    @property
    def devices(self) -> Sequence["Profile"]:
        """All devices, this one first."""
        return (self, *self.others)

    @cached_property
    def step(self) -> Interval:
        """The median one; the first, before which waiting can't be seen, only where there are few."""
        known = self.steps[1:] if len(self.steps) > 2 else self.steps
        middle = statistics.median_low(end - start for start, end in known)
        return next(s for s in known if s[1] - s[0] == middle)

    @property
    def seconds(self) -> float:
        """Length of the median step."""
        return self.step[1] - self.step[0]

    @cached_property
    def ops(self) -> list[ProfiledOp]:
        """Ops of the median step, each with its share of it."""
        low, high = self.step
        inside = self.within(self.trace.ops, self.step)
        described = [self.describe(op) for op in inside]
        ranks = [_rank(op) for op in described]
        shares = exclusive([(max(o.start, low), min(o.end, high)) for o in inside], ranks)
        return [
            replace(op, raw=raw, seconds=seconds, flight=self.flight(raw))
            for op, raw, seconds in zip(described, inside, shares, strict=True)
        ]

    @staticmethod
    def within(ops: Iterable[DeviceOp], step: Interval) -> list[DeviceOp]:
        """Ops that run in an interval, without those that reach into it by rounding alone."""
        low, high = step
        return [
            op
            for op in ops
            if min(op.end, high) - max(op.start, low) > ROUNDING
            or (op.start >= low and op.end <= high)
        ]

    @cached_property
    def span(self) -> Interval:
        """All that was traced, from the first step to the end of the last run."""
        starts = [self.steps[0][0], *(mark.start for mark in self.trace.steps[:1])]
        return min(starts), self.steps[-1][1]

    @cached_property
    def gaps(self) -> list[Interval]:
        """Intervals in which the device did nothing."""
        return missing(union((op.start, op.end) for op in self.trace.ops), self.span)

    @cached_property
    def describe(self) -> Describer:
        """Describes ops of this device."""
        return Describer(self.trace)

    @cached_property
    def ceilings(self) -> Ceilings:
        """Rates of the device's units."""
        return Ceilings(self.trace)

    @cached_property
    def flights(self) -> Mapping[int, float]:
        """Seconds of each asynchronous op that was waited for, by the ``id`` of the op that waits.

        From its start, or from the end of the one before it on the same link: copies to the host follow each
        other, and so do those from it.
        """
        return _flights(self.pairs, self.describe)

    @cached_property
    def copying(self) -> Sequence[Interval]:
        """Intervals in which copies to or from the host are under way, from their start to the op that waits for them."""
        return union(
            (begun.start, done.end)
            for begun, done in self.pairs
            if self.describe(done).kind is Activity.host
        )

    @cached_property
    def pairs(self) -> Sequence[tuple[DeviceOp, DeviceOp]]:
        """Asynchronous ops: the one that starts, and the one that waits for it."""
        return _pairs(self.trace.ops, self.describe)

    def rate(self, op: ProfiledOp) -> Rate | None:
        """Work of one run on the unit that bounds it; None where it is not known, or when it was done is not."""
        if op.opcode.endswith("-start") or op.kind is Activity.loop:
            return None
        if op.opcode.endswith("-done") and id(op.raw) not in self.flights:
            return None
        return self.ceilings.rate(op.kind, op.flops, op.dtype, op.traffic, op.flight)

    def flight(self, op: DeviceOp) -> float:
        """Seconds that an op was under way."""
        return self.flights.get(id(op), op.end - op.start)


def open_profile(path: Path, chip: str = "") -> Profile:
    """A profile with its steps found.

    Args:
        path: A file of a profile, or a directory that holds some: the newest counts.
        chip: The devices' chip by its name in the catalogue, for a file that does not name it.

    Raises:
        NotFoundError: there is no profile.
        DataError: it is damaged, or holds no step.
        OptionError: ``chip`` is another than the one that the profile names.
    """
    traces = [_on(chip, trace) for trace in load_all(path)]
    versions = _versions(traces)
    profiles = [profile for trace in traces if (profile := _profile(trace, versions)) is not None]
    if not profiles:
        raise DataError(f"no program runs in {traces[0].path}; trace a few whole steps")
    return replace(profiles[0], others=profiles[1:])


def _on(chip: str, trace: DeviceTrace) -> DeviceTrace:
    """The trace of a device of that chip."""
    if not chip:
        return trace
    named = by_name(chip)
    held = by_device_kind(trace.kind) if trace.kind else None
    if held is not None and held.name != named.name:
        raise OptionError(
            f"--chip is {named.name}, and the profile is of {trace.kind} ({held.name}); leave it out"
        )
    return replace(trace, kind=trace.kind or named.device_kind or "")


def _profile(trace: DeviceTrace, versions: Versions) -> Profile | None:
    """The profile of one device; None where no program runs on it."""
    runs = _runs(trace, versions)
    if not runs:
        return None
    totals: dict[str, float] = defaultdict(float)
    for run in runs:
        totals[run.name] += run.end - run.start
    main = max(totals, key=lambda name: totals[name])
    own = [run for run in runs if run.name == main]
    marks = trace.marks or _annotated(trace, runs, main) or own
    ends = sorted(mark.end for mark in marks)
    starts = [marks[0].start, *ends[:-1]]
    return Profile(trace=trace, steps=list(zip(starts, ends, strict=True)), runs=own, programs=runs)


def timeline(profile: Profile) -> Timeline:
    """The median step: ops of one line in lane ``core``, of others in lanes of their own."""
    low, high = profile.step
    lines: dict[str, str] = {}
    spans = []
    beside = profile.within(profile.trace.beside, profile.step)
    described = [replace(profile.describe(op), raw=op) for op in beside]
    for op in (*profile.ops, *described):
        name = op.raw.line
        lane = lines.setdefault(name, f"core-{len(lines) + 1}" if lines else "core")
        if name == "async":
            lane = op.resource.value if op.resource in LINKS else "dma"
        start = max(op.raw.start, low)
        spans.append(
            Span(
                name=op.raw.name,
                opcode=op.opcode,
                start=start - low,
                seconds=min(op.raw.end, high) - start,
                resource=op.resource,
                lane=lane,
                layer=op.layer,
                source=op.source,
                flops=op.flops,
                bytes=op.bytes,
                priced_by=PricedBy.measured,
            )
        )
    return Timeline(
        origin=Origin.measured,
        seconds=profile.seconds,
        spans=sorted(spans, key=lambda span: span.start),
        notes=[f"left out: {note}" for note in profile.trace.notes],
    )


# Runs


def _versions(traces: Sequence[DeviceTrace]) -> Versions:
    """Programs by name and number to their names here: ``jit_step``, or ``jit_step (1)`` where several have that name."""
    numbers: dict[str, set[str]] = defaultdict(set)
    for trace in traces:
        for name, number in map(_split, trace.runs) if trace.runs else map(_program, trace.ops):
            if name and number:
                numbers[name].add(number)
    return {
        (name, number): f"{name} ({at})" if len(held) > 1 else name
        for name, held in numbers.items()
        for at, number in enumerate(sorted(held, key=lambda number: (len(number), number)), 1)
    }


def name_of(program: str) -> str:
    """Name of a program without that of its version."""
    return program.partition(" (")[0]


def _split(mark: Mark) -> tuple[str, str]:
    """Name and number of a run's program: ``jit_step(123)``."""
    name, _, number = mark.name.partition("(")
    return name, number.removesuffix(")")


def _program(op: DeviceOp) -> tuple[str, str]:
    """Name and number of an op's program; the number is empty where the profile has none."""
    return op.module, "" if op.program is None else str(op.program)


def _runs(trace: DeviceTrace, versions: Versions) -> list[Mark]:
    """Runs of programs, in order."""
    if trace.runs:
        return [
            replace(mark, name=versions.get(_split(mark), _split(mark)[0])) for mark in trace.runs
        ]
    together: dict[tuple[str, int], list[DeviceOp]] = defaultdict(list)
    for op in trace.ops:
        if op.run is not None:
            together[versions.get(_program(op), op.module), op.run].append(op)
    marks = [_mark(name, ops) for (name, _), ops in together.items()] or _cut(trace, versions)
    return sorted(marks, key=lambda mark: mark.end)


def _annotated(trace: DeviceTrace, runs: Sequence[Mark], main: str) -> list[Mark]:
    """Steps by the host's annotations, each up to the end of its last run; empty where they hold one run of ``main`` each.

    A device works behind its host, so that a run may begin after the next annotation has: then runs do not share out
    evenly, and the annotations say nothing of the device.
    """
    starts = [mark.start for mark in trace.steps]
    held: dict[int, list[Mark]] = defaultdict(list)
    for run in runs:
        if (at := bisect.bisect_right(starts, run.start) - 1) >= 0:
            held[at].append(run)
    counts = {sum(run.name == main for run in of) for of in held.values()}
    if len(held) != len(starts) or len(counts) != 1 or counts <= {0, 1}:
        return []
    return [
        Mark(name=trace.steps[at].name, start=of[0].start, end=max(run.end for run in of))
        for at, of in sorted(held.items())
    ]


def _mark(name: str, ops: Iterable[DeviceOp]) -> Mark:
    ops = list(ops)
    return Mark(name=name, start=min(o.start for o in ops), end=max(o.end for o in ops))


def _cut(trace: DeviceTrace, versions: Versions) -> list[Mark]:
    """Runs of the busiest program where ops do not say theirs: most ops run once in each.

    The first of the ops that run as often as most do begins a run.
    """
    by: dict[str, list[DeviceOp]] = defaultdict(list)
    for op in trace.ops:
        if op.module:
            by[versions.get(_program(op), op.module)].append(op)
    if not by:
        return []
    name = max(by, key=lambda key: sum(op.end - op.start for op in by[key]))
    times: dict[str, list[float]] = defaultdict(list)
    for op in by[name]:
        times[op.name].append(op.start)
    often = statistics.mode(len(starts) for starts in times.values())
    starts = min(times_of_op for times_of_op in times.values() if len(times_of_op) == often)
    parts: dict[int, list[DeviceOp]] = defaultdict(list)
    for op in by[name]:
        parts[bisect.bisect_right(starts, op.start)].append(op)
    return [_mark(name, ops) for number, ops in parts.items() if number]


# Ops


def _pairs(ops: Sequence[DeviceOp], describe: Describer) -> Sequence[tuple[DeviceOp, DeviceOp]]:
    """Pairs for :attr:`Profile.pairs`."""
    started: dict[str, DeviceOp] = {}
    pairs = []
    for op in ops:
        if op.opcode.endswith("-start"):
            started[op.name] = op
        if op.opcode.endswith("-done"):
            line = describe(op).line
            begun = started.pop(line.inputs[0], None) if line is not None and line.inputs else None
            if begun is not None:
                pairs.append((begun, op))
    return pairs


def _flights(
    pairs: Sequence[tuple[DeviceOp, DeviceOp]], describe: Describer
) -> Mapping[int, float]:
    """Seconds for :attr:`Profile.flights`."""
    ended: dict[bool, float] = {}
    flights: dict[int, float] = {}
    for begun, done in pairs:
        if done.end - done.start < WAITED:
            continue
        described, start = describe(done), begun.start
        if described.kind is Activity.host:
            way = described.traffic.to_host
            start = max(start, ended.get(way, start))
            ended[way] = done.end
        flights[id(done)] = done.end - start
    return flights


def _rank(op: ProfiledOp) -> int:
    """Ops of a higher rank count only while none of a lower one runs."""
    if op.kind is Activity.loop:
        return 2
    return 1 if op.resource in LINKS else 0
