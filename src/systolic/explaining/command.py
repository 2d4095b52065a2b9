"""``systolic explain`` and :func:`systolic.explain`: what holds a step or a run back, and what to change; ``systolic calibrate``: corrections of the simulator from what chips measured."""

import enum
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic import recipes
from systolic.chips import SLICE, Slice, slice
from systolic.chips.flags import resolved
from systolic.compiling import StepKind
from systolic.core.arguments import PYTHON, OptionWords, Required, Wording, command_of, explained_by
from systolic.core.errors import DataError, NotFoundError, OptionError, nearest
from systolic.core.machine import bounded_workers
from systolic.core.option_words import path_text
from systolic.core.ranges import NOT_NEGATIVE, POSITIVE
from systolic.core.reporter import reporter, working
from systolic.forecasting.command import forecast_command
from systolic.job import Job
from systolic.recipes.jobs import JobSource, source_of
from systolic.runs.run import JOB, runs_in
from systolic.sim.calibration import Calibration

if TYPE_CHECKING:
    from systolic.explaining.explainer import ProgramExplanation, StepExplanation
    from systolic.explaining.profiles import ProfileExplanation
    from systolic.explaining.runs import RunExplanation
    from systolic.explaining.saved import StepComparison
    from systolic.forecasting.calibrations import CalibrationRecord


USAGE = """usage: systolic explain RECIPE --on SLICE [options]
       systolic explain FORECAST.json [--against OTHER.json] [options]
       systolic explain RUN [--quick] [--trust] [--json]
       systolic explain PROFILE [--against DUMP.txt] [--html PAGE] [options]
       systolic explain DUMP.txt --on SLICE [options]
       systolic explain --on SLICE [options] -- python train.py [its options]

RECIPE (or a model: llama-3.1-70b, a config.json) is forecast on the slice. The answer is where its step's time goes and
which changes of settings help: each is compiled and forecast again, then combined until none helps. For a step that
does not fit, the answer is the fastest layout that does. FORECAST.json is a file of systolic forecast --json or
systolic plan; it takes the recipe's options too, and --against shows what makes one of two files slower. Both files
are forecast from the compiler's schedule, however they were made.

RUN is the directory of a run, ended or still training. The answer, worst first, is what keeps it from learning (spikes,
dead gradients, learning rate, batch, rounding, overfitting) and what took time besides the steps (input,
recompilation, evaluation, checkpoints).

PROFILE is an XProf xplane.pb or trace.json.gz of a TPU, GPU or CPU, or a directory with such files: RUN/profile after
systolic train --profile N, or the output of jax.profiler.trace. Files of several hosts are read together; of several
runs the newest is read. The answer is where the median step's time goes: waiting for input, the host, copies from and
to its memory or other devices, recompilation, and slow ops, each with its bytes and rate. For a run on TPUs it also lists
changes of settings that help, each forecast for its slice.

DUMP.txt is scheduled HLO of another program: compiled.as_text(), or XLA's dump after optimizations. -- runs a JAX program
of your own, unchanged, until its step is known, as systolic forecast does. Both answers have the same causes, but no
changes of settings, since systolic does not know the program's options.

SLICE is one of TPUs, or with the extra gpu-forecast of GPUs: 8xh100.

Exits with 1 when a step does not fit and no change makes it fit. Changes are tried for train steps
only; systolic plan searches further."""

