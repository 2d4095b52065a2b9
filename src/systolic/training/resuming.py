"""Resuming a run: open it, check its files and the given options before anything is compiled, and continue training."""

import json
import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from systolic import recipes
from systolic.chips.flags import resolved
from systolic.core.errors import DataError, NotFoundError, OptionError, RunError, SystolicError
from systolic.core.option_words import plain_words, typed
from systolic.core.ranges import dashed
from systolic.data.fingerprint import contents_of, difference
from systolic.job import Batch, Job, Schedule, Split
from systolic.job.data import Contents
from systolic.recipes import Recipe
from systolic.recipes.jobs import JobSource, kept_flags, resumed
from systolic.recipes.jobs import run as run_files
from systolic.runs import manifest, paths
from systolic.runs.access import Access
from systolic.runs.job_record import JobRecord, RunFlags, check_parts, read_record, types_of
from systolic.runs.plan_choice import Chosen
from systolic.runs.remote.upload import Part
from systolic.runs.run import Run
from systolic.training.ledger import Ledger
from systolic.training.session import (
    Audience,
    SessionOptions,
    TrainResult,
    check_setup,
    check_slice,
    describe,
    expected,
    fewer_devices,
    load_step,
    open_together,
    run_session,
    with_initial,
)

if TYPE_CHECKING:
    from systolic.setup import Setup


Result = TypeVar("Result")


def check_resume(
    run: Run, record: JobRecord, job: Job, options: Mapping[str, Any]
) -> dict[str, Contents]:
    """Checks that a run can resume with a job; returns the fingerprint of the job's data by split.

    Args:
        run: The run.
        record: The run's job.json.
        job: The job to resume with.
        options: The recipe's options that made the job, as plain values.

    Raises:
        OptionError: an option that is fixed for a run has changed, or the run has more steps than the job.
        DataError: the run's data has changed, or can't be read.
    """
    plain = json.loads(json.dumps(job.to_json()))
    _same_settings(run, record.job, plain, job, flat(options))
    newest = max((int(path.name) for path in _checkpoints(run)), default=0)
    if newest > job.steps:
        raise OptionError(too_few(job.steps, run, newest))
    now = contents_of(job.data)
    for split in Split:
        old, new = record.data.get(split.value), now.get(split.value)
        if old is None:
            continue
        # Held-out data may be replaced: the model was not trained on it.
        if split is not Split.train and (new is None or new.where != old.where):
            continue
        what = "no data" if new is None else difference(old, new)
        if what is not None:
            where = old.where if new is None else new.where
            raise DataError(
                f"the {split.value} data of {run.path} has changed since it was trained: {where} has {what}; restore it, or train a new run with --init-from {shlex.quote(str(run.path))}"
            )
    return now


def check_begun(
    run: Run, record: JobRecord, recipe: Recipe, chosen: Chosen | None, init_from: Path | None
) -> None:
    """Refuses to continue a run by a command that would have begun another one, in all processes of the job.

    Args:
        run: The run.
        record: Its job.json.
        recipe: The command's recipe: a run keeps the code that it began with.
        chosen: What the command's plan decides; None without a plan.
        init_from: The command's ``--init-from``.

    Raises:
        OptionError: the recipe, its code, the plan or the start differs from the run's.
    """

    def check() -> None:
        if difference := _other_start(run, record, recipe, chosen, init_from):
            raise OptionError(
                f"{difference}; give another --run, or continue it as it is: systolic train --resume {shlex.quote(str(run.path))}"
            )

    agreed(check)


