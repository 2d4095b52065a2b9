"""The rule book: causes of a step's time from its ops, simulated or measured, by the share that they reach of a unit's rate.

Shares may overlap: recomputed ops may also be bound by memory. Causes that need a forecast's job or a profile's host
are in :mod:`~systolic.explaining.causes`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from systolic.chips.flags import GPU_PIPELINED
from systolic.core.units import duration
from systolic.explaining.settings import advise, render
from systolic.explaining.step import (
    LINKS,
    Cause,
    OpKind,
    Step,
    StepOp,
    axes_of,
    cause_of_ops,
    differentiates,
    is_outside_gradient,
)
from systolic.forecasting.costs import OFF
from systolic.hlo import Shape
from systolic.profile.profile import MATRIX
from systolic.sim.timeline import Resource
from systolic.sim.work import work_of

FULL = 0.7
"""Share of a unit's peak from which only less work makes an op faster."""
HIDES = 0.5
"""Share of a copy's time that other work of the step must have to hide a good part of it."""
ARRAYS = "arrays"
"""How a kernel's work is known: by its arrays, each touched once, or by the profile's count."""
LAYOUT = "a layout that both neighbours take: swap the dims where the array is made, or hold the weights transposed"
BLOCKS = (1024, 2048)
"""Block sides of the attention kernel to try."""
EXPERTS = "decoder/moe.py"
"""Source file of the matmuls over expert slots."""
ESTIMATE = "a cost_estimate on its pallas_call, by which the compiler schedules around it"
PIPELINED = " ".join(GPU_PIPELINED)
LEAST_DIM = 16
"""Smallest dim that counts as a side of the matrix; smaller ones are batch dims."""
POOR = 0.6
"""Share of the peak below which a matmul underfills the matrix units."""
AXIS_ADVICE = {
    "fsdp": advise(
        "fewer, larger passes ({} down, {} up), or a smaller {} with more {}",
        "layout.accumulate",
        "layout.remat",
        "layout.fsdp",
        "layout.data",
        plain="fewer, larger passes, or weights sharded over fewer devices with more data parallelism",
    ),
    "data": "a larger batch per device, so that gradients are summed less often",
    "tensor": advise(
        "a smaller {} with more {}",
        "layout.tensor",
        "layout.fsdp",
        plain="a smaller tensor axis, with the weights sharded along the batch's axis",
    ),
    "context": advise(
        "a smaller {} with more {} or {}",
        "layout.context",
        "layout.fsdp",
        "layout.data",
        plain="a smaller axis of the sequence, with more devices along the batch",
    ),
    "expert": advise(
        "a smaller {}, or a lower {}",
        "layout.expert",
        "model.capacity_factor",
        plain="a smaller axis of experts, or a lower capacity factor",
    ),
    "pipeline": advise("fewer stages: a smaller {}", "layout.pipeline", plain="fewer stages"),
}


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


def callbacks(step: Step) -> Iterable[Cause]:
    """Calls of Python from the program."""
    ops = [op for op in step.ops if op.kind is OpKind.callback]
    if ops:
        yield cause_of_ops(
            step,
            "python-callbacks",
            "the step calls Python on the host",
            ops,
            ["no jax.debug.print, io_callback or pure_callback in the step"],
        )


# Waiting for others


def collectives(step: Step) -> Iterable[Cause]:
    """Exposed collectives, by the mesh axes along which they run."""
    by: dict[tuple[str, ...], list[StepOp]] = defaultdict(list)
    for op in step.ops:
        if op.resource is Resource.ici and op.seconds:
            by[_axes(step, op)].append(op)
    for axes, ops in by.items():
        where = f"along the {' and '.join(axes)} ax{'es' if len(axes) > 1 else 'is'}"
        yield cause_of_ops(
            step,
            f"exposed-collectives-{'-'.join(axes) or 'other'}",
            f"waiting for {_others(step)} {where if axes else '(the mesh is not known)'}",
            ops,
            [AXIS_ADVICE[axis] for axis in axes if axis in AXIS_ADVICE]
            or of_links(ops)
            or [
                f"fewer {_others(step)} along the axis that talks most, or a larger batch per device"
            ],
            note=lambda op: rated(op, f"{op.opcode} {op.name}{_times(op)}"),
        )