TARGET = Wording("a Job, the name of a recipe or a model, or a path")
COMMAND = Wording("the words of a command, such as ['python', 'train.py']")
ON = Required("a slice; add --on v5e-16, systolic chips lists them")
ON_PROGRAM = Required("a slice; add --on v5e-8, systolic chips lists them")
REPEATED = OptionWords(tuple[str, ...], repeated=True)
TripsOption = Annotated[Mapping[str, float | str] | Sequence[str], REPEATED]
CostsOption = Annotated[
    Mapping[str, float | str] | Sequence[str],
    OptionWords(tuple[str, ...], repeated=True, name="cost"),
]
CalibrationOption = Annotated[Calibration | Path | str | None, OptionWords(str, default="")]
Reader = Callable[..., Mapping[str, Any]]
CALIBRATE_USAGE = """usage: systolic calibrate PROFILE [PROFILE ...] --name NAME [options]

PROFILE is an XProf xplane.pb or trace.json.gz of a TPU, or a directory with such files: RUN/profile after systolic
train --profile N, or the output of jax.profiler.trace. Each op is compared with its price in the simulated program,
which an xplane.pb contains. Without it, --against names a dump of the program; without that, ops are priced from
their lines, except for kernels and for fusions without a matmul. The result is a few factors, measured over simulated
seconds of matmuls, kernels, elementwise fusions, data formatting and each kind of collective, and the bytes per
second of the host link.

Passes and formatting in vector memory have their own factors. No factor makes an op faster than the published
rates of the matrix units, device memory, links and host link.

Use it with systolic forecast, plan and explain --calibration NAME. systolic calibrations lists all."""
LIST_USAGE = """usage: systolic calibrations [NAME] [options]

Lists the calibrations of systolic calibrate: corrections of the simulator from measured profiles.

They are files in ~/.config/systolic/calibrations, or under $XDG_CONFIG_HOME; remove a file to delete one."""
CALIBRATION_NAME = Required("a name; add --name my-v5e, which --calibration my-v5e then takes")
PROFILES = OptionWords(tuple[Path, ...])


class ExplainedKind(enum.Enum):
    """Kinds of targets, each with a form of the verb."""

    recipe = "recipe"
    run = "run"
    forecast = "forecast"
    """A saved forecast, or a plan, of which the best is explained."""
    profile = "profile"
    dump = "dump"
    """Scheduled HLO text."""
    program = "program"
    """The words of a command."""


def kind_of(path: Path) -> ExplainedKind | None:
    """The kind of what a path holds, by its content; None where it is nothing that can be explained.

    Raises:
        DataError: a forecast or plan that is damaged.
        OptionError: a JSON file that is no JSON.
    """
    if not path.exists():
        return None
    from systolic.explaining.profiles import is_profile
    from systolic.explaining.saved import is_saved

    if (path / JOB).is_file():
        return ExplainedKind.run
    if is_profile(path):
        return ExplainedKind.profile
    return ExplainedKind.forecast if is_saved(path) else None


def target_kind(target: str) -> ExplainedKind:
    """The kind of what the first word of a command line names.

    Raises:
        NotFoundError: nothing that can be explained; names the nearest run or recipe.
    """
    kind = kind_of(Path(target))
    if kind is not None:
        return kind
    if ".py:" in target or target.endswith(".py") or recipes.is_named(target):
        return ExplainedKind.recipe
    if _is_hlo(Path(target)):
        return ExplainedKind.dump
    raise _unknown(target)


def _is_hlo(path: Path) -> bool:
    """Whether a path is a file of HLO text."""
    if not path.is_file():
        return False
    from systolic.profile.files import beginning

    return beginning(path).lstrip().startswith(b"HloModule")


def _unknown(target: str) -> NotFoundError:
    if Path(target).exists():
        from systolic.profile.files import other

        if Path(target).is_file() and (what := other(Path(target))):
            return NotFoundError(f"{target} is {what}")
        if inside := runs_in(Path(target)):
            return NotFoundError(
                f"{target} is no run but holds {len(inside)}; give one of them: {', '.join(map(str, inside[:3]))}{' …' if len(inside) > 3 else ''}"
            )
        return NotFoundError(
            f"{target} is no run, profile, recipe or forecast; give a directory that systolic train made, an xplane.pb or trace.json.gz, a recipe with --on SLICE, or what systolic forecast --json or systolic plan wrote"
        )
    from systolic.recipes.models import names

    recipes.refuse_missing_file(target)
    runs = {str(job.parent) for job in Path(target).parent.glob(f"*/{JOB}")}
    runs |= {str(job.parent) for job in Path("runs").glob(f"*/{JOB}")}
    return NotFoundError(
        f"{target} is no recipe, run, profile or forecast{nearest(target, [*recipes.shipped(), *names(), *runs])}; systolic recipes lists recipes and models"
    )


# From Python: one function for all that can be explained


