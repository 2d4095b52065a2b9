"""Explanations as they are printed: while they are made, and at their end; as lines or as one JSON object."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from systolic.chips.flags import spoken
from systolic.compiling import StepKind
from systolic.core.option_words import option_words
from systolic.core.units import duration, gibibytes
from systolic.explaining.beside import Beside
from systolic.explaining.cause import Cause
from systolic.explaining.display.beside import beside_json, print_beside
from systolic.explaining.display.text import (
    QUICK,
    overlap_remarks,
    print_causes,
    profile_remark,
    program_remarks,
    run_remarks,
    step_remarks,
    step_title,
)
from systolic.forecasting import Forecast
from systolic.forecasting.display.text import print_forecast
from systolic.planning.candidate import Candidate
from systolic.planning.display.progress import stage
from systolic.planning.display.readings import step
from systolic.planning.fit_ladder import difference
from systolic.planning.plan import reason_of
from systolic.planning.remedies import Remedy
from systolic.report.output import print_json
from systolic.report.progress import ProgressLine
from systolic.session.explaining import (
    ExplainedKind,
    ExplainProgress,
    ExplainStage,
    StepExplanation,
)
from systolic.session.profiles import ProfileExplanation, is_profile
from systolic.session.runs import RunExplanation
from systolic.session.saved import RecipeStep, StepComparison

CHANGES_TRAINING = "  [changes training]"
HEADS: Mapping[ExplainStage, str] = {
    ExplainStage.changing: "\nup to {} changes, each compiled and forecast again, and what helps together:",
    ExplainStage.combining: "\non from the best, up to {} combinations of settings, until none gains:",
    ExplainStage.training: "\non top of the best, changes of precision and batch, which change training:",
}
"""First lines of the stages in which changes are tried."""
LEFT = 3
"""Most causes that are named of the best."""


class ExplainView:
    """A context whose :meth:`see` shows how far an explanation is; with JSON on stdout it writes to stderr.

    Args:
        title: What is explained, for the line that ticks.
        as_json: Whether stdout is for one JSON object.
    """

    def __init__(self, title: str, *, as_json: bool) -> None:
        self._title, self._json = title, as_json
        self._stream = sys.stderr if as_json else sys.stdout
        self._stage: ExplainStage | None = None
        self._line: ProgressLine | None = None

    def __enter__(self) -> "ExplainView":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_line()

    def see(self, progress: ExplainProgress) -> None:
        """Shows what is new."""
        if progress.stage is not self._stage:
            self._end_line()
            self._stage = progress.stage
        match progress.stage:
            case ExplainStage.compiling:
                self._ticking(self._title).say(progress.text)
            case ExplainStage.explained:
                self._explained(progress.explanation)
            case ExplainStage.changing | ExplainStage.combining | ExplainStage.training:
                self._changing(progress)
            case ExplainStage.fitting:
                self._fitting(progress)

    def _ticking(self, title: str) -> ProgressLine:
        if self._line is None:
            self._line = ProgressLine(sys.stderr, title)
        return self._line

    def _end_line(self) -> None:
        if self._line is not None:
            self._line.__exit__(None, None, None)
        self._line = None

    def _explained(self, made: StepExplanation | ProfileExplanation) -> None:
        if isinstance(made, ProfileExplanation):
            if made.forecast is not None and made.of is not None:
                seconds = made.forecast.step_seconds or 0.0
                ratio = made.figures["step_seconds"] / seconds
                text = f"forecast for {made.of.on.name}: {duration(seconds)} a step, measured {ratio:.2f} times that"
                print(f"\n{text}", file=self._stream)
            elif not self._json:
                print_causes(
                    self._title,
                    made.causes,
                    remarks=[
                        profile_remark(made.figures),
                        *overlap_remarks(made.figures),
                        *program_remarks(made.table),
                    ],
                    notes=made.notes,
                )
        elif not self._json and made.forecast.fits:
            print_step(made)
        elif not self._json:
            print_forecast(made.forecast)

    def _changing(self, progress: ExplainProgress) -> None:
        line, one = self._ticking("changes"), progress.remedy
        if one is None:
            line.told(HEADS[progress.stage].format(progress.of), self._stream, "")
            return
        changes = "" if one.same_result else CHANGES_TRAINING
        done = f"{progress.done} of {progress.of} at most compiled"
        line.told(f"  {one.verdict:<59}  {one.text}{changes}", self._stream, done)

    def _fitting(self, progress: ExplainProgress) -> None:
        assert progress.search is not None
        now, made = progress.search, progress.explanation
        if self._line is None and not self._json:
            print("\nlayouts that may fit, each compiled:", flush=True)
        line, one = self._ticking("layouts"), now.latest
        if one is None:
            if not now.compiled:
                line.say(stage(now))
            return
        before = made.job.layout.on(made.on.num_devices, made.on.num_slices)
        where = "" if one.candidate.on == made.on else f"{one.candidate.on.name} "
        result = reason_of(one)
        if one.forecast is not None and one.total is not None:
            peak = one.forecast.memory.peak_bytes if one.forecast.memory else 0
            speed = step(one.forecast.step_seconds or 0.0)
            result = f"fits, {gibibytes(peak)}, {speed} a step"
        text = f"  {where}{difference(before, one.candidate)}: {result}"
        line.told(text, self._stream, f"{now.compiled} compiled")


def applied(
    of: RecipeStep, settings: Mapping[str, Any], candidate: Candidate, verb: str
) -> str | None:
    """The command with some settings, compiled with a candidate's flags; None where no command names the job.

    Args:
        of: The step whose settings they change.
        settings: By option: ``layout.fsdp``, ``batch``.
        candidate: Where, and with which flags.
        verb: ``forecast`` or ``train``.
    """
    if of.recipe.of_job:
        return None
    found = option_words(of.recipe.function, of.options, {**of.settings, **settings})
    if verb == "forecast":
        found += ["--on", candidate.on.name, "--quick"]  # as the figures above were made
    words = shlex.join(["systolic", verb, of.recipe.target, *found])
    flags = spoken(candidate.compiler_flags, candidate.on.chip)
    return f"{words} --flags={shlex.quote(flags)}" if flags else words


# Steps


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


def show_step(target: str, of: RecipeStep, made: StepExplanation, *, as_json: bool) -> int:
    """Prints what to do about a step; returns the exit code, 1 where nothing fits."""
    if not made.forecast.fits:
        return show_attempts(target, of, made, as_json=as_json)
    told = show_remedies(of, made, "forecast", as_json=as_json)
    if as_json:
        print_json(
            {
                "target": target,
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


def show_remedies(
    of: RecipeStep, made: StepExplanation, verb: str, *, as_json: bool
) -> dict[str, Any]:
    """Prints the commands of the best changes; returns what JSON has of all."""
    stream: TextIO = sys.stderr if as_json else sys.stdout
    best, other, job = made.best, made.best_changed, made.job
    before = duration(made.forecast.step_seconds or 0.0)

    def command(one: Remedy | None) -> str | None:
        if one is None:
            return None
        return applied(of, one.candidate.settings(job), one.candidate, verb)

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


def show_attempts(target: str, of: RecipeStep, made: StepExplanation, *, as_json: bool) -> int:
    """Prints the command of a layout that fits, or that none does; returns the exit code."""
    last, found = (made.attempts[-1] if made.attempts else None), made.fit
    typed = None
    if last is not None and found is not None:
        settings = found.candidate.settings(made.job)
        if not last.same_result:
            settings["optimizer.kind"] = last.facts.job.optimizer.kind.value
        typed = applied(of, settings, found.candidate, "forecast")
    if as_json:
        print_json(
            {
                "target": target,
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
        print(f"  {typed}")
    else:
        print(nothing_fits(of, made))
    return 0 if found is not None else 1


def nothing_fits(of: RecipeStep, made: StepExplanation) -> str:
    """What to do where no layout fits."""
    if made.attempts:
        return f"\nnothing that was tried fits; try a smaller model or batch, or another chip: systolic plan {of.recipe.target} --on any"
    if made.step is StepKind.train:
        return "\n--remedies 0 tries no layouts; leave it out to find one that fits"
    return f"\nlayouts are tried for train steps only, and this is a step of --step {made.step.value}; try a smaller batch, other --layout options or a larger slice"


def show_comparison(one: str, two: str, made: StepComparison, *, as_json: bool) -> int:
    """Prints what makes the first slower or faster; returns the exit code, 1 where one does not fit."""
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


# Runs and profiles


def show_run(target: str, made: RunExplanation, *, as_json: bool) -> int:
    """Prints what holds a run back; returns the exit code."""
    if as_json:
        print_json(
            {
                "target": target,
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
    print_causes(target, made.causes, remarks=lines, notes=made.notes)
    return 0


def show_profile(
    target: str,
    made: ProfileExplanation,
    *,
    as_json: bool,
    page: Path | None = None,
    compared: Beside | None = None,
) -> int:
    """Prints what changes a measured step; returns the exit code."""
    more: dict[str, Any] = {}
    stream = sys.stderr if as_json else sys.stdout
    if made.problem:
        print(f"\nno changes were tried: {made.problem}", file=stream)
        more = {"remedies": [], "command": None, "problem": made.problem}
    elif made.of is not None and made.simulated is not None:
        told = show_remedies(made.of, made.simulated, "train", as_json=as_json)
        seconds = made.simulated.forecast.step_seconds
        more = {"slice": made.of.on.name, "forecast_step_seconds": seconds, **told}
    if compared is not None:
        more["against"] = beside_json(compared)
        if not as_json:
            print_beside(compared)
    if page is not None:
        print(f"wrote {page}", file=stream)
        more["report"] = str(page)
    if as_json:
        print_json(
            {
                "target": target,
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


def plain(cause: Cause) -> dict[str, Any]:
    """A cause as JSON has it."""
    return asdict(cause)
