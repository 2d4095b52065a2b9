"""Progress of an explanation: causes as soon as they are known, and each change as it is compiled."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from systolic.core.units import duration, gibibytes
from systolic.explaining.display.text import (
    overlap_remarks,
    print_causes,
    print_step,
    profile_remark,
    program_remarks,
)
from systolic.explaining.explainer import ExplainProgress, ExplainStage, StepExplanation
from systolic.explaining.profiles import ProfileExplanation
from systolic.forecasting.display.text import print_forecast
from systolic.planning.display.progress import stage
from systolic.planning.display.readings import step
from systolic.planning.fit_ladder import difference
from systolic.planning.plan import reason_of
from systolic.report.output import StderrReporter
from systolic.report.progress import ProgressLine

CHANGES_TRAINING = "  [changes training]"
HEADS: Mapping[ExplainStage, str] = {
    ExplainStage.changing: "\nup to {} changes, each compiled and forecast again, and what helps together:",
    ExplainStage.combining: "\non from the best, up to {} combinations of settings, until none gains:",
    ExplainStage.training: "\non top of the best, changes of precision and batch, which change training:",
}
"""First lines of the stages in which changes are tried."""


class ExplainReporter(StderrReporter):
    """The reporter of an explanation, which prints its parts on stdout as they are known; on stderr where stdout is for JSON."""

    def __init__(self, *, quiet: bool = False, json: bool = False) -> None:
        super().__init__(quiet=quiet, json=json)
        self._stream = sys.stderr if json else sys.stdout
        self._title = ""
        self._stage: ExplainStage | None = None
        self._fits = False
        self._lines = ExitStack()

    def begin(self, title: str) -> None:
        """Opens a line of progress; an outer piece of work keeps its own."""
        self._title = self._title or title
        stack = ExitStack()
        if not self._open:
            stack.callback(self._open_line, "")
            self._open_line(title)
        self._open.append(stack)

    def stage(self, text: str) -> None:
        """Shows it on the line of progress, and begins one where the line before has ended."""
        if self._line is None and self._open:
            self._open_line(self._title)
        super().stage(text)

    def update(self, state: Any) -> None:
        """Shows what is new of an explanation."""
        if isinstance(state, ExplainProgress):
            self._show(state)

    def _show(self, progress: ExplainProgress) -> None:
        if progress.stage is not self._stage or progress.stage is ExplainStage.explained:
            self._stage = progress.stage
            self._open_line("")
        match progress.stage:
            case ExplainStage.explained:
                self._explained(progress.explanation)
            case ExplainStage.changing | ExplainStage.combining | ExplainStage.training:
                self._changing(progress)
            case ExplainStage.fitting:
                self._fitting(progress)

    def _open_line(self, title: str) -> None:
        """Ends the line of progress, and begins one with a title."""
        self._lines.close()
        self._line = None
        if title and not self._quiet:
            self._lines.callback(self._clear)
            self._line = self._lines.enter_context(ProgressLine(sys.stderr, title))

    def _told(self, text: str, done: str) -> None:
        """Prints a line of the result, above the line of progress."""
        if self._line is None and self._json and self._quiet:
            return
        if self._line is None:
            print(text, file=self._stream, flush=True)
        else:
            self._line.told(text, self._stream, done)

    def _explained(self, explanation: StepExplanation | ProfileExplanation) -> None:
        if isinstance(explanation, ProfileExplanation):
            if explanation.forecast is not None and explanation.of is not None:
                seconds = explanation.forecast.step_seconds or 0.0
                ratio = explanation.figures["step_seconds"] / seconds
                text = f"forecast for {explanation.of.on.name}: {duration(seconds)} a step, measured {ratio:.2f} times that"
                self._told(f"\n{text}", "")
            elif not self._json:
                print_causes(
                    self._title,
                    explanation.causes,
                    remarks=[
                        profile_remark(explanation.figures),
                        *overlap_remarks(explanation.figures),
                        *program_remarks(explanation.table),
                    ],
                    notes=explanation.notes,
                )
        elif not self._json and explanation.forecast.fits:
            print_step(explanation)
        elif not self._json:
            print_forecast(explanation.forecast)

    def _changing(self, progress: ExplainProgress) -> None:
        remedy = progress.remedy
        if remedy is None:
            self._open_line("changes")
            self._told(HEADS[progress.stage].format(progress.of), "")
            return
        changes = "" if remedy.same_result else CHANGES_TRAINING
        done = f"{progress.done} of {progress.of} at most compiled"
        self._told(f"  {remedy.verdict:<59}  {remedy.text}{changes}", done)

    def _fitting(self, progress: ExplainProgress) -> None:
        assert progress.search is not None
        now, explanation = progress.search, progress.explanation
        if not self._fits:
            self._fits = True
            if not self._json:
                print("\nlayouts that may fit, each compiled:", flush=True)
            self._open_line("layouts")
        trial = now.latest
        if trial is None:
            if not now.compiled and self._line is not None:
                self._line.say(stage(now))
            return
        before = explanation.job.layout.on(explanation.on.num_devices, explanation.on.num_slices)
        where = "" if trial.candidate.on == explanation.on else f"{trial.candidate.on.name} "
        result = reason_of(trial)
        if trial.forecast is not None and trial.total is not None:
            peak = trial.forecast.memory.peak_bytes if trial.forecast.memory else 0
            speed = step(trial.forecast.step_seconds or 0.0)
            result = f"fits, {gibibytes(peak)}, {speed} a step"
        text = f"  {where}{difference(before, trial.candidate)}: {result}"
        self._told(text, f"{now.compiled} compiled")