@command_of
def explain(  # noqa: PLR0913  the options of all forms
    target: Annotated[Job | JobSource | str | Path | Sequence[str], TARGET],
    *,
    on: Annotated[str | Slice | None, SLICE] = None,
    step: StepKind | str | None = None,
    flags: str = "",
    remedies: Annotated[int | None, NOT_NEGATIVE] = None,
    workers: Annotated[int, NOT_NEGATIVE] = 0,
    quick: bool = False,
    trust: bool = False,
    chip: str = "",
    against: Path | str = "",
    minutes: Annotated[float | None, POSITIVE] = None,
    trips: TripsOption = (),
    costs: CostsOption = (),
    calibration: CalibrationOption = None,
    **options: Any,
) -> "StepExplanation | StepComparison | RunExplanation | ProfileExplanation | ProgramExplanation":
    """Explains why a step is slow or does not fit, or what keeps a run from learning, and what changes that.

    Args:
        target: A job, or the name of a recipe or a model that makes one; the path of a run, of a profile, of scheduled
            HLO, or of what ``systolic forecast --json`` or ``plan`` wrote; or the words of a command that starts a program.
        on: The slice of a job, a dump or a program; for a saved forecast a slice in place of its own.
        step: Which of a job's steps, ``train``, ``eval``, ``prefill`` or ``decode``; changes are tried for train steps
            only. Of a program the name of the jitted function that is the step.
        flags: Compiler flags of a job, on top of those that all jobs on the chip share; ``none`` leaves these out.
        remedies: Changes to try: by default 10 for a step, 4 for a run's profile; 0 finds causes only.
        workers: Parallel compiles; 0 takes as many as cores and memory allow.
        quick: Judge a run by its records only.
        trust: Execute a run's recipe although it is another user's.
        chip: The chip of a profile whose file does not name it, as a ``trace.json.gz`` does not: ``tpu7x``.
        against: For a saved forecast another one; for a profile its program's scheduled HLO, ``program`` or ``lines``.
        minutes: Minutes that a program may take to its step; 20 by default.
        trips: Trips of loops that a program leaves open: ``{"while.5": 100}``, by name or ``file.py:line``.
        costs: Time of one call of a kernel, a custom call or a callback: ``{"my_kernel": 1.2e-3}`` in seconds, or ``"1.2ms"``.
        calibration: Corrections of the simulator from profiles of the slice's chip: a name that
            ``systolic calibrations`` lists, or the path of a calibration's file.
        options: Options of the recipe that ``target`` names; of a job ``steps`` and ``layout``.

    Raises:
        NotFoundError: the path holds nothing that can be explained.
        OptionError: a job without a slice, a slice without a compiler here, or an option that has no effect on the target.
    """
    values = {
        name: value
        for name, value in {
            "on": on,
            "step": step,
            "flags": flags,
            "remedies": remedies,
            "workers": workers,
            "quick": quick,
            "trust": trust,
            "chip": chip,
            "against": against,
            "minutes": minutes,
            "trips": trips,
            "costs": costs,
            "calibration": calibration,
        }.items()
        if value not in (None, "", 0, False, ()) or (name == "remedies" and value is not None)
    }
    kind = _kind(target, on, options)
    function = _FUNCTIONS[kind]
    taken = inspect.signature(function).parameters
    if on is None and "on" in taken and taken["on"].default is inspect.Parameter.empty:
        what = "job" if kind is ExplainedKind.recipe else kind.value
        raise OptionError(f"explaining a {what} needs a slice; give on='v5e-16'")
    if calibration and kind in (ExplainedKind.run, ExplainedKind.profile):
        raise OptionError(
            f"calibration is given and {target} is no job: a run and a profile are measured; give a recipe or a Job with on='v5e-16'"
        )
    for name in values:
        if name not in taken:
            raise OptionError(
                f"{name} has no effect on a {kind.value}, which {_name(target)} is; leave it out"
            )
    if options and "options" not in taken:
        raise OptionError(
            f"{target} holds what it was made with, and {', '.join(options)} would change that; leave it out"
        )
    return function(target, **values, **options)


def _name(target: Any) -> str:
    """Name of a target in messages."""
    if isinstance(target, Job | JobSource):
        return target.name if isinstance(target, Job) else target.recipe.target
    return path_text(target) if isinstance(target, str | Path) else " ".join(target)


def _kind(target: Any, on: str | Slice | None, options: Mapping[str, Any]) -> ExplainedKind:
    """The kind of a target from Python.

    Raises:
        NotFoundError: a path that holds nothing that can be explained.
    """
    if isinstance(target, Job | JobSource):
        return ExplainedKind.recipe
    if not isinstance(target, str | Path):
        return ExplainedKind.program
    path = Path(target)
    kind = kind_of(path)
    if kind is not None:
        return kind
    if _is_hlo(path):
        return ExplainedKind.dump
    if on is not None or options or recipes.is_named(path_text(target)):
        return ExplainedKind.recipe
    if path.exists():
        raise _unknown(path_text(target))
    recipes.refuse_missing_file(path_text(target))
    raise NotFoundError(
        f"{_name(target)} is no run, profile, forecast, recipe or model; give a directory that systolic train made, an xplane.pb or trace.json.gz, what systolic forecast --json or systolic plan wrote, or a name that systolic recipes lists"
    )


