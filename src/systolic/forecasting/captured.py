"""The forecast of a captured step, whose programs are simulated and their calls scheduled."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from systolic.capture.program import (
    Captured,
    CapturedProgram,
    HeldArray,
    OutsidePeak,
)
from systolic.chips import Slice
from systolic.compiling.dump import USAGE, used_bytes
from systolic.compiling.kernels import counted_elsewhere
from systolic.compiling.traced import ProgramFacts
from systolic.core.units import Origin, duration, gibibytes, plural, si
from systolic.forecasting import moves
from systolic.forecasting.cost import ForecastCompile
from systolic.forecasting.forecast import Forecast
from systolic.forecasting.memory import (
    HELD,
    LiveBuffer,
    MemoryMap,
    memory_map,
    undonated_bytes,
    with_held,
)
from systolic.forecasting.op_changes import Schedule
from systolic.forecasting.platforms import KERNELS, SIMULATED, gpu_memory, of_pool, of_triton
from systolic.forecasting.run import assemble, capacity
from systolic.forecasting.text import FROM_SCHEDULE, refused
from systolic.hlo import Module, parse
from systolic.hlo.parse import check
from systolic.sim.calls import CallSchedule, Device, DeviceCall, schedule
from systolic.sim.incomplete import NOTHING, Gaps, Given
from systolic.sim.simulate import simulate
from systolic.sim.timeline import Resource, Span, Timeline

WAITS = 0.02
"""Share of a step that its busiest device waits, above which it is told."""

LEFT_OUT = 0.85
"""Share of the FLOPs as written below which a compiled program leaves a part out: compilers join equal matmuls, a ninth of some programs."""
_KERNEL = re.compile(r"pallas_call|ragged_dot")
OUTSIDE = 0.01
"""Share of the step's memory by which a program may hold more outside of it before a line says so."""
MOST_OTHERS = 6
"""Other calls that a note names."""
MOST_NAMED = 8
"""Programs of a step that are named."""
LARGE_SHARE = 0.05
"""Share of a program's memory from which arguments that could be donated are named."""
ZEROS = "arrays on the slice read as zeros while the program was captured, but for counters: where it branches on a loss, it took the branch of 0"


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A program of the step."""

    program: CapturedProgram
    module: Module
    timeline: Timeline | None
    """None of a program that the compiler refused."""
    memory: MemoryMap
    is_compiled_memory: bool
    """Whether the memory is the compiler's figure."""

    @property
    def seconds(self) -> float:
        """Seconds of a call; 0 of a program that the compiler refused."""
        return self.timeline.seconds if self.timeline is not None else 0.0

    @property
    def devices(self) -> frozenset[Device]:
        """Places of its devices in the slice."""
        return frozenset(self.program.places)

    @property
    def calls(self) -> int:
        """Calls a step."""
        return self.program.calls_per_step

    @property
    def copies(self) -> int:
        """Processes that each run it on devices of their own."""
        return self.program.copies

    @property
    def mesh(self) -> Mapping[str, int]:
        """Axis to size of the program's mesh, outermost first; empty where its device order is another."""
        return self.program.mesh


def forecast_captured(captured: Captured, on: Slice, given: Given = NOTHING) -> Forecast:
    """The forecast of a captured program's step.

    Args:
        captured: The answer of :func:`~systolic.capture.program.capture`.
        on: The slice that it was captured for.
        given: Trips and costs that the programs leave open.

    Raises:
        OptionError: ``given`` has a name that the step lacks.
    """
    return forecast_parts(captured, parts_of(captured, on, given), on, given)


def parts_of(captured: Captured, on: Slice, given: Given = NOTHING) -> list[StepPart]:
    """The programs of a captured step, each simulated; raises as :func:`forecast_captured`."""
    programs = captured.programs
    modules = [_module(captured, program) for program in programs]
    names = [program.name for program in programs]
    return [
        _part(captured, program, on, own, module)
        for program, module, own in zip(
            programs, modules, given_apart(given, names, modules), strict=True
        )
    ]


