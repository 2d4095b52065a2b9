"""``systolic train``, :func:`systolic.train`, :func:`systolic.resume`, :func:`systolic.rehearse` and :func:`systolic.replay`."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic.chips import SLICE, Slice, slice
from systolic.core.arguments import (
    PYTHON,
    OptionWords,
    Partner,
    Required,
    Wording,
    command_of,
    explained_by,
)
from systolic.core.errors import OptionError
from systolic.core.machine import bounded_workers
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.core.reporter import reporter
from systolic.job import Job
from systolic.recipes.jobs import JobSource, given_options, source_of
from systolic.runs.metrics import Watcher

if TYPE_CHECKING:
    from systolic.planning.plan import Plan
    from systolic.training.rehearsal import Rehearsal
    from systolic.training.session import ReplayedStep, SessionOptions, TrainResult

JOB = Wording("a Job, the name of a recipe or 'path/to/file.py:function'")
Reader = Callable[..., Mapping[str, Any]]
"""All options of a run's recipe, from the recipe and the run's own."""

USAGE = """usage: systolic train RECIPE [options]
       systolic train RECIPE --plan plan.json [options]
       systolic train RECIPE --rehearse SLICE [options]
       systolic train --resume RUN [options]
       systolic train --replay RUN/bad/step-N.npz [options]

RECIPE is a name that systolic recipes lists, or path/to/file.py:function.
--plan uses the answer of systolic plan: slice, layout, batch, precision, steps and compiler flags. --candidate 2
uses the second of its ranking.
--resume continues from the newest intact checkpoint. Options replace the run's own, and the changes are listed;
another model, data or seed is refused.
--replay computes the train step of a bad step's batch again and reports what is wrong with it.
Both execute the run's recipe.py if it is yours, and another user's only with --trust.
systolic train RECIPE --help shows the recipe's options."""


@command_of
def train(  # noqa: PLR0913  the options of systolic train
    job: Annotated[Job | JobSource | str, JOB],
    on: Annotated[Slice | str | None, SLICE] = None,
    *,
    run: Path | str | None = None,
    continue_: bool = False,
    plan: Annotated["Plan | Path | str | None", OptionWords(Path | None)] = None,
    candidate: Annotated[int, COUNT, Partner("plan")] = 1,
    init_from: Path | str | None = None,
    executable: Path | str | None = None,
    flags: str = "",
    workers: Annotated[int, NOT_NEGATIVE] = 0,
    diagnose: Annotated[int | None, NOT_NEGATIVE] = None,
    profile: Annotated[int, NOT_NEGATIVE] = 0,
    log_every: Annotated[int | None, COUNT] = None,
    for_devices: Annotated[int | None, COUNT] = None,
    coordinator: str | None = None,
    processes: Annotated[int | None, COUNT] = None,
    process: Annotated[int | None, NOT_NEGATIVE] = None,
    watchers: Annotated[Sequence[Watcher], PYTHON] = (),
    **options: Any,
) -> "TrainResult":
    """Trains a job in a new run, on the local devices.

    Ctrl-C and SIGTERM end it after the step that runs, with a checkpoint; :func:`resume` continues it.

    Args:
        job: A Job, or a recipe: its name or ``path/to/file.py:function``.
        on: The slice that the local devices are expected to be.
        run: The run's directory, or s3://BUCKET/FOLDER or gs://BUCKET/FOLDER; by default runs/NAME-TIME.
        continue_: Continue the run of --run from its newest checkpoint if it exists; otherwise start it. For machines that rerun the same command.
        plan: File of systolic plan: train its best candidate with the planned options, and compare the forecast with the measurement.
        candidate: Rank of the plan's candidate.
        init_from: Start from the weights of this run (its best checkpoint) or of RUN/checkpoints/STEP, with a new optimizer state.
        executable: Use the compiled train step of systolic forecast --save instead of compiling it.
        flags: Compiler flags on top of the set that jobs on these devices share (systolic chips v5e lists it): --flags="--xla_tpu_scoped_vmem_limit_kib=65536"; none leaves that set out.
        workers: Processes that read and transform data; 0 uses threads.
        diagnose: Steps between gradient probes by layer, for systolic explain; 0 never probes, by default as often as 1 % of the time allows.
        profile: Steps to trace with XLA's profiler after warm-up, into RUN/profile, for systolic explain RUN/profile; at the end their ops are compared with the program's forecast.
        log_every: Steps between records, each the mean of its steps; by default a 400th of the job.
        for_devices: Number of devices that layout and batch are meant for; on fewer, each step has the same batch in more passes.
        coordinator: HOST:PORT of the first of several processes, if Cloud TPU, GKE, Slurm or MPI does not provide it.
        processes: Number of processes that train together, with --coordinator.
        process: Index of this process, from 0.
        watchers: See each record as it is written to ``metrics.jsonl``.
        options: Options of the recipe; of a Job ``steps`` and ``layout``.

    Raises:
        OptionError: an option is unknown, out of its range, or contradicts the plan.
        RunError: the devices differ from ``on`` or the plan, or the loss is not finite or jumps under the
            guard's rule ``stop``.
        LayoutError: an axis does not divide the devices, the batch or the model.
        DataError: the data is empty or damaged.
    """
    from systolic.training import distributed
    from systolic.training.ledger import Ledger
    from systolic.training.session import Audience, SessionOptions, start

    ledger, audience = Ledger(), Audience(watchers=watchers)
    distributed.describe(coordinator, processes, process)
    settings = SessionOptions(
        executable=_path(executable),
        flags=flags,
        workers=workers,
        diagnose=diagnose,
        profile=profile,
        log_every=log_every,
        for_devices=for_devices,
        on=_slice(on),
    )
    source = _planned(job, plan, candidate, options, audience.warn)
    if continue_ and _begun(_path(run)):
        return _again(source, settings, Path(run or ""), _path(init_from), audience, ledger)
    return start(
        source,
        settings,
        audience,
        run=_path(run),
        init_from=_path(init_from),
        ledger=ledger,
    )


