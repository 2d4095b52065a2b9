"""Forecasts of jobs, functions and dumps, with the range of errors that programs of their kind had against chips (``benchmarks/accuracy/intervals.py``)."""

import enum
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from systolic.chips import Slice
from systolic.chips.flags import resolved
from systolic.compiling import (
    Compiled,
    Compiler,
    Failed,
    JobProgram,
    Outcome,
    Program,
    Rejected,
    StepKind,
    executable,
)
from systolic.compiling import compile as compile_program
from systolic.compiling.outcome import CompiledMemory
from systolic.compiling.traced import ProgramFacts
from systolic.core.errors import RunError
from systolic.core.units import Origin
from systolic.forecasting.calibrations import told_of_step
from systolic.forecasting.cautions import cautions_of, ended
from systolic.forecasting.cost import ForecastCompile, bill_of
from systolic.forecasting.costs import note_of, windowed
from systolic.forecasting.forecast import Forecast
from systolic.forecasting.memory import (
    LARGEST,
    LiveBuffer,
    MemoryMap,
    MemoryShortage,
    kind_of,
    memory_map,
    state_of,
)
from systolic.forecasting.platforms import forecast_host, interval
from systolic.hlo import Module, parse
from systolic.job import Job
from systolic.sim.cost_kinds import corrected_seconds
from systolic.sim.incomplete import NOTHING, Given
from systolic.sim.simulate import simulate
from systolic.sim.timeline import Timeline, layer_of

ALL = "all"
"""The row of all generations together."""
Say = Callable[[str], None]


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent / "errors.toml").read_text())


class ScheduleDetail(enum.Enum):
    """Schedules by what the compiler tells of them."""

    full = "full"
    """Schedule with the compiler's cycles."""
    quick = "quick"
    """Schedule without cycles: the compile ended there."""


class ResultKind(enum.Enum):
    """Measured results that a forecast's errors were found on, by kind of program."""

    own = "own"
    rebuilt = "rebuilt"
    function = "function"
    decode = "decode"

    @classmethod
    def of(cls, facts: ProgramFacts) -> "ResultKind":
        """The kind whose results are nearest to a program."""
        match facts.verb:
            case "captured":
                return cls.own
            case "decode":
                return cls.decode
            case "function":
                return cls.function
            case _:
                return cls.function if facts.unit == "calls" else cls.rebuilt


MEASURED = {
    ResultKind.own: "published steps of captured trainers",
    ResultKind.rebuilt: "published steps",
    ResultKind.function: "measured operations",
    ResultKind.decode: "measured decode steps",
}


def detail_of(module: Module) -> ScheduleDetail:
    """Detail of a module's schedule."""
    cycles = (op.cycles for held in module.computations.values() for op in held)
    return ScheduleDetail.quick if all(count is None for count in cycles) else ScheduleDetail.full


def interval_of(
    generation: str, seconds: float, facts: ProgramFacts, schedule: ScheduleDetail
) -> tuple[float, float, str]:
    """Low and high seconds, and the results that they rest on.

    An error of the table is (forecast - measured) / measured, so a measured time lies between
    forecast / (1 + high) and forecast / (1 + low). A generation with few results takes those of all, widened by its
    own. Made to hold 80 %; the text says how many of them lie inside, why a rebuilt program's range is the wider one,
    and where a program is of another kind or mode.
    """
    kind = ResultKind.of(facts)
    schedules = _table()[kind.value]
    by_generation = schedules.get(schedule.value) or schedules[ScheduleDetail.quick.value]
    row = by_generation.get(generation)
    where = generation if row is not None else f"all generations, too few on {generation}"
    if row is None and kind is ResultKind.decode:
        where = f"v5e, none on {generation}"
    row = row if row is not None else by_generation[ALL]
    text = f"{row['held']} of {row['rows']} {MEASURED[kind]} on {where}"
    if kind is ResultKind.rebuilt:
        text += ", whose trainers' programs differ from a recipe's"
        own = _table()[ResultKind.own.value][ScheduleDetail.quick.value]
        own = own.get(generation) or own[ALL]
        if (row["low"], row["high"]) != (own["low"], own["high"]):
            text += f": wider than a captured program's ({own['low']:+.0%} to {own['high']:+.0%})"
    if schedule.value not in schedules:
        text += ", forecast from schedules"
    if kind is ResultKind.rebuilt and facts.verb != "train":
        text += f"; no {facts.verb} step among them"
    return seconds / (1 + row["high"]), seconds / (1 + row["low"]), text


