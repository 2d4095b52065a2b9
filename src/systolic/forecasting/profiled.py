"""A forecast beside its measurement: what the schedule's simulation says of each op, and what the chip did.

Ops are matched by the names of their instructions. Nothing of a profile is used to fit the simulator.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systolic.chips import Slice
from systolic.compiling.host_backend import measured_rates
from systolic.compiling.kernels import counted_elsewhere
from systolic.core.errors import NotFoundError
from systolic.forecasting.platforms import cpu_peaks
from systolic.hlo import Computation, Instruction, Module, Shape
from systolic.hlo.groups import COLLECTIVES
from systolic.profile import open_profile
from systolic.profile.ops import replica_groups
from systolic.profile.table import OpRow, ProfileTable
from systolic.runs.job_record import compiled_with, read_record
from systolic.runs.record import slice_of
from systolic.runs.run import Run
from systolic.sim.incomplete import PALLAS
from systolic.sim.roofline import ModuleSource, roofline
from systolic.sim.simulate import simulate
from systolic.sim.timeline import Timeline

LEAST = 1e-6
"""Seconds of an op in a step from which its ratio counts: shorter ones are as long as the profiler's own noise."""
HIGH, LOW = 0.9, 0.1


Key = tuple[str, str]
"""Program and name of an instruction."""
_NUMBER = re.compile(r"[.\d]+$")
ALL = "replica_groups={}"
"""Groups of a collective over all devices, and what JAX reads of compact groups in a profile's module."""
ALONE = "replica_groups={{0}}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpBeside:
    """An op with its seconds in a run of its program, simulated and measured."""

    program: str
    name: str
    opcode: str
    kind: str
    simulated: float
    measured: float
    times: float
    """Runs in a step."""
    place: str
    """Source line, else the path of names."""

    @property
    def difference(self) -> float:
        """Measured less simulated, seconds."""
        return self.measured - self.simulated

    @property
    def ratio(self) -> float | None:
        """Simulated over measured; None for an op too short to tell."""
        return self.simulated / self.measured if self.measured >= LEAST else None

    def to_json(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return {
            "program": self.program,
            "name": self.name,
            "opcode": self.opcode,
            "kind": self.kind,
            "simulated_seconds": self.simulated,
            "measured_seconds": self.measured,
            "difference_seconds": self.difference,
            "times": self.times,
            "place": self.place,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class KindBeside:
    """All ops of a kind."""

    kind: str
    number: int
    simulated: float
    measured: float
    median: float | None
    """Median of the ops' ratios, simulated over measured; None where all ops are too short."""
    low: float | None
    """10th percentile."""
    high: float | None
    """90th percentile."""

    def to_json(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return {
            "kind": self.kind,
            "ops": self.number,
            "simulated_seconds": self.simulated,
            "measured_seconds": self.measured,
            "median_ratio": self.median,
            "p10_ratio": self.low,
            "p90_ratio": self.high,
        }


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A step's ops, the largest difference first."""

    program: str
    ops: Sequence[OpBeside]
    measured_alone: float
    """Seconds of the step in ops that the simulation has not."""
    simulated_alone: float
    """Seconds of the simulation in ops that the profile has not."""
    simulated_step: float
    measured_step: float
    """Median of the program's runs."""
    runs: float = 0.0
    """Runs of the program on one device."""
    notes: Sequence[str] = ()

    @property
    def alike(self) -> list[Sequence[OpBeside]]:
        """Ops of one program, opcode and name but for its number, the largest difference of all together first."""
        by: dict[tuple[str, ...], list[OpBeside]] = defaultdict(list)
        for op in self.ops:
            by[op.program, op.opcode, _NUMBER.sub("", op.name)].append(op)
        return sorted(by.values(), key=lambda of: -abs(sum(op.difference for op in of)))

    @property
    def kinds(self) -> list[KindBeside]:
        """Kinds of op, the most measured seconds first."""
        by: dict[str, list[OpBeside]] = defaultdict(list)
        for op in self.ops:
            by[op.kind].append(op)
        rows = [_kind(kind, of) for kind, of in by.items()]
        return sorted(rows, key=lambda row: -row.measured)


def _kind(kind: str, of: Sequence[OpBeside]) -> KindBeside:
    ratios = sorted(ratio for op in of if (ratio := op.ratio) is not None)

    def at(share: float) -> float | None:
        return ratios[min(int(share * len(ratios)), len(ratios) - 1)] if ratios else None

    return KindBeside(
        kind=kind,
        number=len(of),
        simulated=sum(op.simulated for op in of),
        measured=sum(op.measured for op in of),
        median=statistics.median(ratios) if ratios else None,
        low=at(LOW),
        high=at(HIGH),
    )


def beside(
    table: ProfileTable, simulated: Mapping[Key, float], step: float = 0.0, *, whole: bool = True
) -> Beside:
    """The ops of programs, measured and simulated.

    Args:
        table: Ops of a profile.
        simulated: Seconds in a run of its program by program and name of the instruction; of an asynchronous op by the
            name of the instruction that starts it.
        step: Seconds of the simulated step; 0 where ops are priced alone.
        whole: Whether asynchronous ops were simulated in their program, and so by what it waits for them; else by the
            time in which their bytes move.
    """
    programs = {row.name: row for row in table.programs}
    wanted = {program for program, _ in simulated}
    by: dict[Key, list[OpRow]] = defaultdict(list)
    for row in table.ops:
        if row.program in wanted and (whole or not row.op.opcode.endswith("-start")):
            by[row.program, begun_by(row)].append(row)
    ops, alone = [], 0.0
    for key, of in by.items():
        runs = programs[key[0]].runs if key[0] in programs else 1.0
        seconds = sum(_measured(row, whole=whole) for row in of) / runs
        if key not in simulated:
            alone += seconds
            continue
        first = max(of, key=lambda row: row.seconds)
        ops.append(
            OpBeside(
                program=key[0],
                name=first.op.raw.name,
                opcode=first.op.opcode,
                kind=first.op.kind.value,
                simulated=simulated[key],
                measured=seconds,
                times=first.calls / runs,
                place=first.op.source or first.op.op_name,
            )
        )
    main = next((row for row in table.programs if row.name in wanted), None)
    return Beside(
        program=main.name if main is not None else "",
        ops=sorted(ops, key=lambda op: -abs(op.difference)),
        measured_alone=alone,
        simulated_alone=sum(seconds for key, seconds in simulated.items() if key not in by),
        simulated_step=step,
        measured_step=main.median if main is not None else 0.0,
        runs=main.runs if main is not None else 0.0,
    )


def _measured(row: OpRow, *, whole: bool) -> float:
    if whole or not row.op.opcode.endswith("-done"):
        return row.seconds
    return row.flight * row.calls


def by_name(timeline: Timeline, program: str) -> dict[Key, float]:
    """Seconds of the core in a simulated step of a program by the name of the instruction."""
    seconds: dict[Key, float] = defaultdict(float)
    for span, times in timeline.leaves():
        if span.lane == "core":
            seconds[program, span.name] += span.seconds * times
    # Asynchronous ops that nothing waits for take none of the core's time.
    for span, _ in timeline.leaves():
        if span.lane != "core":
            seconds[program, span.name] += 0.0
    return dict(seconds)


def begun_by(row: OpRow) -> str:
    """Name of the instruction that starts what an op waits for; of other ops their own."""
    line = row.op.line
    if row.op.opcode.endswith("-done") and line is not None and line.inputs:
        return line.inputs[0]
    return row.op.raw.name


# Programs that a profile holds


def programs_of(table: ProfileTable) -> Mapping[str, Module]:
    """Program to its module, with the work of its Pallas kernels counted; none of a profile without modules."""
    rows: dict[str, list[OpRow]] = {}
    for row in table.ops:
        if row.op.module is not None:
            rows.setdefault(row.program, []).append(row)
    return {
        name: with_kernels(with_groups(of[0].op.module, of))
        for name, of in rows.items()
        if of[0].op.module is not None
    }


def with_groups(module: Module, rows: Iterable[OpRow]) -> Module:
    """The module with the device groups of its collectives from the lines of its ops.

    Of groups in the compact form ``[4,2]<=[8]`` nothing is left once JAX has read a module, and no groups mean all
    devices. A collective without a line of its own, such as one inside an asynchronous op, gets a group of one device: it
    costs next to nothing, rather than what all devices together would cost.
    """
    lines = {row.op.raw.name: replica_groups(row.op.raw.text) for row in rows}

    def with_group(instruction: Instruction) -> Instruction:
        opcode, rest = instruction.opcode.removesuffix("-start"), instruction.rest
        if opcode not in COLLECTIVES or ALL not in rest:
            return instruction
        group = lines.get(instruction.name) or ALONE
        return replace(instruction, rest=rest.replace(ALL, group, 1))

    return replace(
        module,
        computations={name: _with(held, with_group) for name, held in module.computations.items()},
    )


def with_kernels(module: Module) -> Module:
    """The module with the work of its Pallas kernels beside their code, as of a dump that is forecast.

    A child process reads the code, where there is some.
    """
    calls = [
        call for held in module.computations.values() for call in held if call.target == PALLAS
    ]
    counted = counted_elsewhere("\n".join(call.rest for call in calls)).rstrip("\n").split("\n")
    if len(counted) != len(calls):
        return module  # without kernels, or of a version whose code this one can't read
    texts = {call.name: text for call, text in zip(calls, counted, strict=True)}

    def with_work(instruction: Instruction) -> Instruction:
        text = texts.get(instruction.name)
        return instruction if text is None else replace(instruction, rest=text)

    return replace(
        module,
        computations={name: _with(held, with_work) for name, held in module.computations.items()},
    )


def _with(held: Computation, change: Callable[[Instruction], Instruction]) -> Computation:
    instructions = [change(instruction) for instruction in held]
    return replace(
        held,
        instructions=instructions,
        index={instruction.name: instruction for instruction in instructions},
    )


# A run beside its forecast


def traced_beside(run: Run, folder: Path) -> Beside:
    """The step of a run, measured in its profile and forecast on its devices, op by op.

    The program is the one that the profile holds, so that nothing is compiled again. A TPU's schedule is simulated; on a
    CPU and a GPU the forecast is a roofline, at rates of this CPU that are measured here.

    Args:
        run: The run.
        folder: Its profile.

    Raises:
        NotFoundError: there is no profile, it does not hold the program, or the catalogue has no such devices.
        DataError: it is damaged.
    """
    table = ProfileTable(open_profile(folder))
    programs = programs_of(table)
    main = next((row.name for row in table.programs if row.name in programs), None)
    if main is None:
        raise NotFoundError(
            f"{folder} does not hold the program of its steps; systolic explain {folder} shows what it measured"
        )
    on = slice_of(run)
    forecast, note = _forecast(programs[main], on, run)
    comparison = beside(table, by_name(forecast, main), forecast.seconds)
    return replace(comparison, notes=[note])


def _forecast(module: Module, on: Slice, run: Run) -> tuple[Timeline, str]:
    if on.platform == "tpu":
        flags = compiled_with(read_record(run))
        return simulate(module, on, flags=flags), f"simulated on {on.name}"
    if on.platform == "gpu":
        return simulate(module, on), f"simulated on {on.name}"
    peaks = cpu_peaks(measured_rates(on.num_devices))
    note = "forecast for this CPU: a roofline, op after op, at rates measured after the training; its ops run on several threads, which a profile counts beside each other"
    return roofline(module, peaks, on.num_devices, ModuleSource.compiled), note


def ops_beyond(module: Module, program: str, tables: Sequence[ProfileTable]) -> list[str]:
    """Names of measured ops of a program whose results a dump does not have."""
    held = {
        instruction.name: instruction.shape
        for computation in module.computations.values()
        for instruction in computation
    }
    return [
        row.op.raw.name
        for table in tables
        for row in table.ops
        if row.program == program
        and row.op.line is not None
        and not _is_alike(held.get(row.op.raw.name), row.op.line.shape)
    ]


def _is_alike(held: Shape | None, measured: Shape) -> bool:
    """Whether a dump's result has the arrays of a measured one."""
    if held is None:
        return False
    of, other = list(held.arrays()), list(measured.arrays())
    return [(array.dtype, array.dims) for array in of] == [
        (array.dtype, array.dims) for array in other
    ]
