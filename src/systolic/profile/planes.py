"""Planes of a profile: lines of events with stats, from an ``xplane.pb`` or a ``trace.json``."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from systolic.profile.trace import Event

NANOSECONDS = 1e9
PICOSECONDS = 1e12
DEVICE = re.compile(r"^/device:(?P<kind>TPU|GPU):(?P<number>\d+)(?: SparseCore (?P<sparse>\d+)$)?")

OPS, ASYNC, STEPS, RUNS = "XLA Ops", "Async XLA Ops", "Steps", "XLA Modules"
SPARSE = "Sparse Core Ops"
READ = (OPS, ASYNC, STEPS, RUNS, SPARSE)
"""Lines of a TPU that are read; the names are those of tsl/profiler/utils/xplane_schema.cc."""


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
    for one in events:
        stats = dict(one.stats)
        start, exact = one.start_ns / NANOSECONDS, stats.get("device_duration_ps")
        end = one.end_ns / NANOSECONDS if exact is None else start + float(exact) / PICOSECONDS
        yield Event(name=one.name, start=start, end=end, stats=stats)