def _others(step: Step) -> str:
    return "GPUs" if step.gpu else "chips"


def _axes(step: Step, op: StepOp) -> tuple[str, ...]:
    if op.place is None or not step.mesh:
        return ()
    return axes_of(op.place.module, op.place.computation, op.place.instruction, step.mesh)


def slices(step: Step) -> Iterable[Cause]:
    """Waiting for the network between slices, of GPUs for that between hosts."""
    ops = [op for op in step.ops if op.resource is Resource.dcn]
    if ops and step.gpu:
        yield cause_of_ops(
            step,
            "network",
            "waiting for other hosts over their network",
            ops,
            [
                advise(
                    "{} no more than the GPUs that NVLink joins, the rest in {}: only gradients cross then",
                    "layout.fsdp",
                    "layout.data",
                    plain="weights sharded over the GPUs that NVLink joins and the batch over hosts, so that only gradients cross",
                ),
                "a larger batch per device, so that gradients are summed less often",
                f"collectives beside the layers before and after: {'XLA_FLAGS' if step.foreign else '--flags'}='{PIPELINED}'",
            ],
            note=lambda op: rated(op, f"{op.opcode} {op.name}{_times(op)}"),
        )
    elif ops:
        yield cause_of_ops(
            step,
            "dcn",
            "waiting for other slices over the data-centre network",
            ops,
            [
                advise(
                    "{} data, so that only gradients cross",
                    "layout.slices",
                    plain="the batch split over slices and the model within each, so that only gradients cross",
                ),
                "one larger slice",
            ],
        )


def transfers(step: Step) -> Iterable[Cause]:
    """Waiting for copies from and to host memory, without infeed, which is waiting for input, and calls of Python."""
    ops = [
        op
        for op in step.ops
        if op.resource is Resource.host
        and "infeed" not in op.opcode
        and op.kind not in (OpKind.callback, OpKind.launch)
    ]
    if ops:
        yield cause_of_ops(
            step,
            "host-transfers",
            "waiting for copies between device and host memory",
            ops,
            [
                advise(
                    "offload fewer activations ({}), or {} full",
                    "layout.remat_names",
                    "layout.remat",
                ),
                *of_host(step, ops),
            ],
            note=lambda op: rated(op, f"{op.name}{_times(op)}", way(op)),
        )


def launches(step: Step) -> Iterable[Cause]:
    """A GPU's kernels that are too short for their work to count."""
    ops = [op for op in step.ops if op.kind is OpKind.launch]
    if ops:
        yield cause_of_ops(
            step,
            "kernel-launches",
            "short kernels, of which starting and ending takes most of the time",
            ops,
            [
                advise(
                    "a larger batch per device, or fewer passes ({} down)",
                    "layout.accumulate",
                    plain="a larger batch per device: fewer, longer kernels",
                ),
            ],
            note=lambda op: f"{op.opcode} {op.name}{_times(op)}",
        )


def memories(step: Step) -> Iterable[Cause]:
    """Waiting for copies between the memories of a device, which the compiler started ahead of their use."""
    ops = [op for op in step.ops if op.kind is OpKind.memory and op.seconds]
    if ops:
        yield cause_of_ops(
            step,
            "memory-copies",
            "waiting for copies between memories of the device (prefetches)",
            ops,
            [],
            note=lambda op: rated(op, f"{op.name}{_times(op)}"),
        )


# On the device


