"""Profiles made by hand, as their protocol buffer has them: planes of lines of events with stats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from systolic.forecasting.display.xprof import double, integer, message, table, text

MILLISECOND = 1e9
"""Picoseconds."""


@dataclass(frozen=True)
class Event:
    """``start`` and ``length`` in milliseconds; ``constant`` are stats of its metadata."""

    name: str
    start: float
    length: float
    stats: Mapping[str, Any] = field(default_factory=dict)
    constant: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plane:
    """A device's or the host's."""

    name: str
    lines: Mapping[str, Sequence[Event]]
    stats: Mapping[str, Any] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """A serialized XPlane."""
        events = [event for line in self.lines.values() for event in line]
        stats = [self.stats, *(e.stats for e in events), *(e.constant for e in events)]
        numbers = {name: n for n, name in enumerate(dict.fromkeys(k for s in stats for k in s), 1)}
        named = {event.name: event.constant for event in events}
        ids = {name: n for n, name in enumerate(named, 1)}

        def stat(of: int, name: str, value: Any) -> bytes:
            kinds = {str: lambda v: text(5, v), float: lambda v: double(2, v)}
            coded = kinds.get(type(value), lambda v: integer(4, v))(value)
            return message(of, integer(1, numbers[name]), coded)

        def one(event: Event) -> bytes:
            place = integer(1, ids[event.name]), integer(2, round(event.start * MILLISECOND))
            size = integer(3, round(event.length * MILLISECOND))
            return message(4, *place, size, *(stat(4, k, v) for k, v in event.stats.items()))

        metadata = [
            (ids[name], integer(1, ids[name]) + text(2, name) + b"".join(
                stat(5, k, v) for k, v in constant.items()
            ))
            for name, constant in named.items()
        ]  # fmt: skip
        return b"".join(
            [
                text(2, self.name),
                *(
                    message(3, integer(1, n), text(2, name), integer(3, 0), *map(one, line))
                    for n, (name, line) in enumerate(self.lines.items(), 1)
                ),
                table(4, metadata),
                table(5, [(n, integer(1, n) + text(2, name)) for name, n in numbers.items()]),
                *(stat(6, k, v) for k, v in self.stats.items()),
            ]
        )


def write(path: Path, *planes: Plane) -> Path:
    """One ``xplane.pb``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(message(1, plane.encoded()) for plane in planes))
    return path
