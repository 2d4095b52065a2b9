"""A measured step: which part of a profile it is, what the device did in it, and where it idled.

A step ends where a run of the program that takes most of the time ends (on a TPU, where its line of
steps says so), so that waiting before a run counts to its step. The median step stands for all. Where
several ops run at a time (threads of a CPU, streams of a GPU), each instant is shared among them; what
moves data between chips or to the host counts only while nothing computes, and a loop only while
nothing in it does.
"""

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from systolic.core.errors import DataError
from systolic.core.origin import Origin
from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.collectives import COLLECTIVES
from systolic.hlo.origin import named
from systolic.profile.intervals import Interval, exclusive, missing, union
from systolic.profile.xplane import Backend, DeviceOp, DeviceTrace, Mark, load
from systolic.sim.layers import layer_of
from systolic.sim.timeline import PricedBy, Resource, Span, Timeline
from systolic.sim.work import work_of

CONTAINERS = ("while", "conditional", "call")
COPIES = ("copy", "transpose", "reshape")
KERNELS = ("nccl", "rccl")
"""Beginnings of the names of kernels that move data between GPUs."""
TRANSFERS = ("memcpyh2d", "memcpyd2h", "host-transfer", "infeed", "outfeed")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledOp:
    """One run of an op in the step, with its place in the module where the profile has that."""

    raw: DeviceOp
    seconds: float
    """Its share of the step."""
    opcode: str
    op_name: str
    source: str
    flops: float
    bytes: float
    dtype: str
    """HLO dtype of a matmul's operands; empty where it is not known."""
    resource: Resource
    module: Module | None = None
    computation: Computation | None = None
    instruction: Instruction | None = None

    @property
    def layer(self) -> str:
        """Path of names in the model."""
        return layer_of(self.op_name)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Steps and ops of one device. Times in seconds of the trace's clock."""

    trace: DeviceTrace
    steps: Sequence[Interval]
    runs: Sequence[Mark]
    """Runs of the step's program."""

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
        inside = [op for op in self.trace.ops if op.end > low and op.start < high]
        described = [self._described(op) for op in inside]
        ranks = [_rank(op) for op in described]
        shares = exclusive([(max(o.start, low), min(o.end, high)) for o in inside], ranks)
        return [replace(op, seconds=seconds) for op, seconds in zip(described, shares, strict=True)]

    @cached_property
    def span(self) -> Interval:
        """All that was traced, from the first step to the end of the last run."""
        starts = [self.steps[0][0], *(mark.start for mark in self.trace.steps[:1])]
        return min(starts), self.steps[-1][1]

    @cached_property
    def gaps(self) -> list[Interval]:
        """Intervals in which the device did nothing."""
        return missing(union((op.start, op.end) for op in self.trace.ops), self.span)

    def _described(self, op: DeviceOp) -> ProfiledOp:
        module = self.trace.modules.get(op.program) if op.program is not None else None
        places = self._index.get(op.program, {}) if op.program is not None else {}
        computation, instruction = places.get(op.name, (None, None))
        if module is None or computation is None or instruction is None:
            return _plain(op, self.trace)
        source = named(module, computation, instruction)
        line = module.source(source)
        work = work_of(module, computation, instruction)
        flops, moved = op.flops or work.flops, op.bytes or work.bytes
        opcode = op.opcode or instruction.opcode
        return ProfiledOp(
            raw=op,
            seconds=0.0,
            opcode=opcode,
            op_name=op.op_name or source.op_name,
            source=op.source or (str(line) if line else ""),
            flops=flops,
            bytes=moved,
            dtype=work.dtype if work.flops else "",
            resource=_resource(op, opcode, (flops, moved), self.trace, work.dtype),
            module=module,
            computation=computation,
            instruction=instruction,
        )

    @cached_property
    def _index(self) -> Mapping[int, Mapping[str, tuple[Computation, Instruction]]]:
        return {
            program: {i.name: (c, i) for c in module.computations.values() for i in c}
            for program, module in self.trace.modules.items()
        }


def open_profile(path: Path) -> Profile:
    """A profile with its steps found.

    Raises:
        NotFoundError: there is no profile.
        DataError: it is damaged, or holds no step.
    """
    trace = load(path)
    runs = _runs(trace)
    if not runs:
        raise DataError(f"no program runs in {trace.path}; trace a few whole steps")
    totals: dict[str, float] = defaultdict(float)
    for run in runs:
        totals[run.name] += run.end - run.start
    main = max(totals, key=lambda name: totals[name])
    own = [run for run in runs if run.name == main]
    marks = trace.marks or own
    ends = sorted(mark.end for mark in marks)
    starts = [marks[0].start, *ends[:-1]]
    return Profile(trace=trace, steps=list(zip(starts, ends, strict=True)), runs=own)