def given_apart(given: Given, names: Sequence[str], modules: Sequence[Module]) -> list[Given]:
    """Given trips and costs of each program of a step, and those that match no program.

    A name such as ``outer/while.5`` is of the program ``outer`` alone.
    """
    if not given or len(modules) == 1:
        return [given] * len(modules)
    loops = [_names(module, loops=True) for module in modules]
    others = [_names(module, loops=False) for module in modules]
    by_program = []
    for at, name in enumerate(names):
        trips = _own(given.trips, at, name, names, loops)
        by_program.append(
            replace(given, trips=trips, costs=_own(given.costs, at, name, names, others))
        )
    return by_program


def _own(
    numbers: Mapping[str, float],
    at: int,
    name: str,
    names: Sequence[str],
    known: Sequence[frozenset[str]],
) -> dict[str, float]:
    """Numbers of one program; a name that none of them has stays with each, which refuses it."""
    own = {}
    for word, number in numbers.items():
        program, _, rest = word.partition("/")
        if program in names and rest:
            if program == name:
                own[rest] = number
        elif word in known[at] or not any(word in words for words in known):
            own[word] = number
    return own


def _names(module: Module, *, loops: bool) -> frozenset[str]:
    """Names of a program's loops, or of its other instructions, as the user may give them."""
    gaps = Gaps(module)
    return frozenset(
        name
        for computation in module.computations.values()
        for instruction in computation
        if (instruction.opcode == "while") == loops
        for name in gaps.names(computation, instruction)
    )


def _module(captured: Captured, program: CapturedProgram) -> Module:
    """The compiled text of a program, checked."""
    module = parse(counted_elsewhere((captured.folder / program.text).read_text()))
    check(module, newer=True)
    return module


def schedule_of(captured: Captured, parts: Sequence[StepPart]) -> CallSchedule:
    """When the calls of a step run on which devices."""
    seconds, devices = [part.seconds for part in parts], [part.devices for part in parts]
    return schedule(
        [
            DeviceCall(
                program=call.program,
                seconds=seconds[call.program],
                devices=devices[call.program],
                after=call.after,
            )
            for call in captured.order
        ]
    )


def forecast_parts(
    captured: Captured, parts: Sequence[StepPart], on: Slice, given: Given = NOTHING
) -> Forecast:
    """The forecast of a captured step whose programs are simulated.

    Args:
        captured: The answer that they are from.
        parts: Programs of the step.
        on: The slice that it was captured for.
        given: Trips and costs of programs that come with some steps alone, where they have those names.
    """
    answer, plan = captured.answer, schedule_of(captured, parts)
    calibration = next(
        (part.timeline.calibration for part in parts if part.timeline is not None), None
    )
    links = moves.Links.of(on, calibration)
    moved = {
        cause: links.spans(own, moves.CAUSES[cause][0])
        for cause, own in answer.moves.items()
        if cause != moves.FED
    }
    copies = [span for spans in moved.values() for span in spans]
    lenient = replace(given, strict=False)
    rare = [_part(captured, program, on, lenient) for program in answer.periodic]
    beside = [_part(captured, program, on, lenient) for program in answer.beside]
    largest = max([*parts, *rare], key=lambda part: part.memory.peak_bytes)
    busiest = [part for part in parts if plan.device in part.devices]
    main = max(busiest, key=lambda part: part.calls * part.seconds)
    forecast = assemble(
        module=main.module,
        timeline=moves.with_moves(_bounded(captured, parts, plan), copies),
        memory=largest.memory,
        facts=ProgramFacts(verb="captured", notes=_notes(captured, parts, on)),
        name=_name(parts),
        on=on,
        compiler=ForecastCompile(
            versions=answer.versions,
            seconds=round(sum(sum(part.program.seconds.values()) for part in parts), 3),
            cached=False,
            flags=answer.flags.split(),
        ),
        memory_origin=Origin.compiled if largest.is_compiled_memory else Origin.simulated,
    )
    forecast = replace(
        forecast,
        compiled_for=on.chip.name,
        schedules=_schedules(parts, plan, copies),
        cautions=(
            *answer.cautions,
            *_cautions(parts, plan, on),
            *moves.lines_of(answer.moves, moved, plan.seconds, links),
            *map(_of_some_steps, rare),
            *(text for part in parts if (text := _left_out(part))),
            *forecast.cautions,
        ),
        notes=(*moves.notes_of(answer.moves, plan.seconds, links), *forecast.notes),
        periodic=list(map(_periodic, rare)),
        **_flops(parts, on),
    )
    return _checked(forecast, [*parts, *rare], beside, answer.outside, on)


