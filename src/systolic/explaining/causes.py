"""Causes of a step's time, largest share first, by the same rules for a forecast and a profile; a profile's idle time by what the host did."""

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from systolic.core.units import duration, plural
from systolic.explaining.rules import RULES
from systolic.explaining.settings import Settings
from systolic.explaining.sources import (
    StepProgram,
    step_of_forecast,
    step_of_profile,
    step_of_programs,
)
from systolic.explaining.step import LEAST, SHOWN, Cause, Step
from systolic.forecasting import Forecast
from systolic.hlo import Module
from systolic.job import Model
from systolic.profile import Profile
from systolic.profile.trace import HostEvent, Interval, common, missing, total, union

SHORT = 2e-6
"""Shortest gap between ops that is counted."""
_COMPILE = re.compile(
    r"backend_compile|trace_to_jaxpr|lower_sharding_computation|lower_jaxpr|XlaCompile"
    r"|PjRt\w*::Compile|^compile_or_get_cached|XLA::TPU run backend"
)
_INPUT = re.compile(
    r"data_wait|__next__|\bnext\b|get_?next|infeed|dataloader|next_batch|get_batch|fetch_batch",
    re.I,
)
_BLOCKED = re.compile(
    r"np\.asarray\(jax\.Array\)|block_until_ready|metrics_wait|device_get|__float__|BlockHost"
)
_JIT_MODULE = re.compile(r"\((jit_\w+)\)")


@dataclass(frozen=True, kw_only=True)
class HostAndDevice:
    """Activity of the device and of the host thread that runs the loop."""

    profile: Profile

    @property
    def seconds(self) -> float:
        """Seconds of the median step."""
        return self.profile.seconds

    @cached_property
    def compiling(self) -> list[Interval]:
        """Intervals of tracing and compiling, with the rest of each step in which the loop's thread compiled."""
        compiles = union(
            (e.start, e.end) for e in self.profile.trace.loop if _COMPILE.search(e.name)
        )
        steps = [(mark.start, mark.end) for mark in self.profile.trace.steps]
        steps = [step for step in steps if common([step], compiles)]
        return common(union([*compiles, *steps]), missing(self.waiting, self.profile.span))

    @cached_property
    def waiting(self) -> list[Interval]:
        """Intervals in which the loop's thread waited for a batch."""
        return union((e.start, e.end) for e in self.profile.trace.loop if _INPUT.search(e.name))

    @cached_property
    def idle(self) -> dict[str, list[Interval]]:
        """The device's gaps by cause."""
        gaps = [gap for gap in self.profile.gaps if gap[1] - gap[0] >= SHORT]
        compiling = common(gaps, self.compiling)
        waiting = common(gaps, self.waiting)
        known = union([*compiling, *waiting])
        rest = common(gaps, missing(known, self.profile.span))
        inside = union((run.start, run.end) for run in self.profile.runs)
        return {
            "compile": compiling,
            "input": waiting,
            "copies": common(common(rest, inside), self.profile.copying),
            "ops": common(common(rest, inside), missing(self.profile.copying, self.profile.span)),
            "host": common(rest, missing(inside, self.profile.span)),
        }

    @cached_property
    def traced(self) -> float:
        """Seconds of the trace without compiling."""
        low, high = self.profile.span
        return max(high - low - total(self.idle["compile"]), 1e-12)


def causes(profile: Profile) -> Iterable[Cause]:
    """Waiting for input, the host and the compiler, and gaps between ops, in the whole trace."""
    view = HostAndDevice(profile=profile)
    for rule in (input_wait, host, recompilation, copies, between):
        yield from rule(view)


