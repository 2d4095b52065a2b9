"""Figures of a profile, and which questions it has too little data for."""

from collections import defaultdict
from typing import Any

from systolic.profile import Profile
from systolic.profile.kinds import Activity
from systolic.profile.trace import Backend


def figures(profile: Profile) -> dict[str, Any]:
    """``step_seconds`` of the median of ``steps``, and ``shares`` of it by kinds of op; of several devices the mean.

    ``device`` is their kind, ``devices`` how many there are, ``hosts`` their names, ``slowest`` and ``fastest`` the
    device with the longest and the shortest step with its seconds.
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
        "step_seconds": sum(one.seconds for one in devices) / len(devices),
        "slowest": {"device": steps[0][1], "step_seconds": steps[0][0]},
        "fastest": {"device": steps[-1][1], "step_seconds": steps[-1][0]},
        "shares": {kind.value: by[kind] for kind in Activity if kind in by}
        | {"idle": max(1 - sum(by.values()), 0.0)},
    }


def unjudged(profile: Profile) -> list[str]:
    """Questions that the profile has too little data for, a sentence each."""
    trace = profile.trace
    found = list(trace.notes)
    if profile.trace.peak("bf16") is None:
        found.append(
            f"matmuls against the peak: the profile has no peak of {trace.device}"
            + ("; name its chip: --chip tpu7x" if trace.backend is Backend.tpu else "")
        )
    if not trace.loop:
        found.append("what the host does while the device idles: no thread of it runs a program")
    if not trace.modules and trace.backend is not Backend.tpu:
        found.append("layers and source lines: the profile was made without modules")
    return found
