"""From a job, a run, a profile or a saved forecast to its explanation: what ``systolic explain`` and :func:`systolic.explain` call."""

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from systolic import recipes
from systolic.chips import SLICE, Slice, slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiled, Compiler, JobProgram, StepKind
from systolic.compiling import compile as compile_program
from systolic.core.arguments import Wording, member, with_types
from systolic.core.errors import NotFoundError, OptionError
from systolic.core.ranges import NOT_NEGATIVE, check_arguments
from systolic.explaining.cause import Cause
from systolic.explaining.causes import causes_of_forecast
from systolic.explaining.settings import Settings
from systolic.forecasting import Forecast
from systolic.forecasting.calibrations import given_with
from systolic.forecasting.run import of_outcome
from systolic.hlo import parse
from systolic.job import Job
from systolic.planning.evaluator import CompilingEvaluator, OpenEvaluator
from systolic.planning.facts import facts_of
from systolic.planning.fit_ladder import Attempt, find_fit
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
from systolic.planning.search import Limits, SearchProgress
from systolic.recipes.jobs.source import source_of
from systolic.runs.run import JOB
from systolic.sim.calibration import Calibration
from systolic.sim.incomplete import NOTHING, Costs, Given, Trips

REMEDIES = 10
"""Changes that are tried for a step, unless another number is asked for."""
FOLLOWING = 2
"""Most compiles of each following stage over those of the first."""


@dataclass(frozen=True, kw_only=True)
class StepExplanation:
    """Why a step of a job takes its time, or does not fit, and what changes that."""

    job: Job
    on: Slice
    step: StepKind
    flags: tuple[str, ...]
    """Of the compiler."""
    forecast: Forecast
    """From the compiler's schedule: memory is exact, the time of ops estimated."""
    causes: Sequence[Cause] = ()
    """Where the time goes, largest share first; none of a step that does not fit."""
    remedies: Sequence[Remedy] = ()
    """Changes of settings of a step that fits, each stage's largest gain first."""
    remaining: Sequence[Cause] = ()
    """Where the time of the best goes, largest share first; none where no change gains."""
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
        told = [] if fit is None else [f"the fastest that fits: {fit.candidate.name}"]
        for words, one in (
            ("the best that keeps training the same", self.best),
            ("faster, and changes training", self.best_changed),
        ):
            told += [] if one is None else [f"{words}: {one.text}, {one.verdict}"]
        return screen(shown, told)

    @property
    def best(self) -> Remedy | None:
        """The change that gains most and trains the same; None where none gains."""
        good = [one for one in self.remedies if one.same_result and (one.gain or 0.0) > GAIN]
        return max(good, key=lambda one: one.gain or 0.0, default=None)

    @property
    def best_changed(self) -> Remedy | None:
        """The change that gains most although it changes training; None where it gains no more than :attr:`best`."""
        least = GAIN if self.best is None else (self.best.gain or 0.0) + GAIN
        good = [one for one in self.remedies if not one.same_result and (one.gain or 0.0) > least]
        return max(good, key=lambda one: one.gain or 0.0, default=None)

    @property
    def fit(self) -> Trial | None:
        """The fastest that was found to fit, where the step itself does not."""
        return self.attempts[-1].best if self.attempts else None


class ExplainStage(enum.Enum):
    """What an explanation is at."""

    compiling = "compiling"
    """The step as it is, or the gradients of a checkpoint."""
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
    """Where an explanation is, for whoever watches."""

    stage: ExplainStage
    text: str = ""
    """What the compiler is at."""
    explanation: Any = None
    """What is known so far: of the type of the result."""
    remedy: Remedy | None = None
    """The latest change."""
    done: int = 0
    of: int = 0
    search: SearchProgress | None = None
    """The search for a layout that fits."""


