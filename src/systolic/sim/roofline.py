"""Rooflines: seconds of a program from its FLOPs and bytes, where no schedule of the chip is known; on CPUs and GPUs with a range for sorts, gathers, scatters, windows and FFTs.

Each op takes the longest of its matrix work, its memory traffic and its elementwise work, at rates
that were measured on good shapes; ops and collectives follow each other. That says what the hardware
allows a program, not what a compiler makes of it.
"""

import enum
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from systolic.chips import Slice
from systolic.core.errors import NotFoundError
from systolic.core.units import Origin
from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.groups import COLLECTIVES, groups_of
from systolic.sim.calibration import constant
from systolic.sim.estimate import vector_operations
from systolic.sim.gpu import matmul_format
from systolic.sim.incomplete import (
    BYTES,
    HOST_WORK,
    NOTHING,
    PRINT_MOST_SECONDS,
    PRINT_SECONDS,
    PRINTED,
    Ends,
    GapKind,
    Gaps,
    Given,
    answers,
    is_callback,
    is_print,
    measured,
)
from systolic.sim.network import Switched, switched
from systolic.sim.price import FREE
from systolic.sim.rates import number_format
from systolic.sim.rules import MEASURED, Ruled, comparator_operations
from systolic.sim.timeline import PricedBy, Resource, Span, Timeline, merged, span_of
from systolic.sim.traffic import bytes_read
from systolic.sim.work import Work, numbers, slice_sizes, window_sizes, work_of

LINE_BYTES: int = constant("roofline.line_bytes")
SECTOR_BYTES: int = constant("roofline.sector_bytes")
COMPARATOR_SECONDS: float = constant("roofline.comparator_seconds")
SLICE_SECONDS: float = constant("roofline.slice_seconds")
UPDATE_SECONDS: float = constant("roofline.update_seconds")
WINDOW_SECONDS: float = constant("roofline.window_seconds")
FFT_RATE: float = constant("roofline.fft_rate")
RADIX_SHARE: float = constant("roofline.radix_share")
TILE: int = constant("roofline.tile")
SPREAD: float = constant("roofline.spread")