@command_of
@explained_by(train)
def resume(  # noqa: PLR0913  the options of systolic train --resume
    path: Path | str,
    job: Annotated[Job | None, Wording("a Job, or None for the run's own")] = None,
    on: Annotated[Slice | str | None, SLICE] = None,
    *,
    executable: Path | str | None = None,
    flags: str | None = None,
    workers: Annotated[int, NOT_NEGATIVE] = 0,
    diagnose: Annotated[int | None, NOT_NEGATIVE] = None,
    profile: Annotated[int, NOT_NEGATIVE] = 0,
    log_every: Annotated[int | None, COUNT] = None,
    for_devices: Annotated[int | None, COUNT] = None,
    trust: bool = False,
    coordinator: str | None = None,
    processes: Annotated[int | None, COUNT] = None,
    process: Annotated[int | None, NOT_NEGATIVE] = None,
    watchers: Annotated[Sequence[Watcher], PYTHON] = (),
    reader: Annotated[Reader | None, PYTHON] = None,
    **options: Any,
) -> "TrainResult":
    """Continues a run exactly as if it had not ended; options of its recipe replace the run's own.

    Args:
        path: The run's directory, or s3://BUCKET/FOLDER or gs://BUCKET/FOLDER.
        job: For a run that was made from a Job with types of your own: that Job.
        flags: Compiler flags in place of those that the run was started with; none for XLA's defaults.
        diagnose: Steps between gradient probes by layer, for systolic explain; 0 never probes, by default as the run was started.
        log_every: Steps between records, each the mean of its steps; by default as the run was started.
        trust: Execute the run's recipe even if it is another user's; its digest is remembered for later commands.
        reader: Makes the recipe's options, where they are not given by name.
        options: Options of the recipe, in place of the run's own; of a Job ``steps`` and ``layout``.

    Returns:
        ``trained`` is False if the run was already finished.

    Raises:
        NotFoundError: the path is no run.
        OptionError: an option that a run keeps has changed, or the run has more steps than the job.
        DataError: the run's data has changed.
        TrustError: the run's recipe is another user's.
    """
    from systolic.recipes import expanded
    from systolic.training import distributed
    from systolic.training.ledger import Ledger
    from systolic.training.resuming import continue_run, opened
    from systolic.training.session import Audience, SessionOptions

    ledger, audience = Ledger(), Audience(watchers=watchers)
    distributed.describe(coordinator, processes, process)
    settings = SessionOptions(
        executable=_path(executable),
        flags=flags,
        workers=workers,
        diagnose=diagnose,
        profile=profile,
        log_every=log_every,
        for_devices=for_devices,
        on=_slice(on),
    )
    with opened(Path(path), trust=trust, job=job) as run:
        before = run.saved if job is None else {"steps": job.steps, "layout": job.layout}
        if reader is not None:
            values = reader(run.recipe, before)
        else:
            values = {**before, **expanded(run.recipe, options, before)}
        return continue_run(run, run.source(values), settings, audience, ledger=ledger)