def range_of(
    generation: str, timeline: Timeline, facts: ProgramFacts, schedule: ScheduleDetail
) -> tuple[float, float, str]:
    """:func:`interval_of` a timeline; ops that rules estimate have the rules' own range in place of it, and those of kinds that a calibration measured its spread."""
    by_rule, least, most = timeline.by_rule
    # Seconds of the core in kinds of op whose spread a calibration measured, and the least and most that they may be.
    sums = [0.0, 0.0, 0.0]
    for kind, seconds in corrected_seconds(timeline).items():
        assert timeline.calibration is not None
        ends = timeline.calibration.ends(kind)
        if ends is not None:
            for at, times in enumerate((1.0, *ends)):
                sums[at] += seconds * times
    own, own_least, own_most = sums[0], sums[1], sums[2]
    rest = max(timeline.seconds - by_rule - own, 0.0)
    low, high, text = interval_of(generation, rest, facts, schedule)
    if own and timeline.calibration is not None:
        text = f"{own / timeline.seconds:.0%} of the step from the 10th to the 90th percentile of the ops of the calibration {timeline.calibration.name}, all kinds at once; the rest by {text}"
    share = by_rule / timeline.seconds if timeline.seconds else 0.0
    if share >= 5e-4:
        text += f"; {share:.1%} of it estimated by rules with a range of their own"
    return low + own_least + least, high + own_most + most, text


def forecast_job(
    job: Job,
    on: Slice,
    *,
    verb: StepKind = StepKind.train,
    compiler: Compiler | None = None,
    say: Say = lambda _: None,
    given: Given = NOTHING,
) -> Forecast:
    """One of a job's steps on a slice; without a ``compiler`` with the flags that jobs share there.

    ``given`` has the trips and costs that the program leaves open.

    Raises:
        LayoutError: the layout does not divide the slice, the model or the batch.
        RunError: the compiler failed; the message has its reason.
    """
    compiler = compiler or Compiler(flags=resolved("", on.chip))
    return forecast_program(
        JobProgram(job=job, verb=verb), job.name, on, compiler=compiler, say=say, given=given
    )


def save_executable(forecast: Forecast, path: Path) -> None:
    """Copies the serialized executable of a step that fits out of the store, with what it was made by beside it.

    Raises:
        RunError: others could have written the store's, or the copy can't be written.
    """
    if forecast.fits and forecast.answer is not None:
        executable.save(forecast.answer, path)


def forecast_program(
    program: Program,
    name: str,
    on: Slice,
    *,
    compiler: Compiler | None = None,
    say: Say = lambda _: None,
    given: Given = NOTHING,
) -> Forecast:
    """Any program on a slice, with the trips and costs that it leaves open."""
    begin = time.perf_counter()
    outcome = compile_program(program, on, compiler, say)
    return of_outcome(outcome, name, on, time.perf_counter() - begin, given)


def of_outcome(
    outcome: Outcome, name: str, on: Slice, seconds: float, given: Given = NOTHING
) -> Forecast:
    """The forecast that a compiler's answer makes.

    Raises:
        RunError: the compiler failed.
        OptionError: the program has nothing of a name that is given, or contradicts a number of trips.
    """
    match outcome:
        case Failed(reason=reason):
            raise RunError(f"compiling {name} for {on.name} failed: {reason}")
        case Rejected():
            return _rejected(outcome, name, on, seconds)
        case Compiled() if on.platform != "tpu":
            return forecast_host(outcome, name, on, seconds, given)
        case Compiled():
            return _compiled(outcome, name, on, seconds, given)


