"""Training sessions: their options and result, a new run, the session itself beside the forecast of its step, and the replay of a bad step."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.chips import Slice, by_device_kind, slice
from systolic.core.errors import NotFoundError, OptionError, RunError, SystolicError
from systolic.core.files import cache_home
from systolic.core.machine import bounded
from systolic.core.reporter import reporter, working
from systolic.data.fingerprint import contents_of
from systolic.job import Fewer, Job, on_fewer
from systolic.recipes.jobs import JobSource, kept_flags, new_flags
from systolic.recipes.jobs import run as run_files
from systolic.report.notebook import frame
from systolic.runs.access import Access
from systolic.runs.job_record import JobRecord, RunFlags, read_record
from systolic.runs.metrics import Watcher
from systolic.runs.plan_choice import Chosen
from systolic.runs.remote.store import in_bucket
from systolic.runs.remote.upload import Part
from systolic.runs.run import JOB, Run
from systolic.training.ledger import Ledger, Spent

if TYPE_CHECKING:
    from systolic.compiling.executable import Loaded
    from systolic.forecasting.profiled import Beside
    from systolic.setup import Setup


def open_together(path: Path | None, begin: Callable[[Part | None], Run], verb: str) -> Run:
    """Opens a run for writing in process 0 and for reading in the others. Collective.

    A run in a bucket has one local copy per cache folder; one process per copy uploads its part.

    Args:
        path: Path of the run, as given by the user.
        begin: Creates or opens the run in process 0.
        verb: Verb for messages about ``begin``.

    Raises:
        RunError: another process failed to open it.
    """
    from systolic.training import distributed

    if not distributed.joined():
        return begin(None)
    part = share_of(path)
    run: Run | None = None
    if distributed.is_first():
        try:
            run = begin(part)
        except Exception:
            distributed.share("")
            raise
    shared = distributed.share("" if run is None else str(run.path))
    if not shared:
        raise RunError(f"process 0 could not {verb} the run; see its error message")
    if part is None:
        return run or Run.open(shared if path is None or in_bucket(path) else path)
    failed = ""
    if run is None and part.leads:
        try:
            run = Run.open(str(path), part=part)
        except SystolicError as error:
            failed = str(error)
    for index, text in enumerate(distributed.exchange(failed)):
        if text:
            if run is not None:
                run.close(waits=False)
            raise RunError(f"process {index} could not open its copy of the run: {text}")
    return run or Run.open(_copy(path), part=part)


def share_of(path: Path | None) -> Part | None:
    """Part that this process holds of a run in a bucket; None if all processes share one local copy."""
    from systolic.training import distributed

    if not distributed.several() or path is None or in_bucket(path) is None:
        return None
    leaders = seen_by(_copy(path).parent, distributed.exchange)
    session = distributed.share(uuid.uuid4().hex)
    if not any(leaders):
        return None
    return Part(index=distributed.peers().index, leaders=tuple(leaders), session=session)


def seen_by(folder: Path, exchange: Callable[[str], list[str]]) -> list[int]:
    """For each process, the first process that shares its folder. Collective."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f".seen-{uuid.uuid4().hex}"
    mine.touch()
    try:
        seen = [(folder / name).exists() for name in exchange(mine.name)]
        return [int(text) for text in exchange(json.dumps(seen.index(True)))]
    finally:
        mine.unlink()


def _copy(path: Path | None) -> Path:
    folder = None if path is None else in_bucket(path)
    assert folder is not None
    return folder.copy


def expected(chosen: Chosen | None) -> Any:
    """The forecast that is shown while the job trains; None without one, or on other devices than it is for."""
    from systolic.setup import Expected

    if chosen is None or problem(chosen):
        return None
    forecast = chosen.forecast
    if forecast.step_seconds is None:
        return None
    return Expected(
        slice=chosen.slice,
        step_seconds=forecast.step_seconds,
        low=forecast.step_seconds_low,
        high=forecast.step_seconds_high,
        mfu=forecast.mfu,
    )


def check_machine(chosen: Chosen) -> None:
    """Checks that the local devices are those of the plan's slice.

    Raises:
        RunError: they are not; names both.
    """
    if text := problem(chosen):
        raise RunError(text)