def _other_start(
    run: Run, record: JobRecord, recipe: Recipe, chosen: Chosen | None, init_from: Path | None
) -> str:
    """How a command differs from the one that began a run, or nothing."""
    began = "a Job" if record.recipe is None else record.recipe
    if recipe.file is None or record.recipe is None or not run.recipe.is_file():
        if recipe.target != record.recipe:
            return f"{run.path} began with {began}, not with {recipe.target}"
    elif recipes.split(recipe.target)[1] != recipes.split(record.recipe)[1]:
        return f"{run.path} began with the function of {began}, not with {recipe.target}"
    elif changed := _changed_code(run, recipe):
        return f"{run.path} began with other code in {', '.join(changed)}, of which it keeps a copy"
    settings, planned = ({} if plan is None else plan.settings for plan in (chosen, record.plan))
    if chosen is not None and dict(settings) != dict(planned):
        return f"{run.path} began without the settings of {chosen.path}"
    if init_from is not None and record.init_from is None:
        return f"{run.path} did not begin with the weights of {init_from}"
    return ""


def _changed_code(run: Run, recipe: Recipe) -> list[str]:
    """Files of a recipe that are not those that the run keeps."""
    assert recipe.file is not None
    now = {recipe.file.name: (run.recipe, recipe.source)}
    now |= {name: (run.modules / name, content) for name, content in recipe.modules.items()}
    return [
        name
        for name, (kept, content) in now.items()
        if not kept.is_file() or kept.read_bytes() != content
    ]


def too_few(steps: int, run: Run, newest: int) -> str:
    """Message for a job with fewer steps than its run."""
    return f"steps is {steps}, but {run.path} has a checkpoint of step {newest}; give --steps {newest} or more"


def agreed(check: Callable[[], Result]) -> Result:
    """Runs a check in all processes of a job; fails in all if it fails in one. Collective.

    Raises:
        SystolicError: the check raised it in a process.
    """
    from systolic.training import distributed

    if not distributed.joined():
        return check()
    try:
        checked = check()
    except SystolicError as error:
        distributed.exchange(str(error))
        raise
    for process, text in enumerate(distributed.exchange("")):
        if text:
            raise DataError(f"process {process}: {text}")
    return checked


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names."""
    options: dict[str, Any] = {}
    for name, value in values.items():
        inner = flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else None
        options |= {f"{prefix}{name}": value} if inner is None else inner
    return options


def _same_settings(
    run: Run,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    job: Job,
    options: Mapping[str, Any],
) -> None:
    kept = {
        "model": ("type", *sorted(job.model.lasting())),
        "data": ("type", *sorted(job.data.lasting())),
        "adapter": ("kind", "rank", "alpha", "targets"),
        "optimizer": ("kind",),
        "dtypes": ("parameters", "moments"),
    }
    check_parts(before, run.path)
    old = {name: before[name] for name in ("seed",) if name in before}
    for part, names in kept.items():
        # Runs of earlier versions lack some parts and fields.
        fields = before.get(part)
        known = (
            {name: fields[name] for name in names if name in fields}
            if isinstance(fields, Mapping)
            else {}
        )
        old |= flat(known, f"{part}.")
    new = flat(now)
    changed = [
        f"{_option(name, new.get(name), options)} (was {plain_words(value)})"
        for name, value in old.items()
        if value != new.get(name)
    ]
    if changed:
        them = "that option" if len(changed) == 1 else "these options"
        raise OptionError(
            f"{', '.join(changed)} can't change in {run.path}; leave {them} out, or train a new run"
        )


def _option(name: str, value: Any, options: Mapping[str, Any]) -> str:
    """Setting of a job as a command-line option if the recipe has one of that name, else by its own name."""
    last = name.rpartition(".")[2]
    for option in (name, last):
        if option in options and options[option] == value:
            return typed(option, value)
    return f"{dashed(name)} {plain_words(value)}"


def _checkpoints(run: Run) -> list[Any]:
    return [
        path.parent
        for path in run.checkpoints.glob(f"[0-9]*/{manifest.NAME}")
        if path.parent.name.isdigit()
    ]


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """A run opened for training, and its origin."""

    directory: Run
    record: JobRecord
    recipe: Recipe
    saved: Mapping[str, Any]
    """The recipe's options of the run's last session."""
    types: Mapping[str, str] | None = None
    """Types of a Job without a recipe; see :class:`systolic.recipes.jobs.JobSource`."""
    gives_job: bool = False
    """Whether the caller gave the Job, which may then differ from the run's."""

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.directory.path

    def source(self, options: Mapping[str, Any]) -> JobSource:
        """Source of the job to resume with.

        Args:
            options: All options of the recipe.

        Raises:
            OptionError: an option has the wrong type.
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
        """Options that differ from the run's, as ``--steps 20 (was 10)``; fields of a given Job by name."""
        after, before = flat(recipes.plain(source.options)), flat(recipes.plain(self.saved))
        changed = [
            f"{typed(name, value)} (was {plain_words(before[name])})"
            for name, value in after.items()
            if name in before and str(value) != str(before[name])  # NaN is unequal to itself
        ]
        if not self.gives_job:
            return changed
        options = set(source.options)
        now, old = (
            flat({name: each for name, each in plain.items() if name not in options})
            for plain in (_plain(source.job, self.record), self.record.job)
        )
        return changed + [
            f"{name} {plain_words(now.get(name))} (was {plain_words(old.get(name))})"
            for name in {**old, **now}
            if now.get(name) != old.get(name)
        ]


