"""Ops of a profile with their work: from the profile's stats, its compiled module, or the op's HLO line.

A layout names the memory space of each array (``S(5)`` is the host's memory). XProf's own breakdown of an
op's accesses has device memory exactly, where the profile has it; else what its arrays in other spaces
hold is taken off all that the op accesses.
"""

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from systolic.core.errors import DataError
from systolic.hlo import Computation, Instruction, Module, Shape, parse_groups, parse_shape
from systolic.hlo.groups import COLLECTIVES
from systolic.hlo.module import named
from systolic.hlo.shape import HBM, HOST, VMEM, split
from systolic.profile.trace import Backend, DeviceOp, DeviceTrace
from systolic.sim.cost_kinds import FORMATTING
from systolic.sim.timeline import Resource, layer_of
from systolic.sim.work import Work, work_of

_HEAD = re.compile(r"%?(?P<name>\S+) = ")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w-]*)\(")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_GROUPS = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{\{.*?\}\}|\{\})")
_ALIASED = re.compile(r"\{(\d*)\}: \((\d+),")
_PAIRS = re.compile(r"source_target_pairs=\{\{(.*?)\}\}")
_OPERAND = re.compile(r"%([\w.-]+)")
MOVERS = ("copy-start", "copy-done", "async-start", "async-done", "copy")
"""Opcodes that only move an array, whole or a slice of it."""
SLICED = ("dynamic-slice", "dynamic-update-slice", "slice")
_CONTEXT = ("u32", "s32")
_HOLDERS = ("while", "conditional", "call", "tuple", "get-tuple-element", "parameter", "bitcast")
CONTAINERS = ("while", "conditional", "call")
COPIES = FORMATTING
GPU_COLLECTIVES = ("nccl", "rccl")
"""Beginnings of the names of kernels that move data between GPUs."""
TRANSFERS = ("memcpyh2d", "memcpyd2h", "host-transfer", "infeed", "outfeed")
_COPY = re.compile(r"(copy|transpose)")
_CALLBACK = re.compile(r"callback", re.I)
_ASYNC = ("copy-start", "copy-done", "async-start", "async-done")
_LIBRARIES = ("__cublas", "__cudnn", "__hip")
"""Custom calls of a GPU's libraries of matmuls."""
_MATRIX = ("convolution", "dot")
_COLLECTIVE_NAMES = (*COLLECTIVES, "async-collective")
LINKS = (Resource.ici, Resource.dcn, Resource.host)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpLine:
    """One instruction: its result, the shapes of its operands, and the text after them."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[Shape, ...]
    inputs: tuple[str, ...]
    """Names of the operands."""
    rest: str

    @property
    def target(self) -> str:
        """Target of a custom call; empty for other ops."""
        match = _TARGET.search(self.rest)
        return match[1] if match else ""

    @property
    def group(self) -> tuple[int, ...]:
        """The first group of devices that a collective joins; empty where the line has none."""
        if pairs := _PAIRS.search(self.rest):
            return tuple(int(number) for number in pairs[1].partition("}")[0].split(","))
        return next(iter(self.groups), ())

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups of devices of a collective; none where the line has none."""
        match = _GROUPS.search(self.rest)
        if match is None or match[1] == "{}":
            return ()
        try:
            return parse_groups(match[1], 1).groups
        except (DataError, ValueError):
            return ()

    @property
    def updated(self) -> tuple[Shape, ...]:
        """Operands that a custom call updates in place."""
        _, _, text = self.rest.partition("output_to_operand_aliasing={")
        numbers = [int(number) for _, number in _ALIASED.findall(text.partition("custom_call")[0])]
        return tuple(self.operands[n] for n in numbers if n < len(self.operands))

    def arrays(self) -> tuple[Shape, ...]:
        """Arrays of result and operands."""
        return tuple(a for shape in (self.shape, *self.operands) for a in shape.arrays())