def read_profile(path: Path) -> Timeline:
    """The median step of a profile, measured.

    Args:
        path: An ``xplane.pb`` of a TPU, a GPU or a CPU, or a directory that holds some: the newest counts.

    Raises:
        NotFoundError: there is no profile.
        DataError: it is damaged, or holds no step.
    """
    return timeline(open_profile(path))


def timeline(profile: Profile) -> Timeline:
    """The median step: ops of one line in lane ``core``, of others in lanes of their own."""
    low, high = profile.step
    lines: dict[str, str] = {}
    spans = []
    beside = [op for op in profile.trace.beside if op.end > low and op.start < high]
    described = [profile._described(op) for op in beside]
    for op in (*profile.ops, *described):
        name = op.raw.line
        lane = lines.setdefault(name, f"core-{len(lines) + 1}" if lines else "core")
        if name == "async":
            lane = op.resource.value if op.resource in _LINKS else "dma"
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


def _runs(trace: DeviceTrace) -> list[Mark]:
    """Runs of programs, in order; their names without the program's number."""
    if trace.runs:
        return [
            Mark(name=mark.name.split("(")[0], start=mark.start, end=mark.end)
            for mark in trace.runs
        ]
    together: dict[tuple[str, int], list[DeviceOp]] = defaultdict(list)
    for op in trace.ops:
        if op.run is not None:
            together[op.module, op.run].append(op)
    found = [_mark(name, ops) for (name, _), ops in together.items()] or _cut(trace)
    return sorted(found, key=lambda mark: mark.end)


def _mark(name: str, ops: Iterable[DeviceOp]) -> Mark:
    ops = list(ops)
    return Mark(name=name, start=min(o.start for o in ops), end=max(o.end for o in ops))


def _cut(trace: DeviceTrace) -> list[Mark]:
    """Runs of the busiest program where ops do not say theirs: most ops run once in each.

    The first of the ops that run as often as most do begins a run.
    """
    by: dict[str, list[DeviceOp]] = defaultdict(list)
    for op in trace.ops:
        if op.module:
            by[op.module].append(op)
    if not by:
        return []
    name = max(by, key=lambda key: sum(op.end - op.start for op in by[key]))
    times: dict[str, list[float]] = defaultdict(list)
    for op in by[name]:
        times[op.name].append(op.start)
    often = statistics.mode(len(starts) for starts in times.values())
    starts = min(found for found in times.values() if len(found) == often)
    parts: dict[int, list[DeviceOp]] = defaultdict(list)
    for op in by[name]:
        parts[bisect.bisect_right(starts, op.start)].append(op)
    return [_mark(name, ops) for number, ops in parts.items() if number]


# Ops


_LINKS = (Resource.ici, Resource.dcn, Resource.host)


def _plain(op: DeviceOp, trace: DeviceTrace) -> ProfiledOp:
    """An op of which only the profile's own stats are known."""
    work = (op.flops, op.bytes)
    return ProfiledOp(
        raw=op,
        seconds=0.0,
        opcode=op.opcode,
        op_name=op.op_name,
        source=op.source,
        flops=op.flops,
        bytes=op.bytes,
        dtype="",
        resource=_resource(op, op.opcode, work, trace),
    )


def _resource(
    op: DeviceOp, opcode: str, work: tuple[float, float], trace: DeviceTrace, dtype: str = "bf16"
) -> Resource:
    """Resource that bounds an op: by its kind, then by its work over the device's peaks."""
    kind = f"{opcode} {op.category}".lower()
    if any(one in kind for one in COLLECTIVES) or op.name.lower().startswith(KERNELS):
        return Resource.ici
    if opcode.startswith(("send", "recv")) and "host" not in kind:
        return Resource.dcn
    if any(one in f"{kind} {op.name}".lower() for one in TRANSFERS):
        return Resource.host
    if opcode.startswith(COPIES):
        return Resource.hbm
    flops, moved = work
    if not flops and not moved:
        return Resource.vpu
    if trace.backend is Backend.tpu and flops and not _multiplies(op, opcode):
        flops = 0.0  # the profile counts a vector unit's additions too
    peak = trace.peak(dtype)
    if peak and trace.peak_bytes and flops:
        full = flops / peak >= moved / trace.peak_bytes
        return Resource.mxu if full else Resource.hbm
    return Resource.mxu if flops else Resource.hbm


def _multiplies(op: DeviceOp, opcode: str) -> bool:
    """Whether a TPU's op is one of its matrix units, by the kind that the profile gives it."""
    kind = f"{opcode} {op.category}"
    return any(word in kind for word in ("convolution", "dot", "custom-call"))


def _rank(op: ProfiledOp) -> int:
    """Ops of a higher rank count only while none of a lower one runs."""
    if op.opcode in CONTAINERS or op.raw.category in CONTAINERS:
        return 2
    return 1 if op.resource in _LINKS else 0