def _schedules(
    parts: Sequence[StepPart], plan: CallSchedule, copies: Sequence[Span]
) -> list[Schedule]:
    """Programs of the busiest device with how often a step calls them, and what is copied outside of them."""
    schedules = [
        (part.module, part.timeline, float(plan.own.get(number, 0)))
        for number, part in enumerate(parts)
        if part.timeline is not None and plan.own.get(number)
    ]
    seconds = sum(span.seconds for span in copies)
    outside = Timeline(origin=Origin.simulated, seconds=seconds, spans=tuple(copies))
    return [*schedules, (parts[0].module, outside, 1.0)]


def _name(parts: Sequence[StepPart]) -> str:
    """Names of the programs of a step, the first of many."""
    names = [part.program.name for part in parts]
    more = len(names) - MOST_NAMED
    return " + ".join(names if more <= 1 else [*names[:MOST_NAMED], f"{more} more"])


def _checked(
    forecast: Forecast,
    parts: Sequence[StepPart],
    beside: Sequence[StepPart],
    outside: OutsidePeak,
    on: Slice,
) -> Forecast:
    """The forecast, refused where a program or what is held beside it, or outside of them, needs more memory than a device has.

    ``beside`` are programs that the program called before its step or now and then; ``outside`` is what a device holds at
    once outside of the compiler's figures.
    """
    have = capacity(on)
    large = [part for part in beside if part.timeline is None or part.memory.peak_bytes > have]
    if any(part.timeline is None or part.memory.peak_bytes > have for part in parts):
        large = []
    if large:
        forecast = replace(forecast, cautions=(*map(_of_large, large), *forecast.cautions))
    parts = [*parts, *large]
    refusals = [part for part in parts if part.timeline is None]
    worst = max(refusals or parts, key=lambda part: part.memory.peak_bytes)
    other = max(part.program.held.other_bytes for part in parts)
    memory = worst.memory
    remedy = _remedy(worst, on)
    held = memory.by_kind.get(HELD, 0)
    if held and held >= memory.peak_bytes - have:
        remedy = f"drop or shard arrays of the {gibibytes(held)} {HELD}, or {remedy}"
    if other > max(have, memory.peak_bytes):
        memory = MemoryMap(
            peak_bytes=other, estimated_bytes=other, by_kind={HELD: other}, buffers=[]
        )
        remedy = "shard or drop the arrays that lie on a device which the step does not use"
    if refusals or memory.peak_bytes > have:
        return refused(replace(forecast, memory=memory), memory, have, remedy)
    return _beyond_calls(forecast, memory.peak_bytes, outside, have)


def _beyond_calls(forecast: Forecast, peak_bytes: int, outside: OutsidePeak, have: int) -> Forecast:
    """The forecast, with a line where a device holds more outside of the step than ``peak_bytes``, and refused where that is too much."""
    most = outside.bytes
    if most <= (1 + OUTSIDE) * peak_bytes:
        return forecast
    where = f" at {outside.line}" if outside.line else ""
    line = f"outside of its step the program holds {gibibytes(most)} of arrays on a device at once{where}, and in it {gibibytes(peak_bytes)}"
    if most <= have:
        return replace(forecast, notes=(*forecast.notes, line))
    arrays = [_array(array) for array in outside.arrays if array.memory == "device"]
    memory = MemoryMap(peak_bytes=most, estimated_bytes=most, by_kind={HELD: most}, buffers=arrays)
    forecast = replace(
        forecast,
        memory=memory,
        cautions=(f"{line}: it does not fit, and the program fails there", *forecast.cautions),
    )
    remedy = "make these arrays sharded in a jitted function with out_shardings, or drop the old ones before there are new ones, or choose a chip with more memory"
    return refused(forecast, memory, have, remedy)