@lru_cache(maxsize=65536)
def read_line(text: str) -> OpLine | None:
    """The instruction in a line; None where it is none, or was cut."""
    head = _HEAD.match(text)
    if head is None:
        return None
    start = head.end()
    end = _closing(text, start) + 1 if text[start : start + 1] == "(" else text.find(" ", start)
    opcode = _OPCODE.match(text, end) if end > start else None
    if opcode is None:
        return None
    close = _closing(text, opcode.end() - 1)
    if close < 0:
        return None
    inner = text[opcode.end() : close]
    operands = [part for part in split(inner) if part]
    try:
        shapes = [
            parse_shape(operand.rpartition(" %")[0] or operand)
            for operand in operands
            if "[" in operand
        ]
        shape = parse_shape(text[start:end])
    except DataError:
        return None
    return OpLine(
        name=head["name"],
        opcode=opcode["opcode"],
        shape=shape,
        operands=tuple(shapes),
        inputs=tuple(name for part in operands for name in _OPERAND.findall(part)[-1:]),
        rest=text[close + 1 :],
    )


def replica_groups(text: str) -> str:
    """``replica_groups=…`` as a line writes it; empty where it has none."""
    match = _GROUPS.search(text)
    return match[0] if match is not None else ""


def _closing(text: str, start: int) -> int:
    """Place of the parenthesis that closes the one at ``start``; -1 where the text was cut."""
    depth = 0
    for at in range(start, len(text)):
        if text[at] == "(":
            depth += 1
        elif text[at] == ")":
            depth -= 1
            if not depth:
                return at
    return -1


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


class Activity(enum.Enum):
    """Kinds of op, as ``shares`` and tables name them."""

    matmul = "matmuls"
    kernel = "custom kernels"
    """Pallas and other custom calls, opaque to the compiler."""
    collective = "collectives"
    slices = "other slices"
    """Over the network between slices."""
    host = "host transfers"
    """Between the device's memory and the host's."""
    memory = "copies between memories"
    """Asynchronous copies of one device."""
    formatting = "data formatting"
    """Copies, transposes and reshapes: another layout of the same array."""
    callback = "callbacks"
    loop = "loops"
    """Holds other ops."""
    other = "other ops"
    """Elementwise, reductions, gathers, sorts."""


def kind_of(
    name: str, opcode: str, category: str, line: OpLine | None, target: str, traffic: OpTraffic
) -> Activity:
    """The kind of an op.

    Args:
        name: The instruction's, or a GPU's kernel's.
        opcode: Of the instruction; empty where it is not known.
        category: ``hlo_category`` of the profile.
        line: Its HLO line.
        target: Of a custom call.
        traffic: Where it moves bytes.
    """
    kind, folded = f"{opcode} {category}".lower(), name.lower()
    if opcode in CONTAINERS or category in CONTAINERS:
        return Activity.loop
    if _CALLBACK.search(f"{target} {name}"):
        return Activity.callback
    if any(collective in kind for collective in COLLECTIVES) or folded.startswith(GPU_COLLECTIVES):
        return Activity.collective
    if opcode in ("fusion", "async-start", "async-done") and folded.startswith(_COLLECTIVE_NAMES):
        return Activity.collective
    if opcode.startswith(("send", "recv")):
        to_host = "host" in kind or (line is not None and "is_host_transfer=true" in line.rest)
        return Activity.host if to_host else Activity.slices
    if traffic.host or any(transfer in f"{kind} {folded}" for transfer in TRANSFERS):
        return Activity.host
    if opcode == "custom-call":
        return Activity.matmul if target.startswith(_LIBRARIES) else Activity.kernel
    if opcode in _ASYNC:
        return Activity.memory
    return _of_core(name, opcode, category)


def _of_core(name: str, opcode: str, category: str) -> Activity:
    """The kind of an op that computes on the core, without what its work tells."""
    if opcode in COPIES or category == "data formatting":
        return Activity.formatting
    if any(word in f"{opcode} {category}" for word in _MATRIX):
        return Activity.matmul
    if opcode in ("fusion", "") and _COPY.match(name):
        return Activity.formatting
    return Activity.other


