"""A run that resumes: opened, checked against what is asked for, and trained on."""

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic import recipes
from systolic.artifact import paths
from systolic.artifact.access import Access
from systolic.artifact.job_record import JobRecord, RunFlags
from systolic.artifact.parts import Part
from systolic.artifact.run import Run
from systolic.artifact.saved_job import types_of
from systolic.chips import Slice
from systolic.chips.flags import resolved
from systolic.core.errors import NotFoundError, RunError
from systolic.job import Batch, Job
from systolic.recipes import Recipe
from systolic.session import run_files
from systolic.session.command_line import plain_words, typed
from systolic.session.job_source import JobSource
from systolic.session.planned import check_slice, expected, resumed
from systolic.session.resume_checks import agreed, check_resume, flat
from systolic.session.run_flags import kept_flags
from systolic.session.starting import with_start
from systolic.session.together import open_together
from systolic.session.training import (
    Audience,
    SessionOptions,
    TrainResult,
    check_setup,
    describe,
    fewer_devices,
    load_step,
    run_session,
    with_initial,
)
from systolic.training.ledger import Ledger

if TYPE_CHECKING:
    from systolic.training.setup import Setup


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """A run that is open to be trained on, and what it was made from."""

    directory: Run
    record: JobRecord
    recipe: Recipe
    saved: Mapping[str, Any]
    """The recipe's options as the run was trained last."""
    types: Mapping[str, str] | None = None
    """Of a Job that no recipe made; see :class:`systolic.session.job_source.JobSource`."""
    gives_job: bool = False
    """Whether the caller gave the Job, which then may differ from the run's own."""

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.directory.path

    def source(self, options: Mapping[str, Any]) -> JobSource:
        """What the job that resumes is made from.

        Args:
            options: All of the recipe's.

        Raises:
            OptionError: an option is of another type.
        """
        options = paths.absolute(recipes.converted(self.recipe, options))
        changed = {name for name, value in options.items() if value != self.saved.get(name)}
        return JobSource(
            recipe=self.recipe,
            options=options,
            chosen=resumed(self.record.plan, changed),
            types=self.types,
        )

    def changes(self, source: JobSource) -> list[str]:
        """The options that differ from the run's own, as ``--steps 20 (was 10)``; fields of a given Job by their names."""
        after, before = flat(recipes.plain(source.options)), flat(recipes.plain(self.saved))
        found = [
            f"{typed(name, value)} (was {plain_words(before[name])})"
            for name, value in after.items()
            if name in before and str(value) != str(before[name])  # a NaN is one as before
        ]
        if not self.gives_job:
            return found
        options = set(source.options)
        now, old = (
            flat({name: each for name, each in plain.items() if name not in options})
            for plain in (_plain(source.job, self.record), self.record.job)
        )
        return found + [
            f"{name} {plain_words(now.get(name))} (was {plain_words(old.get(name))})"
            for name in {**old, **now}
            if now.get(name) != old.get(name)
        ]


@contextmanager
def opened(path: Path, *, trust: bool = False, job: Job | None = None) -> Generator[OpenedRun]:
    """A run, open for writing in the first process of its job; joins the other processes, if there are any.

    Args:
        path: The run's directory.
        trust: Execute its recipe although it is another user's.
        job: Of a run that was made from a Job: the Job, in place of what the run keeps of it.

    Raises:
        NotFoundError: it is no run.
        RunError: another process writes to it, or what it was made from is not there or has changed.
        OptionError: a job is given and the run was made from a recipe.
    """
    from systolic.training import hosts

    hosts.join()

    def begin(part: Part | None) -> Run:
        return Run.open(path, access=Access.write, part=part)

    with open_together(path, begin, "open") as directory:
        record = JobRecord.from_json(directory.read_job())
        recipe, _, saved = run_files.rebuild(directory, trust_code=trust, job=job)
        types = record.types if job is None else types_of(job)
        yield OpenedRun(
            directory=directory,
            record=record,
            recipe=recipe,
            saved=saved,
            types=types,
            gives_job=job is not None,
        )