def rematerialisation(step: Step) -> Iterable[Cause]:
    """Activations that the backward pass recomputes."""
    ops = [op for op in step.ops if "rematted_computation" in op.op_name]
    if ops:
        yield cause_of_ops(
            step,
            "rematerialisation",
            "computing activations again for the backward pass",
            ops,
            [
                advise(
                    "{} minimal, save-names or none where it fits",
                    "layout.remat",
                    plain="a policy of jax.checkpoint that saves more, where it fits",
                )
            ],
        )


def windowed_einsums(step: Step) -> Iterable[Cause]:
    """Matmuls whose weights travel between partial matmuls: their time over what the peak needs."""
    ops = [] if step.gpu else [op for op in step.ops if op.windowed]
    if ops:
        yield cause_of_ops(
            step,
            "windowed-einsums",
            "windowed einsums: weights travel piece by piece between partial matmuls",
            ops,
            [
                f"weights gathered whole: LIBTPU_INIT_ARGS={OFF} before the command, and forecast it again"
                if step.foreign
                else f"weights gathered whole: --flags={OFF}"
            ],
            note=lambda op: f"{op.opcode} {op.name}{_times(op)}",
            seconds=lambda op: op.seconds * (1 - min(step.fill(op) or 0.0, 1.0)),
        )


def unfilled(step: Step) -> Iterable[Cause]:
    """Matmuls below :data:`POOR` of the peak: the time over what the peak needs."""
    fills = [
        (op, fill)
        for op in step.ops
        if op.kind is OpKind.matmul
        and op.resource is Resource.mxu
        and (reached := step.fill(op)) is not None
        and (fill := reached * (passes_of(op) or 1)) < POOR
    ]
    if not fills:
        return
    by_op = {id(op): fill for op, fill in fills}

    def note(op: StepOp) -> str:
        text = f"{by_op[id(op)]:.0%} of {_full(step)}{_times(op)}, {op.name}"
        dims = [dims for dims in _matmul_dims(op) if dims]
        odd = sorted({d for shape in dims for d in shape if d >= LEAST_DIM and d % step.mxu_width})
        if dims:
            text += f", {' x '.join(str(list(shape)) for shape in dims[:2])}"
        if odd:
            text += f", dims not a multiple of {step.mxu_width}: {', '.join(map(str, odd[:4]))}"
        return text

    if step.gpu:
        name, what = "unfilled-tensor-cores", "the tensor cores"
        width = f"model dims that are multiples of {step.mxu_width}, the side of a matmul's tile"
    else:
        name, what = "unfilled-mxu", "the matrix units"
        width = "model dims that are multiples of the matrix unit's width"
    of = "a large matmul's rate" if step.gpu else "their peak"
    yield cause_of_ops(
        step,
        name,
        f"matmuls that leave {what} below {POOR:.0%} of {of}",
        [op for op, _ in fills],
        [
            advise(
                "more tokens a pass ({} down), fewer ways of {}",
                "layout.accumulate",
                "layout.tensor",
                plain="more tokens in a call, or fewer devices that share a matmul",
            ),
            width,
        ],
        note=note,
        seconds=lambda op: op.seconds * (1 - by_op[id(op)]),
    )


def attention(step: Step) -> Iterable[Cause]:
    """Attention kernels: their time over what the peak needs for their FLOPs, where those are known."""
    ops = [op for op in step.ops if _is_attention(op)]
    if step.gpu:
        yield from _gpu_attention(step, ops)
        return

    def unfit(op: StepOp) -> bool:
        head = _head_dim(op)
        return head is not None and head % step.mxu_width != 0

    def note(op: StepOp) -> str:
        fill, head = step.fill(op), _head_dim(op)
        text = f"{op.name}{_times(op)}" if fill is None else f"{fill:.0%} of the peak{_times(op)}"
        if head is not None and head % step.mxu_width:
            text += f"; head dim {head} fills {head}/{step.mxu_width} of the matrix unit"
        return text

    rows = min((rows for op in ops if (rows := _attended(op)) is not None), default=None)
    blocks = [b for b in BLOCKS if rows is None or b <= rows]
    if ops:
        yield cause_of_ops(
            step,
            "attention-kernel",
            "attention: softmax, and matrix units that its head dim does not fill",
            ops,
            [
                *(
                    [
                        advise(
                            f"{{}} {' or '.join(map(str, blocks))}",
                            "layout.attention_block",
                            plain="other block sizes of the kernel",
                        )
                    ]
                    if blocks
                    else []
                ),
                *(
                    [f"a head dim that is a multiple of {step.mxu_width}"]
                    if any(map(unfit, ops))
                    else []
                ),
            ],
            note=note,
            seconds=lambda op: op.seconds * (1 - min(step.fill(op) or 0.0, 1.0)),
        )


