"""Spans on resources: what a step does when, simulated or measured, and its place in the model by the names that JAX gives an op."""

import enum
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from systolic.core.units import Origin
from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.module import named
from systolic.sim.calibration import Calibration, constant
from systolic.sim.incomplete import Incomplete

_WRAPPED = re.compile(
    r"^(?:jit|pjit|jvp|transpose|vmap|remat|checkpoint|custom_vjp|shard_map)\((.*)\)$"
)
_MAIN = "jit(main)"
"""Scope that versions of JAX before 0.7 put behind the function's own name."""
_DROPPED = frozenset(
    (
        "",
        "while",
        "body",
        "cond",
        "scan",
        "closed_call",
        "eval_jaxpr",
        "core_call",
        "checkpoint",
        "rematted_computation",
        "remat",
        "remat2",
        "shard_map",
        "pallas_call",
        "custom_vjp_call",
        "custom_jvp_call",
        "jvp()",
        "transpose(jvp())",
        "vmap()",
        "branch_0_fun",
        "branch_1_fun",
    )
)
ASSUMED_SPREAD: float = constant("timeline.assumed_spread")
ASSUMED_SHARE: float = constant("timeline.assumed_share")
_PARTICULAR = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*\.\d+(?:\.[A-Za-z]\w*)*|\d[\d.,e+]*\d|\d")
"""Parts in which two notes of a kind differ: numbered names of instructions, and numbers."""


@lru_cache(maxsize=65536)
def layer_of(op_name: str) -> str:
    """``jit(train)/transpose(jvp(attention))/while/body/dot_general`` is ``attention``."""
    first, *others = op_name.split("/")
    parts = [first, *(_bare(part) for part in others if part != _MAIN)]
    named = [part for part in parts[1:-1] if part not in _DROPPED and "->" not in part]
    return "/".join(named)


def phase_of(op_name: str) -> str:
    """forward, backward, recomputed or update: the part of a train step an op belongs to."""
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    if "jvp(" in op_name:
        return "forward"
    return "update"


def _bare(part: str) -> str:
    while wrapped := _WRAPPED.match(part):
        part = wrapped[1]
    return part


class Resource(enum.Enum):
    """Units and links that a span keeps busy. A TensorCore's ops go to the unit that bounds them."""

    mxu = "mxu"
    """Matrix units."""
    vpu = "vpu"
    """Vector, cross-lane and scalar units."""
    hbm = "hbm"
    """Device memory: ops bound by it, and copies that run beside compute."""
    ici = "ici"
    """Links between the chips of a slice."""
    dcn = "dcn"
    """The network between slices."""
    host = "host"
    """Transfers between device and host memory."""
    idle = "idle"


class PricedBy(enum.Enum):
    """Sources of a span's seconds."""

    cycles = "cycles"
    """The compiler's own estimate, calibrated."""
    estimate = "estimate"
    """Matrix, memory and vector work at fitted rates, for an op without the compiler's cycles."""
    bytes = "bytes"
    """Bytes over a rate."""
    kernel = "kernel"
    """The steps of a kernel's grid."""
    network = "network"
    """A collective on the links."""
    rule = "rule"
    """Another rule of the simulator, which its span's opcode names."""
    sort = "sort"
    """Stages of a sorting network over vector registers."""
    top_k = "top-k"
    """Stages of a bitonic top-k."""
    gather = "gather"
    """An address an index, and the granules of device memory that the slices touch."""
    scatter = "scatter"
    """An address an update, and the granules that it reads and writes."""
    window = "window"
    """Operations over the windows of a reduction."""
    random = "random"
    """Operations of a generator of random bits."""
    fft = "fft"
    """Operations of a fast Fourier transform."""
    halves = "halves"
    """A pass over the 32-bit halves of 64-bit elements."""
    roofline = "roofline"
    """The longest of matrix, memory and elementwise work."""
    small = "small"
    """A fixed time for bookkeeping on few bytes."""
    allowance = "allowance"
    """A share of the step that no schedule shows."""
    print = "print"
    """An assumed time of the host for what a program prints."""
    given = "given"
    """The user, for a kernel or a call."""
    measured = "measured"
    """A profile."""
    nothing = "nothing"
    """No rule; the time of its bytes."""


