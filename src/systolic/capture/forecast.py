"""The forecast of a captured step: each of its programs simulated, and added up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from systolic.aot.dump import USAGE, used_bytes
from systolic.aot.kernels import counted_elsewhere
from systolic.capture.program import Captured
from systolic.chips import Slice
from systolic.core.errors import OptionError
from systolic.core.origin import Origin
from systolic.core.units import plural
from systolic.forecasting.forecast import Forecast
from systolic.forecasting.memory import MemoryMap, memory_map
from systolic.forecasting.run import assemble, capacity
from systolic.forecasting.text import FROM_SCHEDULE, refused
from systolic.hlo import Module, parse
from systolic.hlo.check import check
from systolic.sim import simulate
from systolic.sim.incomplete import NOTHING, Given
from systolic.sim.timeline import Resource, Span, Timeline

MOST_OTHERS = 6
"""Other calls that a note names."""
ZEROS = "arrays on the slice read as zeros while the program was captured, but for counters: where it branches on a loss, it took the branch of 0"


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A program of the step."""

    facts: Mapping[str, Any]
    module: Module
    timeline: Timeline | None
    """None of a program that the compiler refused."""
    memory: MemoryMap
    told: bool
    """Whether the memory is the compiler's figure."""

    @property
    def calls(self) -> int:
        """Calls a step."""
        return self.facts["calls_per_step"]

    @property
    def mesh(self) -> Mapping[str, int]:
        """Axis to size of the program's mesh, outermost first; empty where its device order is another."""
        return self.facts.get("mesh", {})


def forecast_captured(captured: Captured, on: Slice, given: Given = NOTHING) -> Forecast:
    """The forecast of a captured program's step.

    Args:
        captured: The answer of :func:`~systolic.capture.program.capture`.
        on: The slice that it was captured for.
        given: Trips and costs that the programs leave open.

    Raises:
        OptionError: the program spreads its step over another number of devices than the slice has, or ``given`` has a name
            that the step lacks.
    """
    return forecast_parts(captured, parts_of(captured, on, given), on)


def parts_of(captured: Captured, on: Slice, given: Given = NOTHING) -> list[StepPart]:
    """The programs of a captured step, each simulated; raises as :func:`forecast_captured`."""
    return [_part(captured, facts, on, given) for facts in captured.programs]


def forecast_parts(captured: Captured, parts: Sequence[StepPart], on: Slice) -> Forecast:
    """The forecast of a captured step whose programs are simulated."""
    answer = captured.answer
    largest = max(parts, key=lambda part: part.memory.peak_bytes)
    refusals = [part for part in parts if part.timeline is None]
    main = max(parts, key=lambda part: part.calls * (part.timeline.seconds if part.timeline else 0))
    made = assemble(
        module=main.module,
        timeline=_sum(parts),
        memory=largest.memory,
        facts={"notes": _notes(captured, parts, on)},
        name=" + ".join(part.facts["name"] for part in parts),
        on=on,
        compiler={
            **answer["versions"],
            "seconds": round(sum(sum(part.facts["seconds"].values()) for part in parts), 3),
            "cached": False,
            "flags": answer["flags"].split(),
        },
        memory_origin=Origin.compiled if largest.told else Origin.simulated,
    )
    made = replace(
        made,
        compiled_for=on.chip.name,
        cautions=(*_cautions(parts, on), *made.cautions),
        **_flops(parts, on),
    )
    if refusals:
        worst = max(refusals, key=lambda part: part.memory.peak_bytes)
        remedy = "choose a larger slice or a smaller batch, or shard more of it, and run the command again"
        return refused(replace(made, memory=worst.memory), worst.memory, capacity(on), remedy)
    return made