def _gpu_attention(step: Step, ops: Sequence[StepOp]) -> Iterable[Cause]:
    """Attention of cuDNN: its time over what a large matmul's rate needs for its FLOPs."""
    heads = {head for op in ops if (head := _head_dim(op)) is not None}
    narrow = [head for head in sorted(heads) if head < step.mxu_width]
    fits = f"a head dim of {step.mxu_width}, at which its kernels are faster than at {' or '.join(map(str, narrow))}"

    def note(op: StepOp) -> str:
        fill = step.fill(op)
        return f"{op.name}{_times(op)}" + ("" if fill is None else f", {fill:.0%} of {_full(step)}")

    if ops:
        yield cause_of_ops(
            step,
            "attention-kernel",
            "attention: softmax and masks between its matmuls, which reach less than large ones",
            ops,
            [fits]
            if narrow
            else ["fewer keys for each query: a window, where the model allows it"],
            note=note,
            seconds=lambda op: op.seconds * (1 - min(step.fill(op) or 0.0, 1.0)),
        )


def _full(step: Step) -> str:
    """Rate that :meth:`Step.fill` is a share of, in words."""
    return "a large matmul's rate" if step.gpu else "the peak"


def _is_attention(op: StepOp) -> bool:
    target = op.place.instruction.target if op.place is not None else ""
    words = f"{op.op_name} {op.name} {target}".lower()
    return op.kind is OpKind.kernel and any(w in words for w in ("attention", "splash", "fmha"))


def _head_dim(op: StepOp) -> int | None:
    """Last dim of an attention kernel's first array."""
    dims = _queries(op)
    return dims[-1] if dims else None


def _attended(op: StepOp) -> int | None:
    """Queries of an attention kernel: a block is no longer than they are."""
    dims = _queries(op)
    return dims[-2] if dims else None


def _queries(op: StepOp) -> tuple[int, ...]:
    """Dims [..., queries, head dim] of an attention kernel's first array; empty where they are not known."""
    if op.place is None:
        return ()
    shapes = op.place.computation.operand_shapes(op.place.instruction)
    floats = [s for s in shapes if s.dtype in ("bf16", "f16", "f32") and len(s.dims) >= 3]
    return tuple(floats[0].dims) if floats else ()


def kernels(step: Step) -> Iterable[Cause]:
    """Custom (Pallas) kernels besides attention, at their whole time; none whose known FLOPs fill the matrix units."""
    ops = [
        op
        for op in step.ops
        if op.kind is OpKind.kernel and not _is_attention(op) and (step.fill(op) or 0.0) < POOR
    ]
    if ops:
        yield cause_of_ops(
            step,
            "custom-kernels",
            "custom kernels" if step.gpu else "custom kernels (Pallas)",
            ops,
            [
                "other block sizes of the kernel, or XLA's own op in its place",
                *([] if step.gpu else [ESTIMATE]),
            ],
            note=lambda op: rated(op, f"{op.name}{_times(op)}", ARRAYS),
        )


