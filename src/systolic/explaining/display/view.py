"""Views of explanations and calibrations. An explanation's causes and changes are printed as they are found."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic.core.arguments import WRITTEN
from systolic.report.output import print_json

if TYPE_CHECKING:
    from systolic.explaining.command import Calibrated
    from systolic.explaining.explainer import ProgramExplanation, StepExplanation
    from systolic.explaining.profiles import ProfileExplanation
    from systolic.explaining.runs import RunExplanation
    from systolic.explaining.saved import StepComparison
    from systolic.forecasting.calibrations import CalibrationRecord


def show(explanation: "StepExplanation | StepComparison", *, json: bool = False) -> int:
    """Prints what to do about a step, or how two differ; returns the exit code, 1 where nothing fits.

    Args:
        explanation: The explanation, or the comparison.
        json: Print one JSON object on stdout.
    """
    from systolic.explaining.display.text import show_comparison, show_step
    from systolic.explaining.saved import StepComparison

    if isinstance(explanation, StepComparison):
        return show_comparison(explanation, as_json=json)
    return show_step(explanation, as_json=json)


def show_run(explanation: "RunExplanation", *, json: bool = False) -> int:
    """Prints what holds a run back; returns the exit code.

    Args:
        explanation: The explanation.
        json: Print one JSON object on stdout.
    """
    from systolic.explaining.command import ExplainedKind
    from systolic.explaining.display.text import plain, print_causes, run_remarks
    from systolic.explaining.profiles import is_profile

    if json:
        print_json(
            {
                "target": explanation.target,
                "kind": ExplainedKind.run.value,
                "causes": [plain(cause) for cause in explanation.causes],
                "figures": explanation.figures,
                "notes": [*explanation.damage, *explanation.notes],
            }
        )
        return 0
    lines = [*run_remarks(explanation.figures, explanation.unit), *explanation.damage]
    if is_profile(explanation.path / "profile"):
        lines.append(
            f"its steps were traced: systolic explain {shlex.quote(str(explanation.path / 'profile'))}"
        )
    print_causes(explanation.target, explanation.causes, remarks=lines, notes=explanation.notes)
    return 0


def show_profile(
    explanation: "ProfileExplanation",
    *,
    html: Annotated[Path | None, WRITTEN] = None,
    json: bool = False,
) -> int:
    """Prints what changes a measured step; returns the exit code.

    Args:
        explanation: The explanation.
        html: Write a page to this file: the timeline of the median step by core and unit, and a table of all ops.
        json: Print one JSON object on stdout.
    """
    from systolic.explaining.command import ExplainedKind
    from systolic.explaining.display.text import plain, show_remedies
    from systolic.forecasting.display.profiled import beside_json, print_beside

    if html is not None:
        from systolic.explaining.display.page import write_page

        write_page(
            explanation.target,
            explanation.profile,
            explanation.table,
            explanation.causes,
            html,
            explanation.notes,
        )
    more: dict[str, Any] = {}
    stream = sys.stderr if json else sys.stdout
    if explanation.problem:
        print(f"\nno changes were tried: {explanation.problem}", file=stream)
        more = {"remedies": [], "command": None, "problem": explanation.problem}
    elif explanation.of is not None and explanation.simulated is not None:
        remedies = show_remedies(explanation.simulated, "train", as_json=json)
        seconds = explanation.simulated.forecast.step_seconds
        more = {"slice": explanation.of.on.name, "forecast_step_seconds": seconds, **remedies}
    if explanation.against is not None:
        more["against"] = beside_json(explanation.against)
        if not json:
            print_beside(explanation.against)
    if html is not None:
        print(f"wrote {html}", file=stream)
        more["report"] = str(html)
    if json:
        print_json(
            {
                "target": explanation.target,
                "kind": ExplainedKind.profile.value,
                "causes": [plain(cause) for cause in explanation.causes],
                "figures": explanation.figures,
                "devices": [row.to_json() for row in explanation.table.devices],
                "programs": [row.to_json() for row in explanation.table.programs],
                "ops": [row.to_json() for row in explanation.table.ops],
                "notes": explanation.notes,
                **more,
            }
        )
    return 0


def show_program(explanation: "ProgramExplanation", *, json: bool = False) -> int:
    """Prints the causes of a program's step, or why it does not fit; returns the exit code.

    Args:
        explanation: The explanation.
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
    from systolic.forecasting.display.view import print_next

    step = explanation.forecast
    if json:
        print_json(
            {
                "target": explanation.target,
                "kind": ExplainedKind.program.value,
                "program": step.recipe,
                "slice": step.on.name,
                "fits": step.fits,
                "quick": explanation.quick,
                "step_seconds": step.step_seconds,
                "hfu": step.hfu,
                "lower_bound": step.is_lower_bound,
                "bound": step.bound.value,
                "given": list(step.given),
                "calibration": calibration_name(step),
                "rejected": step.rejected and step.rejected.to_json(),
                "causes": [plain(cause) for cause in explanation.causes],
                "notes": list(step.notes),
            }
        )
    elif step.fits:
        flags = step.compiler.flags or ()
        remarks = step_remarks(step, flags) if explanation.quick else step.cautions
        print_causes(step_title(step, step.recipe), explanation.causes, remarks=remarks)
    else:
        print_forecast(step)
        print_next(step)
    return 0 if step.fits else 1


def show_calibrated(calibrated: "Calibrated", *, json: bool = False) -> int:
    """Prints a calibration that was made; returns the exit code.

    Args:
        calibrated: The calibration.
        json: Print one JSON object on stdout.
    """
    from systolic.forecasting.display.calibration import print_calibration

    if json:
        written = {"file": str(calibrated.file), "replaced": calibrated.replaced}
        print_json({**calibrated.record.to_json(), **written})
        return 0
    print_calibration(calibrated.record)
    print(
        f"\nwrote {calibrated.file}{', in place of an earlier one' if calibrated.replaced else ''}"
    )
    name = calibrated.record.calibration.name
    print(f"use it: systolic forecast RECIPE --on SLICE --calibration {name}")
    return 0


def show_calibrations(
    records: "Sequence[CalibrationRecord] | CalibrationRecord", *, json: bool = False
) -> int:
    """Prints the list of calibrations, or one; returns the exit code.

    Args:
        records: The list, or the one.
        json: Print one JSON object.
    """
    from systolic.forecasting.calibrations import CalibrationRecord, folder
    from systolic.forecasting.display.calibration import print_calibration, print_calibrations

    if isinstance(records, CalibrationRecord):
        if json:
            print_json({**records.to_json(), "file": str(records.file)})
        else:
            print_calibration(records)
    elif json:
        print_json(
            {"folder": str(folder()), "calibrations": [record.to_json() for record in records]}
        )
    else:
        print_calibrations(records, folder())
    return 0