@dataclass(frozen=True, slots=True)
class Span:
    """One op, or a loop of them. Times in seconds from the start of the enclosing span."""

    name: str
    """The HLO instruction."""
    opcode: str
    start: float
    seconds: float
    resource: Resource
    lane: str = "core"
    """``core`` runs one op at a time; other lanes (``dma``, ``ici``, ``dcn``, ``host``) run beside it."""
    layer: str = ""
    """Path of names in the model."""
    source: str = ""
    """``file:line``."""
    flops: float = 0.0
    """FLOPs of matrix units."""
    vector_flops: float = 0.0
    """FLOPs of matmuls that the compiler gave to the vector units."""
    padding_flops: float = 0.0
    """FLOPs of a convolution's taps on the padding."""
    number_format: str = "bf16"
    """Format of the matmul's operands in the matrix units: ``bf16``, ``fp8``, ``int8``, ``int4``."""
    bytes: float = 0.0
    """HBM bytes, or bytes on the links."""
    priced_by: PricedBy | None = None
    """Source of the seconds; None for loops and waits."""
    repeat: float = 1
    """Iterations of a loop; ``seconds`` is of all of them. A mean, with a fraction, where runs of it differ."""
    inside: "tuple[Span, ...]" = ()
    """One iteration of a loop, from its start."""
    within_chip: bool = False
    """Whether a collective is over the devices of one chip alone."""
    low: float | None = None
    """Least seconds, of a rule that no measurement holds; None elsewhere."""
    high: float | None = None
    """Most seconds, likewise."""

    @property
    def price_source(self) -> str:
        """Value of ``priced_by`` as JSON and traces have it; empty for loops and waits."""
        return "" if self.priced_by is None else self.priced_by.value


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step."""

    origin: Origin
    seconds: float
    spans: Sequence[Span]
    notes: Sequence[str] = field(default=())
    """Assumptions of the simulation."""
    incomplete: Sequence[Incomplete] = field(default=())
    """Parts whose time the program does not say."""
    most: "Timeline | None" = None
    """The step with the most that all incomplete parts may take; None where one has no bound, or without any."""
    least: "Timeline | None" = None
    """The step with the least that they may take; None where no more is counted for one than it takes at least."""
    given: Sequence[str] = field(default=())
    """Trips and costs that the user gave, a line each."""
    turn_seconds: float = 0.0
    """Seconds that are assumed for each turn of a loop beside its ops."""
    calibration: Calibration | None = None
    """Corrections that its prices have, from profiles."""

    @property
    def executed_flops(self) -> float:
        """FLOPs of all matmuls of the step, on whatever unit, padding of operands included.

        Taps of convolutions that lie on the padding count, as in the model's own FLOPs (``models/vision.py``).
        """
        return sum(self.flops_by_format.values())

    @property
    def flops_by_format(self) -> dict[str, float]:
        """:attr:`executed_flops` by the format of the operands, since each has a peak of its own."""
        flops_by: dict[str, float] = {}
        for span, times in self.leaves():
            flops = (span.flops + span.vector_flops + span.padding_flops) * times
            if flops:
                flops_by[span.number_format] = flops_by.get(span.number_format, 0.0) + flops
        return flops_by

    @property
    def assumed(self) -> float:
        """Seconds that are assumed for ops on few bytes and turns of loops, where they are much of the step; else 0."""
        seconds = self.turn_seconds * _turns(self.spans)
        for span, times in self.leaves():
            if span.lane == "core" and span.priced_by is PricedBy.small:
                seconds += span.seconds * times
        return min(seconds, self.seconds) if seconds > ASSUMED_SHARE * self.seconds else 0.0

    @property
    def by_rule(self) -> tuple[float, float, float]:
        """Seconds of the core that rules price or that are :attr:`assumed`, and the least and most that they may be."""
        seconds = self.assumed
        low, high = seconds / ASSUMED_SPREAD, seconds * ASSUMED_SPREAD
        for span, times in self.leaves():
            if span.lane == "core" and span.low is not None and span.high is not None:
                seconds += span.seconds * times
                low += span.low * times
                high += span.high * times
        return seconds, low, high

    def leaves(self) -> "Iterator[tuple[Span, float]]":
        """Every op that is no loop, with how often it runs."""
        return leaves_of(self.spans, 1)


def _turns(spans: Sequence[Span]) -> float:
    """Turns of all loops, those inside others included."""
    return sum(
        span.repeat * ((span.opcode == "while") + _turns(span.inside))
        for span in spans
        if span.inside
    )


def leaves_of(spans: Sequence[Span], times: float) -> Iterator[tuple[Span, float]]:
    """Every op of the spans that is no loop, with how often it runs where they run so many times."""
    for span in spans:
        if span.inside:
            yield from leaves_of(span.inside, times * span.repeat)
        else:
            yield span, times


def span_of(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    seconds: float,
    resource: Resource,
) -> Span:
    """Span of an op from the start of its computation, on the core."""
    origin = named(module, computation, instruction)
    source = module.source(origin)
    return Span(
        name=instruction.name,
        opcode=instruction.opcode,
        start=0.0,
        seconds=seconds,
        resource=resource,
        layer=layer_of(origin.op_name),
        source=str(source) if source else "",
    )


def merged(notes: Iterable[str]) -> tuple[str, ...]:
    """The first note of each kind, in their order; notes that differ in names and numbers only are of one kind."""
    kinds: dict[str, list[str]] = {}
    for note in notes:
        kinds.setdefault(_PARTICULAR.sub("#", note), []).append(note)
    return tuple(
        first if not rest else f"{first} (and {len(rest)} more like it)"
        for first, *rest in kinds.values()
    )
