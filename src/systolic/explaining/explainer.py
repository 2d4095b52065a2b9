"""Explanation of a step on a slice: of a job's, with changes of settings and what they gain, or of one that no recipe made, from a program or scheduled HLO."""

import enum
import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.capture import capture
from systolic.chips import Slice
from systolic.chips.flags import resolved, spoken
from systolic.compiling import Compiled, Compiler, JobProgram, StepKind
from systolic.compiling import compile as compile_program
from systolic.compiling.gpu_compiler import advice, compiles
from systolic.core.errors import OptionError
from systolic.core.reporter import reporter
from systolic.explaining.causes import causes_of_forecast, causes_of_programs
from systolic.explaining.settings import Settings
from systolic.explaining.sources import StepProgram
from systolic.explaining.step import Cause
from systolic.forecasting import Forecast
from systolic.forecasting.captured import forecast_parts, parts_of, schedule_of
from systolic.forecasting.run import of_outcome
from systolic.forecasting.text import forecast_module
from systolic.hlo import parse
from systolic.job import Job
from systolic.planning.analytic import facts_of
from systolic.planning.fit_ladder import Attempt, find_fit
from systolic.planning.goal import compiles_at_once
from systolic.planning.plan import Trial
from systolic.planning.remedies import (
    GAIN,
    Follower,
    Remedy,
    RemedyWatch,
    base_of,
    changes,
    try_all,
)
from systolic.planning.search import CompilingEvaluator, OpenEvaluator, SearchProgress
from systolic.recipes import Recipe
from systolic.runs.plan_choice import apply
from systolic.sim.incomplete import NOTHING, Given

REMEDIES = 10
"""Changes that are tried for a step, unless another number is asked for."""
FOLLOWING = 2
"""Most compiles of each following stage over those of the first."""


@dataclass(frozen=True, kw_only=True)
class RecipeStep:
    """A step of a recipe's job on a slice, as a command asks for it or a file has it."""

    recipe: Recipe
    options: Mapping[str, Any]
    """Arguments of the recipe."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a plan decided of the job: ``layout.fsdp``, ``batch``."""
    on: Slice
    flags: tuple[str, ...]
    """All flags of the compiler."""
    step: StepKind = StepKind.train
    kept: Job | None = None
    """The job as a run keeps it, with its own tokenizer; None where the recipe makes it."""

    @property
    def job(self) -> Job:
        """The job.

        Raises:
            SystolicError: the recipe refuses its options.
        """
        return self.kept or apply(self.recipe(self.options), self.settings)

    @property
    def as_options(self) -> "RecipeStep":
        """The same with the plan's settings as options, as far as the recipe has options for them."""
        parameters = inspect.signature(self.recipe.function).parameters
        plain, left = recipes.plain(self.options), {}
        for name, value in self.settings.items():
            part, dot, field_name = name.partition(".")
            if part not in parameters:
                left[name] = value
            elif dot:
                default = recipes.plain({part: parameters[part].default})
                plain[part] = {**default[part], **plain.get(part, {}), field_name: value}
            else:
                plain[part] = value
        if "batch" in plain and "batch" in self.settings:
            plain.pop("batch_per_device", None)
        options = recipes.typed(self.recipe, plain)
        return replace(self, options=options, settings=left)

    def with_flags(self, words: str) -> "RecipeStep":
        """The same with ``--flags`` on top of its own; ``none`` leaves its own out.

        Raises:
            OptionError: a word is no flag.
        """
        return replace(self, flags=resolved(words, self.on.chip, self.flags))

    def at(self, on: Slice) -> "RecipeStep":
        """The same on another slice, with the flags that jobs share there in place of those shared here."""
        return replace(self, on=on, flags=resolved(spoken(self.flags, self.on.chip), on.chip))

    def explainer(self) -> "StepExplainer":
        """The explainer of the step, with advice in options that the recipe has."""
        return StepExplainer(
            job=self.job,
            on=self.on,
            step=self.step,
            flags=self.flags,
            known=None if self.recipe.of_job else Settings(recipes.plain(self.options)),
            target=self.recipe.target,
            of=self,
        )


