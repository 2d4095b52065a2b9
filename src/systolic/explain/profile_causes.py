"""Why a measured step takes its time: causes by share of the step, each with what the profile shows.

Names are those of the forecast's causes (:mod:`systolic.explain.causes`) and of a run's
(:mod:`systolic.explain.speed`) where it is the same thing. Waiting is judged over all that was traced,
since it need not be the same in each step; ops are those of the median step.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from systolic.core.units import duration
from systolic.explain.axes import axes_of
from systolic.explain.cause import Cause
from systolic.explain.causes import AXIS_ADVICE, LEAST, POOR, SHOWN
from systolic.explain.phases import differentiates, is_outside_gradient
from systolic.explain.profile import CONTAINERS, COPIES, Op, Profile
from systolic.explain.profile_waiting import View, between, host, input_wait, recompilation
from systolic.explain.xplane import Backend
from systolic.sim.timeline import Resource

_CALLBACK = re.compile(r"callback", re.I)
_SHARES = {
    Resource.mxu: "matmuls",
    Resource.hbm: "other ops",
    Resource.ici: "collectives",
    Resource.dcn: "other slices",
    Resource.host: "host transfers",
    Resource.vpu: "ops of which nothing is known",
}
_F32 = re.compile(r"\bf32\[")


def causes_of_profile(profile: Profile, mesh: Mapping[str, int] | None = None) -> list[Cause]:
    """All causes of a measured step, the largest share first.

    Args:
        profile: What :func:`systolic.explain.profile.open_profile` read.
        mesh: Axis to size, outermost first, where it is known; names the axes of collectives.
    """
    view = View(profile=profile, mesh=mesh or {})
    found = [cause for rule in RULES for cause in rule(view)]
    kept = [cause for cause in found if cause.share is None or cause.share >= LEAST]
    return sorted(kept, key=lambda cause: -(cause.share or 0.0))


def figures(profile: Profile) -> dict[str, Any]:
    """The step in numbers: ``step_seconds`` of the median of ``steps``, and ``shares`` of it by what the device did."""
    by: dict[str, float] = defaultdict(float)
    for op in profile.ops:
        by[_SHARES[op.resource]] += op.seconds / profile.seconds
    idle = max(1 - sum(by.values()), 0.0)
    return {
        "device": profile.trace.kind or profile.trace.device,
        "steps": len(profile.steps),
        "step_seconds": profile.seconds,
        "shares": {name: by[name] for name in _SHARES.values() if name in by} | {"idle": idle},
    }


def unjudged(profile: Profile) -> list[str]:
    """What the profile holds too little for, a sentence each."""
    view, trace = View(profile=profile, mesh={}), profile.trace
    found = list(trace.notes)
    if view.peak_flops is None:
        found.append(f"matmuls against the peak: the profile has no peak of {trace.device}")
    if not trace.loop:
        found.append("what the host does while the device idles: no thread of it runs a program")
    if not trace.modules and trace.backend is not Backend.tpu:
        found.append("layers and source lines: the profile was made without modules")
    return found


# On the device


def callbacks(view: View) -> Iterable[Cause]:
    """The program calls Python."""
    ops = [op for op in view.profile.ops if _calls_python(op)]
    if ops:
        yield _of_ops(
            view,
            "python-callbacks",
            "the step calls Python on the host",
            ops,
            ["no jax.debug.print, io_callback or pure_callback in the step"],
        )


def collectives(view: View) -> Iterable[Cause]:
    """Time in which the device only waits for others, by the mesh axes along which they talk."""
    by: dict[tuple[str, ...], list[Op]] = defaultdict(list)
    for op in view.profile.ops:
        if op.resource is Resource.ici and op.seconds:
            by[_axes(view, op)].append(op)
    for axes, ops in by.items():
        where = f" along the {' and '.join(axes)} ax{'es' if len(axes) > 1 else 'is'}"
        yield _of_ops(
            view,
            f"exposed-collectives-{'-'.join(axes) or 'other'}",
            f"waiting for other devices{where if axes else ''}",
            ops,
            [AXIS_ADVICE[axis] for axis in axes if axis in AXIS_ADVICE]
            or ["a larger batch per device, fewer devices per group"],
            note=lambda op: op.raw.name,
        )


def _axes(view: View, op: Op) -> tuple[str, ...]:
    if op.module is None or op.computation is None or op.instruction is None or not view.mesh:
        return ()
    return axes_of(op.module, op.computation, op.instruction, view.mesh)


def slices(view: View) -> Iterable[Cause]:
    """Waiting for the network between slices."""
    ops = [op for op in view.profile.ops if op.resource is Resource.dcn]
    if ops:
        yield _of_ops(
            view,
            "dcn",
            "waiting for other slices over the data-centre network",
            ops,
            ["--layout.slices data, so that only gradients cross", "one larger slice"],
        )


def transfers(view: View) -> Iterable[Cause]:
    """Waiting for copies from and to host memory."""
    ops = [
        op
        for op in view.profile.ops
        if op.resource is Resource.host and "infeed" not in f"{op.opcode} {op.raw.category}"
    ]
    if ops:
        yield _of_ops(
            view,
            "host-transfers",
            "waiting for copies between device and host memory",
            ops,
            ["offload fewer activations (--layout.remat-names)", "read results less often"],
        )


def rematerialisation(view: View) -> Iterable[Cause]:
    """What the backward pass computes again."""
    ops = [op for op in view.profile.ops if "rematted_computation" in op.op_name]
    if ops:
        yield _of_ops(
            view,
            "rematerialisation",
            "computing activations again for the backward pass",
            ops,
            ["--layout.remat minimal, save-names or none where it fits"],
        )


def unfilled(view: View) -> Iterable[Cause]:
    """Matmuls below :data:`~systolic.explain.causes.POOR` of the peak: the time over what it needs."""
    peak = view.peak_flops
    if peak is None:
        return
    least = {id(op): op.flops / peak for op in view.profile.ops if op.flops and _is_matmul(op)}
    ops = [op for op in view.profile.ops if least.get(id(op), op.seconds) < POOR * op.seconds]
    if ops:
        yield _of_ops(
            view,
            "unfilled-mxu",
            f"matmuls that leave the matrix units below {POOR:.0%} of their peak",
            ops,
            [
                "more tokens a pass (--layout.accumulate down), fewer ways of --layout.tensor",
                "model dims that are multiples of the matrix unit's width",
            ],
            note=lambda op: f"{op.flops / peak / op.seconds:.0%} of the peak, {op.raw.name}",
            seconds=lambda op: op.seconds - least[id(op)],
        )


def kernels(view: View) -> Iterable[Cause]:
    """Kernels written by hand, whose work the compiler does not know."""
    ops = [op for op in view.profile.ops if op.opcode == "custom-call" and not _calls_python(op)]
    if ops:
        yield _of_ops(
            view,
            "custom-kernels",
            "kernels of their own code (Pallas)",
            ops,
            [
                "other block sizes of the kernel, or XLA's own op in its place",
                "a cost_estimate on its pallas_call, by which the compiler schedules around it",
            ],
            note=lambda op: op.raw.name,
        )


def copies(view: View) -> Iterable[Cause]:
    """Copies and transposes that only change an array's layout."""
    ops = [op for op in view.profile.ops if _is_copy(op)]
    if ops:
        yield _of_ops(
            view,
            "layout-copies",
            "copies and transposes between layouts of the same array",
            ops,
            ["other mesh axes: the compiler chooses layouts by them"],
            note=lambda op: op.raw.name,
        )


