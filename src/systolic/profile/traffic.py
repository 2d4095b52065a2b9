"""Bytes that an op moves, by where: device memory, vector memory, the host's memory, links between chips.

A layout names the memory space of each array (``S(5)`` is the host's memory). XProf's own breakdown of an
op's accesses has device memory exactly, where the profile has it; else what its arrays in other spaces
hold is taken off all that the op accesses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from systolic.hlo import Shape
from systolic.hlo.groups import COLLECTIVES
from systolic.hlo.shape import HBM, HOST, VMEM
from systolic.profile.line import OpLine

MOVERS = ("copy-start", "copy-done", "async-start", "async-done", "copy")
"""Opcodes that only move an array, whole or a slice of it."""
SLICED = ("dynamic-slice", "dynamic-update-slice", "slice")
_CONTEXT = ("u32", "s32")
_HOLDERS = ("while", "conditional", "call", "tuple", "get-tuple-element", "parameter", "bitcast")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTraffic:
    """Bytes of one run of an op on one device."""

    hbm: float = 0.0
    """Read from and written to device memory."""
    vmem: float = 0.0
    """Read from and written to vector memory."""
    host: float = 0.0
    """Between the device and the host's memory."""
    to_host: bool = False
    """Whether the host's memory is written."""
    link: float = 0.0
    """Sent to other devices, at the least: of an all-reduce 2 (n - 1) / n of the array."""
    devices: tuple[int, ...] = ()
    """Group that a collective joins, as the program numbers devices."""

    @property
    def space(self) -> str:
        """Farthest memory that the op touches: ``host``, ``HBM``, ``VMEM``; empty where it is not known."""
        named = (("host", self.host), ("HBM", self.hbm), ("VMEM", self.vmem))
        return next((name for name, size in named if size), "")


def traffic_of(line: OpLine | None, accessed: float, of_hbm: float | None = None) -> OpTraffic:
    """OpTraffic of an op.

    Args:
        line: Its HLO line; None where the profile has none.
        accessed: Bytes that the profile says it accesses; 0 where it doesn't: then each of its arrays counts once,
            and a kernel that updates some in place, of which it may touch any part, has no known traffic.
        of_hbm: Bytes of device memory among them; None where the profile doesn't say.
    """
    if line is None:
        return OpTraffic(hbm=accessed if of_hbm is None else of_hbm)
    if line.opcode in _HOLDERS:
        return OpTraffic()
    arrays = line.arrays()
    vmem = float(sum(a.padded_bytes for a in arrays if a.space == VMEM))
    others = sum(a.padded_bytes for a in arrays if a.space != HBM)
    if line.updated and not accessed:
        return OpTraffic()
    known = accessed or float(sum(a.padded_bytes for a in arrays))
    hbm = max(known - others, 0.0) if of_hbm is None else of_hbm
    host = [a for a in arrays if a.space == HOST]
    if line.opcode in MOVERS:
        moved = _moved(line)
        between = {a.space for a in _ends(line)}
        return OpTraffic(
            hbm=moved if HBM in between else 0.0,
            vmem=moved if VMEM in between else 0.0,
            host=moved if HOST in between else 0.0,
            to_host=_into(line).space == HOST if HOST in between else False,
        )
    link, devices = link_bytes(line)
    if host:
        # A slice of a large array in the host's memory moves the slice.
        size = float(sum(a.padded_bytes for a in host))
        out = any(a.space == HOST for a in line.shape.arrays())
        smallest = min(float(a.padded_bytes) for a in arrays if a.dims) if _slices(line) else size
        return OpTraffic(
            hbm=hbm, vmem=vmem, host=min(size, smallest), to_host=out, link=link, devices=devices
        )
    return OpTraffic(hbm=hbm, vmem=vmem, link=link, devices=devices)


def link_bytes(line: OpLine) -> tuple[float, tuple[int, ...]]:
    """Least bytes that each device of a collective sends, and its group; 0 for ops that are none, or without a group."""
    kind = line.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return 0.0, ()
    group = line.group
    size = float(sum(operand.bytes for operand in line.operands))
    if kind == "collective-permute":
        return (size if len(set(group)) > 1 else 0.0), group
    number = len(group)
    if number < 2:
        return 0.0, group
    others = (number - 1) / number
    factor = {"all-gather": number - 1.0, "all-reduce": 2 * others, "collective-broadcast": 1.0}
    return size * factor.get(kind, others), group


def _slices(line: OpLine) -> bool:
    return line.opcode in SLICED or line.name.startswith(SLICED)


def _ends(line: OpLine) -> Sequence[Shape]:
    """Arrays between which a mover moves."""
    arrays = [a for a in line.arrays() if a.dtype not in _CONTEXT or a.elements > 2]
    return arrays or list(line.arrays())


def _moved(line: OpLine) -> float:
    return float(min((a.padded_bytes for a in _ends(line)), default=0))


def _into(line: OpLine) -> Shape:
    """The array that is written: of (destination, source, context), ((sources), destination, context) or a result."""
    shape = line.shape
    if shape.parts is None:
        return shape
    if line.opcode == "async-start" and len(shape.parts) > 1:
        shape = shape.parts[1]
    return next(iter(shape.arrays()), shape)
