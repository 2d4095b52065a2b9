"""Calls of a step on the devices that each of them runs on: calls on different devices run at the same time.

A device runs its calls one after the other, in the order in which the program makes them. A call begins when all of its
devices are free and the calls are over whose results it takes, in its own step or in the one before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEPS = 16
"""Steps that are laid out, one after the other; the time of a step is the mean of the second half."""
WAITS = 0.02
"""Share of a step that its busiest device waits, above which it is told."""

Device = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DeviceCall:
    """One call of a step."""

    program: int
    """Its index among the programs of the step."""
    seconds: float
    devices: frozenset[Device]
    after: Sequence[tuple[int, int]]
    """Calls whose results it takes: the place in the step, and how many steps back."""


@dataclass(frozen=True, kw_only=True)
class CallSchedule:
    """When the calls of a step run, once steps follow each other."""

    seconds: float
    """From one step to the next."""
    device: Device
    """The busiest device."""
    busy: float
    """Seconds of its calls."""
    calls: Sequence[tuple[DeviceCall, float]]
    """Calls in their order, with the second of the step at which each begins, from the first of them."""

    @property
    def own(self) -> Mapping[int, int]:
        """Calls of the busiest device, by program."""
        found: dict[int, int] = {}
        for call, _ in self.calls:
            if self.device in call.devices:
                found[call.program] = found.get(call.program, 0) + 1
        return found


def calls_of(
    order: Sequence[Mapping[str, Any]],
    seconds: Sequence[float],
    devices: Sequence[frozenset[Device]],
) -> list[DeviceCall]:
    """The calls of a step from what was recorded, with the seconds and the devices of each program."""
    return [
        DeviceCall(
            program=call["program"],
            seconds=seconds[call["program"]],
            devices=devices[call["program"]],
            after=[(place, back) for place, back in call["after"]],
        )
        for call in order
    ]


def schedule(calls: Sequence[DeviceCall]) -> CallSchedule:
    """Lays out the calls of some steps; there is one call at least."""
    free: dict[Device, float] = {}
    ends: list[list[float]] = []
    begins: list[float] = []
    for _ in range(STEPS):
        now: list[float] = []
        begins = []
        for call in calls:
            begin = max((free.get(device, 0.0) for device in call.devices), default=0.0)
            for place, back in call.after:
                made = ends[-back] if back and len(ends) >= back else now if not back else []
                if place < len(made):
                    begin = max(begin, made[place])
            begins.append(begin)
            now.append(begin + call.seconds)
            free.update(dict.fromkeys(call.devices, now[-1]))
        ends.append(now)
    half = STEPS // 2
    device, busy = _busiest(calls)
    if all(device in call.devices for call in calls):
        mean = busy  # one after the other, without a rounding
    else:
        mean = (max(ends[-1]) - max(ends[-1 - half])) / half
    first = min(begins)
    return CallSchedule(
        seconds=max(mean, busy),
        device=device,
        busy=busy,
        calls=[(call, begin - first) for call, begin in zip(calls, begins, strict=True)],
    )


def _busiest(calls: Sequence[DeviceCall]) -> tuple[Device, float]:
    """The device with the most seconds of calls, the first of those that have as many."""
    sums: dict[Device, float] = {}
    for call in calls:
        for device in sorted(call.devices):
            sums[device] = sums.get(device, 0.0) + call.seconds
    most = max(sums.values())
    return next((device, seconds) for device, seconds in sorted(sums.items()) if seconds == most)