@command_of
@explained_by(train)
def rehearse(
    job: Annotated[Job | JobSource | str, JOB],
    *,
    on: Annotated[Slice | str, SLICE, OptionWords(str, name="rehearse"), Required("a slice")],
    plan: Annotated["Plan | Path | str | None", OptionWords(Path | None)] = None,
    candidate: Annotated[int, COUNT, Partner("plan")] = 1,
    executable: Path | str | None = None,
    workers: Annotated[int, NOT_NEGATIVE] = 0,
    **options: Any,
) -> "Rehearsal":
    """Runs a few real steps on virtual CPU devices with a slice's mesh, then stops.

    Args:
        job: A recipe: its name or ``path/to/file.py:function``.
        on: Run a few real steps on virtual CPU devices with this slice's mesh, then stop.
        executable: Refused, since it is for the local devices.
        options: Options of the recipe.

    Raises:
        NotFoundError: there is no such slice.
        OptionError: the slice has more devices than a rehearsal can have, or is not the plan's; or there is an executable.
        LayoutError: an axis does not divide the slice, the model or the batch.
        RehearsalError: the job does not fit, or a step failed.
    """
    from systolic.training import rehearsal

    if executable is not None:
        raise OptionError(
            "--executable is for the local devices and --rehearse makes virtual ones; leave one of them out"
        )
    source = _planned(job, plan, candidate, options, reporter().warn)
    place = rehearsal.checked(source, on)
    return rehearsal.rehearse(source, place, bounded_workers(workers))


@command_of
@explained_by(resume)
def replay(path: Path | str, *, trust: bool = False) -> "ReplayedStep":
    """Computes the train step of a bad step's batch again and reports what is wrong with it.

    Args:
        path: RUN/bad/step-N.npz.

    Raises:
        NotFoundError: there is no such file.
        TrustError: the run's recipe is another user's.
    """
    from systolic.training import session

    return session.replay(Path(path), trust=trust)


def _begun(run: Path | None) -> bool:
    """Whether the run has begun, as the first process of the job sees it.

    Raises:
        OptionError: no run is given.
    """
    from systolic.runs.remote.mirror import has
    from systolic.runs.run import JOB as RECORD
    from systolic.training import distributed

    if run is None:
        raise OptionError("--continue needs the run; add --run DIR, the same at every start")
    distributed.join()
    here = (not distributed.joined() or distributed.is_first()) and has(run, RECORD)
    return bool(distributed.share("begun" if here else "")) if distributed.joined() else here


def _again(
    source: JobSource,
    settings: "SessionOptions",
    run: Path,
    init_from: Path | None,
    audience: Any,
    ledger: Any,
) -> "TrainResult":
    """Continues the run of ``--continue`` with the options that were given.

    Raises:
        OptionError: the run began with another recipe, plan or start.
    """
    from systolic.recipes import expanded
    from systolic.training.resuming import check_begun, continue_run, opened

    settings = replace(settings, flags=settings.flags or None)
    with opened(run) as before:
        check_begun(before.directory, before.record, source.recipe, source.chosen, init_from)
        values = {
            **before.saved,
            **expanded(before.recipe, given_options(source), before.saved),
        }
        return continue_run(before, before.source(values), settings, audience, ledger=ledger)


def _planned(
    job: Job | JobSource | str,
    plan: "Plan | Path | str | None",
    candidate: int,
    options: dict[str, Any],
    warn: Callable[[str], None],
) -> JobSource:
    from systolic.recipes.jobs import candidate_of, with_plan
    from systolic.runs.plan_choice import read

    if plan is None or isinstance(job, JobSource):
        return source_of(job, options)
    if isinstance(plan, str | Path):
        chosen = read(Path(plan), candidate, of_job=isinstance(job, Job))
        return with_plan(job, options, chosen, warn)
    from systolic.planning.plan import Plan

    if not isinstance(plan, Plan):
        raise OptionError(
            f"plan is {reprlib.repr(plan)}; it takes what systolic.plan returned, or the path of a plan.json"
        )
    return with_plan(job, options, candidate_of(plan, candidate), warn, plan.facts.job)


def _slice(on: Slice | str | None) -> Slice | None:
    return slice(on) if isinstance(on, str) else on


def _path(path: Path | str | None) -> Path | None:
    return None if path is None else Path(path)
