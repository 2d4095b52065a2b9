"""``systolic explain`` of a step that no recipe made: of a program that is started (-- python train.py), or of a dump."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from systolic.cli.parse import Repeated, parse
from systolic.core.arguments import Required
from systolic.core.errors import OptionError
from systolic.core.ranges import POSITIVE
from systolic.report.output import print_json

if TYPE_CHECKING:
    from systolic.chips import Slice
    from systolic.explaining.sources import StepProgram
    from systolic.forecasting import Forecast

END = "--"
"""What follows is the program."""
SLICE = Required("a slice; add --on v5e-8, systolic chips lists them")


@dataclass(frozen=True, kw_only=True)
class ExplainProgramOptions:
    """Options of a program of your own (-- python train.py).

    Args:
        on: The slice of TPUs that the program is shown.
        step: Name of the jitted function that is the step; by default what the program calls again and again.
        minutes: Minutes that the program may take to its step.
        trips: Trips of a loop that the program leaves open, NAME=NUMBER, such as while.5=100; may be repeated.
        cost: Time of one call of a kernel, custom call or callback, NAME=TIME, such as my_kernel=1.2ms; may be repeated.
        calibration: Corrects the simulator by profiles of this chip: a name that systolic calibrations lists, or a calibration's file.
        json: Print one JSON object on stdout.
    """

    on: Annotated[str, SLICE]
    step: str = ""
    minutes: Annotated[float, POSITIVE] = 20.0
    trips: Repeated = ()
    cost: Repeated = ()
    calibration: str = ""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class ExplainDumpOptions:
    """Options of scheduled HLO that another program dumped.

    Args:
        on: The slice that it was compiled for.
        trips: Trips of a loop that the program leaves open, NAME=NUMBER, such as while.5=100; may be repeated.
        cost: Time of one call of a kernel, custom call or callback, NAME=TIME, such as my_kernel=1.2ms; may be repeated.
        calibration: Corrects the simulator by profiles of this chip: a name that systolic calibrations lists, or a calibration's file.
        json: Print one JSON object on stdout.
    """

    on: Annotated[str, SLICE]
    trips: Repeated = ()
    cost: Repeated = ()
    calibration: str = ""
    json: bool = False


def explain_program(args: Sequence[str]) -> int:
    """Explains the step of the program behind ``--``; returns the exit code."""
    from systolic.capture import capture
    from systolic.chips import slice
    from systolic.explaining.sources import StepProgram
    from systolic.forecasting.calibrations import given_with
    from systolic.forecasting.captured import forecast_parts, parts_of, schedule_of
    from systolic.report.progress import ProgressLine

    end = list(args).index(END)
    if end and not args[0].startswith("-"):
        raise OptionError(
            f"{args[0]} is explained, or the program behind --, and both are given; leave one of them out"
        )
    options = parse(ExplainProgramOptions, list(args[:end]), "systolic explain")
    command = list(args[end + 1 :])
    if "," in options.on:
        raise OptionError(
            f"--on {options.on} names several slices, and a step is explained for one; systolic plan --on {options.on} -- … compares them"
        )
    on = slice(options.on)
    known = given_with(options.trips, options.cost, options.calibration, on)
    title = f"{' '.join(command[:3])} for {on.name}"
    with (
        tempfile.TemporaryDirectory(prefix="systolic-") as folder,
        ProgressLine(sys.stderr, title) as progress,
    ):
        captured = capture(
            command,
            on,
            Path(folder),
            step=options.step,
            quick=True,
            limit_seconds=60 * options.minutes,
            watch=progress.say,
        )
        progress.say("simulating")
        parts = parts_of(captured, on, known)
        made = forecast_parts(captured, parts, on)
        busiest = schedule_of(captured, parts).device
    programs = [
        StepProgram(module=one.module, timeline=one.timeline, calls=one.calls, mesh=one.mesh)
        for one in parts
        if one.timeline is not None and busiest in one.devices
    ]
    return show(captured.command, made, programs, on, as_json=options.json, quick=True)


def explain_dump(path: Path, args: Sequence[str]) -> int:
    """Explains scheduled HLO text; returns the exit code."""
    from systolic.chips import slice
    from systolic.explaining.sources import StepProgram
    from systolic.forecasting.calibrations import given_with
    from systolic.forecasting.text import forecast_module

    options = parse(ExplainDumpOptions, args, f"systolic explain {path}")
    on = slice(options.on)
    known = given_with(options.trips, options.cost, options.calibration, on)
    made, module = forecast_module(path, on, known)
    programs = [] if made.timeline is None else [StepProgram(module=module, timeline=made.timeline)]
    return show(str(path), made, programs, on, as_json=options.json)


def show(
    target: str,
    made: "Forecast",
    programs: "Sequence[StepProgram]",
    on: "Slice",
    *,
    as_json: bool,
    quick: bool = False,
) -> int:
    """Prints the causes of a step, or why it does not fit; returns the exit code. ``quick``: without the compiler's cycles."""
    from systolic.explaining.causes import causes_of_programs
    from systolic.explaining.display.text import print_causes, step_remarks, step_title
    from systolic.forecasting.display.text import print_forecast

    causes = causes_of_programs(made, programs) if made.fits else []
    if as_json:
        from systolic.cli.explain_view import calibration_name, plain

        print_json(
            {
                "target": target,
                "kind": "program",
                "program": made.recipe,
                "slice": on.name,
                "fits": made.fits,
                "quick": quick,
                "step_seconds": made.step_seconds,
                "hfu": made.hfu,
                "lower_bound": made.is_lower_bound,
                "bound": made.bound.value,
                "given": list(made.given),
                "calibration": calibration_name(made),
                "rejected": made.rejected,
                "causes": [plain(cause) for cause in causes],
                "notes": list(made.notes),
            }
        )
    elif made.fits:
        remarks = step_remarks(made, made.compiler.get("flags", ())) if quick else made.cautions
        print_causes(step_title(made, made.recipe), causes, remarks=remarks)
    else:
        print_forecast(made)
    return 0 if made.fits else 1
