"""Ops of all programs of a profile, over all its devices and runs: times, work, rates."""

import bisect
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from systolic.profile.ops import Activity, ProfiledOp
from systolic.profile.profile import Profile, Rate
from systolic.profile.trace import DeviceOp

LATE = 0.9
"""The high quantile of times that is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRow:
    """An op of one program with all its runs; of several devices those of one, in the mean of the ones that ran it."""

    program: str
    op: ProfiledOp
    """Any of its runs."""
    calls: float
    seconds: float
    """Seconds of all runs, as the device was busy or waited with it; what ran beside counts too."""
    median: float
    late: float
    """90th percentile."""
    flight: float
    """Median seconds in which its bytes moved: of a copy that was waited for, from its start to its end."""
    rate: Rate | None
    """Rate of one run."""

    @property
    def per_second(self) -> float | None:
        """Bytes or FLOPs a second, by the median."""
        return self.rate.work / self.flight if self.rate is not None and self.flight else None

    @property
    def share(self) -> float | None:
        """Share of the unit's peak, by the median."""
        return self.rate.share(self.flight) if self.rate is not None else None

    def to_json(self) -> dict[str, Any]:
        """The row as JSON has it; seconds, bytes and FLOPs of one run, but for ``seconds``."""
        moved, rate = self.op.traffic, self.rate
        return {
            "program": self.program,
            "name": self.op.raw.name,
            "opcode": self.op.opcode,
            "kind": self.op.kind.value,
            "calls": self.calls,
            "seconds": self.seconds,
            "median_seconds": self.median,
            "p90_seconds": self.late,
            "flight_seconds": self.flight,
            "flops": self.op.flops,
            "hbm_bytes": moved.hbm,
            "vmem_bytes": moved.vmem,
            "host_bytes": moved.host,
            "link_bytes": moved.link,
            "space": moved.space,
            "unit": rate.unit if rate else None,
            "per_second": self.per_second,
            "measure": rate.measure if rate else None,
            "share": self.share,
            "op_name": self.op.op_name,
            "source": self.op.source,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRow:
    """A program with its runs on one device, in the mean of those that ran it."""

    name: str
    runs: float
    seconds: float
    median: float
    devices: int

    def to_json(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return {
            "name": self.name,
            "runs": self.runs,
            "seconds": self.seconds,
            "median_seconds": self.median,
            "devices": self.devices,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRow:
    """A device with its steps."""

    device: str
    steps: Sequence[float]
    """Seconds of each."""
    step: float
    """Seconds of the median one."""
    shares: Mapping[str, float]
    """Shares of the median step, by kind of op, the largest first; ``idle`` is the rest."""

    @property
    def bound_by(self) -> str:
        """Kind that takes most of the step."""
        return next(iter(self.shares), "")

    def to_json(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return {
            "device": self.device,
            "steps": list(self.steps),
            "step_seconds": self.step,
            "shares": dict(self.shares),
            "bound_by": self.bound_by,
        }


@dataclass(frozen=True)
class ProfileTable:
    """Rows of a profile, the most seconds first."""

    profile: Profile

    @cached_property
    def ops(self) -> Sequence[OpRow]:
        """Ops but those that only hold others."""
        by: dict[tuple[str, str, str], list[tuple[Profile, DeviceOp]]] = defaultdict(list)
        for profile in self.profile.devices:
            starts = [run.start for run in profile.programs]
            for op in (*profile.trace.ops, *profile.trace.sparse):
                at = bisect.bisect_right(starts, op.start + 1e-9) - 1
                program = profile.programs[at].name if at >= 0 else op.module
                by[program, op.name, op.opcode].append((profile, op))
        rows = [self._row(program, of) for (program, _, _), of in by.items()]
        kept = [row for row in rows if row.op.kind is not Activity.loop]
        return sorted(kept, key=lambda row: -row.seconds)

    @cached_property
    def programs(self) -> Sequence[ProgramRow]:
        """Programs."""
        by: dict[str, list[float]] = defaultdict(list)
        on: dict[str, set[str]] = defaultdict(set)
        for profile in self.profile.devices:
            for run in profile.programs:
                by[run.name].append(run.end - run.start)
                on[run.name].add(profile.trace.device)
        rows = [
            ProgramRow(
                name=name,
                runs=len(times) / len(on[name]),
                seconds=sum(times) / len(on[name]),
                median=statistics.median(times),
                devices=len(on[name]),
            )
            for name, times in by.items()
        ]
        return sorted(rows, key=lambda row: -row.seconds)

    @cached_property
    def devices(self) -> Sequence[DeviceRow]:
        """Devices, in the order of the profile."""
        return [_device(profile) for profile in self.profile.devices]

    def _row(self, program: str, of: Sequence[tuple[Profile, DeviceOp]]) -> OpRow:
        number = len({id(profile) for profile, _ in of})
        times = sorted(op.end - op.start for _, op in of)
        first, raw = of[0]
        described = first.describe(raw)
        flights = [profile.flight(op) for profile, op in of if _ends(described, profile, op)]
        flight = statistics.median(flights) if flights else 0.0
        work = first.ceilings.rate(
            described.kind, described.flops, described.dtype, described.traffic, flight
        )
        return OpRow(
            program=program,
            op=described,
            calls=len(of) / number,
            seconds=sum(times) / number,
            median=statistics.median(times),
            late=times[min(int(LATE * len(times)), len(times) - 1)],
            flight=flight,
            rate=work if flights else None,
        )


def _device(profile: Profile) -> DeviceRow:
    by: dict[str, float] = defaultdict(float)
    for op in profile.ops:
        by[op.kind.value] += op.seconds / profile.seconds
    by["idle"] = max(1 - sum(by.values()), 0.0)
    return DeviceRow(
        device=profile.trace.device,
        steps=[end - start for start, end in profile.steps],
        step=profile.seconds,
        shares=dict(sorted(by.items(), key=lambda item: -item[1])),
    )


def _ends(op: ProfiledOp, profile: Profile, raw: DeviceOp) -> bool:
    """Whether it is known from when to when a run moved its bytes."""
    if op.opcode.endswith("-start"):
        return False
    return not op.opcode.endswith("-done") or id(raw) in profile.flights
