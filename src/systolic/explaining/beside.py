"""A forecast beside its measurement: what the schedule's simulation says of each op, and what the chip did.

Ops are matched by the names of their instructions. Nothing of a profile is used to fit the simulator.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from systolic.profile.table import OpRow, ProfileTable
from systolic.sim.timeline import Timeline

LEAST = 1e-6
"""Seconds of an op in a step from which its ratio counts: shorter ones are as long as the profiler's own noise."""
HIGH, LOW = 0.9, 0.1


Key = tuple[str, str]
"""Program and name of an instruction."""
_NUMBER = re.compile(r"[.\d]+$")


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
    """Of the ops' ratios, simulated over measured; None where all are too short."""
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
    found, alone = [], 0.0
    for key, of in by.items():
        runs = programs[key[0]].runs if key[0] in programs else 1.0
        seconds = sum(_measured(row, whole=whole) for row in of) / runs
        if key not in simulated:
            alone += seconds
            continue
        first = max(of, key=lambda row: row.seconds)
        found.append(
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
        ops=sorted(found, key=lambda op: -abs(op.difference)),
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
    found: dict[Key, float] = defaultdict(float)
    for span, times in timeline.leaves():
        if span.lane == "core":
            found[program, span.name] += span.seconds * times
    # Asynchronous ops that nothing waits for take none of the core's time.
    for span, _ in timeline.leaves():
        if span.lane != "core":
            found[program, span.name] += 0.0
    return dict(found)


def begun_by(row: OpRow) -> str:
    """Name of the instruction that starts what an op waits for; of other ops their own."""
    line = row.op.line
    if row.op.opcode.endswith("-done") and line is not None and line.inputs:
        return line.inputs[0]
    return row.op.raw.name
