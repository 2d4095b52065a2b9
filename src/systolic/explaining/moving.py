"""Shares that ops of a measured step reach of the units that move their bytes, and advice for them."""

from collections.abc import Sequence

from systolic.core.units import duration
from systolic.explaining.step import LINKS, OpKind, Step, StepOp
from systolic.profile.ceilings import MATRIX

FULL = 0.7
"""Share of a unit's peak from which only less work makes an op faster."""
HIDES = 0.5
"""Share of a copy's time that other work of the step must have to hide a good part of it."""
ARRAYS = "arrays"
"""How a kernel's work is known: by its arrays, each touched once, or by the profile's count."""
LAYOUT = "a layout that both neighbours take: swap the dims where the array is made, or hold the weights transposed"


def rated(op: StepOp, name: str, way: str = "") -> str:
    """``5.37 GB to the host at 29.4 GB/s, 46 % of the host link, copy-done.5``; the name where no rate is known."""
    if op.rate is None or not op.flight:
        return name
    text = op.rate.text(op.flight)
    if way == ARRAYS:
        text = f"{text} as the profile counts" if op.rate.unit == MATRIX else f"arrays of {text}"
    elif way:
        size, at, rest = text.partition(" at ")
        text = f"{size} {way}{at}{rest}"
    return f"{text}, {name}"


def way(op: StepOp) -> str:
    """Direction of a copy."""
    return "to the host" if op.to_host else "from the host"


def of_host(step: Step, ops: Sequence[StepOp]) -> list[str]:
    """Advice for copies between the device and its host, of a program that no recipe made."""
    if not step.foreign:
        return []
    waited = sum(op.seconds for op in ops)
    work = sum(op.seconds for op in step.ops if op.resource not in LINKS)
    first = "keep in device memory what fits there: no pinned_host sharding, no offloading"
    if work < HIDES * waited:
        return [
            f"{first}; starting copies earlier hides at most the {duration(work)} in which the device computes"
        ]
    return [first, "start the copies earlier, so that they run beside the step's compute"]


def of_links(ops: Sequence[StepOp]) -> list[str]:
    """Advice for collectives by what they reach of their links; none where that is not known."""
    known = [op for op in ops if op.rate is not None and op.flight]
    done = sum(op.rate.work for op in known if op.rate is not None)
    seconds = sum(op.flight for op in known)
    share = sum((op.reached or 0.0) * op.flight for op in known) / seconds if seconds else 0.0
    if not done or not share:
        return []
    if share >= FULL:
        return ["fewer bytes: bf16 for f32, a reduce-scatter where each device needs a part only"]
    sent = done / max(sum(op.times for op in known), 1)
    if sent < 1e6:
        return ["fewer and larger collectives: these are too small for the links' rate"]
    return ["compute beside them: collectives that are started before their result is needed"]


def of_memory(ops: Sequence[StepOp]) -> str:
    """Advice for ops bound by device memory by what they reach of it, of a program that no recipe made."""
    known = [op for op in ops if op.rate is not None and op.flight and op.kind is not OpKind.copy]
    seconds = sum(op.flight for op in known)
    share = sum((op.reached or 0.0) * op.flight for op in known) / seconds if seconds else 0.0
    if not share:
        return ""
    if share >= FULL:
        return "fewer bytes, since the memory is at its rate: narrower dtypes, ops that fuse with their neighbours"
    return "larger arrays in one op, since most of these stay below the memory's rate: a larger batch per device"
