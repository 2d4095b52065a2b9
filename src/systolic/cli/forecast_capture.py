"""``systolic forecast --on SLICE -- python train.py``: the step of a program that stays as it is."""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from systolic.cli.parse import Repeated, parse
from systolic.core.arguments import Required
from systolic.core.errors import OptionError, TakenError
from systolic.core.ranges import POSITIVE

END = "--"
"""What follows is the program."""


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """Options of the forecast of a program (-- python train.py).

    Args:
        on: The slice of TPUs that the program is shown.
        step: Name of the jitted function that is the step; by default what the program calls again and again.
        quick: Stop at the compiler's schedule, after seconds: memory is exact, the time of ops estimated.
        minutes: Minutes that the program may take to its step.
        keep: Keep the compiled text, the compiler's memory report and the order of devices in this new folder.
        html: Write a report of one page to this file.
        perfetto: Write a trace for Perfetto or Chrome to this file; .gz compresses it.
        xprof: Write a profile into this folder, for xprof --logdir.
        against: Print what changed since the forecast in this JSON file.
        trips: Trips of a loop that the program leaves open, NAME=NUMBER, such as while.5=100 or train.py:42=100; may be repeated.
        cost: Time of one call of a kernel, custom call or callback, NAME=TIME, such as my_kernel=1.2ms or EighTpu=350us; may be repeated.
        calibration: Corrects the simulator by profiles of this chip: a name that systolic calibrations lists, or a calibration's file.
        json: Print one JSON object on stdout.
    """

    on: Annotated[str, Required("a slice; add --on v5e-8 before the --, systolic chips lists them")]
    step: str = ""
    quick: bool = False
    minutes: Annotated[float, POSITIVE] = 20.0
    keep: Path | None = None
    html: Path | None = None
    perfetto: Path | None = None
    xprof: Path | None = None
    against: Path | None = None
    trips: Repeated = ()
    cost: Repeated = ()
    calibration: str = ""
    json: bool = False


def forecast_program(args: Sequence[str]) -> int:
    """Forecasts the step of the program behind ``--``; returns the exit code."""
    from systolic.capture import capture
    from systolic.chips import slice
    from systolic.cli.forecast import ForecastOptions, before_of, show
    from systolic.forecasting.calibrations import given_with
    from systolic.forecasting.captured import forecast_captured
    from systolic.report.progress import ProgressLine

    end = list(args).index(END)
    options = parse(CaptureOptions, list(args[:end]), "systolic forecast")
    command = list(args[end + 1 :])
    if "," in options.on:
        raise OptionError(
            f"--on {options.on} names several slices, and a program is forecast for one at a time; systolic plan --on {options.on} -- … compares them"
        )
    on = slice(options.on)
    shown = ForecastOptions(
        **{
            name: getattr(options, name)
            for name in ("on", "quick", "html", "perfetto", "xprof", "against", "json")
        }
    )
    before = before_of(shown)
    known = given_with(options.trips, options.cost, options.calibration, on)
    with ExitStack() as stack:
        folder = options.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="systolic-")))
        else:
            _make(folder)
        name = " ".join(command[:3])
        with ProgressLine(sys.stderr, f"{name} for {on.name}") as progress:
            captured = capture(
                command,
                on,
                folder,
                step=options.step,
                quick=options.quick,
                limit_seconds=60 * options.minutes,
                watch=progress.say,
            )
            progress.say("simulating")
            made = forecast_captured(captured, on, known)
        return show(made, shown, before, {"command": command})


def _make(folder: Path) -> None:
    """Makes the folder of ``--keep``."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TakenError(f"{folder} exists; give --keep a new folder")
    folder.mkdir(parents=True, exist_ok=True)
