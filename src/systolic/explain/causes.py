"""Why a forecast step takes its time: causes by share of the step, each with the ops that show it."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from systolic.core.units import duration
from systolic.explain.axes import axes_of
from systolic.explain.cause import Cause
from systolic.explain.phases import differentiates, is_outside_gradient
from systolic.forecasting import Forecast
from systolic.forecasting.windowed import OFF, names
from systolic.hlo import Computation, Instruction, Module, Shape
from systolic.hlo.origin import named
from systolic.job import Model
from systolic.sim.rates import Rates, rates_of
from systolic.sim.timeline import Resource, Span
from systolic.sim.work import work_of

SHOWN = 4
"""Ops that are named as evidence."""
LEAST = 0.01
"""Share of the step below which something is no cause."""
LEAST_DIM = 16
"""Smaller dims count a batch, not a side of the matrix."""
POOR = 0.6
"""Share of the peak below which a matmul is said not to fill the matrix units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One op of the step with its place in the module."""

    span: Span
    times: int
    instruction: Instruction
    computation: Computation
    op_name: str

    @property
    def seconds(self) -> float:
        """Of all its runs in a step."""
        return self.span.seconds * self.times


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the causes look at."""

    forecast: Forecast
    module: Module
    rates: Rates
    ops: Sequence[Op]

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.forecast.step_seconds or 0.0

    @property
    def mesh(self) -> Mapping[str, int]:
        """Axis to size, in the order of the mesh."""
        names = ("data", "pipeline", "fsdp", "expert", "context", "tensor")
        layout = self.forecast.layout
        return {name: int(layout[name]) for name in names if name in layout}


def causes_of(forecast: Forecast, module: Module, model: Model | None = None) -> list[Cause]:
    """All causes of a forecast, the largest share first; none where it has no timeline.

    ``model``, where it is known, tells what the program can't: how many slots its experts have.
    """
    if forecast.timeline is None or not forecast.step_seconds:
        return []
    step = _step(forecast, module)
    found = [cause for rule in RULES for cause in rule(step)]
    found += empty_slots(step, model)
    kept = [cause for cause in found if cause.share is None or cause.share >= LEAST]
    return sorted(kept, key=lambda cause: -(cause.share or 0.0))


def _step(forecast: Forecast, module: Module) -> Step:
    assert forecast.timeline is not None
    index: dict[str, tuple[Computation, Instruction]] = {}
    for computation in module.computations.values():
        for instruction in computation:
            index.setdefault(instruction.name, (computation, instruction))
    ops = []
    for span, times in forecast.timeline.leaves():
        if span.lane != "core" or span.name not in index:
            continue
        computation, instruction = index[span.name]
        source = named(module, computation, instruction)
        ops.append(
            Op(
                span=span,
                times=times,
                instruction=instruction,
                computation=computation,
                op_name=source.op_name,
            )
        )
    return Step(forecast=forecast, module=module, rates=rates_of(forecast.on), ops=ops)


def _cause(
    step: Step,
    name: str,
    title: str,
    ops: Iterable[Op],
    advice: Sequence[str] = (),
    *,
    note: Callable[[Op], str] = lambda _: "",
    seconds: Callable[[Op], float] = lambda op: op.seconds,
) -> Cause:
    """A cause made of ops; ``seconds`` says what of each is lost."""
    by: dict[tuple[str, str], list[Op]] = defaultdict(list)
    for op in ops:
        by[op.span.layer, op.span.source].append(op)
    places = sorted(by.items(), key=lambda item: -sum(map(seconds, item[1])))
    lost = sum(seconds(op) for of in by.values() for op in of)
    lines = []
    for (layer, source), of in places[:SHOWN]:
        largest = max(of, key=seconds)
        text = f"{duration(sum(map(seconds, of)))} in {_near(layer) or largest.instruction.name}"
        text += f" ({_short(source)})" if source else ""
        more = note(largest)
        lines.append(f"{text}: {more}" if more else text)
    share = lost / step.seconds if step.seconds else 0.0
    return Cause(
        name=name, title=title, share=share, seconds=lost, evidence=lines, advice=list(advice)
    )


