"""The schedule of a step of several programs: when each of its calls runs, on the devices that it takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STEPS = 16
"""Steps that are laid out, one after the other; the time of a step is the mean of the second half."""

Device = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DeviceCall:
    """One call of a step."""

    program: int
    """Its index among the programs of the step."""
    seconds: float
    devices: frozenset[Device]
    after: Sequence[tuple[int, int]]
    """Calls that it waits for: the place in the step, and how many steps back."""


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
        counts: dict[int, int] = {}
        for call, _ in self.calls:
            if self.device in call.devices:
                counts[call.program] = counts.get(call.program, 0) + 1
        return counts


def schedule(calls: Sequence[DeviceCall]) -> CallSchedule:
    """Lays out the calls of some steps; there is one call at least.

    A device runs its calls one after the other, in the order in which the program makes them. A call begins when all of its
    devices are free and the calls are over whose results it takes, in its own step or in the one before.
    """
    free: dict[Device, float] = {}
    ends: list[list[float]] = []
    begins: list[float] = []
    for _ in range(STEPS):
        now: list[float] = []
        begins = []
        for call in calls:
            begin = max((free.get(device, 0.0) for device in call.devices), default=0.0)
            for place, back in call.after:
                earlier_ends = (
                    ends[-back] if back and len(ends) >= back else now if not back else []
                )
                if place < len(earlier_ends):
                    begin = max(begin, earlier_ends[place])
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