@dataclass(frozen=True, kw_only=True)
class StepExplanation:
    """Why a step of a job takes its time, or does not fit, and what changes that."""

    job: Job
    on: Slice
    step: StepKind
    flags: tuple[str, ...]
    """Flags of the compiler."""
    target: str = ""
    """The target, as it was named."""
    of: RecipeStep | None = None
    """The recipe that makes the job, for the commands of changes."""
    forecast: Forecast
    """From the compiler's schedule: memory is exact, the time of ops estimated."""
    causes: Sequence[Cause] = ()
    """Causes of the time, largest share first; none of a step that does not fit."""
    remedies: Sequence[Remedy] = ()
    """Changes of settings of a step that fits, each stage's largest gain first."""
    remaining: Sequence[Cause] = ()
    """Causes of the time of the best, largest share first; none where no change gains."""
    attempts: Sequence[Attempt] = ()
    """Searches for a layout that fits, of a step that does not; the last has it if any."""

    def __repr__(self) -> str:
        """The largest cause and the best change on one line."""
        parts = [repr(self.forecast)[1:-1].removeprefix("Forecast of ")]
        parts += (
            [f"{len(self.causes)} causes, first: {self.causes[0].title}"] if self.causes else []
        )
        best = self.best
        parts += [] if best is None else [f"best change: {best.text}, {best.verdict}"]
        fit = self.fit
        parts += [] if fit is None else [f"fastest that fits: {fit.candidate.name}"]
        return f"<StepExplanation of {'; '.join(parts)}>"

    def _repr_html_(self) -> str:
        from systolic.explaining.display.text import lines, step_remarks, step_title
        from systolic.forecasting.display import text
        from systolic.report.notebook import WIDTH, screen

        if self.forecast.fits:
            title = step_title(self.forecast, self.job.name)
            remarks = step_remarks(self.forecast, self.flags)
            shown = list(lines(title, self.causes, WIDTH, remarks=remarks))
        else:
            shown = list(text.lines(self.forecast, WIDTH, every_note=True))
        fit = self.fit
        texts = [] if fit is None else [f"the fastest that fits: {fit.candidate.name}"]
        for words, remedy in (
            ("the best that keeps training the same", self.best),
            ("faster, and changes training", self.best_changed),
        ):
            texts += [] if remedy is None else [f"{words}: {remedy.text}, {remedy.verdict}"]
        return screen(shown, texts)

    @property
    def best(self) -> Remedy | None:
        """The change that gains most and trains the same; None where none gains."""
        good = [
            remedy for remedy in self.remedies if remedy.same_result and (remedy.gain or 0.0) > GAIN
        ]
        return max(good, key=lambda remedy: remedy.gain or 0.0, default=None)

    @property
    def best_changed(self) -> Remedy | None:
        """The change that gains most although it changes training; None where it gains no more than :attr:`best`."""
        least = GAIN if self.best is None else (self.best.gain or 0.0) + GAIN
        good = [
            remedy
            for remedy in self.remedies
            if not remedy.same_result and (remedy.gain or 0.0) > least
        ]
        return max(good, key=lambda remedy: remedy.gain or 0.0, default=None)

    @property
    def fit(self) -> Trial | None:
        """The fastest that was found to fit, where the step itself does not."""
        return self.attempts[-1].best if self.attempts else None


class ExplainStage(enum.Enum):
    """Stages of an explanation."""

    explained = "explained"
    """Causes are known; of a step that does not fit, what holds its memory."""
    changing = "changing"
    """Changes of settings, each compiled."""
    combining = "combining"
    """On from the best change, until none gains."""
    training = "training"
    """On top of the best: changes that change training."""
    fitting = "fitting"
    """Layouts that may fit, each compiled."""


@dataclass(frozen=True, kw_only=True)
class ExplainProgress:
    """Progress of an explanation, which a reporter is given."""

    stage: ExplainStage
    explanation: Any = None
    """The result as far as it is known."""
    remedy: Remedy | None = None
    """The latest change."""
    done: int = 0
    of: int = 0
    search: SearchProgress | None = None
    """The search for a layout that fits."""