def input_wait(view: HostAndDevice) -> Iterable[Cause]:
    """Idle time while the loop waits for a batch or the step reads its infeed."""
    gaps = view.idle["input"]
    infeed = [op for op in view.profile.ops if "infeed" in op.opcode or "infeed" in op.raw.category]
    share = total(gaps) / view.traced + sum(op.seconds for op in infeed) / view.seconds
    if share < LEAST:
        return
    evidence = [_waits(view, gaps, "for a batch")] if gaps else []
    evidence += _covering(gaps, view.profile.trace.loop)
    evidence += [f"{duration(op.seconds)} in {op.raw.name}" for op in infeed[:SHOWN]]
    yield Cause(
        name="input-wait",
        title="steps wait for their batches",
        share=share,
        seconds=share * view.seconds,
        evidence=evidence,
        advice=["more --workers", "data that is read and transformed ahead (systolic data pack)"],
    )


def host(view: HostAndDevice) -> Iterable[Cause]:
    """Idle time between runs while the loop does something other than waiting for input."""
    gaps = view.idle["host"]
    share = total(gaps) / view.traced
    if share < LEAST:
        return
    loop = view.profile.trace.loop
    evidence = [_waits(view, gaps, "for the host to start the next program")]
    evidence += _covering(gaps, loop)
    blocked = [e for e in loop if _BLOCKED.search(e.name)]
    if blocked:
        seconds = total(union((e.start, e.end) for e in blocked))
        worst = max(blocked, key=lambda e: e.end - e.start)
        evidence.append(
            f"the loop blocks on the device for {duration(seconds)}, longest in {_plain(worst.name)}"
        )
    yield Cause(
        name="host-synchronisation",
        title="the device waits for the host between programs",
        share=share,
        seconds=share * view.seconds,
        evidence=evidence,
        advice=[
            "a larger batch per device, so that a step outlasts the host's part",
            "no float(), print() or .item() of results in each step",
        ],
    )


def recompilation(view: HostAndDevice) -> Iterable[Cause]:
    """Idle time while the loop traces and compiles programs."""
    gaps = view.idle["compile"]
    low, high = view.profile.span
    share = total(gaps) / (high - low)
    if share < LEAST:
        return
    trace = view.profile.trace
    steps = [m.name for m in trace.steps if common(gaps, [(m.start, m.end)])]
    evidence = [f"{duration(total(gaps))} of the {duration(high - low)} that were traced"]
    if steps:
        evidence.append(f"in step {', '.join(steps[:SHOWN])}")
    compiles = [e for e in trace.loop if re.search(r"backend_compile", e.name)]
    names = [m[1] for thread in trace.threads for e in thread if (m := _JIT_MODULE.search(e.name))]
    if names:
        evidence.append(f"compiled: {', '.join(list(dict.fromkeys(names))[:SHOWN])}")
    for event in compiles[:SHOWN]:
        evidence.append(f"{event.name}: {duration(event.end - event.start)}")
    programs: dict[str, set[int]] = defaultdict(set)
    for op in trace.ops:
        if op.program is not None and op.module:
            programs[op.module].add(op.program)
    changes = {module: len(ids) for module, ids in programs.items() if len(ids) > 1}
    for module, count in changes.items():
        evidence.append(f"{module} runs as {count} different programs: its arguments change")
    yield Cause(
        name="recompilation",
        title="programs are compiled while the step should run",
        share=share,
        seconds=total(gaps),
        evidence=evidence,
        advice=[
            "batches of one shape: pad the odd ones, mask 0, or leave them out"
            if changes
            else "a trace that begins later, if these programs run for the first time"
        ],
    )


def copies(view: HostAndDevice) -> Iterable[Cause]:
    """Gaps between the ops of one run while copies to or from the host are under way."""
    gaps = view.idle["copies"]
    share = total(gaps) / view.traced
    if share < LEAST:
        return
    longest = max(end - start for start, end in gaps)
    yield Cause(
        name="gaps-during-host-transfers",
        title="the device idles while copies to or from the host are under way",
        share=share,
        seconds=share * view.seconds,
        evidence=[
            f"{plural(len(gaps), 'gap')} in {plural(len(view.profile.runs), 'run')}, the longest {duration(longest)}, with no op on the device's line"
        ],
        advice=[],
    )