def continue_run(
    run: OpenedRun,
    source: JobSource,
    options: SessionOptions,
    audience: Audience,
    *,
    on: Slice | None = None,
    ledger: Ledger | None = None,
) -> TrainResult:
    """Trains a run on from its newest intact checkpoint.

    Args:
        run: The run.
        source: What its job is made from now.
        options: How the session runs; what is None is as the run was started.
        audience: Receives records and warnings.
        on: The slice that the local devices are expected to be.
        ledger: Opened when the caller started, so that start-up counts.

    Raises:
        OptionError: an option that a run keeps has changed, or the run has more steps than the job.
        DataError: its data has changed.
    """
    ledger, directory, record = ledger or Ledger(), run.directory, run.record
    resolved(options.flags or "", None)
    _check_executable(options)
    job = source.job
    same_job = source.options == run.saved and (run.types is None or _is_same(job, record))
    summary = finished(directory, job, changed=not same_job)
    if summary is not None:
        return _as_it_was(run, summary, run.changes(source), audience)
    options = as_recorded(options, record)
    plain = recipes.plain(source.options)
    data = agreed(lambda: check_resume(directory, record, job, plain))
    flags = kept_flags(record, source.chosen, options.flags)
    job, after = continued(run, source, options, flags)
    if on is not None:
        check_slice(on)
    if source.options.get("tokenizer") == run.saved.get("tokenizer"):
        job = replace(job, data=run_files.with_tokenizer(directory, job.data))
    from systolic.training.setup import set_up

    fewer = fewer_devices(job, options, audience)
    setup = set_up(fewer.job if fewer else job, flags=flags.compiler)
    meant = fewer.meant.layout if fewer else None
    setup = replace(setup, expected=expected(source.chosen), meant=meant)
    check_setup(setup, audience)
    setup = _begun(setup, directory, record, audience)
    kept = {"init_from": record.init_from, "start": record.start, "labels": record.labels}
    after = replace(after, **kept, data=data)
    loaded = load_step(setup, options, ledger)

    def accept() -> None:
        if text := ", ".join(run.changes(source)):
            audience.warn(f"{run.path} continues with {text}")
        directory.drop_summary()
        if not same_job or _how(after) != _how(record):
            directory.write_job(after.to_json())

    return run_session(setup, directory, options, audience, ledger, loaded=loaded, accept=accept)


def _check_executable(options: SessionOptions) -> None:
    """Before anything is compiled for the run."""
    if options.executable is not None and not options.executable.exists():
        raise NotFoundError(f"{options.executable} does not exist; check the path")


def _begun(setup: "Setup", directory: Run, record: JobRecord, audience: Audience) -> "Setup":
    """A set-up with what the run began with, as far as its checkpoints don't hold it."""
    fresh = not any(directory.checkpoints.glob("[0-9]*"))
    if record.init_from is not None and fresh:
        return with_initial(setup, record.init_from, audience)[0]
    if setup.job.adapter or fresh:
        return with_start(setup, directory.path, record)[0]
    return setup


def _as_it_was(
    run: OpenedRun, summary: Mapping[str, Any], ignored: Sequence[str], audience: Audience
) -> TrainResult:
    """The result of a run that has nothing left to do."""
    them = f", so {', '.join(ignored)} is ignored" if ignored else ""
    audience.warn(
        f"{run.path} is finished at step {summary['steps']}{them}; give --steps a larger number to continue, or use it: {summary['next']}"
    )
    return TrainResult(
        run=run.path, summary=summary, trained=False, warnings=tuple(audience.warnings)
    )


def as_recorded(options: SessionOptions, record: JobRecord) -> SessionOptions:
    """Options of which those that are left out are as the run was started."""
    return replace(
        options,
        log_every=record.log_every if options.log_every is None else options.log_every,
        diagnose=record.diagnose if options.diagnose is None else options.diagnose,
    )


def continued(
    run: OpenedRun, source: JobSource, options: SessionOptions, flags: RunFlags
) -> tuple[Job, JobRecord]:
    """The job that resumes and its job.json: on other devices, with the batch that it started with."""
    job = source.job
    spread = {name for name, value in source.options.items() if value != run.saved.get(name)}
    same_batch = not any("batch" in name or name == "layout" for name in spread)
    layout = run.record.layout
    if same_batch and job.batch.per_device is not None:
        total = job.batch.resolve(replace(job.layout, **layout))
        job = replace(job, batch=Batch(total=total))
    record = describe(source, job, flags, options, run.path)
    return job, replace(record, layout=layout) if same_batch else record


def finished(directory: Run, job: Job, *, changed: bool) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do; ``None`` for one that has.

    A run whose summary is damaged continues from its checkpoint, which writes the summary anew.
    """
    try:
        summary = directory.read_summary()
    except (NotFoundError, RunError):
        return None
    if not {"steps", "stopped", "interrupted"} <= set(summary):
        return None
    early = bool(summary["stopped"]) and not changed
    done = summary["steps"] >= job.steps or early
    return summary if done and not summary["interrupted"] else None


def _is_same(job: Job, record: JobRecord) -> bool:
    """Whether a job is the recorded one on any devices."""
    return {**_plain(job, record), "layout": None} == {**record.job, "layout": None}


def _plain(job: Job, record: JobRecord) -> dict[str, Any]:
    """A job as job.json would have it; a batch per device is a total where the record's is."""
    if job.batch.per_device is not None and record.job["batch"]["total"] is not None:
        total = job.batch.resolve(replace(job.layout, **record.layout))
        job = replace(job, batch=Batch(total=total))
    # JSON has lists where a job has tuples.
    return json.loads(json.dumps(job.to_json()))


def _how(record: JobRecord) -> tuple[Any, ...]:
    """Entries of job.json beside the job; a session that changes one writes job.json anew."""
    return record.flags, record.data, record.log_every, record.diagnose
