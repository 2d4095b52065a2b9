""":class:`Step` from a forecast's schedule or from a profile's median step."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypedDict

from systolic.chips import Slice
from systolic.chips.catalogue import by_device_kind
from systolic.explaining.settings import Settings
from systolic.explaining.step import OpKind, Place, Step, StepOp
from systolic.forecasting import Forecast
from systolic.forecasting.costs import names
from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.module import named
from systolic.job import Axis, Model
from systolic.profile import Profile
from systolic.profile import ProfiledOp as Measured
from systolic.profile.ops import COPIES, Activity
from systolic.profile.profile import Rate
from systolic.profile.trace import Backend
from systolic.sim import gpu
from systolic.sim.gpu_ops import CONVOLUTION, CUBLAS, hosted_bytes
from systolic.sim.rates import matrix_width, rates_of
from systolic.sim.timeline import PricedBy, Resource, Span, Timeline
from systolic.sim.work import work_of

_CALLBACK = re.compile(r"callback", re.I)
_COPY = re.compile(r"(copy|transpose)")
_NARROW = re.compile(r"\b(s8|u8|s4|u4|f8\w+)\[")
_F32 = re.compile(r"\bf32\[")
LARGE = 8192
"""Side of the square matmul whose rate a GPU's matmuls are held against."""
TILE = 128
"""Side of a tile of a GPU's matmul."""
MESH = tuple(axis.value for axis in Axis)
"""Axes in the order of the mesh, outermost first."""
_KINDS = {
    Activity.callback: OpKind.callback,
    Activity.kernel: OpKind.kernel,
    Activity.loop: OpKind.loop,
    Activity.formatting: OpKind.copy,
    Activity.memory: OpKind.memory,
    Activity.matmul: OpKind.matmul,
}


class _StepDevice(TypedDict):
    """Facts of the device of a :class:`Step`."""

    peak: Callable[[str], float | None]
    mxu_width: int
    memory_peak: float | None
    f32_passes: bool
    gpu: bool


def _device(on: Slice) -> _StepDevice:
    """The device of a simulated step.

    A GPU's matmul is held against a large square one's rate, power limit included, which the published peak is far above.
    """
    if on.platform != "gpu":
        rates = rates_of(on)
        return _StepDevice(
            peak=rates.peak,
            mxu_width=matrix_width(rates.chip),
            memory_peak=rates.hbm,
            f32_passes=True,
            gpu=False,
        )

    @cache
    def reached(dtype: str) -> float:
        seconds = gpu.matmul_seconds(on.chip, 1, LARGE, LARGE, LARGE, dtype, dtype, "bf16")
        return 2.0 * LARGE**3 / seconds

    return _StepDevice(
        peak=reached,
        mxu_width=TILE,
        memory_peak=on.chip.hbm_bytes_per_second,
        f32_passes=False,
        gpu=True,
    )


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """One of the programs that a step runs."""

    module: Module
    timeline: Timeline
    calls: int = 1
    """Runs in a step."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Axis to size, outermost first, in the order of its devices; empty where it is not known."""


# Simulated


def step_of_forecast(
    forecast: Forecast, module: Module, model: Model | None, settings: Settings | None = None
) -> Step:
    """The step of a forecast that has a timeline, with the places of its ops in the program."""
    assert forecast.timeline is not None
    device = _device(forecast.on)
    index: dict[str, tuple[Computation, Instruction]] = {}
    for computation in module.computations.values():
        for instruction in computation:
            index.setdefault(instruction.name, (computation, instruction))
    windowed = names(module)
    layout = forecast.layout
    known = None if forecast.answer is None else forecast.answer.report.program
    trains = known is None or known.verb == "train"
    mesh = {axis: int(layout[axis]) for axis in MESH if axis in layout}
    return Step(
        seconds=forecast.step_seconds or 0.0,
        ops=[
            _simulated(
                span,
                times,
                Place(module=module, computation=at[0], instruction=at[1]),
                windowed,
                device["gpu"],
            )
            for span, times in forecast.timeline.leaves()
            if span.lane == "core" and (at := index.get(span.name)) is not None
        ],
        mesh=mesh,
        microbatches=int(layout.get("microbatches", 0)),
        # Prefill and decode size their slots to their tokens.
        slots_per_token=model.slots_per_token() if model is not None and trains else 1.0,
        settings=settings,
        **device,
    )


def step_of_programs(forecast: Forecast, programs: Sequence[StepProgram]) -> Step:
    """The step of programs that no recipe made, run one after the other: captured, or the one of a dump."""
    device = _device(forecast.on)
    ops: list[StepOp] = []
    for program in programs:
        index: dict[str, tuple[Computation, Instruction]] = {}
        for computation in program.module.computations.values():
            for instruction in computation:
                index.setdefault(instruction.name, (computation, instruction))
        windowed = names(program.module)
        for span, times in program.timeline.leaves():
            if span.lane == "core" and (at := index.get(span.name)) is not None:
                place = Place(module=program.module, computation=at[0], instruction=at[1])
                ops.append(_simulated(span, times * program.calls, place, windowed, device["gpu"]))
    meshes = {tuple(program.mesh.items()) for program in programs}
    return Step(
        seconds=forecast.step_seconds or 0.0,
        ops=ops,
        mesh=dict(meshes.pop()) if len(meshes) == 1 else {},
        foreign=True,
        **device,
    )


