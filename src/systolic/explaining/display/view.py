"""Views of explanations and calibrations. An explanation's causes and changes are printed as they are found."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic.core.arguments import WRITTEN
from systolic.report.output import print_json

if TYPE_CHECKING:
    from systolic.explaining.calibrate import Calibrated
    from systolic.explaining.explainer import ProgramExplanation, StepExplanation
    from systolic.explaining.profiles import ProfileExplanation
    from systolic.explaining.runs import RunExplanation
    from systolic.explaining.saved import StepComparison
    from systolic.forecasting.calibrations import CalibrationRecord


def show(made: "StepExplanation | StepComparison", *, json: bool = False) -> int:
    """Prints what to do about a step, or how two differ; returns the exit code, 1 where nothing fits.

    Args:
        made: The explanation, or the comparison.
        json: Print one JSON object on stdout.
    """
    from systolic.explaining.display.text import show_comparison, show_step
    from systolic.explaining.saved import StepComparison

    if isinstance(made, StepComparison):
        return show_comparison(made, as_json=json)
    return show_step(made, as_json=json)


def show_run(made: "RunExplanation", *, json: bool = False) -> int:
    """Prints what holds a run back; returns the exit code.

    Args:
        made: The explanation.
        json: Print one JSON object on stdout.
    """
    from systolic.explaining.command import ExplainedKind
    from systolic.explaining.display.text import plain, print_causes, run_remarks
    from systolic.explaining.profiles import is_profile

    if json:
        print_json(
            {
                "target": made.target,
                "kind": ExplainedKind.run.value,
                "causes": [plain(cause) for cause in made.causes],
                "figures": made.figures,
                "notes": [*made.damage, *made.notes],
            }
        )
        return 0
    lines = [*run_remarks(made.figures, made.unit), *made.damage]
    if is_profile(made.path / "profile"):
        lines.append(
            f"its steps were traced: systolic explain {shlex.quote(str(made.path / 'profile'))}"
        )
    print_causes(made.target, made.causes, remarks=lines, notes=made.notes)
    return 0


def show_profile(
    made: "ProfileExplanation",
    *,
    html: Annotated[Path | None, WRITTEN] = None,
    json: bool = False,
) -> int:
    """Prints what changes a measured step; returns the exit code.

    Args:
        made: The explanation.
        html: Write a page to this file: the timeline of the median step by core and unit, and a table of all ops.
        json: Print one JSON object on stdout.
    """
    from systolic.explaining.command import ExplainedKind
    from systolic.explaining.display.text import plain, show_remedies
    from systolic.forecasting.display.profiled import beside_json, print_beside

    if html is not None:
        from systolic.explaining.display.page import write_page

        write_page(made.target, made.profile, made.table, made.causes, html, made.notes)
    more: dict[str, Any] = {}
    stream = sys.stderr if json else sys.stdout
    if made.problem:
        print(f"\nno changes were tried: {made.problem}", file=stream)
        more = {"remedies": [], "command": None, "problem": made.problem}
    elif made.of is not None and made.simulated is not None:
        told = show_remedies(made.simulated, "train", as_json=json)
        seconds = made.simulated.forecast.step_seconds
        more = {"slice": made.of.on.name, "forecast_step_seconds": seconds, **told}
    if made.against is not None:
        more["against"] = beside_json(made.against)
        if not json:
            print_beside(made.against)
    if html is not None:
        print(f"wrote {html}", file=stream)
        more["report"] = str(html)
    if json:
        print_json(
            {
                "target": made.target,
                "kind": ExplainedKind.profile.value,
                "causes": [plain(cause) for cause in made.causes],
                "figures": made.figures,
                "devices": [row.to_json() for row in made.table.devices],
                "programs": [row.to_json() for row in made.table.programs],
                "ops": [row.to_json() for row in made.table.ops],
                "notes": made.notes,
                **more,
            }
        )
    return 0


def show_program(made: "ProgramExplanation", *, json: bool = False) -> int:
    """Prints the causes of a program's step, or why it does not fit; returns the exit code.

    Args:
        made: The explanation.
        json: Print one JSON object on stdout.
    """
    from systolic.explaining.command import ExplainedKind
    from systolic.explaining.display.text import (
        calibration_name,
        plain,
        print_causes,
        step_remarks,
        step_title,
    )
    from systolic.forecasting.display.text import print_forecast

    step = made.forecast
    if json:
        print_json(
            {
                "target": made.target,
                "kind": ExplainedKind.program.value,
                "program": step.recipe,
                "slice": step.on.name,
                "fits": step.fits,
                "quick": made.quick,
                "step_seconds": step.step_seconds,
                "hfu": step.hfu,
                "lower_bound": step.is_lower_bound,
                "bound": step.bound.value,
                "given": list(step.given),
                "calibration": calibration_name(step),
                "rejected": step.rejected,
                "causes": [plain(cause) for cause in made.causes],
                "notes": list(step.notes),
            }
        )
    elif step.fits:
        flags = step.compiler.get("flags", ())
        remarks = step_remarks(step, flags) if made.quick else step.cautions
        print_causes(step_title(step, step.recipe), made.causes, remarks=remarks)
    else:
        print_forecast(step)
    return 0 if step.fits else 1


def show_calibrated(made: "Calibrated", *, json: bool = False) -> int:
    """Prints a calibration that was made; returns the exit code.

    Args:
        made: The calibration.
        json: Print one JSON object on stdout.
    """
    from systolic.forecasting.display.calibration import print_calibration

    if json:
        written = {"file": str(made.file), "replaced": made.replaced}
        print_json({**made.record.to_json(), **written})
        return 0
    print_calibration(made.record)
    print(f"\nwrote {made.file}{', in place of an earlier one' if made.replaced else ''}")
    name = made.record.calibration.name
    print(f"use it: systolic forecast RECIPE --on SLICE --calibration {name}")
    return 0


def show_calibrations(
    found: "Sequence[CalibrationRecord] | CalibrationRecord", *, json: bool = False
) -> int:
    """Prints the list of calibrations, or one; returns the exit code.

    Args:
        found: The list, or the one.
        json: Print one JSON object.
    """
    from systolic.forecasting.calibrations import CalibrationRecord, folder
    from systolic.forecasting.display.calibration import print_calibration, print_calibrations

    if isinstance(found, CalibrationRecord):
        if json:
            print_json({**found.to_json(), "file": str(found.file)})
        else:
            print_calibration(found)
    elif json:
        print_json({"folder": str(folder()), "calibrations": [one.to_json() for one in found]})
    else:
        print_calibrations(found, folder())
    return 0