def between(view: HostAndDevice) -> Iterable[Cause]:
    """Gaps between the ops of one run."""
    gaps = view.idle["ops"]
    share = total(gaps) / view.traced
    if share < LEAST:
        return
    evidence = [
        f"{plural(len(gaps), 'gap')} in {plural(len(view.profile.runs), 'run')}, {plural(len(view.profile.ops), 'op')} in a step"
    ]
    yield Cause(
        name="gaps-between-ops",
        title="the device idles between the ops of a program",
        share=share,
        seconds=share * view.seconds,
        evidence=evidence,
        advice=["a larger batch per device: fewer, larger ops"],
    )


def _waits(view: HostAndDevice, gaps: Sequence[Interval], why: str) -> str:
    worst = max(gaps, key=lambda gap: gap[1] - gap[0])
    at = worst[0] - view.profile.span[0]
    text = f"the device waits {duration(total(gaps))} of {duration(view.traced)} {why}"
    return f"{text}; longest {duration(worst[1] - worst[0])}, at {duration(at)}"


def _covering(gaps: Sequence[Interval], loop: Sequence[HostEvent]) -> list[str]:
    """The loop's events in the gaps (innermost of nested ones), longest first."""
    ends = [end for _, end in gaps]
    before = list(accumulate((end - start for start, end in gaps), initial=0.0))

    def idle(at: float) -> float:
        number = bisect.bisect_left(ends, at)
        return before[number] + (max(at - gaps[number][0], 0.0) if number < len(gaps) else 0.0)

    by: dict[str, float] = defaultdict(float)
    outer: list[HostEvent] = []
    for event in loop:
        seconds = idle(event.end) - idle(event.start)
        while outer and outer[-1].end <= event.start:
            outer.pop()
        if outer:
            by[outer[-1].name] -= seconds
        by[event.name] += seconds
        outer.append(event)
    worst = sorted(by.items(), key=lambda item: -item[1])[: SHOWN - 1]
    least = LEAST * before[-1]
    return [f"{duration(s)} of it in {_plain(name)}" for name, s in worst if s > least]


def _plain(name: str) -> str:
    """An event's name without the dollar sign that begins Python's."""
    return name.removeprefix("$")


def causes_of_forecast(
    forecast: Forecast,
    module: Module,
    model: Model | None = None,
    settings: Settings | None = None,
) -> list[Cause]:
    """Causes of a simulated step; none where the forecast has no timeline.

    Args:
        forecast: Forecast of a step that fits.
        module: The scheduled program that was simulated.
        model: The job's model, for the slots of its experts, which the program does not state.
        settings: Options of the recipe, for advice; None where it is not known.
    """
    if forecast.timeline is None or not forecast.step_seconds:
        return []
    return _sorted(_by_rules(step_of_forecast(forecast, module, model, settings)))


def causes_of_programs(forecast: Forecast, programs: Sequence[StepProgram]) -> list[Cause]:
    """Causes of the simulated step of programs that no recipe made; none where the forecast has no step time.

    Args:
        forecast: Forecast of the step, which fits.
        programs: What it runs, one after the other.
    """
    if not forecast.step_seconds:
        return []
    return _sorted(_by_rules(step_of_programs(forecast, programs)))


def causes_of_profile(profile: Profile, mesh: Mapping[str, int] | None = None) -> list[Cause]:
    """Causes of the median step of a profile, and of the device's waiting in the whole trace.

    Args:
        profile: A profile from :func:`systolic.profile.open_profile`.
        mesh: Axis to size, outermost first, to name the axes of collectives; empty where unknown, None where no
            recipe made the program.
    """
    step = step_of_profile(profile, mesh)
    return _sorted([*causes(profile), *_by_rules(step)])


def _by_rules(step: Step) -> list[Cause]:
    return [cause for rule in RULES for cause in rule(step)]


def _sorted(unsorted: Iterable[Cause]) -> list[Cause]:
    kept = [cause for cause in unsorted if cause.share is None or cause.share >= LEAST]
    return sorted(kept, key=lambda cause: -(cause.share or 0.0))