def _part(captured: Captured, facts: Mapping[str, Any], on: Slice, given: Given) -> StepPart:
    path = captured.folder / facts["text"]
    module = parse(counted_elsewhere(path.read_text()))
    check(module)
    num_devices, places = module.num_partitions, [tuple(place) for place in facts["places"]]
    if num_devices not in (1, on.num_devices, on.num_devices // on.num_slices):
        raise OptionError(
            f"{facts['name']} of {captured.command} runs on {num_devices} devices but {on.name} has {on.num_devices}; choose a slice of that size, or a mesh over all of jax.devices()"
        )
    usage = path.with_name(f"{path.name}.{USAGE}")
    told = used_bytes(usage.read_text()) if usage.exists() else None
    timeline = None
    if not facts["refused"]:
        timeline = simulate(
            module,
            on,
            places if len(places) == on.num_devices else None,
            flags=captured.answer["flags"].split(),
            given=given,
        )
    return StepPart(
        facts=facts,
        module=module,
        timeline=timeline,
        memory=memory_map(module, told),
        told=told is not None,
    )


def _sum(parts: Sequence[StepPart]) -> Timeline:
    """The programs one after the other, as often as a step calls them."""
    timelines = [part.timeline for part in parts if part.timeline is not None]
    if len(parts) == 1 and parts[0].calls == 1 and timelines:
        return timelines[0]
    spans: list[Span] = []
    start = 0.0
    for part in parts:
        if part.timeline is None:
            continue
        seconds = part.calls * part.timeline.seconds
        spans.append(
            Span(
                name=part.facts["name"],
                opcode="call",
                start=start,
                seconds=seconds,
                resource=Resource.idle,
                repeat=part.calls,
                inside=tuple(part.timeline.spans),
            )
        )
        start += seconds
    notes = dict.fromkeys(note for one in timelines for note in one.notes)
    return Timeline(
        origin=Origin.simulated,
        seconds=start,
        spans=tuple(spans),
        notes=tuple(notes),
        incomplete=tuple(gap for one in timelines for gap in one.incomplete),
        calibration=timelines[0].calibration if timelines else None,
        given=tuple(line for one in timelines for line in one.given),
        turn_seconds=max((one.turn_seconds for one in timelines), default=0.0),
    )


def _flops(parts: Sequence[StepPart], on: Slice) -> dict[str, Any]:
    """FLOPs of a device, the mean over all of the slice: a program may run on one alone."""
    found: dict[str, float] = {}
    for part in parts:
        if part.timeline is None:
            continue
        share = part.calls / (on.num_devices if part.module.num_partitions == 1 else 1)
        for name, flops in part.timeline.flops_by_format.items():
            found[name] = found.get(name, 0.0) + share * flops
    return {"hardware_flops": sum(found.values()), "flops_by_format": found}


def _notes(captured: Captured, parts: Sequence[StepPart], on: Slice) -> list[str]:
    answer = captured.answer
    jax, libtpu = (f"{name} {answer['versions'][name]}" for name in ("jax", "libtpu"))
    versions = f"{jax} and {libtpu} of its own environment"
    if answer.get("lent_libtpu"):
        versions = f"{jax} of its own environment, which has no libtpu, and {libtpu} of Systolic's"
    step = ", ".join(
        f"{part.facts['name']}{f' {part.calls} times' if part.calls > 1 else ''}" for part in parts
    )
    notes = [
        f"a step of {captured.command} calls {step}; compiled by {versions}; the program {answer['ended']}",
        *answer["notes"],
    ]
    if len(parts) > 1:
        notes.append(
            "memory is that of the largest program of the step; arrays that another keeps meanwhile come on top"
        )
    if others := answer["others"]:
        named = [f"{one['name']} ({one['calls']})" for one in others[:MOST_OTHERS]]
        more = f" and {len(others) - MOST_OTHERS} more" if len(others) > MOST_OTHERS else ""
        notes.append(
            f"other jitted functions that it called, and how often: {', '.join(named)}{more}; --step NAME takes another for the step"
        )
    if number := answer["operations_per_step"]:
        notes.append(
            f"a step has {plural(number, 'operation')} on the slice's arrays outside of the program's own jitted functions, which the time leaves out"
        )
    if on.num_hosts > 1:
        notes.append(
            f"the program ran as the first of {on.num_hosts} processes, one a host with {on.num_devices // on.num_hosts} of the {on.num_devices} devices; it was the only one: what others would have told it, it was told of itself"
        )
    if not max(parts, key=lambda part: part.memory.peak_bytes).told:
        notes.append(FROM_SCHEDULE)
    return [*notes, ZEROS]


def _cautions(parts: Sequence[StepPart], on: Slice) -> list[str]:
    single = [part.facts["name"] for part in parts if part.module.num_partitions == 1]
    if on.num_devices == 1 or not single:
        return []
    return [
        f"{' and '.join(single)} runs on one of the {on.num_devices} devices of {on.name}: shard its arguments over a mesh of jax.devices() to use all"
    ]
