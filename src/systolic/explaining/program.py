"""A step that no recipe made, explained: of a program that is started, or of scheduled HLO."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from systolic.capture import capture
from systolic.chips import Slice
from systolic.core.reporter import reporter
from systolic.explaining.cause import Cause
from systolic.explaining.causes import causes_of_programs
from systolic.explaining.sources import StepProgram
from systolic.forecasting import Forecast
from systolic.forecasting.captured import forecast_parts, parts_of, schedule_of
from systolic.forecasting.text import forecast_module
from systolic.sim.incomplete import Given


@dataclass(frozen=True, kw_only=True)
class ProgramExplanation:
    """Why a program's step takes its time, or does not fit."""

    target: str
    """The file, or the command."""
    forecast: Forecast
    causes: Sequence[Cause]
    """Causes of the time, largest share first; none of a step that does not fit."""
    quick: bool
    """Whether the program was compiled up to its schedule, without the compiler's cycles."""

    def __repr__(self) -> str:
        """The forecast and the largest cause on one line."""
        first = f"; {len(self.causes)} causes, first: {self.causes[0].title}" if self.causes else ""
        return f"<ProgramExplanation of {self.target}: {repr(self.forecast)[1:-1]}{first}>"


def captured_explanation(
    command: Sequence[str], on: Slice, folder: Path, *, step: str, seconds: float, given: Given
) -> ProgramExplanation:
    """Explains the step of a program, which is started.

    Args:
        command: The program with its options.
        on: The slice that it is shown.
        folder: An empty folder for what is captured.
        step: Name of the jitted function that is the step; empty for what is called again and again.
        seconds: Most seconds to the step.
        given: Trips and costs that the program leaves open, and corrections from profiles.
    """
    captured = capture(
        command,
        on,
        folder,
        step=step,
        quick=True,
        limit_seconds=seconds,
        watch=reporter().stage,
    )
    reporter().stage("simulating")
    parts = parts_of(captured, on, given)
    made = forecast_parts(captured, parts, on)
    busiest = schedule_of(captured, parts).device
    programs = [
        StepProgram(module=one.module, timeline=one.timeline, calls=one.calls, mesh=one.mesh)
        for one in parts
        if one.timeline is not None and busiest in one.devices
    ]
    return _explained(captured.command, made, programs, quick=True)


def dump_explanation(path: Path, on: Slice, given: Given) -> ProgramExplanation:
    """Explains scheduled HLO text that was compiled for a slice; raises as :func:`~systolic.forecasting.text.forecast_text`."""
    made, module = forecast_module(path, on, given)
    programs = [] if made.timeline is None else [StepProgram(module=module, timeline=made.timeline)]
    return _explained(str(path), made, programs, quick=False)


def _explained(
    target: str, made: Forecast, programs: Sequence[StepProgram], *, quick: bool
) -> ProgramExplanation:
    causes = causes_of_programs(made, programs) if made.fits else []
    return ProgramExplanation(target=target, forecast=made, causes=causes, quick=quick)