def memory_bound(view: View) -> Iterable[Cause]:
    """Ops that wait for device memory, other than copies."""
    updates = {id(op) for op in _updates(view)}
    ops = [
        op
        for op in view.profile.ops
        if op.resource is Resource.hbm
        and op.opcode not in CONTAINERS
        and op.opcode != "custom-call"
        and not _is_copy(op)
        and id(op) not in updates
        and not _calls_python(op)
    ]

    def note(op: Op) -> str:
        if not op.bytes:
            return op.raw.name
        rate = op.bytes / max(op.raw.end - op.raw.start, 1e-12) / 1e9
        return f"{op.raw.name}, {op.bytes / 1e6:.3g} MB at {rate:.3g} GB/s"

    what = "ops bound by device memory: norms, activations, the loss"
    if view.profile.trace.peak_bytes is None:
        what = "ops other than matmuls: norms, activations, the loss"
    if ops:
        yield _of_ops(
            view,
            "memory-bound",
            what,
            ops,
            ["larger matmuls a pass (--layout.accumulate down), so that they weigh less"],
            note=note,
        )


def update(view: View) -> Iterable[Cause]:
    """The optimizer's part."""
    ops = _updates(view)
    if ops:
        yield _of_ops(
            view,
            "optimizer-update",
            "the optimizer's update of weights and moments",
            ops,
            [
                "a larger batch",
                "--optimizer.kind lion or adafactor: fewer moments",
                "more --layout.fsdp",
            ],
        )