def _remedy(part: StepPart, on: Slice) -> str:
    """Ways to make a program fit, the most certain first."""
    ways = []
    if (kept := undonated_bytes(part.module)) > LARGE_SHARE * part.memory.peak_bytes:
        ways.append(
            f"donate arguments that it makes anew (jax.jit's donate_argnums; up to {gibibytes(kept)})"
        )
    if len(part.devices) == 1 < on.num_devices:
        ways.append(
            "shard its arguments over a mesh of jax.devices(), since it runs on one of them"
        )
    else:
        ways.append("choose a larger slice or a smaller batch, or shard more of it")
    return f"{', or '.join(ways)}, and run the command again"


def _of_large(part: StepPart) -> str:
    """The line of a program beside the step that does not fit."""
    return f"{part.program.name}, which the program calls beside its step, needs {gibibytes(part.memory.peak_bytes)} of a device and does not fit: the program fails there"


def _part(
    captured: Captured,
    program: CapturedProgram,
    on: Slice,
    given: Given,
    module: Module | None = None,
) -> StepPart:
    path, answer = captured.folder / program.text, captured.answer
    module = module or _module(captured, program)
    usage = path.with_name(f"{path.name}.{USAGE}")
    peak_bytes = used_bytes(usage.read_text()) if usage.exists() else None
    timeline = None
    if not program.refused:
        flags = answer.flags.split()
        timeline = simulate(module, on, program.places, flags=flags, given=given)
    arrays = [_array(array) for array in answer.held if array.memory == "device"]
    memory = gpu_memory if on.platform == "gpu" else memory_map
    return StepPart(
        program=program,
        module=module,
        timeline=timeline,
        memory=with_held(memory(module, peak_bytes), arrays, program.held.bytes),
        is_compiled_memory=peak_bytes is not None,
    )


def _array(array: HeldArray) -> LiveBuffer:
    """An array that the program holds outside of its step."""
    return LiveBuffer(
        name="",
        kind=HELD,
        bytes=array.bytes,
        shape=f"{array.dtype}{array.shape}" if array.dtype else "",
        layer="",
        source="",
        op=f"made by {array.made_by}" if array.made_by else HELD,
    )


def _bounded(captured: Captured, parts: Sequence[StepPart], plan: CallSchedule) -> Timeline:
    """The timeline of a step, with those of the least and the most that the incomplete programs among its parts may take."""
    timeline = _sum(parts, plan)
    if len(parts) == 1 and parts[0].calls == 1:
        return timeline
    timelines = [part.timeline for part in parts if part.timeline is not None]
    bounds: dict[str, Timeline] = {}
    if any(timeline.least for timeline in timelines):
        bounds["least"] = _of(captured, parts, lambda part: part.least or part)
    if timeline.incomplete and all(part.most or not part.incomplete for part in timelines):
        bounds["most"] = _of(captured, parts, lambda part: part.most or part)
    return replace(timeline, **bounds)


def _of(
    captured: Captured, parts: Sequence[StepPart], choose: Callable[[Timeline], Timeline]
) -> Timeline:
    """The timeline of a step with another timeline for each of its programs."""
    others = [
        replace(part, timeline=None if part.timeline is None else choose(part.timeline))
        for part in parts
    ]
    return _sum(others, schedule_of(captured, others))


def _sum(parts: Sequence[StepPart], plan: CallSchedule) -> Timeline:
    """The programs of the busiest device one after the other, as often as a step calls them, and what others run meanwhile."""
    if len(parts) == 1 and parts[0].calls == 1 and parts[0].timeline is not None:
        return parts[0].timeline
    timelines = [part.timeline for part in parts if part.timeline is not None]
    spans: list[Span] = []
    start = 0.0
    for number, part in enumerate(parts):
        calls = plan.own.get(number, 0)
        if part.timeline is None or not calls:
            continue
        seconds = calls * part.seconds
        spans.append(
            Span(
                name=part.program.name,
                opcode="call",
                start=start,
                seconds=seconds,
                resource=Resource.idle,
                repeat=calls,
                inside=tuple(part.timeline.spans),
            )
        )
        start += seconds
    notes = dict.fromkeys(note for timeline in timelines for note in timeline.notes)
    return Timeline(
        origin=Origin.simulated,
        seconds=plan.seconds,
        spans=(*spans, *_beside(parts, plan)),
        notes=tuple(notes),
        incomplete=tuple(gap for timeline in timelines for gap in timeline.incomplete),
        calibration=timelines[0].calibration if timelines else None,
        given=tuple(line for timeline in timelines for line in timeline.given),
        turn_seconds=max((timeline.turn_seconds for timeline in timelines), default=0.0),
    )


