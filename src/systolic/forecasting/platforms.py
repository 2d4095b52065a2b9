"""Forecasts for CPUs and GPUs.

A GPU's program is compiled by XLA's GPU compiler where that is installed, and its schedule is simulated. Without it
the program is partitioned and scheduled on a CPU, and its forecast, a roofline, is marked as assumed. A CPU's program is
compiled for real, and its time is a roofline too.
"""

import enum
import math
import os
from collections.abc import Sequence
from dataclasses import replace

from systolic.chips import Slice
from systolic.chips.flags import OVERLAPPED, name_of
from systolic.compiling import Compiled
from systolic.compiling.gpu_compiler import (
    FRACTIONS,
    advice,
    flags_for,
    overlaps_unasked,
    pool_bytes,
)
from systolic.compiling.host_backend import Built, CpuRates
from systolic.compiling.outcome import CompiledMemory, CompileReport
from systolic.core.errors import NotFoundError
from systolic.core.units import Origin, duration, gibibytes
from systolic.forecasting.cautions import cautions_of, ended, errors
from systolic.forecasting.cost import ForecastCompile, bill_of
from systolic.forecasting.forecast import Forecast
from systolic.forecasting.memory import MemoryMap, MemoryShortage, memory_map, peak_of
from systolic.hlo import Module, parse
from systolic.sim.cost_kinds import check_chip
from systolic.sim.gpu_ops import add_workspaces
from systolic.sim.incomplete import NOTHING, Given
from systolic.sim.roofline import ModuleSource, Peaks, gpu_peaks, roofline
from systolic.sim.simulate import simulate
from systolic.sim.timeline import Resource, Timeline

LEAST_ALONE = 0.02
"""Share of a step from which collectives beside nothing are spoken of."""
SCHEDULED_SHARE = 0.8
"""Share of a GPU's memory that XLA's scheduler counts on where it compiles for an absent GPU; on a GPU it is the pool (gpu_hlo_schedule.cc)."""
SCHEDULED_SLOP = 0.95
"""Share of what arguments and results leave of that up to which the scheduler overlaps."""
LARGEST_ERROR = "software of 2023 was the slowest beside it"
"""Steps at the far end of a GPU's range, by its schedule as by its roofline."""
MORE_MEMORY = "--xla_gpu_memory_limit_slop_factor=125"
CPU_FACTOR = 2.0
"""Factor by which a CPU's step may miss its roofline, either way: threads, caches and small ops are not modelled."""
CONTEXT_BYTES = 1 << 29
"""Memory that CUDA takes of a GPU beside XLA's pool, about; assumed."""

STAND_IN = "roofline, not compiled for this GPU: XLA partitioned and scheduled it on a CPU; a GPU's fusions differ"
REMEDY = "split more ways with layout.fsdp, take a smaller batch, or layout.remat full"
SIMULATED = "compiled by XLA's GPU compiler, whose schedule is simulated"
WITHOUT_TRITON = "Triton's matmuls are off, since their tiles come from timing them on a GPU; --flags=--xla_gpu_enable_triton_gemm=true has them"
WITH_TRITON = (
    "Triton's matmuls, whose tiles come from timing them on a GPU, are priced by their sizes"
)
KERNELS = "kernels assumed, as none was timed: cuBLAS matmuls, cuDNN attention"
HOST_TIME = "step time is a roofline over the compiled program, op after op"
MEASURED = "rates of this CPU were measured when the program was compiled"


def forecast_host(
    outcome: Compiled, name: str, on: Slice, seconds: float, given: Given = NOTHING
) -> Forecast:
    """The forecast of a program for a CPU or GPU slice, with the trips and costs that it leaves open."""
    if given.calibration is not None:
        check_chip(given.calibration, on)
    report = outcome.report
    built, facts = report.built or Built.topology, report.program
    module = parse(outcome.hlo)
    memory = _memory(module, report)
    have = capacity(on)
    notes = [*facts.notes, *_notes(built, on, memory, have, report)]
    timeline, why = _timeline(module, on, report, given)
    if timeline is None:
        notes.append(why)
    elif on.platform == "gpu" and built is Built.topology:
        notes += of_overlap(on, timeline, report.memory or CompiledMemory(), report.flags)
    fits = not have or memory.peak_bytes <= have
    by = GpuModel.roofline if built is Built.stand_in else GpuModel.compiler
    low, high, basis = (None, None, "") if timeline is None else interval(on, timeline, by)
    shown = fits and timeline is not None
    simulated = shown and on.platform == "gpu" and built is not Built.stand_in
    return Forecast(
        recipe=name,
        on=on,
        origin=_origin(built, timeline, fits),
        memory_origin=Origin.assumed if built is Built.stand_in else Origin.compiled,
        fits=fits,
        capacity_bytes=have,
        memory=memory,
        timeline=timeline if fits else None,
        step_seconds=timeline.seconds if shown and timeline is not None else None,
        low=low if shown else None,
        high=high if shown else None,
        interval=basis if shown else "",
        model_flops=facts.model_flops,
        unit=facts.unit,
        units=facts.units,
        hardware_flops=timeline.executed_flops if timeline is not None else 0.0,
        flops_by_format=timeline.flops_by_format if timeline is not None else {},
        bill=bill_of(on),
        compiler=ForecastCompile.of(
            outcome, seconds, "cpu" if built is Built.stand_in else on.chip.name
        ),
        layout=facts.layout,
        rejected=None if fits else MemoryShortage.of(memory, have, REMEDY),
        cautions=cautions_of(timeline) if timeline is not None else (),
        notes=(*notes, *(timeline.notes if timeline is not None else ())),
        answer=outcome,
        schedules=[(module, timeline, 1.0)] if simulated and timeline is not None else (),
    )