def wide(view: View) -> Iterable[Cause]:
    """Matmuls in f32, which take several bf16 passes; a CPU has no faster kind."""
    if view.profile.trace.backend is Backend.cpu:
        return
    ops = [
        op
        for op in view.profile.ops
        if op.flops
        and _is_matmul(op)
        and (op.dtype == "f32" or (not op.dtype and _reads_f32(op.raw.text)))
    ]
    if ops:
        yield _of_ops(
            view,
            "f32-matmuls",
            "matmuls with f32 operands: several passes of the matrix units each",
            ops,
            ["--precision bf16"],
            note=lambda op: op.raw.name,
        )


RULES: Sequence[Callable[[View], Iterable[Cause]]] = (
    input_wait,
    host,
    callbacks,
    recompilation,
    between,
    collectives,
    slices,
    transfers,
    rematerialisation,
    unfilled,
    kernels,
    copies,
    memory_bound,
    update,
    wide,
)
"""Shares may overlap: what is computed again may also be bound by memory."""


def _of_ops(
    view: View,
    name: str,
    title: str,
    ops: Iterable[Op],
    advice: Sequence[str],
    *,
    note: Callable[[Op], str] = lambda _: "",
    seconds: Callable[[Op], float] = lambda op: op.seconds,
) -> Cause:
    """A cause made of ops of the median step; ``seconds`` says what of each is lost."""
    by: dict[tuple[str, str], list[Op]] = defaultdict(list)
    for op in ops:
        by[op.layer or op.raw.name, op.source].append(op)
    lines = []
    for (layer, source), of in sorted(by.items(), key=lambda i: -sum(map(seconds, i[1])))[:SHOWN]:
        text = f"{duration(sum(map(seconds, of)))} in {layer}"
        text += f" ({'/'.join(source.split('/')[-2:])})" if source else ""
        more = note(max(of, key=seconds))
        lines.append(f"{text}: {more}" if more and more != layer else text)
    lost = sum(seconds(op) for of in by.values() for op in of)
    return Cause(
        name=name,
        title=title,
        share=lost / view.seconds,
        seconds=lost,
        evidence=lines,
        advice=list(advice),
    )


def _is_matmul(op: Op) -> bool:
    return bool(op.dtype) or op.resource is Resource.mxu


def _is_copy(op: Op) -> bool:
    if op.resource is not Resource.hbm:
        return False
    if op.opcode.startswith(COPIES) or op.raw.category == "data formatting":
        return True
    return op.raw.name.startswith(("copy", "transpose")) and not op.flops


def _updates(view: View) -> list[Op]:
    """Ops outside of the loss and its gradient, of a step that has one: the optimizer's."""
    if not differentiates(op.op_name for op in view.profile.ops):
        return []
    elsewhere = (Resource.ici, Resource.dcn, Resource.host)
    return [
        op
        for op in view.profile.ops
        if op.resource not in elsewhere and is_outside_gradient(op.op_name)
    ]


def _calls_python(op: Op) -> bool:
    target = op.instruction.target if op.instruction is not None else ""
    return bool(_CALLBACK.search(f"{target} {op.raw.name}"))


def _reads_f32(text: str) -> bool:
    """Whether an instruction's text has f32 operands and none of fewer bits."""
    operands = text.partition(" = ")[2].partition("(")[2]
    return bool(_F32.search(operands)) and "bf16[" not in operands