def _near(layer: str) -> str:
    """A path without the insides of a kernel's library."""
    return layer.split("/static_sparsity")[0]


def _short(source: str) -> str:
    return "/".join(source.split("/")[-2:])


# Waiting for other chips


def collectives(step: Step) -> Iterable[Cause]:
    """Time in which the core only waits for chips, by the mesh axes along which they talk."""
    by: dict[tuple[str, ...], list[Op]] = defaultdict(list)
    for op in step.ops:
        if op.span.resource is Resource.ici:
            by[axes_of(step.module, op.computation, op.instruction, step.mesh)].append(op)
    for axes, ops in by.items():
        where = f"along the {' and '.join(axes)} ax{'es' if len(axes) > 1 else 'is'}"
        advice = [AXIS_ADVICE[axis] for axis in axes if axis in AXIS_ADVICE]
        yield _cause(
            step,
            f"exposed-collectives-{'-'.join(axes) or 'other'}",
            f"waiting for chips {where if axes else '(the mesh is not known)'}",
            ops,
            advice or ["fewer chips along the axis that talks most, or more work between"],
            note=lambda op: f"{op.span.opcode} {op.instruction.name} x{op.times}",
        )


AXIS_ADVICE = {
    "fsdp": "fewer, larger passes (--layout.accumulate down, --layout.remat up), or a smaller --layout.fsdp with more --layout.data",
    "data": "a larger batch per device, so that gradients are summed less often",
    "tensor": "a smaller --layout.tensor with more --layout.fsdp",
    "context": "a smaller --layout.context with more --layout.fsdp or --layout.data",
    "expert": "a smaller --layout.expert, or a lower --model.capacity-factor",
    "pipeline": "fewer stages: a smaller --layout.pipeline",
}


def slices(step: Step) -> Iterable[Cause]:
    """Waiting for the network between slices."""
    ops = [op for op in step.ops if op.span.resource is Resource.dcn]
    if ops:
        yield _cause(
            step,
            "dcn",
            "waiting for other slices over the data-centre network",
            ops,
            ["--layout.slices data, so that only gradients cross", "one larger slice"],
        )


def host(step: Step) -> Iterable[Cause]:
    """Waiting for copies from and to host memory."""
    ops = [op for op in step.ops if op.span.resource is Resource.host]
    if ops:
        yield _cause(
            step,
            "host-transfers",
            "waiting for activations that are offloaded to host memory",
            ops,
            ["offload fewer activations (--layout.remat-names), or --layout.remat full"],
        )


# On the core


def rematerialisation(step: Step) -> Iterable[Cause]:
    """What the backward pass computes again."""
    ops = [op for op in step.ops if "rematted_computation" in op.op_name and op.span.lane == "core"]
    if ops:
        yield _cause(
            step,
            "rematerialisation",
            "computing activations again for the backward pass",
            ops,
            ["--layout.remat minimal, save-names or none where it fits"],
        )


def unfilled(step: Step) -> Iterable[Cause]:
    """Matmuls below :data:`POOR` of the peak: the time over what the peak needs."""
    ops = []
    for op in step.ops:
        if op.span.flops and op.span.seconds and op.span.priced_by in ("cycles", "estimate"):
            ideal = op.span.flops / step.rates.peak(_dtype(step, op))
            if ideal < POOR * op.span.seconds:
                ops.append(op)

    def lost(op: Op) -> float:
        ideal = op.span.flops / step.rates.peak(_dtype(step, op))
        return (op.span.seconds - ideal) * op.times

    def note(op: Op) -> str:
        share = op.span.flops / step.rates.peak(_dtype(step, op)) / op.span.seconds
        width = (step.rates.chip.mxu_shape or (128, 128))[0]
        dims = [dims for dims in _matmul_dims(step, op) if dims]
        odd = sorted({d for shape in dims for d in shape if d >= LEAST_DIM and d % width})
        text = f"{share:.0%} of the peak, x{op.times}, {' x '.join(map(_shape_text, dims[:2]))}"
        return text + (
            f", dims not a multiple of {width}: {', '.join(map(str, odd[:4]))}" if odd else ""
        )

    if ops:
        yield _cause(
            step,
            "unfilled-mxu",
            f"matmuls that leave the matrix units below {POOR:.0%} of their peak",
            ops,
            [
                "more tokens a pass (--layout.accumulate down), fewer ways of --layout.tensor",
                "model dims that are multiples of the matrix unit's width",
            ],
            note=note,
            seconds=lost,
        )