ExplainWatch = Callable[[ExplainProgress], None]


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
        watch: Is given the progress.
        evaluator: Tells what a change does; by default the compiler.
        given: Trips and costs that the program leaves open, and corrections from profiles.
    """

    job: Job
    on: Slice
    step: StepKind = StepKind.train
    flags: tuple[str, ...] = ()
    known: Settings | None = None
    remedies: int = REMEDIES
    workers: int = 0
    watch: ExplainWatch = field(default=lambda _: None)
    evaluator: OpenEvaluator = CompilingEvaluator
    given: Given = NOTHING

    @property
    def _opens(self) -> OpenEvaluator:
        """What opens the evaluator of changes, with what was given."""
        known = bool(self.given) or self.given.calibration is not None
        if self.evaluator is CompilingEvaluator and known:
            return partial(CompilingEvaluator, given=self.given)
        return self.evaluator

    def explain(self) -> StepExplanation:
        """Forecasts the step, finds its causes and tries changes, or layouts that fit.

        Raises:
            OptionError: the slice is not one of TPUs.
            LayoutError: the layout does not divide the slice, the model or the batch.
            RunError: the compiler failed.
        """
        if self.on.platform != "tpu":
            raise OptionError(
                f"{self.on.name} is a {self.on.platform}: a schedule to explain comes from the TPU compiler; systolic forecast shows the roofline of others"
            )
        made, outcome = self.forecast()
        result = StepExplanation(
            job=self.job, on=self.on, step=self.step, flags=self.flags, forecast=made
        )
        tries = self.step is StepKind.train and self.remedies > 0
        if not made.fits:
            self.watch(ExplainProgress(stage=ExplainStage.explained, explanation=result))
            return replace(result, attempts=self._attempts(result)) if tries else result
        assert isinstance(outcome, Compiled)
        module = parse(outcome.hlo)
        causes = causes_of_forecast(made, module, self.job.model, self.known)
        result = replace(result, causes=causes)
        self.watch(ExplainProgress(stage=ExplainStage.explained, explanation=result))
        return self._improved(replace(result, remedies=self.try_changes(made))) if tries else result

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
        made = of_outcome(outcome, job.name, self.on, 0.0, replace(self.given, strict=False))
        causes = causes_of_forecast(made, parse(outcome.hlo), job.model, self.known)
        return replace(result, remaining=causes)

    def forecast(self) -> tuple[Forecast, Any]:
        """The step as it is, up to its schedule, and the compiler's answer."""

        def say(text: str) -> None:
            self.watch(ExplainProgress(stage=ExplainStage.compiling, text=text))

        began = time.monotonic()
        program = JobProgram(job=self.job, verb=self.step)
        outcome = compile_program(program, self.on, Compiler(flags=self.flags).quick(), say)
        seconds = time.monotonic() - began
        return of_outcome(outcome, self.job.name, self.on, seconds, self.given), outcome

    def try_changes(self, made: Forecast) -> list[Remedy]:
        """Changes of settings with what each gains over a forecast of the step."""
        facts = facts_of(self.job)
        base = base_of(facts, self.on, self.flags)
        wanted = changes(facts, base)[: self.remedies]
        workers = Limits(workers=self.workers).at_once
        with self._opens(workers) as evaluator:
            watch = self._watching(ExplainStage.changing, len(wanted))
            tried = try_all(facts, made, base, wanted, evaluator, watch)
            follower = Follower(
                facts=facts,
                made=made,
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
                    key=lambda one: -(one.gain if one.gain is not None else -1.0),
                )
        return tried

    def _watching(self, stage: ExplainStage, of: int) -> RemedyWatch:
        """Begins a stage of changes; returns what is called with each."""

        def watch(one: Remedy | None, done: int, of: int) -> None:
            self.watch(ExplainProgress(stage=stage, remedy=one, done=done, of=of))

        watch(None, 0, of)
        return watch

    def _attempts(self, result: StepExplanation) -> list[Attempt]:
        def watch(now: SearchProgress) -> None:
            self.watch(ExplainProgress(stage=ExplainStage.fitting, explanation=result, search=now))

        return find_fit(
            facts_of(self.job),
            self.on,
            lambda _: self.flags,
            Limits(workers=self.workers).at_once,
            watch,
            self._opens,
        )


class ExplainedKind(enum.Enum):
    """What a path that is explained holds."""

    run = "run"
    forecast = "forecast"
    """A saved forecast, or a plan, of which the best is explained."""
    profile = "profile"


def kind_of(path: Path) -> ExplainedKind | None:
    """What a path holds, by its content; None where it is nothing that can be explained.

    Raises:
        DataError: a forecast or plan that is damaged.
        OptionError: a JSON file that is no JSON.
    """
    from systolic.session.profiles import is_profile
    from systolic.session.saved import is_saved

    if (path / JOB).is_file():
        return ExplainedKind.run
    if is_profile(path):
        return ExplainedKind.profile
    return ExplainedKind.forecast if is_saved(path) else None