def copies(step: Step) -> Iterable[Cause]:
    """Copies and transposes that only change an array's layout."""
    ops = [op for op in step.ops if op.kind is OpKind.copy]

    def note(op: StepOp) -> str:
        shape = f" {str(op.place.instruction.shape)[:48]}" if op.place is not None else ""
        return rated(op, f"{op.name}{_times(op)}{shape}")

    if ops:
        yield cause_of_ops(
            step,
            "layout-copies",
            "copies and transposes between layouts of the same array",
            ops,
            [LAYOUT]
            if step.foreign
            else ["other mesh axes: the compiler chooses layouts by them"]
            if not step.mesh or math.prod(step.mesh.values()) > 1
            else ["another batch or sequence: the compiler chooses layouts by their sizes"],
            note=note,
        )


def memory_bound(step: Step) -> Iterable[Cause]:
    """Ops that wait for device memory, matmuls among them, other than copies and the update."""
    updates = {id(op) for op in _updates(step)}
    ops = [
        op
        for op in step.ops
        if op.resource is Resource.hbm
        and op.kind in (OpKind.other, OpKind.matmul)
        and id(op) not in updates
    ]

    def note(op: StepOp) -> str:
        if op.rate is not None or not op.bytes:
            return rated(op, f"{op.name}{_times(op)}")
        rate = op.bytes / max(op.seconds, 1e-12) / 1e9
        return f"{op.bytes / op.times / 1e6:.3g} MB{_times(op)} at {rate:.3g} GB/s, {op.name}"

    what = "bound by device memory" if step.memory_peak is not None else "other than matmuls"
    if ops:
        yield cause_of_ops(
            step,
            "memory-bound",
            f"ops {what}"
            + ("" if step.foreign else ": norms, activations, narrow matmuls, the loss"),
            ops,
            [
                advise(
                    "another {}: what is kept for the backward pass is written and read again",
                    "layout.remat",
                    plain=of_memory(ops),
                ),
                advise(
                    "larger matmuls a pass ({} down), so that they weigh less", "layout.accumulate"
                ),
            ],
            note=note,
        )


def update(step: Step) -> Iterable[Cause]:
    """The optimizer's update."""
    ops = _updates(step)
    if ops:
        yield cause_of_ops(
            step,
            "optimizer-update",
            "the optimizer's update of weights and moments",
            ops,
            [
                "a larger batch",
                advise(
                    "{} lion or adafactor: fewer moments",
                    "optimizer.kind",
                    plain="an optimizer with fewer moments: lion or adafactor",
                ),
                advise(
                    "more {}", "layout.fsdp", plain="moments that are sharded over more devices"
                ),
            ],
        )


def _updates(step: Step) -> list[StepOp]:
    """Ops of the optimizer: those outside of loss and gradient, in a step that has a gradient."""
    if not differentiates(op.op_name for op in step.ops):
        return []
    return [op for op in step.ops if not op.waits and is_outside_gradient(op.op_name)]


def wide(step: Step) -> Iterable[Cause]:
    """Matmuls in f32 whose precision asks for several bf16 passes, or is not known; a CPU has no faster kind."""
    if step.gpu:
        yield from _gpu_wide(step)
    if not step.f32_passes:
        return
    matmuls = [op for op in step.ops if op.kind is OpKind.matmul]
    passes = {id(op): passes_of(op) for op in matmuls}
    ops = [op for op in matmuls if (passes[id(op)] or 1) > 1]
    if ops:
        numbers = sorted({int(passes[id(op)] or 1) for op in ops})
        yield cause_of_ops(
            step,
            "f32-matmuls",
            f"matmuls with f32 operands: {' or '.join(map(str, numbers))} passes of the matrix units each, by their precision",
            ops,
            [
                "the default matmul precision, one pass each (jax_default_matmul_precision, or precision= of the matmul)",
                advise("{} bf16", "precision", plain="bf16 operands"),
            ],
            note=lambda op: f"{op.name}, {passes[id(op)]:g} passes",
        )
        return
    ops = [op for op in matmuls if op.dtype == "f32" and passes[id(op)] is None]
    if ops:
        yield cause_of_ops(
            step,
            "f32-matmuls",
            "matmuls with f32 operands: one pass of the matrix units each at the default precision, 3 at high, 6 at highest (the profile does not say which)",
            ops,
            [advise("{} bf16", "precision", plain="bf16 operands")],
        )