# Steps


@command_of
def explain_step(  # noqa: PLR0913  the options of systolic explain RECIPE
    job: Annotated[
        Job | JobSource | str | Path, Wording("a Job or the name of a recipe or a model")
    ],
    *,
    on: Annotated[str | Slice, SLICE, ON],
    step: StepKind = StepKind.train,
    flags: str = "",
    remedies: Annotated[int, NOT_NEGATIVE] = 10,
    workers: Annotated[int, NOT_NEGATIVE] = 0,
    trips: TripsOption = (),
    costs: CostsOption = (),
    calibration: CalibrationOption = None,
    **options: Any,
) -> "StepExplanation":
    """Explains why a step is slow or does not fit, and what changes that.

    Args:
        job: The job, or what makes it.
        on: The slice: v5e-16, v5p-128, tpu7x-8, 2xv5e-256.
        step: Which of the job's steps: train, eval, prefill or decode; changes of settings are tried for train steps only.
        flags: Compiler flags on top of the set that all jobs on the chip share (systolic chips v5e lists it); none leaves that set out.
        remedies: Changes of settings to compile and forecast, one at a time, if the step fits. Up to twice as many follow: combinations of the best, until none helps, and changes of precision and batch. 0 lists only causes.
        workers: Parallel compiles; 0 takes as many as cores and memory allow.
        trips: Number of iterations of a loop whose length the program does not fix, NAME=NUMBER, such as while.5=100; may be repeated.
        costs: Time of one call of a kernel, custom call or callback, NAME=TIME, such as my_kernel=1.2ms; may be repeated.
        calibration: Correct the simulator with profiles of this chip: a name that systolic calibrations lists, or a calibration's file.
        options: Options of the recipe.

    Raises:
        OptionError: the slice is not of TPUs, or an option does not parse.
        NotFoundError: there is no such recipe, slice or calibration.
        LayoutError: the layout does not divide the slice, the model or the batch.
        RunError: the compiler failed.
    """
    from systolic.explaining.explainer import RecipeStep
    from systolic.forecasting.calibrations import given_with

    source = source_of(path_text(job) if isinstance(job, Path) else job, options)
    place = slice(on) if isinstance(on, str) else on
    of = RecipeStep(
        recipe=source.recipe,
        options=source.options,
        on=place,
        flags=resolved(flags, place.chip),
        step=step,
    )
    known = given_with(trips, costs, calibration, place)
    explainer = replace(
        of.explainer(), remedies=remedies, workers=bounded_workers(workers), given=known
    )
    with working(f"{source.recipe.target} for {place.name}"):
        return explainer.explain()


@command_of
@explained_by(explain_step)
def explain_saved(  # noqa: PLR0913  the options of systolic explain FORECAST.json
    path: Path | str,
    *,
    against: Path | None = None,
    on: Annotated[str | Slice | None, SLICE] = None,
    step: StepKind | None = None,
    flags: str = "",
    remedies: Annotated[int, NOT_NEGATIVE] = 10,
    workers: Annotated[int, NOT_NEGATIVE] = 0,
    trips: TripsOption = (),
    costs: CostsOption = (),
    calibration: CalibrationOption = None,
    reader: Annotated[Reader | None, PYTHON] = None,
    **options: Any,
) -> "StepExplanation | StepComparison":
    """Options of a saved forecast or plan.

    Args:
        path: The file.
        against: Another saved forecast or plan: print what makes one slower.
        on: Slice in place of the file's.
        step: Step of the job in place of the file's.
        flags: Compiler flags on top of those of the file; none leaves these out.
        reader: Makes the recipe's options, where they are not given by name.
        options: Options of the recipe, in place of those of the file.

    Raises:
        NotFoundError: there is no such file, slice, recipe or calibration.
        DataError: a file is damaged, or nothing in the plan fits.
        OptionError: ``against`` is no forecast, or an option does not parse.
        RunError: a file does not say what it was made of, its recipe may not be executed, or the compiler failed.
    """
    from systolic.explaining.saved import compare, is_saved, saved_step, step_of_file
    from systolic.forecasting.calibrations import calibration_for
    from systolic.sim.incomplete import given

    if against is not None and not against.is_file():
        raise NotFoundError(f"{against} is no file; write one with systolic forecast … --json")
    if against is not None and not is_saved(against):
        raise OptionError(f"{against} is not a forecast; write one with systolic forecast … --json")
    place = slice(on) if isinstance(on, str) else on
    of = step_of_file(Path(path), on=place, step=step, flags=flags, reader=reader, options=options)
    other = None if against is None else saved_step(against)
    slices = [of.on] if other is None else [of.on, other.on]
    known = replace(given(trips, costs), calibration=calibration_for(calibration, slices))
    with working(f"{of.recipe.target} for {of.on.name}"):
        if other is not None and against is not None:
            return compare(of, other, known, (path_text(path), path_text(against)))
        explainer = replace(
            of.explainer(), remedies=remedies, workers=bounded_workers(workers), given=known
        )
        return explainer.explain()