_BY = {
    "sort": PricedBy.sort,
    "gather": PricedBy.gather,
    "scatter": PricedBy.scatter,
    "reduce-window": PricedBy.window,
    "select-and-scatter": PricedBy.window,
    "fft": PricedBy.fft,
}
_NOTES = {
    PricedBy.sort: (
        "estimated: sorts by n log2 n calls of the comparator in one thread, as XLA:CPU runs them",
        "estimated: sorts by the passes over memory of a radix sort, at most those of a bitonic network",
    ),
    PricedBy.gather: (
        "estimated: gathers by the cache lines of 64 bytes that they touch",
        "estimated: gathers by the sectors of 32 bytes that they touch",
    ),
    PricedBy.scatter: (
        "estimated: scatters by their updates in one thread, and the cache lines that they read and write",
        "estimated: scatters by the sectors of 32 bytes that they read and write",
    ),
    PricedBy.window: (
        "estimated: windows (cumulative sums, pooling) by their operations",
        "estimated: windows (cumulative sums, pooling) by their operations",
    ),
    PricedBy.fft: (
        "estimated: FFTs by 5 n log2 n FLOPs and their bytes",
        "estimated: FFTs by 5 n log2 n FLOPs and their bytes",
    ),
}
MATMUL_EFFICIENCY: float = constant("roofline.matmul_efficiency")
MEMORY_EFFICIENCY: float = constant("roofline.memory_efficiency")
F32_SHARE: float = constant("roofline.f32_share")
ATTENTION: tuple[tuple[int, float], ...] = constant("roofline.attention")
"""Head dim, and share of the bf16 peak that attention reaches with it."""
LAUNCH_SECONDS: float = constant("roofline.launch_seconds")
_FMHA = "__cudnn$fmha"
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
_LAYOUT_ONLY = frozenset(("parameter", "copy", "transpose", "bitcast", "reshape"))
_PASSED = ("bitcast", "reshape", "get-tuple-element")
_PRODUCTS = ("dot", "convolution")
_LEAST_BYTES = 65536
"""Size below which the way of reading an array does not matter."""
Reading = tuple[Instruction, Instruction]
"""A reader, and the instruction whose result it reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IrregularRates:
    """Rates that these ops take.

    Their bytes alone say nothing of a sort, and too little of single elements that are gathered or scattered: memory
    moves whole cache lines (64 bytes of a CPU) or sectors (32 bytes of a GPU).

    - Sort. XLA:CPU sorts in one thread and calls the comparator n log2 n times a row. A GPU reads and writes all operands once for
      each byte of the keys, and the keys once before (radix sort; Adinets and Merrill, Onesweep, arXiv 2206.01784).
      Where XLA has no radix sort for the comparator it emits a bitonic network, whose passes over memory are the upper end.
    - Gather and scatter. Each run of elements that lie side by side touches whole lines; a scatter reads and writes them.
      An operand that a cache holds is read at most once from memory, which is the lower end.
    - Windows (cumulative sums, pooling): an operation for each element of each window.
    - FFT: 5 n log2 n FLOPs (Cooley and Tukey), and on a GPU another pass over memory for sizes beyond one block of threads.
    """

    memory: float
    """Bytes/s."""
    operations: float
    """Operations/s: elementwise ones of a CPU; of a GPU its rate of f32 matmuls, which elementwise work stays below."""
    is_cpu: bool
    launch_seconds: float = 0.0


def note(by: PricedBy, machine: IrregularRates) -> str:
    """Basis of an estimate of this kind."""
    return _NOTES[by][0 if machine.is_cpu else 1]


def irregular(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    work: Work,
    machine: IrregularRates,
) -> Ruled | None:
    """The price of such an op, or of a fusion with all that it holds; None for others.

    Args:
        module: The program.
        computation: The computation that holds the op.
        instruction: The op.
        work: Its work; bytes as if elements were moved alone.
        machine: Rates.
    """
    seconds, touched, passes, slowest = 0.0, 0.0, 1.0, 1.0
    by: PricedBy | None = None
    for held, at in _held(module, computation, instruction):
        by = by or _BY[held.opcode]
        if held.opcode == "sort":
            each, turns, most = _sort(module, held, at, machine)
            passes, slowest = max(passes, turns), max(slowest, most)
        elif held.opcode in ("gather", "scatter"):
            each, lines = _addressed(held, at, machine)
            touched += lines
        elif held.opcode == "fft":
            size = math.prod(numbers(held, "fft_length") or [2])
            elements = max(s.elements for s in (held.shape, *at.operand_shapes(held)))
            flops = 5 * elements * math.log2(max(size, 2))
            each = flops / (FFT_RATE if machine.is_cpu else machine.operations)
            passes = max(passes, 1.0 if machine.is_cpu or size <= TILE else 2.0)
        else:
            operations = _window(held, at)
            each = operations * (WINDOW_SECONDS if machine.is_cpu else 1 / machine.operations)
        seconds += each
    if by is None:
        return None
    floor = work.bytes * (passes if by is PricedBy.sort else 1) / machine.memory
    moved = (work.bytes * passes + touched) / machine.memory
    if by in (PricedBy.gather, PricedBy.scatter) and not touched and seconds <= moved:
        return None  # whole lines are a copy, which bytes price
    if passes > 1 and by is PricedBy.sort:
        moved /= RADIX_SHARE
    launches = machine.launch_seconds * passes
    value = max(seconds, moved, launches, machine.launch_seconds)
    high = max(SPREAD * value, work.bytes * slowest / machine.memory + launches)
    if seconds > moved:
        floor = max(floor, seconds / SPREAD)
    most_low = value if by is PricedBy.sort else value / MEASURED
    low = min(max(floor, machine.launch_seconds), most_low)
    return Ruled(seconds=value, low=low, high=high, by=by, on_memory=moved >= seconds)


def without_tiles(
    module: Module, computation: Computation, instruction: Instruction, work: Work
) -> Work:
    """The work with the bytes that a scatter updates as elements, not as the tiles that a TPU reads and writes."""
    operand_bytes = sum(shape.bytes for shape in computation.operand_shapes(instruction))
    updated = 0.0
    has_scatter = False
    for held, at in _held(module, computation, instruction):
        if held.opcode == "scatter":
            has_scatter = True
            shapes = at.operand_shapes(held)
            buffers = max(len(shapes) // 2, 1)
            operand_bytes -= sum(shape.bytes for shape in shapes[:buffers])
            updated += 2 * sum(shape.bytes for shape in shapes[buffers + 1 :])
    return (
        work
        if not has_scatter
        else replace(work, bytes=min(work.bytes, max(operand_bytes, 0.0) + updated))
    )


def _held(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Instruction, Computation]]:
    if instruction.opcode in _BY:
        yield instruction, computation
    elif instruction.opcode == "fusion":
        inner = module.callee(instruction, "calls")
        for inner_op in inner:
            yield from _held(module, inner, inner_op)


def _sort(
    module: Module, sort: Instruction, at: Computation, machine: IrregularRates
) -> tuple[float, float, float]:
    """Seconds of comparisons, and passes over memory of a radix sort and of a bitonic network."""
    operands = [a for s in at.operand_shapes(sort) for a in s.arrays()]
    keys = operands[0]
    dim = (numbers(sort, "dimensions") or [len(keys.dims) - 1])[0]
    size = max(keys.dims[dim] if keys.dims else 1, 1)
    if size == 1:
        return 0.0, 1.0, 1.0
    if machine.is_cpu:
        calls = keys.elements * math.log2(size)
        # Another operand is moved by each swap: an argsort takes 1.4 times a sort's time.
        moves = comparator_operations(module, sort) + 6 * (len(operands) - 1)
        return calls * moves * COMPARATOR_SECONDS, 1.0, 1.0
    digits = max(keys.bits // 8, 1)
    share = keys.bytes / max(2 * sum(shape.bytes for shape in operands), 1)
    # Stages between elements that are apart by more than a tile pass over memory one by one.
    far = max((size - 1).bit_length() - (TILE - 1).bit_length(), 0)
    network = far * (far + 1) // 2 + far + 1
    one_block = size <= TILE
    return 0.0, 1.0 if one_block else digits + share, float(max(network, digits + share))


def _addressed(held: Instruction, at: Computation, machine: IrregularRates) -> tuple[float, float]:
    """Seconds of the slices of a gather or the updates of a scatter, and bytes of lines beyond the elements themselves."""
    shapes = at.operand_shapes(held)
    buffers = 1 if held.opcode == "gather" else max(len(shapes) // 2, 1)
    operand = next(shapes[0].arrays())
    addressed = held.shape if held.opcode == "gather" else shapes[buffers + 1]
    elements = next(addressed.arrays()).elements
    window = slice_sizes(held, operand.dims, addressed.dims)
    count = elements / max(math.prod(window), 1)
    side_by_side = 1
    for dim in operand.minor_to_major or range(len(window) - 1, -1, -1):
        side_by_side *= window[dim]
        if window[dim] != operand.dims[dim]:
            break
    runs = elements / max(side_by_side, 1)
    line = LINE_BYTES if machine.is_cpu else SECTOR_BYTES
    wanted = side_by_side * operand.bits / 8
    beyond = runs * (math.ceil(wanted / line) * line - wanted) * buffers
    if held.opcode == "scatter":
        return (count * UPDATE_SECONDS if machine.is_cpu else 0.0), 2 * beyond
    return (count * SLICE_SECONDS if machine.is_cpu else 0.0), beyond


def _window(held: Instruction, at: Computation) -> float:
    size = math.prod(window_sizes(held))
    scattered = held.opcode == "select-and-scatter"
    over = at.operand_shapes(held)[1] if scattered else next(held.shape.arrays())
    return float(over.elements * size)


class ModuleSource(enum.Enum):
    """Compilers that a module may come from."""

    compiled = "compiled"
    """Compiled by the compiler of the platform it is priced for."""
    stand_in = "stand-in"
    """Partitioned by XLA, scheduled and fused for another platform."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """Rates that one device reaches."""

    matmul: dict[str, float]
    """FLOP/s by kind of operand: ``bf16``, ``f32``, ``fp8``, ``int8``; ``bf16`` or ``f32`` is there."""
    memory: float
    """Bytes/s, read and written."""
    attention: float = 0.0
    """bf16 peak that the shares of ``ATTENTION`` are of."""
    vector: float | None = None
    """Elementwise operations/s; None where only memory bounds them."""
    launch_seconds: float = 0.0
    """The least an op takes."""
    is_cpu: bool = False
    """Whether it is a CPU, whose sorts and scatters run in one thread."""
    links: Switched | None = None
    """Links between the devices; None where collectives are copies in the memory of one host."""

    @property
    def machine(self) -> IrregularRates:
        """Rates of sorts, gathers and their kind."""
        return IrregularRates(
            memory=self.memory,
            operations=self.vector or self.of("f32"),
            is_cpu=self.is_cpu,
            launch_seconds=self.launch_seconds,
        )

    def of(self, dtype: str) -> float:
        """FLOP/s of a matmul whose operands have this HLO dtype."""
        if dtype.startswith("f8") and "fp8" in self.matmul:
            return self.matmul["fp8"]
        if dtype in ("s8", "u8") and "int8" in self.matmul:
            return self.matmul["int8"]
        if dtype in ("f32", "f64") and "f32" in self.matmul:
            return self.matmul["f32"]
        return self.matmul.get("bf16") or self.matmul["f32"]


def gpu_peaks(on: Slice) -> Peaks:
    """Peaks of a GPU, from the catalogue.

    Raises:
        NotFoundError: the catalogue lacks the peak or the bandwidth.
    """
    chip = on.chip
    peak, memory = chip.peak_bf16_flops_per_second, chip.hbm_bytes_per_second
    if peak is None or memory is None:
        raise NotFoundError(
            f"the catalogue has no peak or no bandwidth of {chip.name}; add it to your own catalogue"
        )
    reached = chip.measured_matmul_bf16_flops_per_second or MATMUL_EFFICIENCY * peak
    published = {"fp8": chip.peak_fp8_flops_per_second, "int8": chip.peak_int8_ops_per_second}
    narrow = {k: v * reached / peak for k, v in published.items() if v is not None}
    return Peaks(
        matmul={"bf16": reached, "f32": F32_SHARE * reached, **narrow},
        memory=chip.measured_hbm_copy_bytes_per_second or MEMORY_EFFICIENCY * memory,
        attention=peak,
        launch_seconds=LAUNCH_SECONDS,
        links=switched(on),
    )


def roofline(
    module: Module,
    peaks: Peaks,
    num_devices: int,
    program: ModuleSource,
    given: Given = NOTHING,
) -> Timeline:
    """The step that ``module`` is, on one of ``num_devices``.

    Args:
        module: Partitioned and scheduled HLO.
        peaks: What a device reaches.
        num_devices: Of the slice.
        program: Whether it was compiled for these devices; what another platform's compiler adds
            before a matmul, and the reductions that a GPU's would scatter, are then corrected.

        given: Trips and costs that the module leaves open.

    Raises:
        NotFoundError: the catalogue lacks the rate of a link that the program needs.
        OptionError: the module has nothing of a name that is given, or contradicts a number of trips.
    """
    walk = _Walk(
        module=module,
        peaks=peaks,
        num_devices=num_devices,
        program=program,
        reads=OperandReads(module),
        gaps=Gaps(module, given),
    )
    origin = Origin.simulated if program is ModuleSource.compiled else Origin.assumed

    def at(ends: Ends) -> Timeline:
        other = replace(walk, gaps=walk.gaps.at(ends), notes={}, known={})
        seconds, spans = other.computation(module.entry)
        return Timeline(origin=origin, seconds=seconds, spans=spans)

    seconds, spans = walk.computation(module.entry)
    missed = measured(walk.gaps.missed.values(), spans)
    return Timeline(
        origin=origin,
        seconds=seconds,
        spans=spans,
        notes=(*merged(walk.notes), *walk.gaps.notes()),
        incomplete=missed,
        most=at(Ends.most) if missed and all(part.bounded for part in missed) else None,
        least=at(Ends.least) if any(part.is_assumed for part in missed) else None,
        given=tuple(walk.gaps.lines()),
    )


@dataclass
class _Walk:
    module: Module
    peaks: Peaks
    num_devices: int
    program: ModuleSource
    reads: "OperandReads"
    gaps: Gaps
    notes: dict[str, None] = field(default_factory=dict)
    known: dict[str, tuple[float, tuple[Span, ...]]] = field(default_factory=dict)

    def computation(self, computation: Computation) -> tuple[float, tuple[Span, ...]]:
        """Seconds and spans of one run of it, one op after another."""
        if computation.name not in self.known:
            spans: list[Span] = []
            now = 0.0
            for instruction in computation:
                for span in self.steps(computation, instruction):
                    spans.append(replace(span, start=now))
                    now += span.seconds
            self.known[computation.name] = (now, tuple(spans))
        return self.known[computation.name]

    def steps(self, computation: Computation, instruction: Instruction) -> list[Span]:
        """Spans of an op: one for each branch of a conditional that is taken, none where it takes no time."""
        if instruction.opcode == "conditional":
            return self.branch(computation, instruction)
        span = self.step(computation, instruction)
        return [] if span is None else [span]

    def branch(self, computation: Computation, instruction: Instruction) -> list[Span]:
        """Branches of a conditional, each with the share of runs that take it."""
        names = instruction.called_computations
        runs = {
            number: self.computation(self.module.computations[names[number]])
            for number in self.gaps.possible(instruction)
        }
        shares = self.gaps.branches(
            computation, instruction, {n: run[0] for n, run in runs.items()}
        )
        branches = []
        for number, share in shares.items():
            seconds, spans = runs[number]
            if spans:
                outer = self.span(computation, instruction, seconds * share, Resource.idle)
                branches.append(replace(outer, repeat=share, inside=spans))
        return branches

    def step(self, computation: Computation, instruction: Instruction) -> Span | None:
        """Span of an op; None where it takes no time."""
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith(("-done", "-update")):
            return None
        if opcode == "while":
            return self.loop(computation, instruction)
        if opcode in ("call", "async-start", "call-start"):
            inner = [self.module.computations[name] for name in instruction.called_computations]
            seconds, spans = max(map(self.computation, inner), key=lambda cost: cost[0])
            outer = self.span(computation, instruction, seconds, Resource.idle)
            return replace(outer, inside=spans) if spans else None
        if opcode.removesuffix("-start") in COLLECTIVES:
            return self.collective(computation, instruction)
        return self.op(computation, instruction)

    def loop(self, computation: Computation, instruction: Instruction) -> Span | None:
        count = self.gaps.trips(computation, instruction)
        if not count:
            return None
        seconds, spans = self.computation(self.module.callee(instruction, "body"))
        if not spans:
            return None
        outer = self.span(computation, instruction, seconds * count, Resource.idle)
        return replace(outer, repeat=count, inside=spans)

    def op(self, computation: Computation, instruction: Instruction) -> Span | None:
        stand_in = self.program is ModuleSource.stand_in
        if stand_in and self.reads.feeds_products_only(computation, instruction):
            return None  # a GPU's matmul reads its operands in either order
        if instruction.opcode == "custom-call":
            return self.call(computation, instruction)
        if is_callback(instruction) and not answers(computation, instruction):
            if is_print(instruction):
                return self.printed(computation, instruction)
            self.gaps.miss(computation, instruction, GapKind.callback, HOST_WORK)
        work = work_of(self.module, computation, instruction)
        work = without_tiles(self.module, computation, instruction, work)
        elements = 0.0
        if self.peaks.vector is not None:
            inner = instruction.called("calls") if instruction.opcode == "fusion" else None
            elements = (
                vector_operations(self.module, self.module.computations[inner])
                if inner is not None
                else float(instruction.shape.elements)
            )
        span = self.priced(computation, instruction, work, PricedBy.roofline, elements=elements)
        return self.estimated(computation, instruction, work, span)

    def estimated(
        self, computation: Computation, instruction: Instruction, work: Work, span: Span
    ) -> Span:
        """The span with an estimate and its range, where it is a sort, a gather or another op that its bytes do not price."""
        machine = self.peaks.machine
        ruled = irregular(self.module, computation, instruction, work, machine)
        if ruled is None:
            return span
        self.notes[note(ruled.by, machine)] = None
        seconds = max(span.seconds, ruled.seconds)
        if ruled.seconds >= span.seconds:
            resource = Resource.hbm if ruled.on_memory else Resource.vpu
            span = replace(span, resource=resource, priced_by=ruled.by)
        low = max(min(span.seconds, seconds), ruled.low)
        return replace(span, seconds=seconds, low=low, high=max(ruled.high, seconds))

    def call(self, computation: Computation, instruction: Instruction) -> Span:
        """Libraries: attention and matmuls by their shapes, what is not known by its bytes."""
        operands = computation.operand_shapes(instruction)
        moved = float(
            sum(s.bytes_in(0) for s in operands)
            + sum(s.bytes_in(0) for s in instruction.shape.arrays() if s.dtype != "u8")
        )
        target = instruction.target
        if target.startswith(_FMHA) and len(operands) >= 3:
            flops, head_dim = _attention(instruction, operands)
            rate = self.peaks.attention * _share(head_dim) or self.peaks.of("bf16")
            return self.priced(
                computation, instruction, Work(flops, moved), PricedBy.kernel, seconds=flops / rate
            )
        contracted = _CONTRACTED.search(instruction.rest)
        if target.startswith("__cublas") and contracted is not None and operands:
            dims = [int(n) for n in contracted[1].replace('"', "").split(",") if n.strip()]
            depth = math.prod(operands[0].dims[dim] for dim in dims)
            out = next(iter(instruction.shape.arrays()))
            work = Work(2.0 * out.elements * depth, moved, operands[0].dtype)
            return self.priced(computation, instruction, work, PricedBy.roofline)
        given_seconds = self.gaps.cost(computation, instruction)
        if given_seconds is not None:
            span = self.span(computation, instruction, given_seconds, Resource.host)
            return replace(span, bytes=moved, priced_by=PricedBy.given)
        if is_print(instruction):
            return replace(self.printed(computation, instruction), bytes=moved)
        asks = "callback" in target
        kind, why = (GapKind.callback, HOST_WORK) if asks else (GapKind.call, BYTES)
        self.gaps.miss(computation, instruction, kind, why)
        return self.priced(computation, instruction, Work(0.0, moved), PricedBy.nothing)

    def printed(self, computation: Computation, instruction: Instruction) -> Span:
        """A print, by the host's assumed time."""
        self.notes[PRINTED] = None
        span = self.span(computation, instruction, PRINT_SECONDS, Resource.host)
        return replace(span, priced_by=PricedBy.print, low=0.0, high=PRINT_MOST_SECONDS)

    def priced(
        self,
        computation: Computation,
        instruction: Instruction,
        work: Work,
        by: PricedBy,
        *,
        seconds: float | None = None,
        elements: float = 0.0,
    ) -> Span:
        """The longest of matrix, memory and elementwise work; ``seconds`` of matrix work where known."""
        peaks = self.peaks
        matrix = work.flops / peaks.of(work.dtype) if seconds is None else seconds
        memory = work.bytes / peaks.memory
        vector = elements / peaks.vector if peaks.vector is not None else 0.0
        longest = max(matrix, memory, vector, peaks.launch_seconds)
        resource = Resource.mxu if matrix >= memory else Resource.hbm
        if max(matrix, memory) < longest:
            resource = Resource.vpu if vector >= longest else Resource.host
        form = number_format(work.dtype)
        if peaks.links is not None:  # of a GPU, which multiplies f32 as TF32
            form = matmul_format(work.dtype, work.dtype)
        span = self.span(computation, instruction, longest, resource)
        return replace(
            span,
            flops=work.flops,
            vector_flops=work.vector_flops,
            padding_flops=work.padding_flops,
            number_format=form,
            bytes=work.bytes,
            priced_by=by,
        )

    def collective(self, computation: Computation, instruction: Instruction) -> Span | None:
        kind = instruction.opcode.removesuffix("-start")
        operand_bytes = sum(s.bytes for s in computation.operand_shapes(instruction))
        result = instruction.shape
        if (
            instruction.opcode.endswith("-start")
            and result.parts is not None
            and len(result.parts) > 1
        ):
            result = result.parts[1]  # (operands, results)
        groups = groups_of(instruction, self.num_devices)
        links = self.peaks.links
        if links is None:
            # The devices are threads of one host: what one holds, another copies.
            work = Work(0.0, float(operand_bytes + result.bytes))
            span = self.priced(computation, instruction, work, PricedBy.roofline)
            return replace(span, resource=Resource.hbm, opcode=kind)
        size = max(groups.size, 1)
        if (
            self.program is ModuleSource.stand_in
            and kind == "all-reduce"
            and self.reads.in_parts(computation, instruction, size)
        ):
            kind = "reduce-scatter"
        cost = links.collective(kind, groups, float(result.bytes), float(operand_bytes))
        if not cost.seconds:
            return None
        resource = Resource.dcn if "dcn" in cost.lanes else Resource.ici
        span = self.span(computation, instruction, cost.seconds, resource)
        return replace(span, opcode=kind, bytes=cost.bytes, priced_by=PricedBy.network)

    def span(
        self,
        computation: Computation,
        instruction: Instruction,
        seconds: float,
        resource: Resource,
    ) -> Span:
        return span_of(self.module, computation, instruction, seconds, resource)