def _beside(parts: Sequence[StepPart], plan: CallSchedule) -> list[Span]:
    """Calls on devices that the busiest one's leave out, each device in a lane of its own."""
    return [
        Span(
            name=parts[call.program].program.name,
            opcode="call",
            start=start,
            seconds=call.seconds,
            resource=Resource.idle,
            lane=f"device {','.join(map(str, min(call.devices)))}",
        )
        for call, start in plan.calls
        if plan.device not in call.devices
    ]


def _flops(parts: Sequence[StepPart], on: Slice) -> dict[str, Any]:
    """FLOPs of a device, the mean over all of the slice: a program may run on some of them."""
    flops_by_format: dict[str, float] = {}
    for part in parts:
        if part.timeline is None:
            continue
        share = part.calls * part.copies * len(part.devices) / on.num_devices
        for name, flops in part.timeline.flops_by_format.items():
            flops_by_format[name] = flops_by_format.get(name, 0.0) + share * flops
    return {"hardware_flops": sum(flops_by_format.values()), "flops_by_format": flops_by_format}


def _notes(captured: Captured, parts: Sequence[StepPart], on: Slice) -> list[str]:
    answer = captured.answer
    name = next(name for name in answer.versions if name not in ("jax", "jaxlib"))
    jax, compiler = (f"{key} {answer.versions[key]}" for key in ("jax", name))
    versions = f"{jax} and {compiler} of its own environment"
    if answer.lent_compiler:
        versions = (
            f"{jax} of its own environment, which has no {name}, and {compiler} of Systolic's"
        )
    named = [
        f"{part.program.name}{f' {part.calls} times' if part.calls > 1 else ''}" for part in parts
    ]
    left = len(named) - MOST_NAMED
    step = ", ".join(named if left <= 1 else [*named[:MOST_NAMED], f"{left} more"])
    notes = [
        f"a step of {captured.command} calls {step}; compiled by {versions}; the program {answer.ended}",
        *answer.notes,
    ]
    if len(parts) > 1:
        notes.append(
            f"memory is that of the program of the step with the largest need; what the other calls keep for theirs is in the line {HELD!r}"
        )
    if others := answer.others:
        own = {part.program.name for part in parts}
        named = [
            f"{other.name} ({other.calls}{', with other arguments' if other.name in own else ''})"
            for other in others[:MOST_OTHERS]
        ]
        more = f" and {len(others) - MOST_OTHERS} more" if len(others) > MOST_OTHERS else ""
        notes.append(
            f"other calls of jitted functions, and how often: {', '.join(named)}{more}; --step NAME takes another function for the step"
        )
    number = round(answer.operations_per_step, 1)
    if number := int(number) if number == int(number) else number:
        notes.append(
            f"a step has {plural(number, 'operation')} on the slice's arrays outside of the program's own jitted functions, which the time leaves out"
        )
    if host := max(part.program.held.host_bytes for part in parts):
        notes.append(
            f"the program holds {gibibytes(host)} of arrays in the memory of a host beside those of its step"
        )
    if on.num_hosts > 1:
        notes.append(
            f"the program ran as the first of {on.num_hosts} processes, one a host with {on.num_devices // on.num_hosts} of the {on.num_devices} devices; it was the only one: what others would have told it, it was told of itself"
        )
    if on.platform == "gpu":
        notes += [SIMULATED, *of_triton(answer.flags.split(), "captured"), KERNELS]
    if not max(parts, key=lambda part: part.memory.peak_bytes).is_compiled_memory:
        notes.append(FROM_SCHEDULE)
    return [*notes, ZEROS]