def capacity(on: Slice) -> int:
    """Device memory of one JAX device of a TPU or a GPU."""
    return on.program_bytes


def _compiled(outcome: Compiled, name: str, on: Slice, seconds: float, given: Given) -> Forecast:
    report = outcome.report
    module = parse(outcome.hlo)
    places = [tuple(place) for place in report.places] or None
    timeline = simulate(module, on, places, flags=report.flags, given=given)
    stats = report.memory or CompiledMemory()
    # The figure that libtpu compares with the chip's memory; its peak_memory has on-chip memory in it.
    memory = memory_map(module, stats.used_in_bytes or stats.peak_memory_in_bytes or None)
    forecast = assemble(
        module=module,
        timeline=timeline,
        memory=memory,
        facts=report.program,
        name=name,
        on=on,
        compiler=ForecastCompile.of(outcome, seconds),
    )
    return replace(forecast, answer=outcome, schedules=[(module, timeline, 1.0)])


def assemble(
    *,
    module: Module,
    timeline: Timeline,
    memory: Any,
    facts: ProgramFacts,
    name: str,
    on: Slice,
    compiler: ForecastCompile,
    memory_origin: Origin = Origin.compiled,
) -> Forecast:
    """The forecast of a simulated step; ``facts`` is what the program says of itself."""
    if on.platform == "tpu":
        detail = detail_of(module)
        low, high, text = ended(
            timeline, lambda variant: range_of(on.chip.name, variant, facts, detail)
        )
    else:
        low, high, text = interval(on, timeline)
    return Forecast(
        recipe=name,
        on=on,
        origin=Origin.simulated,
        memory_origin=memory_origin,
        fits=True,
        capacity_bytes=capacity(on),
        memory=memory,
        timeline=timeline,
        step_seconds=timeline.seconds,
        low=low,
        high=high,
        interval=text,
        model_flops=facts.model_flops,
        unit=facts.unit,
        units=facts.units,
        hardware_flops=timeline.executed_flops,
        flops_by_format=timeline.flops_by_format,
        bill=bill_of(on),
        compiler=compiler,
        layout=facts.layout,
        cautions=[*told_of_step(timeline, low, high), *cautions_of(timeline)],
        warnings=_warnings(module, timeline),
        notes=(*facts.notes, *timeline.notes),
    )


def _warnings(module: Module, timeline: Timeline) -> list[str]:
    einsums = windowed(module, timeline)
    return [] if einsums is None else [note_of(einsums, timeline.seconds)]


def _rejected(outcome: Rejected, name: str, on: Slice, seconds: float) -> Forecast:
    report = outcome.report
    facts = ProgramFacts() if report is None else report.program
    text = outcome.hlo
    memory = memory_map(parse(text), outcome.need_bytes or None) if text is not None else None
    return Forecast(
        recipe=name,
        on=on,
        origin=Origin.compiled,
        fits=False,
        capacity_bytes=outcome.have_bytes or capacity(on),
        memory=memory,
        model_flops=facts.model_flops,
        unit=facts.unit,
        units=facts.units,
        bill=bill_of(on),
        compiler=ForecastCompile.of(outcome, seconds),
        layout=facts.layout,
        rejected=MemoryShortage(
            space=outcome.space,
            need_bytes=outcome.need_bytes,
            have_bytes=outcome.have_bytes,
            buffers=_named(outcome, memory)[:LARGEST],
        ),
    )


def _named(outcome: Rejected, memory: MemoryMap | None) -> Sequence[LiveBuffer]:
    """The largest buffers: from the schedule that did not fit, else as the compiler's message has them."""
    if memory is not None and memory.buffers:
        return memory.buffers
    return [
        LiveBuffer(
            name=b.label,
            kind=(None if b.op.startswith("jit(") else state_of(b.op)) or kind_of(b.op, b.label),
            bytes=b.bytes,
            shape=b.shape,
            layer=layer_of(b.op),
            source=b.source,
            op=b.op,
        )
        for b in outcome.buffers
    ]