_OF_KIND = {
    Activity.collective: Resource.ici,
    Activity.slices: Resource.dcn,
    Activity.host: Resource.host,
    Activity.callback: Resource.host,
    Activity.formatting: Resource.hbm,
    Activity.memory: Resource.hbm,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledOp:
    """One run of an op in the step, with its place in the module where the profile has that."""

    raw: DeviceOp
    seconds: float
    """Its share of the step."""
    flight: float = 0.0
    """From its start to its end; of an asynchronous op that was waited for, from when it had its link for itself."""
    opcode: str
    op_name: str
    source: str
    flops: float
    bytes: float
    dtype: str
    """HLO dtype of a matmul's operands; empty where it is not known."""
    kind: Activity
    traffic: OpTraffic
    resource: Resource
    line: OpLine | None = None
    module: Module | None = None
    computation: Computation | None = None
    instruction: Instruction | None = None

    @property
    def layer(self) -> str:
        """Path of names in the model."""
        return layer_of(self.op_name)

    @property
    def target(self) -> str:
        """Target of a custom call."""
        return _target(self.line, self.instruction)


@dataclass(frozen=True)
class Describer:
    """Describes the ops of a device; what all runs of an op share is found once."""

    trace: DeviceTrace

    @cached_property
    def _known(self) -> dict[tuple[int | None, str, str], ProfiledOp]:
        return {}

    @cached_property
    def _index(self) -> Mapping[int, Mapping[str, tuple[Computation, Instruction]]]:
        return {
            program: {i.name: (c, i) for c in module.computations.values() for i in c}
            for program, module in self.trace.modules.items()
        }

    def __call__(self, op: DeviceOp) -> ProfiledOp:
        """The op with its work; ``raw`` is any of its runs."""
        key = op.program, op.name, op.text
        if key not in self._known:
            self._known[key] = self._described(op)
        return self._known[key]

    def _described(self, op: DeviceOp) -> ProfiledOp:
        module = self.trace.modules.get(op.program) if op.program is not None else None
        places = self._index.get(op.program, {}) if op.program is not None else {}
        computation, instruction = places.get(op.name, (None, None))
        line = read_line(op.text) if op.text else None
        if module is None or computation is None or instruction is None:
            return self._made(op, line, Work(dtype=""), op.op_name, op.source)
        source = named(module, computation, instruction)
        where = module.source(source)
        return self._made(
            op,
            line,
            work_of(module, computation, instruction),
            op.op_name or source.op_name,
            op.source or (str(where) if where else ""),
            (module, computation, instruction),
        )

    def _made(
        self,
        op: DeviceOp,
        line: OpLine | None,
        work: Work,
        op_name: str,
        source: str,
        place: tuple[Module, Computation, Instruction] | None = None,
    ) -> ProfiledOp:
        instruction = place[2] if place else None
        opcode = op.opcode or (instruction.opcode if instruction is not None else "")
        traffic = traffic_of(line, op.bytes or (0.0 if line else work.bytes), op.hbm)
        target = _target(line, instruction)
        kind = kind_of(op.name, opcode, op.category, line, target, traffic)
        flops, moved = op.flops or work.flops, op.bytes or work.bytes
        dtype = work.dtype if work.flops else ""
        if kind is Activity.other and dtype:
            kind = Activity.matmul
        return ProfiledOp(
            raw=op,
            seconds=0.0,
            opcode=opcode,
            op_name=op_name,
            source=source,
            flops=flops,
            bytes=moved,
            dtype=dtype,
            kind=kind,
            traffic=traffic,
            resource=self._resource(
                kind, flops, traffic.hbm if line is not None else moved, dtype if place else "bf16"
            ),
            line=line,
            module=place[0] if place else None,
            computation=place[1] if place else None,
            instruction=instruction,
        )

    def _resource(self, kind: Activity, flops: float, moved: float, dtype: str) -> Resource:
        """Resource that bounds an op: by its kind, then by its FLOPs and its bytes of device memory over the peaks.

        What moves nothing but vector memory is bound by the vector units.
        """
        if kind in _OF_KIND:
            return _OF_KIND[kind]
        if not flops and not moved:
            return Resource.vpu
        if self.trace.backend is Backend.tpu and kind not in (Activity.matmul, Activity.kernel):
            flops = 0.0  # the profile counts a vector unit's additions too
        peak = self.trace.peak(dtype)
        if peak and self.trace.peak_bytes and flops:
            full = flops / peak >= moved / self.trace.peak_bytes
            return Resource.mxu if full else Resource.hbm
        return Resource.mxu if flops else Resource.hbm


def _target(line: OpLine | None, instruction: Instruction | None) -> str:
    if instruction is not None and instruction.target:
        return instruction.target
    return line.target if line is not None else ""