def _cautions(parts: Sequence[StepPart], plan: CallSchedule, on: Slice) -> list[str]:
    """Devices that the step leaves out, and calls that wait for each other."""
    cautions = []
    used = frozenset[Device]().union(*(part.devices for part in parts))
    copies = min(part.copies for part in parts)
    num_used = copies * len(used)
    if copies > 1:
        each = on.num_devices // copies
        of_all = "all" if len(used) == each else f"{len(used)} of the {each} devices"
        use = (
            ""
            if len(used) == each
            else "; shard its arguments over a mesh of jax.devices() to use all"
        )
        cautions.append(
            f"the step runs on {of_all} of one host: each of the {copies} processes runs it on its own, and what they send each other is none of it; the time is that of one, the FLOPs and the bill are of all{use}"
        )
    elif len(used) == 1 < on.num_devices:
        names = " and ".join(part.program.name for part in parts)
        cautions.append(
            f"{names} runs on one of the {on.num_devices} devices of {on.name}, and MFU, HFU and the bill are of all: shard its arguments over a mesh of jax.devices() to use all"
        )
    elif num_used < on.num_devices:
        chips = len({place if len(place) == 1 else (*place[:3], place[4]) for place in used})
        cautions.append(
            f"the step uses {chips} of the {on.num_chips} chips of {on.name}, and MFU, HFU and the bill are of all: make its mesh of all of jax.devices(), or choose a slice of {plural(chips, 'chip')}"
        )
    else:
        cautions += [
            f"{part.program.name} runs on one of the {on.num_devices} devices of {on.name}: shard its arguments over a mesh of jax.devices() to use all"
            for part in parts
            if len(part.devices) == 1 < on.num_devices and not _all_single(parts)
        ]
    if on.platform == "gpu":
        cautions += of_pool(max(part.memory.peak_bytes for part in parts), on)
    waiting = plan.seconds - plan.busy
    if waiting > WAITS * plan.seconds:
        cautions.append(
            f"calls of the step on different devices wait for each other's results: the busiest device computes {duration(plan.busy)} of {duration(plan.seconds)}"
        )
    return cautions


def _left_out(part: StepPart) -> str:
    """Caution on a program that executes clearly fewer FLOPs of matmuls than its results need as written; empty for any other.

    Branches and kernels that were written as such explain fewer; what is incomplete says so itself.
    """
    if part.timeline is None or part.timeline.incomplete:
        return ""
    held = [
        instruction
        for computation in part.module.computations.values()
        for instruction in computation
    ]
    if any(
        instruction.opcode == "conditional" or _KERNEL.search(instruction.op_name)
        for instruction in held
    ):
        return ""
    executed = len(part.program.places) * sum(
        times * (span.flops + span.vector_flops + span.padding_flops)
        for span, times in part.timeline.leaves()
    )
    written = part.program.needed_flops
    if executed >= LEFT_OUT * written:
        return ""
    return f"the compiled {part.program.name} executes {si(executed, 'FLOP')} in matmuls, and its results need {si(written, 'FLOP')} as they are written: the compiler found a way around the rest, or does it in ops whose work is not known here; then the time is a lower bound"


def _all_single(parts: Sequence[StepPart]) -> bool:
    return all(len(part.devices) == 1 for part in parts)


def _periodic(part: StepPart) -> dict[str, Any]:
    """Facts of a program that comes with some steps alone."""
    calls = part.program.calls
    return {
        "name": part.program.name,
        "every_steps": part.program.every,
        "calls": calls,
        "seconds": calls * part.seconds if part.timeline is not None else None,
        "peak_bytes": part.memory.peak_bytes,
    }


def _of_some_steps(part: StepPart) -> str:
    """The line of a program that comes with some steps alone."""
    program = _periodic(part)
    calls, every = program["calls"], program["every_steps"]
    times = "" if calls == 1 else f"{calls:g} calls "
    taken = "" if program["seconds"] is None else f", {duration(program['seconds'])}"
    share = (
        ""
        if program["seconds"] is None
        else f" ({duration(program['seconds'] / every)} a step on average)"
    )
    return f"{program['name']}: {times}every {every:g} steps{taken}, which the step leaves out{share}; its memory counts"
