"""``systolic.train`` and ``systolic.resume``: the words of the command line, values in and out, nothing printed."""

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic.artifact.chosen import read
from systolic.chips import SLICE, Slice, slice
from systolic.core.arguments import Wording, with_types
from systolic.core.errors import OptionError
from systolic.job import Job
from systolic.recipes import expanded
from systolic.recipes.jobs.plan import candidate_of
from systolic.recipes.jobs.source import JobSource, source_of, with_plan
from systolic.session.resuming import continue_run, opened
from systolic.session.training import Audience, SessionOptions, TrainResult, Warn, start
from systolic.training.watch import Watcher

JOB = Wording("a Job, the name of a recipe or 'path/to/file.py:function'")

if TYPE_CHECKING:
    from systolic.planning.plan import Plan


@with_types
def train(  # noqa: PLR0913
    job: Annotated[Job | str, JOB],
    on: Annotated[Slice | str | None, SLICE] = None,
    *,
    run: Path | str | None = None,
    plan: "Plan | Path | str | None" = None,
    candidate: int = 1,
    init_from: Path | str | None = None,
    executable: Path | str | None = None,
    flags: str = "",
    workers: int = 0,
    diagnose: int | None = None,
    profile: int = 0,
    log_every: int | None = None,
    for_devices: int | None = None,
    watchers: Sequence[Watcher] = (),
    warn: Warn | None = None,
    **options: Any,
) -> TrainResult:
    """Trains a job in a new run, on the local devices.

    Ctrl-C and SIGTERM end it after the step that runs, with a checkpoint; :func:`resume` continues it.

    Args:
        job: A Job, or a recipe: its name or ``path/to/file.py:function``.
        on: The slice that the local devices are expected to be.
        run: The run's directory; by default ``runs/NAME-TIME``.
        plan: What ``systolic.plan`` returned, or a plan.json: layout, batch, precision, steps and
            compiler flags; of a recipe also the options that were planned.
        candidate: Which of the plan's candidates, by rank from 1.
        init_from: Begin with the weights of this run (its best checkpoint) or of ``RUN/checkpoints/STEP``.
        executable: The compiled train step that ``systolic forecast --save`` kept.
        flags: Of the compiler, on top of the set that jobs on these devices share; ``none`` leaves that out.
        workers: Processes that read and transform data; 0 uses threads.
        diagnose: Steps between gradient probes by layer; 0 is never, None where they cost little.
        profile: Steps to trace with XLA's profiler after warm-up, into ``RUN/profile``.
        log_every: Steps between records, each the mean of its steps; None is a 400th of the job.
        for_devices: Devices that layout and batch are for: on fewer a step has the same batch in more passes.
        watchers: See each record as it is written to ``metrics.jsonl``.
        warn: Called at once with each line of ``TrainResult.warnings``.
        options: Of the recipe; of a Job ``steps`` and ``layout``.

    Raises:
        OptionError: an option is unknown, out of its range, or contradicts the plan.
        RunError: the devices are others than ``on`` or the plan say, or the loss went bad under the
            guard's rule ``stop``.
        LayoutError: an axis does not divide the devices, the batch or the model.
        DataError: the data is empty or damaged.
    """
    audience = Audience(watchers=watchers, tell=warn)
    source = _planned(job, plan, candidate, options, audience)
    return start(
        source,
        SessionOptions(
            executable=_path(executable),
            flags=flags,
            workers=workers,
            diagnose=diagnose,
            profile=profile,
            log_every=log_every,
            for_devices=for_devices,
        ),
        audience,
        run=_path(run),
        init_from=_path(init_from),
        on=_slice(on),
    )


@with_types
def resume(  # noqa: PLR0913
    path: Path | str,
    job: Annotated[Job | None, Wording("a Job, or None for the run's own")] = None,
    on: Annotated[Slice | str | None, SLICE] = None,
    *,
    executable: Path | str | None = None,
    flags: str | None = None,
    workers: int = 0,
    diagnose: int | None = None,
    profile: int = 0,
    log_every: int | None = None,
    for_devices: int | None = None,
    trust: bool = False,
    watchers: Sequence[Watcher] = (),
    warn: Warn | None = None,
    **options: Any,
) -> TrainResult:
    """Continues a run from its newest intact checkpoint; exactly as if it had not ended.

    Args:
        path: The run's directory.
        job: For a run that was made from a Job with types of your own: that Job.
        on: The slice that the local devices are expected to be.
        executable: As for :func:`train`.
        flags: Of the compiler, in place of those that the run was started with.
        workers: As for :func:`train`.
        diagnose: As for :func:`train`; None is as the run was started.
        profile: As for :func:`train`.
        log_every: As for :func:`train`; None is as the run was started.
        for_devices: As for :func:`train`.
        trust: Execute the run's recipe although it is another user's, now and later.
        watchers: As for :func:`train`.
        warn: As for :func:`train`.
        options: Of the recipe, in place of the run's own; of a Job ``steps`` and ``layout``.

    Returns:
        ``trained`` is False where the run was finished before.

    Raises:
        NotFoundError: it is no run.
        OptionError: an option that a run keeps has changed, or the run has more steps than the job.
        DataError: its data has changed.
        TrustError: its recipe is another user's.
    """
    audience = Audience(watchers=watchers, tell=warn)
    session = SessionOptions(
        executable=_path(executable),
        flags=flags,
        workers=workers,
        diagnose=diagnose,
        profile=profile,
        log_every=log_every,
        for_devices=for_devices,
    )
    expected = _slice(on)
    with opened(Path(path), trust=trust, job=job) as run:
        before = run.saved if job is None else {"steps": job.steps, "layout": job.layout}
        changed = expanded(run.recipe, options, before)
        return continue_run(
            run,
            run.source({**before, **changed}),
            session,
            audience,
            on=expected,
        )


def _planned(
    job: Job | str,
    plan: "Plan | Path | str | None",
    candidate: int,
    options: dict[str, Any],
    audience: Audience,
) -> JobSource:
    if plan is None:
        return source_of(job, options)
    if isinstance(plan, (str, Path)):
        chosen = read(Path(plan), candidate, of_job=isinstance(job, Job))
        return with_plan(job, options, chosen, audience.warn)
    from systolic.planning.plan import Plan

    if not isinstance(plan, Plan):
        raise OptionError(
            f"plan is {reprlib.repr(plan)}; it takes what systolic.plan returned, or the path of a plan.json"
        )
    chosen = candidate_of(plan, candidate)
    return with_plan(job, options, chosen, audience.warn, plan.facts.job)


def _slice(on: Slice | str | None) -> Slice | None:
    return slice(on) if isinstance(on, str) else on


def _path(given: Path | str | None) -> Path | None:
    return None if given is None else Path(given)
