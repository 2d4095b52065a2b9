"""Explanations of steps as they are printed: causes, changes with their commands, layouts that fit, and two steps compared."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from systolic.chips.flags import spoken
from systolic.compiling import StepKind
from systolic.core.option_words import option_words
from systolic.core.units import duration, gibibytes
from systolic.explaining.cause import Cause
from systolic.explaining.command import ExplainedKind
from systolic.explaining.display.text import QUICK, print_causes, step_remarks, step_title
from systolic.explaining.explainer import RecipeStep, StepExplanation
from systolic.explaining.saved import StepComparison
from systolic.forecasting import Forecast
from systolic.planning.candidate import Candidate
from systolic.planning.display.readings import step
from systolic.planning.remedies import Remedy
from systolic.report.output import print_json

LEFT = 3
"""Most causes that are named of the best."""


def plain(cause: Cause) -> dict[str, Any]:
    """A cause as JSON has it."""
    return asdict(cause)


def applied(
    of: RecipeStep | None, settings: Mapping[str, Any], candidate: Candidate, verb: str
) -> str | None:
    """The command with some settings, compiled with a candidate's flags; None where no command names the job.

    Args:
        of: The step whose settings they change.
        settings: By option: ``layout.fsdp``, ``batch``.
        candidate: Where, and with which flags.
        verb: ``forecast`` or ``train``.
    """
    if of is None or of.recipe.of_job:
        return None
    found = option_words(of.recipe.function, of.options, {**of.settings, **settings})
    if verb == "forecast":
        found += ["--on", candidate.on.name, "--quick"]  # as the figures above were made
    words = shlex.join(["systolic", verb, of.recipe.target, *found])
    flags = spoken(candidate.compiler_flags, candidate.on.chip)
    return f"{words} --flags={shlex.quote(flags)}" if flags else words


def calibration_name(made: Forecast) -> str | None:
    """Name of the calibration that corrects a forecast; None without one."""
    return None if made.calibration is None else made.calibration.name


def print_step(made: StepExplanation) -> None:
    """Causes of a step that fits."""
    title, remarks = (
        step_title(made.forecast, made.job.name),
        step_remarks(made.forecast, made.flags),
    )
    print_causes(title, made.causes, remarks=remarks)


def show_step(made: StepExplanation, *, as_json: bool) -> int:
    """Prints what to do about a step; returns the exit code, 1 where nothing fits."""
    if not made.forecast.fits:
        return show_attempts(made, as_json=as_json)
    told = show_remedies(made, "forecast", as_json=as_json)
    if as_json:
        print_json(
            {
                "target": made.target,
                "kind": ExplainedKind.forecast.value,
                "slice": made.on.name,
                "fits": True,
                "step": made.step.value,
                "quick": True,
                "layout": dict(made.forecast.layout),
                "step_seconds": made.forecast.step_seconds,
                "mfu": made.forecast.mfu,
                "lower_bound": made.forecast.is_lower_bound,
                "bound": made.forecast.bound.value,
                "given": list(made.forecast.given),
                "calibration": calibration_name(made.forecast),
                "flags": list(made.flags),
                "causes": [plain(cause) for cause in made.causes],
                **told,
            }
        )
    return 0


def show_remedies(made: StepExplanation, verb: str, *, as_json: bool) -> dict[str, Any]:
    """Prints the commands of the best changes; returns what JSON has of all."""
    stream: TextIO = sys.stderr if as_json else sys.stdout
    best, other, job = made.best, made.best_changed, made.job
    before = duration(made.forecast.step_seconds or 0.0)

    def command(one: Remedy | None) -> str | None:
        if one is None:
            return None
        return applied(made.of, one.candidate.settings(job), one.candidate, verb)

    lines: list[str | None] = []
    if best is not None:
        text = f"the best that keeps training the same: {best.text}, {best.verdict}, now {before}"
        lines += ["", text, command(best)]
        if made.remaining:
            left = (f"{one.title} {one.share or 0.0:.0%}" for one in made.remaining[:LEFT])
            lines.append(f"  where its time goes: {'; '.join(left)}")
    elif made.remedies:
        lines += ["", "none of the changes that keep training the same is faster"]
    if other is not None:
        text = f"faster, and changes training: {other.text}, {other.verdict}, now {before}"
        lines += ["", text, command(other)]
    if lines:
        print(
            "\n".join(
                f"  {line}" if line and line.startswith("systolic ") else line
                for line in lines
                if line is not None
            ),
            file=stream,
        )
    settings = [one.candidate.settings(job) for one in made.remedies]
    return {
        "remedies": [one.to_json(how) for one, how in zip(made.remedies, settings, strict=True)],
        "command": command(best),
        "changes_training_command": command(other),
        "remaining": [plain(cause) for cause in made.remaining],
    }


def show_attempts(made: StepExplanation, *, as_json: bool) -> int:
    """Prints the command of a layout that fits, or that none does; returns the exit code."""
    last, found = (made.attempts[-1] if made.attempts else None), made.fit
    typed = None
    if last is not None and found is not None:
        settings = found.candidate.settings(made.job)
        if not last.same_result:
            settings["optimizer.kind"] = last.facts.job.optimizer.kind.value
        typed = applied(made.of, settings, found.candidate, "forecast")
    if as_json:
        print_json(
            {
                "target": made.target,
                "kind": ExplainedKind.forecast.value,
                "slice": made.on.name,
                "fits": False,
                "rejected": made.forecast.rejected,
                "attempts": [attempt.to_json() for attempt in made.attempts],
                "command": typed,
            }
        )
    elif last is not None and found is not None and found.forecast is not None:
        peak = found.forecast.memory.peak_bytes if found.forecast.memory else 0
        print(
            f"\nthe fastest that fits: {found.candidate.name}, {gibibytes(peak)} of "
            f"{gibibytes(found.forecast.capacity_bytes)}, {step(found.forecast.step_seconds or 0.0)} a step"
        )
        if not last.same_result:
            print("it changes the optimizer, and with it the result of training")
        if typed is not None:
            print(f"  {typed}")
    else:
        print(nothing_fits(made))
    return 0 if found is not None else 1


def nothing_fits(made: StepExplanation) -> str:
    """The advice where no layout fits."""
    if made.attempts:
        return f"\nnothing that was tried fits; try a smaller model or batch, or another chip: systolic plan {made.target} --on any"
    if made.step is StepKind.train:
        return "\n--remedies 0 tries no layouts; leave it out to find one that fits"
    return f"\nlayouts are tried for train steps only, and this is a step of --step {made.step.value}; try a smaller batch, other --layout options or a larger slice"


def show_comparison(made: StepComparison, *, as_json: bool) -> int:
    """Prints what makes the first slower or faster; returns the exit code, 1 where one does not fit."""
    one, two = made.target, made.against_target
    mine, other = made.forecast.step_seconds, made.against.step_seconds
    if as_json:
        print_json(
            {
                "target": one,
                "against": two,
                "kind": ExplainedKind.forecast.value,
                "step_seconds": mine,
                "against_step_seconds": other,
                "causes": [asdict(row) for row in made.causes],
            }
        )
        return 0
    if mine is None or other is None:
        for path, forecast in ((one, made.forecast), (two, made.against)):
            print(f"{path}: {'fits' if forecast.fits else 'does not fit'} on {forecast.on.name}")
        return 1
    if made.alike:
        print(f"{one} and {two} take the same time: {duration(mine)} a step")
    else:
        word = "slower" if mine > other else "faster"
        ratio = max(mine, other) / min(mine, other)
        print(
            f"{one} is {ratio:.2f} times {word}: {duration(mine)} a step, {two} {duration(other)}"
        )
    print(f"both forecast {QUICK}")
    rows = made.worth_showing
    if not rows:
        print("and no cause takes more in one of them")
        return 0
    print(f"\n{'':>10}  {'first':>8}  {'second':>8}  cause (they may overlap)")
    for row in rows:
        change = row.seconds - row.against_seconds
        sign = "+" if change >= 0 else "-"
        print(
            f"{sign + duration(abs(change)):>10}  {duration(row.seconds):>8}  {duration(row.against_seconds):>8}  {row.title}"
        )
    return 0