def windowed_einsums(step: Step) -> Iterable[Cause]:
    """Matmuls whose weights travel between partial matmuls: their time over what the peak needs."""
    found = names(step.module)
    ops = [op for op in step.ops if op.op_name in found]

    def lost(op: Op) -> float:
        ideal = op.span.flops / step.rates.peak(_dtype(step, op)) if op.span.flops else 0.0
        return max(op.span.seconds - ideal, 0.0) * op.times

    if ops:
        yield _cause(
            step,
            "windowed-einsums",
            "windowed einsums: weights travel piece by piece between partial matmuls",
            ops,
            [f"weights gathered whole: --flags={OFF}"],
            note=lambda op: f"{op.span.opcode} {op.instruction.name} x{op.times}",
            seconds=lost,
        )


def attention(step: Step) -> Iterable[Cause]:
    """Attention kernels over the peak's time for their FLOPs."""
    ops = [op for op in step.ops if op.span.priced_by == "kernel" and op.span.flops]
    if not ops:
        return

    def lost(op: Op) -> float:
        return max(op.span.seconds - op.span.flops / step.rates.peak("bf16"), 0.0) * op.times

    width = (step.rates.chip.mxu_shape or (128, 128))[0]

    def note(op: Op) -> str:
        share = op.span.flops / step.rates.peak("bf16") / op.span.seconds
        shapes = op.computation.operand_shapes(op.instruction)
        floats = [s for s in shapes if s.dtype in ("bf16", "f16", "f32") and len(s.dims) >= 3]
        head = floats[0].dims[-1] if floats else None
        text = f"{share:.0%} of the peak, x{op.times}"
        if head is not None and head % width:
            text += f"; head dim {head} fills {head}/{width} of the matrix unit"
        return text

    yield _cause(
        step,
        "attention-kernel",
        "attention: softmax, and matrix units that its head dim does not fill",
        ops,
        ["--layout.attention-block 1024 or 2048", "a head dim of 128 or 256"],
        note=note,
        seconds=lost,
    )


def copies(step: Step) -> Iterable[Cause]:
    """Copies and transposes that only change an array's layout."""
    ops = [
        op
        for op in step.ops
        if op.span.opcode in ("copy", "transpose", "reshape")
        or (op.span.opcode == "fusion" and re.match(r"(copy|transpose)", op.instruction.name))
    ]
    if ops:
        yield _cause(
            step,
            "layout-copies",
            "copies and transposes between layouts of the same array",
            ops,
            ["other mesh axes: the compiler chooses layouts by them"],
            note=lambda op: f"{op.instruction.name} x{op.times} {str(op.instruction.shape)[:48]}",
        )


def memory_bound(step: Step) -> Iterable[Cause]:
    """Ops that wait for device memory, other than copies and matmuls."""
    updates = {id(op) for op in _updates(step)}
    ops = [
        op
        for op in step.ops
        if op.span.resource is Resource.hbm
        and not op.span.flops
        and op.span.opcode not in ("copy", "transpose", "reshape")
        and id(op) not in updates
    ]
    if ops:
        yield _cause(
            step,
            "memory-bound",
            "ops bound by device memory: norms, activations, the loss",
            ops,
            [
                "another --layout.remat: what is kept for the backward pass is written and read again",
                "larger matmuls a pass (--layout.accumulate down), so that they weigh less",
            ],
            note=lambda op: f"{op.span.bytes / 1e6:.0f} MB x{op.times}",
        )


