"""Figures of a profile, and which questions it has too little data for."""

from collections import defaultdict
from typing import Any

from systolic.explaining.sources import step_of_profile
from systolic.profile import Profile
from systolic.profile.xplane import Backend
from systolic.sim.timeline import Resource

_SHARES = {
    Resource.mxu: "matmuls",
    Resource.hbm: "other ops",
    Resource.ici: "collectives",
    Resource.dcn: "other slices",
    Resource.host: "host transfers",
    Resource.vpu: "ops of unknown kind",
}


def figures(profile: Profile) -> dict[str, Any]:
    """``step_seconds`` of the median of ``steps``, and ``shares`` of it by the device's activity."""
    by: dict[str, float] = defaultdict(float)
    for op in profile.ops:
        by[_SHARES[op.resource]] += op.seconds / profile.seconds
    idle = max(1 - sum(by.values()), 0.0)
    return {
        "device": profile.trace.kind or profile.trace.device,
        "steps": len(profile.steps),
        "step_seconds": profile.seconds,
        "shares": {name: by[name] for name in _SHARES.values() if name in by} | {"idle": idle},
    }


def unjudged(profile: Profile) -> list[str]:
    """Questions that the profile has too little data for, a sentence each."""
    trace = profile.trace
    found = list(trace.notes)
    if step_of_profile(profile, {}).peak("bf16") is None:
        found.append(f"matmuls against the peak: the profile has no peak of {trace.device}")
    if not trace.loop:
        found.append("what the host does while the device idles: no thread of it runs a program")
    if not trace.modules and trace.backend is not Backend.tpu:
        found.append("layers and source lines: the profile was made without modules")
    return found
