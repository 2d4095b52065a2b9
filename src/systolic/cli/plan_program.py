"""``systolic plan --on SLICES -- python train.py``: which slice runs a program of your own fastest and cheapest."""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from systolic.cli.output import print_json
from systolic.cli.parse import Repeated, Required, parse
from systolic.core.errors import OptionError
from systolic.core.files import check_writable, write_atomically
from systolic.core.ranges import COUNT, POSITIVE
from systolic.planning.objective import Objective

if TYPE_CHECKING:
    from systolic.capture import Captured
    from systolic.capture.slices import Ranking
    from systolic.chips import Slice

END = "--"
"""What follows is the program."""
GOALS = (Objective.cost, Objective.time)


@dataclass(frozen=True, kw_only=True)
class PlanProgramOptions:
    """Options of a program of your own (-- python train.py).

    Args:
        on: Slices of TPUs, chips (all slices of them) or any, with commas: v5e-8,v5e-16,v6e-8. The program is started once for each.
        goal: What ranks them: cost or time, for the same work.
        step: Name of the jitted function that is the step; by default what the program calls again and again.
        full: Compile in full, with the compiler's cycles, rather than up to its schedule.
        minutes: Minutes that the program may take to its step on each slice.
        max_chips: Chips at most of a slice that any or the name of a chip stands for.
        csv: Write the table to this file as CSV.
        trips: Trips of a loop that the program leaves open, NAME=NUMBER, such as while.5=100; may be repeated.
        cost: Time of one call of a kernel, custom call or callback, NAME=TIME, such as my_kernel=1.2ms; may be repeated.
        calibration: Corrects the simulator by profiles of the slices' chip: a name that systolic calibrations lists, or a calibration's file.
        json: Print one JSON object on stdout.
    """

    on: Annotated[str, Required("slices; add --on v5e-8,v5e-16 before the --")]
    goal: Objective = Objective.cost
    step: str = ""
    full: bool = False
    minutes: Annotated[float, POSITIVE] = 20.0
    max_chips: Annotated[int, COUNT] = 256
    csv: Path | None = None
    trips: Repeated = ()
    cost: Repeated = ()
    calibration: str = ""
    json: bool = False


def plan_program(args: Sequence[str]) -> int:
    """Ranks slices for the program behind ``--``; returns the exit code, 1 where none fits."""
    from systolic.capture import capture
    from systolic.capture.slices import rank
    from systolic.forecasting.calibrations import calibration_for
    from systolic.report.progress import ProgressLine
    from systolic.session.planning import slices_of
    from systolic.sim.incomplete import given

    end = list(args).index(END)
    options = parse(PlanProgramOptions, list(args[:end]), "systolic plan")
    command = list(args[end + 1 :])
    if options.goal not in GOALS:
        names = " or ".join(one.value for one in GOALS)
        raise OptionError(f"--goal is {options.goal.value}; slices of a program rank by {names}")
    if options.csv is not None:
        check_writable(options.csv)
    slices = slices_of(options.on, options.max_chips, None)
    known = replace(
        given(options.trips, options.cost), calibration=calibration_for(options.calibration, slices)
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="systolic-") as root:

        def captured_for(on: "Slice") -> "Captured":
            folder = Path(root) / f"{slices.index(on)}"
            folder.mkdir()
            where = f"[{slices.index(on) + 1}/{len(slices)}] {' '.join(command[:3])} for {on.name}"
            with ProgressLine(sys.stderr, where) as progress:
                return capture(
                    command,
                    on,
                    folder,
                    step=options.step,
                    quick=not options.full,
                    limit_seconds=60 * options.minutes,
                    watch=progress.say,
                )

        made = rank(
            " ".join(command),
            slices,
            captured_for,
            by_time=options.goal is Objective.time,
            given=known,
        )
    made = replace(made, notes=[*corrected(made), *made.notes])
    if options.csv is not None:
        write_atomically(options.csv, made.table.to_csv())
    if options.json:
        seconds = round(time.monotonic() - began, 1)
        shown = {"goal": options.goal.value, **made.to_json()}
        print_json({**shown, "quick": not options.full, "seconds": seconds})
    else:
        from systolic.report.forecast.table import print_table

        print_table(made.table, notes=made.notes)
        if options.csv is not None:
            print(f"csv      {options.csv}")
    return 0 if any(row.fits for row in made.table) else 1


def corrected(made: "Ranking") -> list[str]:
    """A line on the calibration of the steps' times; none without one."""
    from systolic.forecasting.calibrations import told_of_steps

    forecasts = [row.forecast for row in made.table if row.forecast is not None]
    return told_of_steps([one.timeline for one in forecasts if one.timeline is not None])