def capacity(on: Slice) -> int:
    """Memory of one JAX device; virtual devices of a CPU share the machine's."""
    memory = on.chip.hbm_bytes or 0
    return memory // on.num_devices if on.platform == "cpu" else memory


def _memory(module: Module, report: CompileReport) -> MemoryMap:
    """Memory by the compiler, with the workspaces that only a GPU's library could have told it."""
    peak = _peak(report.memory or CompiledMemory())
    if report.built is not Built.topology:
        return memory_map(module, peak)
    return gpu_memory(module, peak)


def gpu_memory(module: Module, peak_bytes: int | None) -> MemoryMap:
    """Memory of a GPU's program by the compiler's peak, to which the workspaces of cuDNN's attention are added."""
    before = peak_of(module).bytes
    add_workspaces(module)
    return memory_map(module, peak_bytes and peak_bytes + peak_of(module).bytes - before)


def _peak(stats: CompiledMemory) -> int | None:
    """Arguments, results that don't take their place, and temporaries at once."""
    if stats.argument_size_in_bytes is None:
        return stats.used_in_bytes
    own = (stats.output_size_in_bytes or 0) - (stats.alias_size_in_bytes or 0)
    return stats.argument_size_in_bytes + own + (stats.temp_size_in_bytes or 0)


def _timeline(
    module: Module, on: Slice, report: CompileReport, given: Given
) -> tuple[Timeline | None, str]:
    """The step as a GPU's compiler scheduled it, else a roofline; None and what the catalogue lacks for it."""
    stands_in = report.built is Built.stand_in
    program = ModuleSource.stand_in if stands_in else ModuleSource.compiled
    try:
        if on.platform == "gpu" and not stands_in:
            places = [tuple(place) for place in report.places] or None
            timeline = simulate(module, on, places, given=given)
            assumed = [KERNELS] if report.built is Built.topology else []
            return replace(timeline, notes=(*assumed, *timeline.notes)), ""
        peaks = gpu_peaks(on) if report.rates is None else cpu_peaks(report.rates)
        return roofline(module, peaks, on.num_devices, program, given), ""
    except NotFoundError as error:
        return None, f"no step time: {error}"


def cpu_peaks(rates: CpuRates) -> Peaks:
    """Peaks of this CPU by its rates."""
    return Peaks(
        matmul={"f32": rates.matmul_flops_per_second},
        memory=rates.memory_bytes_per_second,
        vector=rates.vector_operations_per_second,
        is_cpu=True,
    )


class GpuModel(enum.Enum):
    """Ways to the time of a GPU's step, each with errors of its own."""

    compiler = "compiler"
    """Schedule of XLA's GPU compiler, simulated."""
    roofline = "roofline"


def interval(
    on: Slice, timeline: Timeline, by: GpuModel = GpuModel.compiler
) -> tuple[float, float | None, str]:
    """Low and high seconds of a step on a CPU or a GPU, and what they rest on."""
    if on.platform == "cpu":
        down, up = 1 / CPU_FACTOR, CPU_FACTOR
        text = f"a factor of {CPU_FACTOR:g} either way: a roofline does not model threads, caches or small ops"
    else:
        by_chip = errors()["gpu"][by.value]
        row = by_chip.get(on.chip.name) or by_chip["all"]
        where = on.chip.name if on.chip.name in by_chip else f"GPUs, too few on {on.chip.name}"
        down, up = 1 / (1 + row["high"]), 1 / (1 + row["low"])
        text = f"{row['held']} of {row['rows']} published training steps on {where}, to which no price was fitted; {LARGEST_ERROR}"

    def range_of(variant: Timeline) -> tuple[float, float, str]:
        estimated, least, most = variant.by_rule
        rest, why = max(variant.seconds - estimated, 0.0), text
        if estimated:
            why += f"; {estimated / variant.seconds:.0%} of it sorts, gathers, prints and their kind, which are estimated between {duration(least)} and {duration(most)}"
        return rest * down + least, rest * up + most, why

    return ended(timeline, range_of)


