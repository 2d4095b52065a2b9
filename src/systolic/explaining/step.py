"""Input and output of the rules: a step, simulated by a forecast or measured by a profile, and a cause, of which explanations are lists."""

import enum
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from systolic.core.units import duration, si
from systolic.explaining.settings import Advice, Settings, render
from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.groups import COLLECTIVES, groups_of
from systolic.profile.profile import Rate
from systolic.sim.timeline import Resource

SHOWN = 4
"""Number of places named as evidence."""
LEAST = 0.01
"""Share of the step below which a cause is not reported."""
LINKS = (Resource.ici, Resource.dcn, Resource.host)
_GRADIENT = re.compile(r"jvp\(|transpose\(")
_INSIDE = re.compile(r"jvp|transpose\(|while/body")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """Work of measured ops on the unit that most of their time is bound by."""

    unit: str
    """``host link``, ``device memory``, ``matrix units``."""
    measure: str
    """``B`` or ``FLOP``."""
    amount: float
    """Bytes or FLOPs in a step."""
    per_second: float
    """While they were under way."""
    share: float | None
    """Share of the unit's peak (0 to 1); None where no peak is known."""

    @property
    def text(self) -> str:
        """``32.2 GB at 27.1 GB/s, 42% of the peak: host link``."""
        size = si(self.amount, self.measure)
        text = f"{size} at {si(self.per_second, f'{self.measure}/s')}"
        return f"{text}, {self.unit}" + ("" if self.share is None else f" at {self.share:.0%}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Something that costs time, memory or quality, with its evidence."""

    name: str
    """``exposed-collectives``, ``dead-gradients``: stable, in kebab case."""
    title: str
    """One line for people."""
    share: float | None
    """Share of the step (0 to 1) for a cause that costs time, else ``None``."""
    seconds: float | None
    """Cost in seconds; ``None`` for a cause that is not about time."""
    evidence: Sequence[str]
    """Lines with numbers: ops, layers, source lines, steps."""
    advice: Sequence[str]
    """Settings to try, as typed on the command line."""
    work: Reached | None = None
    """Bytes and rate of a measured step's ops; None where they are not known."""


class OpKind(enum.Enum):
    """Kinds of op that the rules distinguish."""

    matmul = "matmul"
    kernel = "kernel"
    """Custom kernel (Pallas), opaque to the compiler."""
    launch = "launch"
    """A GPU's kernel whose start and end take longer than its work."""
    copy = "copy"
    """Only changes an array's layout."""
    memory = "memory"
    """Waits for a copy between memories of the device."""
    callback = "callback"
    """Calls Python on the host."""
    loop = "loop"
    """Contains other ops."""
    other = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Position of an op in a compiled module."""

    module: Module
    computation: Computation
    instruction: Instruction


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOp:
    """Op of the step, with all its runs summed."""

    name: str
    """Name of the HLO instruction, or of the kernel where it belongs to none."""
    opcode: str
    kind: OpKind
    resource: Resource
    """The resource that bounds it."""
    seconds: float
    times: float = 1
    """Runs in a step."""
    flops: float = 0.0
    """FLOPs of all runs."""
    bytes: float = 0.0
    """Bytes of all runs, of device memory or on the links."""
    dtype: str = ""
    """HLO dtype of a matmul's operands; empty where it is not known."""
    op_name: str = ""
    layer: str = ""
    source: str = ""
    windowed: bool = False
    """Whether it belongs to a windowed einsum."""
    place: Place | None = None
    rate: Rate | None = None
    """Measured work of all runs on the unit that bounds it; None in a forecast, or where the profile tells no work."""
    flight: float = 0.0
    """Seconds in which that work was done; longer than ``seconds`` where a part of it was hidden."""
    to_host: bool = False
    """Whether a copy writes the host's memory."""

    @property
    def reached(self) -> float | None:
        """Share of the peak of the unit that bounds it; None where it is not known."""
        return None if self.rate is None else self.rate.share(self.flight)

    @property
    def waits(self) -> bool:
        """Whether the device waits in it for chips, slices or the host."""
        return self.resource in LINKS


@dataclass(frozen=True, kw_only=True)
class Step:
    """Ops of one step on one device.

    Args:
        seconds: Step time.
        ops: The device's ops in order.
        mesh: Axis to size, outermost first; empty where it is not known.
        microbatches: Microbatches of a pipeline; 0 where there is none or it is not known.
        peak: FLOP/s of a matmul by the HLO dtype of its operands; None where no peak is known.
        mxu_width: Columns of a matrix unit.
        memory_peak: Bytes/s of device memory; None where it is not known.
        f32_passes: Whether f32 matmuls take several passes of the matrix units.
        settings: Options of the recipe; None where it is not known.
        slots_per_token: Expert slots for each one that a token fills.
        foreign: Whether no recipe made the program: advice then names no options.
        gpu: Whether a GPU runs it.
    """

    seconds: float
    ops: Sequence[StepOp]
    mesh: Mapping[str, int] = field(default_factory=dict)
    microbatches: int = 0
    peak: Callable[[str], float | None]
    mxu_width: int
    memory_peak: float | None
    f32_passes: bool
    slots_per_token: float = 1.0
    settings: Settings | None = None
    foreign: bool = False
    """Whether no recipe made the program, so that advice names none of its options."""
    gpu: bool = False
    """Whether a GPU runs it, whose units and links have other names and remedies."""

    def fill(self, op: StepOp) -> float | None:
        """Share of the peak that a matmul or a kernel reaches; None where it is unknown."""
        peak = self.peak(op.dtype or "bf16")
        if not op.flops or not op.seconds or peak is None:
            return None
        return op.flops / peak / op.seconds


def cause_of_ops(
    step: Step,
    name: str,
    title: str,
    ops: Iterable[StepOp],
    advice: Sequence[str | Advice],
    *,
    note: Callable[[StepOp], str] = lambda op: op.name,
    seconds: Callable[[StepOp], float] = lambda op: op.seconds,
) -> Cause:
    """Cause from ops, with the most expensive places as evidence.

    Args:
        step: The step that has the ops.
        name: Name of the cause.
        title: Title of the cause.
        ops: Ops that show it.
        advice: What to try.
        note: Makes the text for the largest op of a place.
        seconds: Gives the seconds lost in an op.
    """
    by: dict[tuple[str, str], list[StepOp]] = defaultdict(list)
    for op in ops:
        layer = _near(op.layer)
        by[layer if layer or op.source else op.name, op.source].append(op)
    places = sorted(by.items(), key=lambda item: -sum(map(seconds, item[1])))
    lines = []
    for (layer, source), of in places[:SHOWN]:
        largest = max(of, key=seconds)
        where, more = layer or largest.name, note(largest)
        text = f"{_part(of, seconds)} in {where}"
        text += f" ({'/'.join(source.split('/')[-2:])})" if source else ""
        if len(of) > 1 and more:
            more = f"{len(of)} ops, the largest {_part([largest], seconds)}: {more}"
        more = more.removesuffix(f", {where}")
        lines.append(f"{text}: {more}" if more and more != where else text)
    every = [op for of in by.values() for op in of]
    lost = sum(map(seconds, every))
    reached = _reached(every)
    return Cause(
        name=name,
        title=title,
        share=lost / step.seconds if step.seconds else 0.0,
        seconds=lost,
        evidence=lines,
        advice=[text for hint in advice if (text := render(hint, step.settings, step.foreign))],
        work=reached,
    )


def _part(ops: Sequence[StepOp], seconds: Callable[[StepOp], float]) -> str:
    """Seconds lost in ops, of the whole time too where they have another part: ``0.0963 ms of 0.222 ms lost``."""
    lost, whole = sum(map(seconds, ops)), sum(op.seconds for op in ops)
    text = duration(lost)
    return text if lost >= whole * (1 - 1e-6) else f"{text} of {duration(whole)} lost"


def _reached(ops: Sequence[StepOp]) -> Reached | None:
    """Bytes that ops moved over the unit that most of their time is bound by, and at which rate."""
    by: dict[tuple[str, str], list[StepOp]] = defaultdict(list)
    for op in ops:
        if op.rate is not None and op.flight > 0:
            by[op.rate.unit, op.rate.measure].append(op)
    if not by:
        return None
    (unit, measure), most = max(by.items(), key=lambda item: sum(op.flight for op in item[1]))
    done = sum(op.rate.work for op in most if op.rate is not None)
    seconds = sum(op.flight for op in most)
    peak = most[0].rate.peak if most[0].rate is not None else None
    return Reached(
        unit=unit,
        measure=measure,
        amount=done,
        per_second=done / seconds,
        share=done / seconds / peak if peak else None,
    )


def _near(layer: str) -> str:
    """Path without the frames inside a kernel's library."""
    return layer.split("/static_sparsity")[0]


# Parts of a step, by the transformations in the paths of JAX names


def differentiates(op_names: Iterable[str]) -> bool:
    """Whether a program computes a gradient; one that doesn't has no optimizer update."""
    return any(_GRADIENT.search(name) for name in op_names)


def is_outside_gradient(op_name: str) -> bool:
    """Whether an op of a differentiating program is outside of loss and gradient, so in the update."""
    return "jit(" in op_name and not _INSIDE.search(op_name)


# Mesh axes that a collective runs along


def axes_of(
    module: Module, computation: Computation, instruction: Instruction, mesh: Mapping[str, int]
) -> tuple[str, ...]:
    """Names of the axes in which members of a group differ; () when the groups do not match the mesh.

    ``mesh`` is axis name to size, outermost first; partition ids count its devices in that order.
    """
    collective = _collective(module, computation, instruction)
    sizes = tuple(mesh.values())
    total = int(np.prod(sizes)) if sizes else 0
    if collective is None or not total:
        return ()
    groups = groups_of(collective, total)
    if not groups.groups or max(max(group) for group in groups.groups) >= total:
        return ()
    places = np.array(np.unravel_index(np.array(groups.groups[0]), sizes)).T
    differ = (places != places[0]).any(axis=0)
    return tuple(name for name, apart in zip(mesh, differ, strict=True) if apart)


def _collective(
    module: Module, computation: Computation, instruction: Instruction
) -> Instruction | None:
    """The instruction that names the groups: itself, or the one that an async op or a fusion holds."""
    if instruction.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
        if instruction.opcode.endswith("-done"):
            begun = computation.index.get(instruction.operands[0])
            return None if begun is None else _collective(module, computation, begun)
        return instruction
    name = instruction.called("calls") or instruction.called("to_apply")
    if name is None or name not in module.computations:
        return None
    held = module.computations[name]
    return next(
        (inner for inner in held if inner.opcode.removesuffix("-start") in COLLECTIVES),
        None,
    )