def _gpu_wide(step: Step) -> Iterable[Cause]:
    """Matmuls in f32, which tensor cores take as TF32, at half the rate of bf16."""
    ops = [op for op in step.ops if op.kind is OpKind.matmul and op.dtype == "f32"]
    if ops:
        yield cause_of_ops(
            step,
            "f32-matmuls",
            "matmuls with f32 operands, which tensor cores take as TF32 at half the rate of bf16",
            ops,
            [advise("{} bf16", "precision", plain="bf16 operands")],
            note=lambda op: f"{op.name}{_times(op)}",
            seconds=lambda op: op.seconds / 2,
        )


def passes_of(op: StepOp) -> float | None:
    """Passes of the matrix units that a matmul's precision asks for; None where its program is not known."""
    if op.place is None:
        return None
    return work_of(op.place.module, op.place.computation, op.place.instruction).passes


def bubble(step: Step) -> Iterable[Cause]:
    """Stages that wait for their first and last microbatch."""
    stages, micro = step.mesh.get("pipeline", 1), step.microbatches
    if stages > 1 and micro:
        share = (stages - 1) / (micro + stages - 1)
        yield Cause(
            name="pipeline-bubble",
            title="stages that wait for the pipeline to fill and drain",
            share=share,
            seconds=share * step.seconds,
            evidence=[
                f"{stages} stages, {micro} microbatches: ({stages} - 1) / ({micro} + {stages} - 1)"
            ],
            advice=[
                render(
                    advise("more {}, a smaller {}", "layout.microbatches", "layout.pipeline"),
                    step.settings,
                )
            ],
        )


def empty_slots(step: Step) -> Iterable[Cause]:
    """Slots of a mixture's experts beyond what an even choice fills, at the rate of their matmuls."""
    factor = step.slots_per_token
    # Dense layers and shared experts are in other files. The router's matmul is counted too; it is far smaller.
    ops = [op for op in step.ops if op.flops and EXPERTS in op.source]
    if factor > 1 and ops:
        yield cause_of_ops(
            step,
            "empty-expert-slots",
            f"expert slots that stay empty even with balanced routing (capacity factor {factor:g}), besides imbalance from the data",
            ops,
            [
                advise(
                    "{} 1.0: watch dropped in the run's records, it changes training",
                    "model.capacity_factor",
                )
            ],
            seconds=lambda op: op.seconds * (1 - 1 / factor),
        )


RULES: Sequence[Callable[[Step], Iterable[Cause]]] = (
    callbacks,
    collectives,
    slices,
    transfers,
    launches,
    memories,
    rematerialisation,
    windowed_einsums,
    unfilled,
    attention,
    kernels,
    copies,
    memory_bound,
    update,
    wide,
    bubble,
    empty_slots,
)


def _times(op: StepOp) -> str:
    return f" x{op.times:g}" if op.times > 1 else ""


def _matmul_dims(op: StepOp) -> list[tuple[int, ...]]:
    """Dims of the operands of the largest product in an op."""
    if op.place is None:
        return []
    held, product = op.place.computation, op.place.instruction
    if product.opcode == "fusion":
        held = op.place.module.computations[product.called("calls") or ""]
        inner = [
            instruction for instruction in held if instruction.opcode in ("dot", "convolution")
        ]
        if not inner:
            return []
        product = max(
            inner, key=lambda instruction: sum(s.elements for s in instruction.shape.arrays())
        )
    shapes: list[Shape] = held.operand_shapes(product)
    return [tuple(shape.dims) for shape in shapes]