def _attention(instruction: Instruction, operands: list) -> tuple[float, int]:
    """FLOPs and head dim of a cuDNN attention: queries, keys and values are [batch, sequence, heads, head dim].

    Two matmuls forward, five backward; half of them where the kernel masks causally itself.
    """
    query, key = operands[0].dims, operands[1].dims
    batch, queries, heads, head_dim = query
    flops = 2.0 * 2 * batch * heads * queries * key[1] * head_dim
    if "Backward" in instruction.target:
        flops *= 2.5
    if "CAUSAL" in instruction.rest:
        flops *= 0.5
    return flops, head_dim


def _share(head_dim: int) -> float:
    """Share of the peak for a head dim, between and beyond the measured ones."""
    (low, small), (high, large) = ATTENTION
    at = min(max((head_dim - low) / (high - low), 0.0), 1.0)
    return small + at * (large - small)


@dataclass
class OperandReads:
    """Readers of results in a module's computations."""

    module: Module
    known: dict[str, dict[str, list[Instruction]]] = field(default_factory=dict)

    def feeds_products_only(self, computation: Computation, instruction: Instruction) -> bool:
        """Whether an op only reorders an array that only matmuls read."""
        if instruction.opcode == "fusion":
            inner = self.module.callee(instruction, "calls")
            if any(held.opcode not in _LAYOUT_ONLY for held in inner):
                return False
        elif instruction.opcode not in ("copy", "transpose"):
            return False
        readings = self._readings(computation, instruction)
        return bool(readings) and all(self._is_product(reader) for reader, _ in readings)

    def in_parts(self, computation: Computation, written: Instruction, parts: int) -> bool:
        """Whether every reader of a result takes at most one of ``parts`` of each array in it."""
        readings = [
            (reader, source)
            for reader, source in self._readings(computation, written)
            if source.shape.bytes > _LEAST_BYTES
        ]
        return (
            parts > 1
            and bool(readings)
            and all(
                self._bytes(reader, source) <= source.shape.bytes / parts
                for reader, source in readings
            )
        )

    def _bytes(self, reader: Instruction, source: Instruction) -> float:
        size = float(source.shape.bytes)
        if reader.opcode == "dynamic-slice":
            return float(reader.shape.bytes)
        if reader.opcode != "fusion":
            return size
        inner = self.module.callee(reader, "calls")
        read = [
            bytes_read(self.module, inner, parameter, size)
            for name, parameter in zip(reader.operands, inner.parameters, strict=False)
            if name == source.name
        ]
        return max(read, default=size)

    def _is_product(self, instruction: Instruction) -> bool:
        if instruction.opcode in _PRODUCTS:
            return True
        if instruction.opcode == "custom-call":
            return instruction.target.startswith(("__cublas", "__cudnn"))
        if instruction.opcode != "fusion":
            return False
        held = self.module.callee(instruction, "calls")
        return any(inner.opcode in _PRODUCTS for inner in held)

    def _readings(self, computation: Computation, written: Instruction) -> list[Reading]:
        """Readings of a result, through ops that only rename it or take it out of a tuple."""
        users = self._users(computation)
        readings: list[Reading] = []
        todo = [written]
        while todo:
            at = todo.pop()
            for user in users.get(at.name, ()):
                if user.opcode in _PASSED:
                    todo.append(user)
                else:
                    readings.append((user, at))
        return readings

    def _users(self, computation: Computation) -> dict[str, list[Instruction]]:
        if computation.name not in self.known:
            users: dict[str, list[Instruction]] = {}
            for instruction in computation:
                for name in instruction.operands:
                    users.setdefault(name, []).append(instruction)
            self.known[computation.name] = users
        return self.known[computation.name]