@contextmanager
def opened(path: Path, *, trust: bool = False, job: Job | None = None) -> Generator[OpenedRun]:
    """Opens a run, for writing in process 0 of its job; joins the other processes, if any.

    Args:
        path: The run's directory.
        trust: Execute its recipe even if it belongs to another user.
        job: For a run made from a Job: the Job, instead of the run's record of it.

    Raises:
        NotFoundError: the path is not a run.
        RunError: another process writes to it, or its recipe or Job is missing or has changed.
        OptionError: a job is given, but the run was made from a recipe.
    """
    from systolic.training import distributed

    distributed.join()

    def begin(part: Part | None) -> Run:
        return Run.open(path, access=Access.write, part=part)

    with open_together(path, begin, "open") as directory:
        record = read_record(directory)
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
    ledger: Ledger | None = None,
) -> TrainResult:
    """Continues training a run from its newest intact checkpoint.

    Args:
        run: The run.
        source: Source of its job for this session.
        options: Options of the session; None means the value that the run was started with.
        audience: Receives records and warnings.
        ledger: Opened when the caller started, so that start-up time counts.

    Raises:
        OptionError: an option that is fixed for a run has changed, or the run has more steps than the job.
        DataError: the run's data has changed.
    """
    ledger, directory, record = ledger or Ledger(), run.directory, run.record
    _check_options(options)
    job = source.job
    same_job = source.options == run.saved and (run.types is None or _is_same(job, record))
    summary = finished(directory, job, changed=not same_job)
    if summary is not None:
        return _as_it_was(run, summary, run.changes(source), audience)
    options = as_recorded(options, record)
    data = agreed(lambda: check_resume(directory, record, job, recipes.plain(source.options)))
    flags = kept_flags(record, source.chosen, job.model, options.flags)
    job, after = continued(run, source, options, flags)
    if options.on is not None:
        check_slice(options.on)
    if source.options.get("tokenizer") == run.saved.get("tokenizer"):
        job = replace(job, data=run_files.with_tokenizer(directory, job.data))
    from systolic.setup import set_up

    fewer = fewer_devices(job, options, audience)
    setup = set_up(fewer.job if fewer else job, flags=flags.compiler)
    intended = fewer.intended.layout if fewer else None
    setup = replace(setup, expected=expected(source.chosen), intended_layout=intended)
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

    return run_session(
        setup, directory, options, audience, ledger, loaded=loaded, resume=True, accept=accept
    )