# Runs and profiles


@command_of
def explain_run(path: Path | str, *, quick: bool = False, trust: bool = False) -> "RunExplanation":
    """Options of a run.

    Args:
        path: The run, which has ended or is still training.
        quick: Use only the run's records. Otherwise a run without gradient probes is probed now, at its newest checkpoint, if this machine can.
        trust: Execute the run's recipe.py even if it is another user's; its digest is remembered for later commands.

    Raises:
        NotFoundError: the run does not exist.
        RunError: its records are damaged.
    """
    from systolic.explaining.runs import explain_run as explained

    with working(path_text(path)):
        return replace(explained(Path(path), quick=quick, trust=trust), target=path_text(path))


@command_of
@explained_by(explain_step, explain_run)
def explain_profile(
    path: Path | str,
    *,
    remedies: Annotated[int, NOT_NEGATIVE] = 4,
    workers: Annotated[int, NOT_NEGATIVE] = 0,
    trust: bool = False,
    chip: str = "",
    against: Annotated[Path | str, OptionWords(str)] = "",
) -> "ProfileExplanation":
    """Options of a profile.

    Args:
        path: An ``xplane.pb``, a ``trace.json.gz`` or a directory with some.
        remedies: Changes of settings to compile and forecast, one at a time, for the profile of a run on TPUs. Up to twice as many follow: combinations of the best. 0 lists only causes.
        chip: The devices' chip, such as tpu7x: a trace.json.gz does not name it, and rates need its peaks.
        against: Compare the measurement with a forecast of the program, op by op. Give its scheduled HLO text, or program for the one in an xplane.pb, or lines to price each op from its line in the profile.

    Raises:
        NotFoundError: there is no such file.
        OptionError: ``chip`` is another than the one that the profile names; or ``against`` is of another program.
        DataError: a file is damaged, or the profile has no steps.
    """
    from systolic.explaining.profiles import check
    from systolic.explaining.profiles import explain_profile as explained

    if against:
        check(path_text(against))
    with working(path_text(path)):
        explanation = explained(
            Path(path),
            remedies=remedies,
            workers=bounded_workers(workers),
            trust=trust,
            chip=chip,
            against=path_text(against),
        )
    return replace(explanation, target=path_text(path))


# Programs that no recipe made


@command_of
@explained_by(explain_step, forecast_command)
def explain_program(
    command: Annotated[Sequence[str], COMMAND],
    *,
    on: Annotated[str | Slice, SLICE, ON_PROGRAM],
    step: str = "",
    minutes: Annotated[float, POSITIVE] = 20.0,
    trips: TripsOption = (),
    costs: CostsOption = (),
    calibration: CalibrationOption = None,
) -> "ProgramExplanation":
    """Options of a program of your own (-- python train.py).

    Args:
        command: The program with its options; it runs in its own environment, unchanged.
        on: The slice of TPUs or GPUs that the program sees.
        step: Name of the jitted function that is the step; by default the sequence of calls that repeats.

    Raises:
        OptionError: an option that does not parse, or several slices.
        NotFoundError: there is no such command, slice or calibration.
        RunError: the program failed, or has no step in its minutes.
    """
    from systolic.capture import short_name
    from systolic.explaining.explainer import captured_explanation
    from systolic.forecasting.calibrations import given_with

    if isinstance(on, str) and "," in on:
        raise OptionError(
            f"--on {on} names several slices, and a step is explained for one; systolic plan --on {on} -- … compares them"
        )
    place = slice(on) if isinstance(on, str) else on
    known = given_with(trips, costs, calibration, place)
    with (
        tempfile.TemporaryDirectory(prefix="systolic-") as folder,
        working(f"{short_name(command)} for {place.name}"),
    ):
        return captured_explanation(
            command, place, Path(folder), step=step, seconds=60 * minutes, given=known
        )