def problem(chosen: Chosen) -> str:
    """Why the local devices are not those of the plan's slice; empty when they are."""
    on = slice(chosen.slice)
    both = _difference(on)
    return (
        both
        and f"{chosen.path} is a plan for {both}; train there, or rehearse {on.name} to try it here"
    )


def check_slice(on: Slice) -> None:
    """Checks that the local devices are those of a slice.

    Raises:
        RunError: they are not; names both.
    """
    if both := _difference(on):
        raise RunError(f"on is {both}; train there, or leave on out")


def _difference(on: Slice) -> str:
    """The slice and the local devices, where these are others; else empty."""
    from systolic.steps.machine import LocalDevices

    machine = LocalDevices.here()
    kind = machine.devices[0].device_kind
    known = by_device_kind(kind)
    here = "cpu" if machine.platform == "cpu" else known.name if known is not None else kind
    if here == on.chip.name and len(machine.devices) == on.num_devices:
        return ""
    return f"{on.name} ({on.num_devices} x {on.chip.device_kind or on.chip.name}) and this machine has {machine.name}"


def check_rehearsal(chosen: Chosen, name: str) -> None:
    """Checks that the slice of ``--rehearse`` is the plan's.

    Raises:
        OptionError: it is not; names both.
    """
    if slice(name) != slice(chosen.slice):
        raise OptionError(
            f"the plan's candidate is for {chosen.slice} and --rehearse asks for {name}; rehearse {chosen.slice}, or choose one of {name} with --candidate"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """How a session runs, by options of :func:`systolic.train`; what it computes is the job's."""

    on: Slice | None = None
    executable: Path | None = None
    flags: str | None = None
    workers: int = 0
    diagnose: int | None = None
    profile: int = 0
    log_every: int | None = None
    for_devices: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """Result of a training session."""

    run: Path
    """The run's directory."""
    summary: Mapping[str, Any]
    """``summary.json``: steps, final loss and metrics, throughput, MFU, goodput, where the time went."""
    trained: bool = True
    """False where the run was finished before, so that nothing was done."""
    warnings: tuple[str, ...] = ()
    beside: "Beside | None" = None
    """Ops of the traced steps, measured and forecast; None without a profile, or where it can't be compared."""

    @property
    def interrupted(self) -> str | None:
        """The signal that ended the session early; it is saved, and ``systolic.resume`` continues it."""
        return self.summary["interrupted"]

    def _repr_html_(self) -> str | None:
        page = Path(self.run) / "report.html"
        return frame(page.read_text()) if page.is_file() else None


@dataclass(frozen=True, kw_only=True)
class Audience:
    """Receivers of a session's records and warnings."""

    watchers: Sequence[Watcher] = ()
    """Closed when the session ends."""
    warnings: list[str] = field(default_factory=list)
    """All warnings so far."""

    def warn(self, text: str) -> None:
        """Keeps a warning and reports it."""
        self.warnings.append(text)
        reporter().warn(text)

    def caution(self, text: str) -> None:
        """Keeps a warning that is also an event of the session, which the reporter may show."""
        self.warnings.append(text)
        if not reporter().shows_events:
            reporter().warn(text)


class ReporterWatcher:
    """Hands the records of a session to the reporter."""

    def see(self, record: dict[str, Any]) -> None:
        """Reports a record."""
        reporter().update(record)

    def close(self) -> None:
        """Does nothing: the piece of work ends with the session."""


def start(
    source: JobSource,
    options: SessionOptions,
    audience: Audience,
    *,
    run: Path | None = None,
    init_from: Path | None = None,
    ledger: Ledger | None = None,
) -> TrainResult:
    """Trains a job in a new run. Joins the other processes of the job, if there are any.

    Args:
        source: What the job is made from.
        options: How the session runs; like ``run`` and ``init_from`` by options of :func:`systolic.train`.
        audience: Receives records and warnings.
        ledger: Opened when the caller started, so that start-up counts.
    """
    from systolic.setup import set_up, with_start
    from systolic.training import distributed

    ledger = ledger or Ledger()
    check_data(source.job)
    distributed.join()
    if options.on is not None:
        check_slice(options.on)
    if source.chosen is not None:
        check_machine(source.chosen)
    flags = new_flags(options.flags or "", source.chosen, source.job.model)
    fewer = fewer_devices(source.job, options, audience)
    setup = set_up(source.job if fewer is None else fewer.job, flags=flags.compiler)
    intended = None if fewer is None else fewer.intended.layout
    setup = replace(setup, expected=expected(source.chosen), intended_layout=intended)
    check_setup(setup, audience)
    setup, begun_with = with_initial(setup, init_from, audience)
    if begun_with is not None and setup.job.adapter:
        raise OptionError(
            f"--init-from {init_from} sets all weights, and the job trains adapters beside those of {setup.job.start}; give the model that it begins with as --from"
        )
    origin = None
    if begun_with is None:
        setup, origin = with_start(setup)
    record = replace(
        describe(source, setup.job if fewer is None else fewer.intended, flags, options),
        init_from=begun_with,
        start=origin,
        data=contents_of(setup.job.data),
        labels=tuple(setup.job.data.labels()),
    )
    loaded = load_step(setup, options, ledger)
    files = run_files.files(source, setup.job, audience.warn)

    def begin(part: Part | None) -> Run:
        return Run.create(run, record.to_json(), files=files, part=part)

    with open_together(run, begin, "make") as directory:
        return run_session(setup, directory, options, audience, ledger, loaded=loaded)


def check_data(job: Job) -> None:
    """Raises OptionError where a job has shapes only, which a forecast is enough with."""
    if missing := job.data.missing():
        raise OptionError(missing)


def fewer_devices(job: Job, options: SessionOptions, audience: Audience) -> Fewer | None:
    """The job on fewer devices than it is for; None where none is missing, or nothing was said of their number.

    Raises:
        LayoutError: layout or batch do not fit them.
    """
    if options.for_devices is None:
        return None
    from systolic.steps.machine import LocalDevices
    from systolic.steps.target import slices_of

    devices = LocalDevices.here().devices
    fewer = on_fewer(job, options.for_devices, len(devices), slices_of(devices))
    if fewer is not None:
        audience.warn(fewer.text)
    return fewer


def check_setup(setup: "Setup", audience: Audience) -> None:
    """Checks the metric of best checkpoints, and a model of another framework against that framework, before anything is written.

    Raises:
        OptionError: the task does not report the metric, or the model does not train as there.
    """
    setup.check_metric()
    for note in setup.check_model():
        audience.warn(note)


def run_session(
    setup: "Setup",
    directory: Run,
    options: SessionOptions,
    audience: Audience,
    ledger: Ledger,
    *,
    loaded: "Loaded | None" = None,
    resume: bool = False,
    accept: Callable[[], None] | None = None,
) -> TrainResult:
    """Trains in a run and writes its report.

    Args:
        setup: The job on this machine.
        directory: The run; open for writing in the first process of the job.
        options: How the session runs.
        audience: Its watchers are closed.
        ledger: Where the time goes.
        loaded: The train step, compiled elsewhere.
        resume: Whether the run continues from its newest intact checkpoint; else it begins with the set-up's weights.
        accept: Called after all checks, before anything is written, in the process that writes.
    """
    from systolic.steps.programs import compiler_cache
    from systolic.training.trainer import Trainer

    compiler_cache(str(cache_home() / "xla"))
    writes, accepted = directory.access is Access.write, False

    def begin() -> None:
        nonlocal accepted
        accepted = True
        if writes:
            if accept is not None:
                accept()
            directory.write_environment([*map(str, setup.machine.devices)], setup.flags)

    watchers = _watchers(directory, audience)
    trainer = Trainer(
        setup=setup,
        run=directory,
        watchers=watchers,
        options=replace(options, workers=_workers(options.workers, audience)),
        ledger=ledger,
        loaded=loaded,
        accept=begin,
        warn=audience.caution,
    )
    try:
        with working(setup.job.name):
            summary = trainer.train(resume=resume)
    finally:
        for watcher in watchers:
            watcher.close()
        if writes and accepted:
            _report(directory, audience)
    return _finished(TrainResult(run=directory.path, summary=summary), directory, options, audience)


def _watchers(directory: Run, audience: Audience) -> list[Watcher]:
    """Receivers of a session's records."""
    watchers: list[Watcher] = [ReporterWatcher(), *audience.watchers]
    if directory.access is Access.write:
        from systolic.training.display.tensorboard import TensorBoard

        watchers.append(TensorBoard(directory.tensorboard))
    return watchers


def describe(
    source: JobSource,
    job: Job,
    flags: RunFlags,
    options: SessionOptions,
    directory: Path | None = None,
) -> JobRecord:
    """The record of a session for job.json, without its data and first weights.

    Args:
        source: What the job is made from.
        job: With the layout of the local devices.
        flags: Of the compiler.
        options: How the session runs.
        directory: The run's; None for one that is not there yet.
    """
    return JobRecord(
        recipe=None if source.types is not None else source.recipe.target,
        options=run_files.options(source.options, job, directory),
        job=job.to_json(),
        plan=source.chosen,
        layout=job.layout.mesh_shape,
        flags=flags,
        log_every=options.log_every,
        diagnose=options.diagnose,
        types=source.types,
    )


def with_initial(
    setup: "Setup", source: Path | str | None, audience: Audience
) -> "tuple[Setup, str | None]":
    """A set-up that begins with the weights of another run, and the path of their checkpoint."""
    if source is None:
        return setup, None
    from systolic.runs.weights import begin_with

    path = Path(source).absolute()
    weights = begin_with(path, setup.steps)
    for line in weights.skipped:
        audience.warn(f"{line}; using step {weights.step}")
    folder = path / "checkpoints" if (path / JOB).is_file() else path.parent
    return replace(setup, initial=weights), str(folder / str(weights.step))


def load_step(setup: "Setup", options: SessionOptions, ledger: Ledger) -> "Loaded | None":
    """The train step of ``executable``, before a run is made; None where it is to be compiled."""
    if options.executable is None:
        return None
    with ledger.spend(Spent.compile):
        return setup.load(options.executable)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedStep:
    """The train step of a bad batch, made again."""

    path: Path
    """The batch's file."""
    report: Mapping[str, Any]
    """Result of :func:`systolic.training.diagnosis.replay`."""


def replay(path: Path, *, trust: bool = False) -> ReplayedStep:
    """The train step of a run made again on the batch of a bad step, by options of :func:`systolic.replay`.

    Raises:
        NotFoundError: there is no such file.
    """
    from systolic.setup import with_start

    if not path.is_file():
        raise NotFoundError(f"{path} is not a file; give RUN/bad/step-N.npz")
    with Run.open(path.parent.parent) as directory:
        job = run_files.rebuild(directory, trust_code=trust).job
        record = read_record(directory)
        flags = kept_flags(record, record.plan, job.model)
        from systolic.setup import set_up
        from systolic.training import diagnosis

        setup = set_up(job, flags=flags.compiler)
        if job.adapter or not any(directory.checkpoints.glob("[0-9]*")):
            setup, _ = with_start(setup, directory.path, record)
        return ReplayedStep(path=path, report=diagnosis.replay(setup, directory, path))


def _workers(wanted: int, audience: Audience) -> int:
    """Worker processes, at most one a core."""
    workers = bounded(wanted)
    if workers < wanted:
        audience.warn(
            f"workers is {wanted}, more than the {workers} cores of this machine; {workers} work at once"
        )
    return workers


def _finished(
    trained: TrainResult, directory: Run, options: SessionOptions, audience: Audience
) -> TrainResult:
    """The result with its warnings and, of a traced session, the steps beside their forecast where they can be compared."""
    from systolic.training.profile import FOLDER

    folder = directory.path / FOLDER
    traced = options.profile and directory.access is Access.write and trained.interrupted is None
    if traced and folder.is_dir():  # else its profiler failed and said so
        from systolic.forecasting.profiled import traced_beside

        try:
            trained = replace(trained, beside=traced_beside(directory, folder))
        except Exception as error:  # whatever it is, it must not hide how the run ended
            named = "" if isinstance(error, SystolicError) else f"{type(error).__name__}: "
            audience.warn(f"the profile is not set beside a forecast: {named}{error}")
    return replace(trained, warnings=tuple(audience.warnings))


def _report(directory: Run, audience: Audience) -> None:
    """Writes the page; that it can't be written must not hide how the run ended."""
    from systolic.training.display.page import write_report

    try:
        write_report(directory.path)
    except (SystolicError, OSError) as error:
        audience.warn(f"there is no report: {error}")