def _check_options(options: SessionOptions) -> None:
    """Checks before anything is compiled that the flags are flags and the executable exists."""
    resolved(options.flags or "", None)
    if options.executable is not None and not options.executable.exists():
        raise NotFoundError(f"{options.executable} does not exist; check the path")


def _begun(setup: "Setup", directory: Run, record: JobRecord, audience: Audience) -> "Setup":
    """Adds the run's initial weights to a set-up, as far as its checkpoints don't contain them."""
    from systolic.setup import with_start

    fresh = not any(directory.checkpoints.glob("[0-9]*"))
    if record.init_from is not None and fresh:
        return with_initial(setup, record.init_from, audience)[0]
    if setup.job.adapter or fresh:
        return with_start(setup, directory.path, record)[0]
    return setup


def _as_it_was(
    run: OpenedRun, summary: Mapping[str, Any], ignored: Sequence[str], audience: Audience
) -> TrainResult:
    """Result of a run that is already finished."""
    them = f", so {', '.join(ignored)} is ignored" if ignored else ""
    audience.warn(
        f"{run.path} is finished at step {summary['steps']}{them}; give a larger --steps to continue, or use the run: {summary['next']}"
    )
    return TrainResult(
        run=run.path, summary=summary, trained=False, warnings=tuple(audience.warnings)
    )


def as_recorded(options: SessionOptions, record: JobRecord) -> SessionOptions:
    """Fills in omitted options with those that the run was started with."""
    return replace(
        options,
        log_every=record.log_every if options.log_every is None else options.log_every,
        diagnose=record.diagnose if options.diagnose is None else options.diagnose,
    )


def continued(
    run: OpenedRun, source: JobSource, options: SessionOptions, flags: RunFlags
) -> tuple[Job, JobRecord]:
    """The job to resume with and its job.json; keeps the run's global batch on different devices, and its warm-up with other steps."""
    job = _with_warmup(source.job, run, source)
    spread = {name for name, value in source.options.items() if value != run.saved.get(name)}
    same_batch = not any("batch" in name or name == "layout" for name in spread)
    layout = run.record.layout
    if same_batch and job.batch.per_device is not None:
        total = job.batch.resolve(replace(job.layout, **layout))
        job = replace(job, batch=Batch(total=total))
    record = describe(source, job, flags, options, run.path)
    return job, replace(record, layout=layout) if same_batch else record


def _with_warmup(job: Job, run: OpenedRun, source: JobSource) -> Job:
    """The job with the run's warm-up, unless another schedule was given: its recipe fits one to the steps, whose number has grown."""
    if run.gives_job or source.options.get("schedule") != run.saved.get("schedule"):
        return job
    warmup = run.record.outline.schedule.warmup
    if warmup == job.schedule.warmup or warmup >= job.steps:
        return job
    own = job.schedule
    kept = Schedule(kind=own.kind, warmup=int(warmup), decay=own.decay, final=own.final)
    return replace(job, schedule=kept)


def finished(directory: Run, job: Job, *, changed: bool) -> dict[str, Any] | None:
    """Summary of a finished run; ``None`` if the run has steps left.

    A run with a damaged summary continues from its checkpoint, which rewrites the summary.
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
    """Whether a job equals the recorded one, apart from its layout."""
    return {**_plain(job, record), "layout": None} == {**record.job, "layout": None}


def _plain(job: Job, record: JobRecord) -> dict[str, Any]:
    """Job in the form of job.json; a per-device batch becomes a total if the record has a total."""
    if job.batch.per_device is not None and record.job["batch"]["total"] is not None:
        total = job.batch.resolve(replace(job.layout, **record.layout))
        job = replace(job, batch=Batch(total=total))
    # JSON has lists where a job has tuples.
    return json.loads(json.dumps(job.to_json()))


def _how(record: JobRecord) -> tuple[Any, ...]:
    """Entries of job.json besides the job; a session that changes one rewrites job.json."""
    return record.flags, record.data, record.log_every, record.diagnose