@command_of
@explained_by(explain_step)
def explain_dump(
    path: Path | str,
    *,
    on: Annotated[str | Slice, SLICE, ON_PROGRAM],
    trips: TripsOption = (),
    costs: CostsOption = (),
    calibration: CalibrationOption = None,
) -> "ProgramExplanation":
    """Options of scheduled HLO that another program dumped.

    Args:
        path: The file.
        on: The slice that it was compiled for.

    Raises:
        NotFoundError: there is no such file, slice or calibration.
        DataError: the file is no scheduled HLO, or damaged.
        OptionError: it was compiled for another slice.
    """
    from systolic.explaining.explainer import dump_explanation
    from systolic.forecasting.calibrations import given_with

    place = slice(on) if isinstance(on, str) else on
    known = given_with(trips, costs, calibration, place)
    return dump_explanation(Path(path), place, known)


_FUNCTIONS: Mapping[ExplainedKind, Callable[..., Any]] = {
    ExplainedKind.recipe: explain_step,
    ExplainedKind.run: explain_run,
    ExplainedKind.forecast: explain_saved,
    ExplainedKind.profile: explain_profile,
    ExplainedKind.dump: explain_dump,
    ExplainedKind.program: explain_program,
}


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A calibration from profiles."""

    record: "CalibrationRecord"
    file: Path
    replaced: bool
    """Whether an earlier one of the name was there."""


@command_of
def calibrate(
    profiles: Annotated[Path | str | Sequence[Path | str], PROFILES],
    *,
    name: Annotated[str, CALIBRATION_NAME],
    against: Annotated[Sequence[Path | str], PROFILES] = (),
    chip: str = "",
    on: Annotated[str | Slice, SLICE] = "",
) -> Calibrated:
    """Corrects the simulator with profiles of TPUs, and writes the corrections to the user's folder.

    Args:
        profiles: Profiles of one generation of TPUs; several are combined.
        name: Name of the calibration; an existing one is replaced.
        against: Scheduled HLO of the profiled program, if the profiles do not contain it; may be several files.
        chip: The devices' chip, such as tpu7x: a trace.json.gz does not name it.
        on: The slice that the profiles were recorded on; by default as many devices of the chip as the programs name.

    Raises:
        NotFoundError: there is no such profile or dump.
        DataError: a file is damaged, or no op of the profiles has a price to compare with its time.
        OptionError: the chip is not known, is no TPU, or differs between the profiles; or a dump is of another program.
        RunError: the calibration can't be written.
    """
    from systolic.explaining.calibrating import CalibrationRequest, record_of
    from systolic.forecasting.calibrations import path_of, save

    paths = [profiles] if isinstance(profiles, str | Path) else profiles
    record = record_of(
        CalibrationRequest(
            profiles=[Path(path) for path in paths],
            name=name,
            against=[Path(path) for path in against],
            chip=chip,
            on=on,
        )
    )
    replaced = path_of(name).is_file()
    return Calibrated(record=record, file=save(record), replaced=replaced)


@command_of
def calibrations(
    name: Annotated[Path | str | None, OptionWords(str | None)] = None,
) -> "Sequence[CalibrationRecord] | CalibrationRecord":
    """Lists the calibrations that systolic calibrate made.

    Args:
        name: A calibration, or the path of its file: what it corrects, and how much each factor rests on.

    Returns:
        All calibrations, or the named one. A damaged file is left out of the list, with a warning.

    Raises:
        NotFoundError: no calibration has that name.
        DataError: its file is damaged.
    """
    from systolic.forecasting.calibrations import load, names

    if name is not None:
        return load(name)
    records = []
    for stem in names():
        try:
            records.append(load(stem))
        except DataError as error:
            reporter().warn(str(error))
    return records
