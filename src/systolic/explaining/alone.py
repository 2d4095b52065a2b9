"""Ops of a profile priced alone, from the HLO line that the profile has of each, where no dump of the program is.

A line names shapes, layouts and device groups, which is all that copies, slices and collectives need. It has neither
the computation that a fusion calls nor the body of a kernel: of fusions only matmuls are priced, by the FLOPs and bytes that
the profile counts.
"""

import re

from systolic.chips import Slice
from systolic.core.errors import SystolicError
from systolic.forecasting.profiled import Key, begun_by
from systolic.hlo import parse
from systolic.profile.ops import Activity, OpLine, read_line
from systolic.profile.table import OpRow, ProfileTable
from systolic.sim.estimate import Parts, estimated_seconds, slowdown_of
from systolic.sim.rates import Rates, number_format, rates_of
from systolic.sim.simulate import simulate

_OPERAND = re.compile(r"%[\w.-]+")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%")
_HEAD = "HloModule alone, is_scheduled=true, num_partitions={}\n\n"
_SUM = "%sum (x: T, y: T) -> T {\n  %x = T parameter(0)\n  %y = T parameter(1)\n  ROOT %z = T add(%x, %y)\n}\n\n"
NOT_ALONE = (Activity.kernel, Activity.loop, Activity.callback)


def priced_alone(table: ProfileTable, on: Slice) -> tuple[dict[Key, float], int]:
    """Seconds in a run of its program of each op that its line prices, and how many ops have none.

    Args:
        table: Ops of a profile.
        on: The slice whose rates are taken.
    """
    priced: dict[Key, float] = {}
    known: dict[str, float | None] = {}
    left, rates = 0, rates_of(on)
    runs = {row.name: row.runs for row in table.programs}
    started = {
        (row.program, row.op.raw.name): row.op.raw.text
        for row in table.ops
        if row.op.opcode.endswith("-start")
    }
    for row in table.ops:
        if row.op.opcode.endswith("-start"):
            continue
        text = ""
        if row.op.opcode.endswith("-done"):
            begun = started.get((row.program, begun_by(row)), "")
            if row.rate is not None:
                text = waiting_module(begun, row.op.raw.text, on.num_devices)
        elif row.op.kind not in NOT_ALONE:
            text = module_of(row.op.raw.text, on.num_devices)
        if text not in known:
            known[text] = _seconds(text, on)
        seconds = known[text]
        if seconds is None:
            seconds = matmul_seconds(row, rates, on)
        if seconds is None:
            left += 1
        else:
            priced[row.program, begun_by(row)] = seconds * row.calls / runs.get(row.program, 1.0)
    return priced, left


def matmul_seconds(row: OpRow, rates: Rates, on: Slice) -> float | None:
    """Seconds of a fused matmul by the FLOPs and bytes that the profile counts; its vector work is not known. None of other ops.

    Over all matmuls of dense train steps on v5e and v6e it is within 1 % of the price in the simulated program.
    """
    line, work = row.op.line, row.op
    if work.kind is not Activity.matmul or not work.flops or line is None:
        return None
    parts = Parts(
        matrix=work.flops / rates.peaks.get(_format(line), rates.peaks["bf16"]),
        memory=work.traffic.hbm / rates.hbm,
        vector=0.0,
    )
    return estimated_seconds(parts, slowdown_of(on.chip.name))


def _format(line: OpLine) -> str:
    """Format of a matmul's operands: that of the two largest, bf16 where they differ."""
    arrays = [array for shape in line.operands for array in shape.arrays()]
    largest = sorted(arrays, key=lambda array: -array.elements)[:2]
    formats = {number_format(array.dtype) for array in largest}
    return formats.pop() if len(formats) == 1 else "bf16"


def devices_of(table: ProfileTable) -> int:
    """Devices that the programs run on: those of their collectives' groups, or of the profile where it has more."""
    return max(len(table.profile.devices), devices_named(table))


def devices_named(table: ProfileTable) -> int:
    """Devices that the groups of collectives name; 0 where no op has groups."""
    lines = [row.op.line for row in table.ops if row.op.line is not None]
    return max(
        (max(max(group) for group in line.groups) + 1 for line in lines if line.groups), default=0
    )


def waiting_module(begun: str, done: str, devices: int) -> str:
    """A module that starts a copy and waits for it at once; empty for other asynchronous ops."""
    start, end = read_line(begun), read_line(done)
    if start is None or end is None or (start.opcode, end.opcode) != ("copy-start", "copy-done"):
        return ""
    (source,) = start.operands[:1] or (None,)
    shapes = _shapes(begun)
    if source is None or not shapes:
        return ""
    pair = begun.partition(" = ")[2].partition(" copy-start(")[0]
    result = done.partition(" = ")[2].partition(" copy-done(")[0]
    body = f"  %a0 = {shapes[0]} parameter(0)\n  %begun = {pair} copy-start({shapes[0]} %a0)\n  ROOT %op = {result} copy-done({pair} %begun)\n"
    return _HEAD.format(devices) + f"ENTRY %main () -> f32[] {{\n{body}}}\n"


def module_of(text: str, devices: int) -> str:
    """A module with that instruction alone; empty where it needs others."""
    line = read_line(text)
    if line is None or line.opcode.endswith(("-start", "-done")):
        return ""
    rest, reduces = line.rest, "to_apply=%" in line.rest
    if _CALLED.search(rest.replace("to_apply=%", "")) or len(line.inputs) != len(line.operands):
        return ""
    tail = text.partition(" = ")[2]
    names = list(dict.fromkeys(line.inputs))
    first = dict(zip(reversed(line.inputs), reversed(_shapes(text)), strict=False))
    parameters = "".join(
        f"  %a{n} = {first[name]} parameter({n})\n" for n, name in enumerate(names)
    )
    numbers = {name: f"%a{n}" for n, name in enumerate(names)}
    body = _OPERAND.sub(lambda match: numbers.get(match[0][1:], match[0]), tail)
    added = ""
    if reduces:
        dtype = line.shape.dtype or next(iter(line.shape.arrays())).dtype
        body = re.sub(r"to_apply=%[\w.-]+", "to_apply=%sum", body)
        added = _SUM.replace("T", f"{dtype}[]")
    return f"{_HEAD.format(devices)}{added}ENTRY %main () -> f32[] {{\n{parameters}  ROOT %op = {body}\n}}\n"


def _shapes(text: str) -> list[str]:
    """Shapes of the operands as the line writes them."""
    inner = re.search(r"[a-z][\w-]*\((.*)", text.partition(" = ")[2])
    parts = re.findall(
        r"([a-z]\w*\[[^\]]*\](?:\{[^}]*\})?) %[\w.-]+", inner[1] if inner is not None else ""
    )
    return list(parts)


def _seconds(text: str, on: Slice) -> float | None:
    """Seconds of a module with one op; None where the simulator can't tell."""
    if not text:
        return None
    try:
        return simulate(parse(text), on).seconds
    except (SystolicError, KeyError, ValueError, AssertionError):
        return None
