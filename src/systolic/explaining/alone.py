"""Ops of a profile priced alone, from the HLO line that the profile has of each, where no dump of the program is.

A line names shapes, layouts and device groups, which is all that copies, slices and collectives need. It has neither
the computation that a fusion calls nor the body of a kernel: of fusions only those of one matmul are priced, whose sizes follow
from their shapes and their FLOPs.
"""

import re
from dataclasses import dataclass

from systolic.chips import Slice
from systolic.core.errors import SystolicError
from systolic.explaining.beside import Key, begun_by
from systolic.hlo import Shape, parse
from systolic.hlo.shape import HBM
from systolic.profile.kinds import Activity
from systolic.profile.line import OpLine, read_line
from systolic.profile.table import ProfileTable
from systolic.sim import simulate

_OPERAND = re.compile(r"%[\w.-]+")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%")
_HEAD = "HloModule alone, is_scheduled=true, num_partitions={}\n\n"
_SUM = "%sum (x: T, y: T) -> T {\n  %x = T parameter(0)\n  %y = T parameter(1)\n  ROOT %z = T add(%x, %y)\n}\n\n"
ELEMENTWISE = 0.02
"""Share of a fusion's FLOPs that may be of other ops than its matmul."""
NOT_ALONE = (Activity.kernel, Activity.loop, Activity.callback)


def priced_alone(table: ProfileTable, on: Slice) -> tuple[dict[Key, float], int]:
    """Seconds in a run of its program of each op that its line prices, and how many ops have none.

    Args:
        table: Ops of a profile.
        on: The slice whose rates are taken.
    """
    found: dict[Key, float] = {}
    known: dict[str, float | None] = {}
    left = 0
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
            text = module_of(row.op.raw.text, on.num_devices, row.op.flops)
        if text not in known:
            known[text] = _seconds(text, on)
        seconds = known[text]
        if seconds is None:
            left += 1
        else:
            found[row.program, begun_by(row)] = seconds * row.calls / runs.get(row.program, 1.0)
    return found, left


def devices_of(table: ProfileTable) -> int:
    """Devices that the programs run on: those of their collectives' groups, or of the profile where it has more."""
    lines = [row.op.line for row in table.ops if row.op.line is not None]
    named = [max(max(group) for group in line.groups) + 1 for line in lines if line.groups]
    return max([len(table.profile.devices), *named])


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


def module_of(text: str, devices: int, flops: float = 0.0) -> str:
    """A module with that instruction alone; empty where it needs others.

    Args:
        text: The line.
        devices: How many the program runs on.
        flops: Of one run, by which a fusion is known to be of one matmul.
    """
    line = read_line(text)
    if line is not None and line.opcode == "fusion":
        return _matmul_module(line, _shapes(text), devices, flops)
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
    body = _OPERAND.sub(lambda found: numbers.get(found[0][1:], found[0]), tail)
    added = ""
    if reduces:
        dtype = line.shape.dtype or next(iter(line.shape.arrays())).dtype
        body = re.sub(r"to_apply=%[\w.-]+", "to_apply=%sum", body)
        added = _SUM.replace("T", f"{dtype}[]")
    return f"{_HEAD.format(devices)}{added}ENTRY %main () -> f32[] {{\n{parameters}  ROOT %op = {body}\n}}\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matmul:
    """Rows and the wide side of one matmul of a fusion, by the numbers of its operands."""

    left: int
    right: int
    parts: int
    """Blocks of the left operand that are joined element by element before: two of a gated layer."""
    m: int
    n: int
    k: int
    transposed: bool
    """Whether the right operand is [n, k]."""


def _matmul(line: OpLine, flops: float) -> _Matmul | None:
    """The matmul [m, k] x [k, n] whose FLOPs are those of a fusion; None where no two operands, or several pairs, have them."""
    out = max(line.shape.arrays(), key=lambda one: one.elements)
    found: dict[tuple[int, int, int], _Matmul] = {}  # with its operands exchanged it is the same
    for right, wide in enumerate(line.operands):
        if wide.is_tuple or len(wide.dims) != 2:
            continue
        for transposed in (False, True):
            k, n = reversed(wide.dims) if transposed else wide.dims
            if n not in out.dims or not 0 <= flops - 2 * out.elements * k <= ELEMENTWISE * flops:
                continue
            m = out.elements // n
            for left, rows in enumerate(line.operands):
                parts, rest = divmod(rows.elements, m * k)
                if left != right and not rows.is_tuple and not rest and parts in (1, 2):
                    one = _Matmul(
                        left=left, right=right, parts=parts, m=m, n=n, k=k, transposed=transposed
                    )
                    found.setdefault((min(m, n), max(m, n), k), one)
    return next(iter(found.values())) if len(found) == 1 else None


def _matmul_module(line: OpLine, shapes: list[str], devices: int, flops: float) -> str:
    """A module with a fusion of one matmul; empty where it is none."""
    of = _matmul(line, flops) if flops and len(shapes) == len(line.operands) else None
    if of is None:
        return ""
    out = max(line.shape.arrays(), key=lambda one: one.elements)
    rows = line.operands[of.left].dtype
    inner = "".join(f"  %p{n} = {shape} parameter({n})\n" for n, shape in enumerate(shapes))
    tile = "{1,0:T(8,128)}"
    whole = f"{rows}[{of.m},{of.parts * of.k}]{tile}"
    half = f"{rows}[{of.m},{of.k}]{tile}"
    inner += f"  %whole = {whole} bitcast(%p{of.left})\n"
    if of.parts == 1:
        inner += f"  %rows = {half} bitcast(%whole)\n"
    else:
        for number in range(2):
            low = number * of.k
            inner += f"  %part{number} = {half} slice(%whole), slice={{[0:{of.m}], [{low}:{low + of.k}]}}\n"
        inner += f"  %rows = {half} multiply(%part0, %part1)\n"
    labels = "bf_oi->bf" if of.transposed else "bf_io->bf"
    inner += f"  %matmul = {out.dtype}[{of.m},{of.n}]{tile} convolution(%rows, %p{of.right}), dim_labels={labels}\n"
    result = _result(out)
    inner += f"  ROOT %out = {result} bitcast(%matmul)\n"
    names = ", ".join(f"p{n}: {shape}" for n, shape in enumerate(shapes))
    body = "".join(f"  %a{n} = {shape} parameter({n})\n" for n, shape in enumerate(shapes))
    given = ", ".join(f"%a{n}" for n in range(len(shapes)))
    body += f"  ROOT %op = {result} fusion({given}), kind=kOutput, calls=%fused\n"
    return f"{_HEAD.format(devices)}%fused ({names}) -> {result} {{\n{inner}}}\n\nENTRY %main () -> f32[] {{\n{body}}}\n"


def _result(out: Shape) -> str:
    """An array as text, with its place in memory."""
    order = ",".join(map(str, out.minor_to_major or range(len(out.dims) - 1, -1, -1)))
    tile = f"T({','.join(map(str, out.tile))})" if out.tile else ""
    space = f"S({out.space})" if out.space != HBM else ""
    layout = f"{order}:{tile}{space}" if tile or space else order
    return f"{out.dtype}[{','.join(map(str, out.dims))}]{{{layout}}}"


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