def update(step: Step) -> Iterable[Cause]:
    """The optimizer's part."""
    ops = _updates(step)
    if ops:
        yield _cause(
            step,
            "optimizer-update",
            "the optimizer's update of weights and moments",
            ops,
            [
                "a larger batch",
                "--optimizer.kind lion or adafactor: fewer moments",
                "more --layout.fsdp",
            ],
        )


def wide(step: Step) -> Iterable[Cause]:
    """Matmuls in f32, which take several bf16 passes."""
    ops = [
        op
        for op in step.ops
        if op.span.flops
        and op.span.priced_by in ("cycles", "estimate")
        and _dtype(step, op) == "f32"
    ]
    if ops:
        yield _cause(
            step,
            "f32-matmuls",
            "matmuls with f32 operands: several passes of the matrix units each",
            ops,
            ["--precision bf16"],
        )


def bubble(step: Step) -> Iterable[Cause]:
    """Stages that wait for their first and last microbatch."""
    layout = step.forecast.layout
    stages = int(layout.get("pipeline", 1))
    if stages > 1:
        micro = int(layout.get("microbatches", 0) or 2 * stages)
        share = (stages - 1) / (micro + stages - 1)
        yield Cause(
            name="pipeline-bubble",
            title="stages that wait for the pipeline to fill and drain",
            share=share,
            seconds=share * step.seconds,
            evidence=[
                f"{stages} stages, {micro} microbatches: ({stages} - 1) / ({micro} + {stages} - 1)"
            ],
            advice=["more --layout.microbatches, a smaller --layout.pipeline"],
        )


def empty_slots(step: Step, model: Model | None) -> Iterable[Cause]:
    """Slots of a mixture's experts beyond what an even choice fills, at the rate of their matmuls."""
    experts = getattr(model, "experts", 1)
    if experts <= 1:
        return
    # Without a factor each expert has a slot for every token.
    factor = getattr(model, "capacity_factor", 1.0) or experts / getattr(
        model, "experts_per_token", experts
    )
    if factor <= 1:
        return
    # The router's own matmul, far smaller, is among them.
    ops = [op for op in step.ops if op.span.flops and "mlp" in op.span.layer.split("/")]
    if ops:
        yield _cause(
            step,
            "empty-expert-slots",
            f"slots of experts that stay empty however evenly they are chosen (capacity factor {factor:g}), beside the imbalance that the data brings",
            ops,
            [
                "--model.capacity-factor 1.0: watch dropped in the run's records, it trains otherwise"
            ],
            seconds=lambda op: op.seconds * (1 - 1 / factor),
        )


RULES: Sequence[Callable[[Step], Iterable[Cause]]] = (
    collectives,
    slices,
    host,
    rematerialisation,
    windowed_einsums,
    unfilled,
    attention,
    copies,
    memory_bound,
    update,
    wide,
    bubble,
)
"""Shares may overlap: what is computed again may also be bound by memory."""


def _updates(step: Step) -> list[Op]:
    """Ops outside of the loss and its gradient, of a step that has one: the optimizer's."""
    if not differentiates(op.op_name for op in step.ops):
        return []
    elsewhere = (Resource.ici, Resource.dcn, Resource.host)
    return [
        op
        for op in step.ops
        if op.span.resource not in elsewhere and is_outside_gradient(op.op_name)
    ]


def _dtype(step: Step, op: Op) -> str:
    return work_of(step.module, op.computation, op.instruction).dtype


def _matmul_dims(step: Step, op: Op) -> list[tuple[int, ...]]:
    """Dims of the operands of the largest product in an op."""
    held: Any = op.computation
    found = op.instruction
    if op.instruction.opcode == "fusion":
        held = step.module.computations[op.instruction.called("calls") or ""]
        inner = [one for one in held if one.opcode in ("dot", "convolution")]
        if not inner:
            return []
        found = max(inner, key=lambda one: sum(s.elements for s in one.shape.arrays()))
    shapes: list[Shape] = held.operand_shapes(found)
    return [tuple(shape.dims) for shape in shapes]


def _shape_text(dims: Sequence[int]) -> str:
    return f"[{', '.join(map(str, dims))}]"