def _origin(built: Built, timeline: Timeline | None, fits: bool) -> Origin:
    """Origin of the step time, else of the verdict."""
    if built is Built.stand_in:
        return Origin.assumed
    return Origin.simulated if timeline is not None and fits else Origin.compiled


def of_triton(flags: Sequence[str], verb: str) -> list[str]:
    """The line on Triton's matmuls in a step for a GPU that is not there; none where the flags say whether it has them."""
    if "--xla_gpu_enable_triton_gemm" in map(name_of, flags):
        return []
    if verb == "captured":
        return [WITHOUT_TRITON.replace("--flags=", "XLA_FLAGS=")]
    return [WITHOUT_TRITON if flags_for(verb) else WITH_TRITON]


def of_overlap(
    on: Slice, timeline: Timeline, memory: CompiledMemory, flags: Sequence[str]
) -> list[str]:
    """A line where collectives that a GPU's schedule runs beside nothing take a share of the step, and why."""
    alone = sum(
        span.seconds * times
        for span, times in timeline.leaves()
        if span.lane == "core" and span.bytes and span.resource in (Resource.ici, Resource.dcn)
    )
    if alone < LEAST_ALONE * timeline.seconds:
        return []
    line = f"{duration(alone)} of collectives run beside nothing"
    set_already = {name_of(flag) for flag in flags}
    if not overlaps_unasked(on.chip) and name_of(OVERLAPPED) not in set_already:
        return [f"{line}: on {on.chip.name} XLA overlaps them with --flags={OVERLAPPED} only"]
    whole, pool = on.chip.driver_hbm_bytes or 0, pool_bytes(on.chip)
    here = _scheduled(SCHEDULED_SHARE * whole, memory)
    if (_peak(memory) or 0) <= here or name_of(MORE_MEMORY) in set_already:
        return []
    there = _scheduled(pool if pool < whole else SCHEDULED_SHARE * whole, memory)
    return [
        f"{line}: memory is short for XLA's scheduler, which keeps to {gibibytes(here)} here and, by the size of XLA's pool, to {gibibytes(there)} on a GPU; --flags={MORE_MEMORY} lets it take more"
    ]


def _scheduled(base: float, memory: CompiledMemory) -> int:
    """Bytes that XLA's scheduler keeps a program to, of those that it counts on."""
    held = (_peak(memory) or 0) - (memory.temp_size_in_bytes or 0)
    return round(held + SCHEDULED_SLOP * (base - held))


def of_pool(peak_bytes: int, on: Slice) -> list[str]:
    """A line where a program that fits a GPU needs more than the pool that XLA takes of its memory."""
    pool, memory = pool_bytes(on.chip), on.chip.driver_hbm_bytes or on.chip.hbm_bytes or 0
    if not pool < peak_bytes <= capacity(on):
        return []
    share = math.ceil(100 * (peak_bytes + CONTEXT_BYTES) / memory) / 100
    name = next(filter(os.environ.get, FRACTIONS), FRACTIONS[0])
    step = f"set {name}={share:.2f}" if share < 1 else "take a smaller batch"
    return [
        f"XLA takes {pool / memory:.0%} of a GPU's memory, {gibibytes(round(pool))}, less than this needs: {step}"
    ]


def _notes(
    built: Built, on: Slice, memory: MemoryMap, have: int, report: CompileReport
) -> list[str]:
    if built is Built.stand_in:
        notes = [STAND_IN, *([more] if (more := advice(on)) else [])]
        notes.append(
            "memory is estimated: parameters and optimizer are exact, temporaries as a CPU would have them"
        )
        if report.flags:
            notes.append("compiler flags have no effect on a roofline")
    else:
        notes = [HOST_TIME] if on.platform == "cpu" else [SIMULATED]
    if built is Built.topology:
        notes += of_triton(report.flags, report.program.verb)
    if on.platform == "cpu":
        notes.append(MEASURED)
        if on.num_devices > 1:
            notes.append(f"{on.num_devices} virtual devices share this machine's cores and memory")
    else:
        notes += of_pool(memory.peak_bytes, on)
    return notes