@dataclass(frozen=True, kw_only=True)
class StepExplainer:
    """Explains steps of one job on one slice.

    Args:
        job: What is trained.
        on: The slice.
        step: Which of the job's steps; changes are tried for train steps only.
        flags: Compiler flags of every program.
        known: Options that advice may name; None where there is no recipe.
        remedies: Changes to try; 0 finds causes only.
        workers: Compiles at once; 0 as many as cores and memory allow.
        evaluator: Tells what a change does; by default the compiler.
        given: Trips and costs that the program leaves open, and corrections from profiles.
        target: What is explained, as it was named.
        of: The recipe that makes the job, where there is one.
    """

    job: Job
    on: Slice
    step: StepKind = StepKind.train
    flags: tuple[str, ...] = ()
    known: Settings | None = None
    remedies: int = REMEDIES
    workers: int = 0
    evaluator: OpenEvaluator = CompilingEvaluator
    given: Given = NOTHING
    target: str = ""
    of: RecipeStep | None = None

    @property
    def _opens(self) -> OpenEvaluator:
        """The evaluator of changes, with what was given."""
        known = bool(self.given) or self.given.calibration is not None
        if self.evaluator is CompilingEvaluator and known:
            return partial(CompilingEvaluator, given=self.given)
        return self.evaluator

    def explain(self) -> StepExplanation:
        """Forecasts the step, finds its causes and tries changes, or layouts that fit.

        Raises:
            OptionError: the slice has no compiler here whose schedule can be explained.
            LayoutError: the layout does not divide the slice, the model or the batch.
            RunError: the compiler failed.
        """
        result = self.find_causes()
        reporter().update(ExplainProgress(stage=ExplainStage.explained, explanation=result))
        if self.step is not StepKind.train or self.remedies < 1:
            return result
        if not result.forecast.fits:
            return replace(result, attempts=self._attempts(result))
        return self._improved(replace(result, remedies=self.try_changes(result.forecast)))

    def find_causes(self) -> StepExplanation:
        """Forecasts the step and finds its causes; raises as :meth:`explain`."""
        _check_scheduled(self.on)
        forecast, outcome = self.forecast()
        result = StepExplanation(
            job=self.job,
            on=self.on,
            step=self.step,
            flags=self.flags,
            target=self.target,
            of=self.of,
            forecast=forecast,
        )
        if not forecast.fits:
            return result
        assert isinstance(outcome, Compiled)
        module = parse(outcome.hlo)
        return replace(
            result, causes=causes_of_forecast(forecast, module, self.job.model, self.known)
        )

    def _improved(self, result: StepExplanation) -> StepExplanation:
        """The explanation with the causes that are left of the best; the program is in the store."""
        best = result.best
        if best is None or best.trial is None or best.trial.forecast is None:
            return result
        flags, job = best.candidate.compiler_flags, best.candidate.job(self.job)
        compiler = Compiler(flags=flags).quick()
        outcome = compile_program(JobProgram(job=job, verb=self.step), self.on, compiler)
        if not isinstance(outcome, Compiled):
            return result
        forecast = of_outcome(outcome, job.name, self.on, 0.0, replace(self.given, strict=False))
        causes = causes_of_forecast(forecast, parse(outcome.hlo), job.model, self.known)
        return replace(result, remaining=causes)

    def forecast(self) -> tuple[Forecast, Any]:
        """The step as it is, up to its schedule, and the compiler's answer."""
        began = time.monotonic()
        program = JobProgram(job=self.job, verb=self.step)
        outcome = compile_program(
            program, self.on, Compiler(flags=self.flags).quick(), reporter().stage
        )
        seconds = time.monotonic() - began
        return of_outcome(outcome, self.job.name, self.on, seconds, self.given), outcome

    def try_changes(self, forecast: Forecast) -> list[Remedy]:
        """Changes of settings with what each gains over a forecast of the step."""
        facts = facts_of(self.job)
        base = base_of(facts, self.on, self.flags)
        wanted = changes(facts, base)[: self.remedies]
        workers = compiles_at_once(self.workers)
        with self._opens(workers) as evaluator:
            watch = self._watching(ExplainStage.changing, len(wanted))
            tried = try_all(facts, forecast, base, wanted, evaluator, watch)
            follower = Follower(
                facts=facts,
                forecast=forecast,
                base=base,
                evaluator=evaluator,
                most=FOLLOWING * self.remedies,
                workers=workers,
            )
            for stage, follow in (
                (ExplainStage.combining, Follower.combine),
                (ExplainStage.training, Follower.change_training),
            ):
                watch = self._watching(stage, follower.most)
                tried += sorted(
                    follow(replace(follower, watch=watch), tried),
                    key=lambda remedy: -(remedy.gain if remedy.gain is not None else -1.0),
                )
        return tried

    def _watching(self, stage: ExplainStage, of: int) -> RemedyWatch:
        """Begins a stage of changes; returns what is called with each."""

        def watch(remedy: Remedy | None, done: int, of: int) -> None:
            reporter().update(ExplainProgress(stage=stage, remedy=remedy, done=done, of=of))

        watch(None, 0, of)
        return watch

    def _attempts(self, result: StepExplanation) -> list[Attempt]:
        def watch(now: SearchProgress) -> None:
            reporter().update(
                ExplainProgress(stage=ExplainStage.fitting, explanation=result, search=now)
            )

        return find_fit(
            facts_of(self.job),
            self.on,
            lambda _: self.flags,
            compiles_at_once(self.workers),
            watch,
            self._opens,
        )


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
    forecast = forecast_parts(captured, parts, on)
    busiest = schedule_of(captured, parts).device
    programs = [
        StepProgram(module=part.module, timeline=part.timeline, calls=part.calls, mesh=part.mesh)
        for part in parts
        if part.timeline is not None and busiest in part.devices
    ]
    return _explained(captured.command, forecast, programs, quick=True)


def _check_scheduled(on: Slice) -> None:
    """Refuses a slice whose compiler's schedule can't be had here: a CPU, and a GPU without its compiler."""
    if on.platform == "tpu" or compiles(on):
        return
    way = advice(on) if on.platform == "gpu" else ""
    raise OptionError(
        f"{on.name} is a {on.platform.upper()}, and a schedule to explain comes from its own compiler; {way or 'systolic forecast shows its time'}"
    )


def dump_explanation(path: Path, on: Slice, given: Given) -> ProgramExplanation:
    """Explains scheduled HLO text that was compiled for a slice; raises as :func:`~systolic.forecasting.text.forecast_text`."""
    forecast, module = forecast_module(path, on, given)
    programs = (
        []
        if forecast.timeline is None
        else [StepProgram(module=module, timeline=forecast.timeline)]
    )
    return _explained(str(path), forecast, programs, quick=False)


def _explained(
    target: str, forecast: Forecast, programs: Sequence[StepProgram], *, quick: bool
) -> ProgramExplanation:
    causes = causes_of_programs(forecast, programs) if forecast.fits else []
    return ProgramExplanation(target=target, forecast=forecast, causes=causes, quick=quick)
