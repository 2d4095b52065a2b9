"""Figures of a profile, and which questions it has too little data for."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

from systolic.profile import Profile
from systolic.profile.intervals import common, missing, total, union
from systolic.profile.kinds import Activity
from systolic.profile.trace import Backend

MOVING = (Activity.collective, Activity.slices, Activity.host, Activity.memory)
"""Kinds of op that can run beside the device's work."""


def figures(profile: Profile) -> dict[str, Any]:
    """``step_seconds`` of the median of ``steps``, and ``shares`` of it by kinds of op; of several devices the mean.

    ``simulated_by`` names the program that wrote a schedule as a profile; it is empty for a measurement.
    ``device`` is their kind, ``devices`` how many there are, ``hosts`` their names, ``slowest`` and ``fastest`` the
    device with the longest and the shortest step with its seconds. ``beside`` is :func:`overlap`.
    """
    devices = profile.devices
    by: dict[Activity, float] = defaultdict(float)
    for one in devices:
        for op in one.ops:
            by[op.kind] += op.seconds / one.seconds / len(devices)
    steps = sorted(((one.seconds, one.trace.device) for one in devices), reverse=True)
    return {
        "device": profile.trace.kind
        or (profile.trace.device if len(devices) == 1 else profile.trace.backend.value),
        "devices": len(devices),
        "hosts": list(dict.fromkeys(one.trace.host for one in devices)),
        "steps": len(profile.steps),
        "simulated_by": profile.trace.simulated_by,
        "step_seconds": sum(one.seconds for one in devices) / len(devices),
        "slowest": {"device": steps[0][1], "step_seconds": steps[0][0]},
        "fastest": {"device": steps[-1][1], "step_seconds": steps[-1][0]},
        "beside": overlap(profile),
        "shares": {kind.value: by[kind] for kind in Activity if kind in by}
        | {"idle": max(1 - sum(by.values()), 0.0)},
    }


def overlap(profile: Profile) -> dict[str, dict[str, float]]:
    """Seconds of a step in which collectives and copies are exposed, and hidden: under way while the device works.

    By kind of op, of those that have some; of several devices the mean.
    """
    found: dict[str, dict[str, float]] = {}
    devices = profile.devices
    for kind in MOVING:
        exposed = hidden = 0.0
        for one in devices:
            exposed += sum(op.seconds for op in one.ops if op.kind is kind)
            waits = union((op.raw.start, op.raw.end) for op in one.ops if op.kind is kind)
            flights = union(
                (begun.start, done.end)
                for begun, done in one.pairs
                if one.describe(done).kind is kind
            )
            hidden += total(common(flights, missing(waits, one.step)))
        if exposed or hidden:
            found[kind.value] = {
                "exposed_seconds": exposed / len(devices),
                "hidden_seconds": hidden / len(devices),
            }
    return found


BEYOND, LONG = 1.1, 5e-6
"""Share of a peak that no op reaches, and seconds of an op from which it counts: a trace's clock rounds shorter ones."""


def _beyond(profile: Profile) -> list[str]:
    """Sentence on ops faster than a chip that the file does not name itself; none where all keep within its peaks."""
    if profile.trace.peak_bytes is not None:  # the file has the peaks of its own chip
        return []
    most: tuple[float, str, str] | None = None
    for one in profile.devices:
        for raw in one.trace.ops:
            op = replace(one.describe(raw), raw=raw, flight=one.flight(raw))
            rate = one.rate(op) if op.flight >= LONG else None
            share = None if rate is None else rate.share(op.flight)
            if (
                rate is not None
                and share is not None
                and share > max(BEYOND, most[0] if most else 0)
            ):
                most = share, rate.unit, raw.name
    if most is None:
        return []
    share, unit, name = most
    return [
        f"rates against the peaks of {profile.trace.kind}: {name} reaches {share:.0%} of its {unit}, more than that chip can, so that the profile is of another one; name it with --chip"
    ]


def unjudged(profile: Profile) -> list[str]:
    """Questions that the profile has too little data for, a sentence each."""
    trace = profile.trace
    found = list(trace.notes)
    if profile.trace.peak("bf16") is None:
        found.append(
            f"matmuls against the peak: the profile has no peak of {trace.device}"
            + ("; name its chip: --chip tpu7x" if trace.backend is Backend.tpu else "")
        )
    found += _beyond(profile)
    if not trace.loop:
        found.append("what the host does while the device idles: no thread of it runs a program")
    if not trace.modules and trace.backend is not Backend.tpu:
        found.append("layers and source lines: the profile was made without modules")
    return found