@with_types
def explain(  # noqa: PLR0913  the options of systolic explain
    target: Annotated[
        Job | str | Path, Wording("a Job, the name of a recipe or a model, or a path")
    ],
    *,
    on: Annotated[str | Slice | None, SLICE] = None,
    step: StepKind | str = StepKind.train,
    flags: str = "",
    remedies: Annotated[int | None, NOT_NEGATIVE] = None,
    trust: bool = False,
    chip: str = "",
    watch: ExplainWatch = lambda _: None,
    trips: Trips = (),
    costs: Costs = (),
    calibration: Calibration | Path | str | None = None,
    **options: Any,
) -> Any:
    """Why a step is slow or does not fit, or what keeps a run from learning, and what changes that.

    Args:
        target: A job, or the name of a recipe or a model that makes one; or the path of a run, of a profile, or of what ``systolic forecast --json`` or ``plan`` wrote.
        on: The slice, of a job.
        step: Which of a job's steps, ``train``, ``eval``, ``prefill`` or ``decode``; changes are tried for train steps only.
        flags: Compiler flags of a job, beside those that all jobs on the chip share; ``none`` leaves these out.
        remedies: Changes to try: by default 10 for a step, 4 for a run's profile; 0 finds causes only.
        trust: Execute a run's recipe although it is another user's.
        chip: The chip of a profile whose file does not name it, as a ``trace.json.gz`` does not: ``tpu7x``.
        watch: Is given the progress.
        trips: Trips of loops that a job's program leaves open: ``{"while.5": 100}``, by name or ``file.py:line``.
        costs: Time of one call of a kernel, a custom call or a callback: ``{"my_kernel": 1.2e-3}`` in seconds, or ``"1.2ms"``.
        calibration: Corrections of the simulator from profiles of the slice's chip, for a job: a name that
            ``systolic calibrations`` lists, or the path of a calibration's file.
        options: Of the recipe that ``target`` names; of a job ``steps`` and ``layout``.

    Returns:
        A :class:`StepExplanation`, :class:`~systolic.session.runs.RunExplanation` or
        :class:`~systolic.session.profiles.ProfileExplanation`.

    Raises:
        NotFoundError: the path holds nothing that can be explained.
        OptionError: a job without a slice, or a slice that is not of TPUs.
    """
    check_arguments(explain, {"remedies": remedies}, lambda name: f"--{name}")
    what = _named(target, on, options)
    if isinstance(what, Job):
        if on is None:
            raise OptionError("explaining a job needs a slice; give on='v5e-16'")
        place = slice(on) if isinstance(on, str) else on
        most = REMEDIES if remedies is None else remedies
        return StepExplainer(
            job=what,
            on=place,
            step=member(StepKind, step, "--step"),
            flags=resolved(flags, place.chip),
            remedies=most,
            watch=watch,
            given=given_with(trips, costs, calibration, place),
        ).explain()
    if calibration:
        raise OptionError(
            f"calibration is given and {what} is no job: a run and a profile are measured, and a saved forecast is of the steps that it names; give a recipe or a Job with on='v5e-16'"
        )
    path = what
    explainers: Mapping[ExplainedKind, Callable[[], Any]] = {
        ExplainedKind.run: lambda: _run(path, trust, watch),
        ExplainedKind.forecast: lambda: _saved(path, remedies, watch),
        ExplainedKind.profile: lambda: _profile(path, remedies, trust, chip, watch),
    }
    kind = kind_of(path)
    if kind is None:
        raise NotFoundError(
            f"{path} is no run, profile, forecast, recipe or model; give a directory that systolic train made, an xplane.pb or trace.json.gz, what systolic forecast --json or systolic plan wrote, or a name that systolic recipes lists"
        )
    return explainers[kind]()


def _named(
    target: Job | str | Path, on: str | Slice | None, options: Mapping[str, Any]
) -> Job | Path:
    """The job that is explained, or the path of files."""
    if isinstance(target, Job):
        return source_of(target, options).job if options else target
    name = str(target)
    if kind_of(Path(target)) is None and (on is not None or options or recipes.is_named(name)):
        return source_of(name, options).job
    if options:
        raise OptionError(
            f"{name} holds what it was made with, and {', '.join(options)} would change that; leave it out"
        )
    return Path(target)


def _run(path: Path, trust: bool, watch: ExplainWatch) -> Any:
    from systolic.session.runs import explain_run

    return explain_run(path, trust=trust, watch=watch)


def _saved(path: Path, remedies: int | None, watch: ExplainWatch) -> StepExplanation:
    from systolic.session.saved import saved_step

    most = REMEDIES if remedies is None else remedies
    return replace(saved_step(path).explainer(), remedies=most, watch=watch).explain()


def _profile(path: Path, remedies: int | None, trust: bool, chip: str, watch: ExplainWatch) -> Any:
    from systolic.session.profiles import REMEDIES as FEW
    from systolic.session.profiles import explain_profile

    most = FEW if remedies is None else remedies
    return explain_profile(path, remedies=most, trust=trust, chip=chip, watch=watch)