def _simulated(span: Span, times: float, place: Place, windowed: Set[str], on_gpu: bool) -> StepOp:
    source = named(place.module, place.computation, place.instruction)
    dtype = work_of(*_where(place)).dtype if span.flops else ""
    return StepOp(
        name=span.name,
        opcode=span.opcode,
        kind=_simulated_kind(span, place, on_gpu),
        resource=span.resource,
        seconds=span.seconds * times,
        times=times,
        flops=span.flops * times,
        bytes=span.bytes * times,
        dtype=dtype,
        op_name=source.op_name,
        layer=span.layer,
        source=span.source,
        windowed=source.op_name in windowed,
        place=place,
    )


def _where(place: Place) -> tuple[Module, Computation, Instruction]:
    return place.module, place.computation, place.instruction


def _simulated_kind(span: Span, place: Place, on_gpu: bool) -> OpKind:
    instruction = place.instruction
    if _CALLBACK.search(instruction.target) or span.priced_by is PricedBy.print:
        return OpKind.callback
    if on_gpu and _is_short(span, place):
        return OpKind.launch
    if span.priced_by is PricedBy.kernel:
        return OpKind.matmul if on_gpu and _is_matmul(instruction) else OpKind.kernel
    if span.opcode in COPIES or (span.opcode == "fusion" and _COPY.match(span.name)):
        return OpKind.copy
    return OpKind.matmul if span.flops else OpKind.other


def _is_short(span: Span, place: Place) -> bool:
    """Whether most of a GPU's kernel is its start and its end, whatever it computes."""
    if span.lane != "core" or span.priced_by in (None, PricedBy.network):
        return False
    if hosted_bytes(place.computation, place.instruction):
        return False
    fixed = gpu.MATMUL_SECONDS if span.flops else gpu.MEMORY_SECONDS
    return span.seconds < 2 * fixed


def _is_matmul(kernel: Instruction) -> bool:
    """Whether a GPU's kernel is a matmul of cuBLAS, a convolution of cuDNN, or a product that the compiler fused itself."""
    return kernel.opcode != "custom-call" or kernel.target.startswith((CUBLAS, CONVOLUTION))


# Measured


def step_of_profile(profile: Profile, mesh: Mapping[str, int] | None) -> Step:
    """The median step of a profile: of several devices the mean of theirs.

    Args:
        profile: The profile.
        mesh: Axis to size, outermost first; empty where it is not known, None where no recipe made the program.
    """
    trace = profile.trace
    chip = by_device_kind(trace.kind) if trace.kind else None
    windowed: Mapping[int, Set[str]] = {id(m): names(m) for m in trace.modules.values()}
    devices = profile.devices
    known = mesh or {}
    return Step(
        seconds=sum(device.seconds for device in devices) / len(devices),
        ops=_together(
            [_measured(op, windowed, device) for device in devices for op in device.ops],
            len(devices),
        ),
        mesh={axis: known[axis] for axis in MESH if axis in known},
        microbatches=int(known.get("microbatches", 0)),
        peak=trace.peak,
        mxu_width=matrix_width(chip),
        memory_peak=profile.ceilings.memory,
        f32_passes=trace.backend is Backend.tpu,
        gpu=trace.backend is Backend.gpu,
        foreign=mesh is None,
    )


def _together(ops: Sequence[StepOp], devices: int) -> list[StepOp]:
    """Ops with their runs summed, of one device in the mean."""
    by: dict[tuple[str, str, int], list[StepOp]] = defaultdict(list)
    for op in ops:
        by[op.name, op.opcode, id(op.place.module) if op.place else 0].append(op)
    return [
        replace(
            of[0],
            seconds=sum(op.seconds for op in of) / devices,
            times=len(of) / devices,
            flops=sum(op.flops for op in of) / devices,
            bytes=sum(op.bytes for op in of) / devices,
            rate=_summed([op.rate for op in of if op.rate is not None], devices),
            flight=sum(op.flight for op in of) / devices,
        )
        for of in by.values()
    ]


def _summed(rates: Sequence[Rate], devices: int) -> Rate | None:
    if not rates:
        return None
    return replace(rates[0], work=sum(rate.work for rate in rates) / devices)


def _measured(op: Measured, windowed: Mapping[int, Set[str]], profile: Profile) -> StepOp:
    place = None
    if op.module is not None and op.computation is not None and op.instruction is not None:
        place = Place(module=op.module, computation=op.computation, instruction=op.instruction)
    kind = _KINDS.get(op.kind, OpKind.other)
    if kind is OpKind.other and op.resource is Resource.mxu:
        kind = OpKind.matmul
    dtype = op.dtype
    if kind is OpKind.matmul and not dtype:
        dtype = _operand_dtype(op.raw.text)
    rate = profile.rate(op)
    return StepOp(
        name=op.raw.name,
        opcode=op.opcode,
        kind=kind,
        resource=op.resource,
        seconds=op.seconds,
        flops=op.flops,
        bytes=op.bytes,
        dtype=dtype,
        op_name=op.op_name,
        layer=op.layer,
        source=op.source,
        windowed=place is not None and op.op_name in windowed.get(id(place.module), ()),
        place=place,
        rate=rate,
        flight=op.flight if rate is not None else 0.0,
        to_host=op.traffic.to_host,
    )


def _operand_dtype(text: str) -> str:
    """Dtype of a matmul's operands by an instruction's text: two that are narrow, or f32 ones and none of fewer bits."""
    operands = text.partition(" = ")[2].partition("(")[2]
    narrow = _NARROW.findall(operands)
    if len(narrow) > 1:
        return narrow[0]
    return "f32" if _F32.search(operands) and "bf16[" not in operands else ""
