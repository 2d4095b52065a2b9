"""Runs trials of a search in this process, one after another: claims, forecasts, trains and judges them."""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from systolic.chips import slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiler
from systolic.core.errors import (
    LayoutError,
    OptionError,
    RunError,
    SystolicError,
    is_out_of_memory,
)
from systolic.core.files import fault_of, is_full
from systolic.core.reporter import Reporter, reporter, reporting
from systolic.core.shutdown import remembered
from systolic.core.units import dollars, gibibytes
from systolic.forecasting.run import forecast_job
from systolic.job import Job, Precision, Split
from systolic.planning.goal import HOUR, hourly
from systolic.recipes.jobs import JobSource
from systolic.runs.access import is_held
from systolic.runs.record import load_run
from systolic.runs.run import JOB
from systolic.steps.machine import LocalDevices
from systolic.training.interrupt import end_training
from systolic.training.resuming import continue_run, opened
from systolic.training.session import Audience, SessionOptions, TrainResult, start
from systolic.tuning import sampling
from systolic.tuning.claims import this_worker
from systolic.tuning.definition import Tuning
from systolic.tuning.objective import check_reported
from systolic.tuning.study import SharedStudy, TrialNotes, notes_of

INTERRUPTED = "interrupted"
"""Why a worker stopped that a signal ended."""
WAIT_SECONDS = 1.0
"""Interval between claims while the remaining trials are other workers'."""
BEGUN = 5
"""Starts of a trial from the same checkpoint, each ended by the death of its process, before it is given up."""
BATCH = "batch-per-device"
FAILURES = 3
"""Trials in a row without a result after which a worker stops."""


class StoppedTrialError(Exception):
    """A signal ended a trial's training; its run is saved."""


class OverBudgetError(Exception):
    """The trial would cost more than is left of the budget."""


@dataclass(kw_only=True)
class TrialWorker:
    """Runs trials of a study in this process.

    Args:
        tuning: The search.
        shared: Its study.
        ended: Called after each trial.
    """

    tuning: Tuning
    shared: SharedStudy
    ended: Callable[[], None] = lambda: None
    stopped: str = ""
    """Why the worker stopped before the study was done."""
    _signals: list[int] = field(default_factory=list, init=False)

    def work(self) -> None:
        """Runs trials until all are done, a signal arrives, or the budget is spent.

        Raises:
            RunError: several trials in a row had no result.
        """
        failed: list[str] = []
        self._check_metrics()
        self._check_precision()
        self._check_batch()
        # Signals between trainings; a training has its own handler.
        with remembered(self._signals):
            while not self._signals:
                record = self.shared.claim(self.tuning.trials, this_worker(), self._is_busy)
                if record is None:
                    if not self._others_run():
                        return
                    time.sleep(WAIT_SECONDS)
                    continue
                try:
                    reason = self._attempt(record)
                except StoppedTrialError:
                    self.stopped = INTERRUPTED
                    return
                except OverBudgetError as over:
                    self.shared.release(record.number, this_worker())
                    self.stopped = str(over)
                    return
                except BaseException:
                    # If this fails, on a full disk, the next command sees that this process has ended.
                    with contextlib.suppress(Exception):
                        self.shared.release(record.number, this_worker())
                    raise
                self.ended()
                failed = [*failed, reason] if reason else []
                if len(failed) >= FAILURES:
                    raise RunError(
                        f"{FAILURES} trials in a row had no result, the last one: {failed[-1]}; their runs are in {self.tuning.runs}"
                    )
            self.stopped = INTERRUPTED

    def _check_metrics(self) -> None:
        """Checks before any trial that objectives other than the recipe's own metric are reported."""
        own = self.tuning.job.evaluation.metric
        if all(aim.is_cost or aim.name == own for aim in self.tuning.aims):
            return
        from systolic.setup import set_up

        setup = set_up(self.tuning.job)
        reported = sorted(setup.jitted_evaluate.eval_shape(*setup.abstract_evaluation))
        check_reported(self.tuning.aims, reported)

    def _check_precision(self) -> None:
        """Checks that all machines of the study resolve precision auto to the same one."""
        job, searched = self.tuning.job, [option.name for option in self.tuning.searched]
        if job.precision is Precision.auto and "precision" not in searched:
            own = job.precision.resolve(LocalDevices.here().platform)
            self.shared.agree_on({"precision": own.value})

    def _check_batch(self) -> None:
        """Checks that a batch per device makes the same batch on all machines of the study and on the forecast's slice.

        Raises:
            OptionError: their numbers of devices differ.
        """
        tuning = self.tuning
        if tuning.job.batch.per_device is None and BATCH not in (
            option.name for option in tuning.searched
        ):
            return
        here = len(LocalDevices.here().devices)
        there = here if tuning.on is None else slice(tuning.on).num_devices
        if there != here:
            raise OptionError(
                f"the batch is per device, and {tuning.on} has {there} devices and this machine {here}, so that the forecast would be for another batch; give --batch, or leave out --on"
            )
        self.shared.agree_on({"devices": here})

    def _is_busy(self, number: int) -> bool:
        """Whether a process is training a trial: a suspended worker sends no heartbeats, and is not dead."""
        return is_held(self.tuning.run(number))

    def _others_run(self) -> bool:
        running = [
            trial
            for trial in self.shared.trials(self.tuning.trials)
            if not trial.state.is_finished()
        ]
        return bool(running)

    def _attempt(self, record: Any) -> str:
        """Runs a claimed trial; returns why it has no result, or an empty string."""
        tuning, shared, worker = self.tuning, self.shared, this_worker()
        number = record.number
        with beating(shared, record.number, worker) as taken:
            sampler = sampling.build(tuning.sampler, tuning.searched, tuning.seed, number)
            trial = shared.drawn(record, sampler, tuning.pruning())
            refused, source = self._source(tuning.values(trial))
            if not refused:
                tuning.check_run(number, source.options)
            notes = notes_of(record)
            if not refused and tuning.on is not None:
                refused, notes = self._forecast(record, source.job, notes)
            if refused:
                shared.finish(trial, worker, None, refused)
                return ""
            if not shared.owns(record.number, worker):
                return self._give_up(number)
            if lost := self._lost(number, notes):
                self._note_taken(trial, source.job.steps)
                shared.fail(trial, worker, lost)
                return lost
            watcher = TrialWatcher(
                trial=trial,
                seen=frozenset(record.intermediate_values),
                reports=len(tuning.aims) == 1,
                last=source.job.steps,
                metric=tuning.aims[0].name,
                note=lambda **notes: shared.note(record.number, **notes),
                taken=taken,
                owned=lambda: shared.owns(record.number, worker),
            )
            try:
                result = self._train(source, tuning.run(number), watcher)
            except SystolicError as error:
                if is_full(error):
                    raise RunError(
                        f"trial {number} could not be saved ({fault_of(error)}); free space in {tuning.folder} and rerun to continue it"
                    ) from error
                self._note_taken(trial, watcher.last)
                if watcher.started:
                    shared.finish(trial, worker, None, f"failed: {error}")
                    return ""
                shared.fail(trial, worker, str(error))
                return str(error)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._note_taken(trial, watcher.last)
                return self._out_of_memory(trial)
            return self._judge(trial, result, watcher, notes)

    def _out_of_memory(self, trial: Any) -> str:
        """Ends a trial that ran out of device memory; returns the reason if it is not attributed to the settings, or an empty string."""
        reason = "out of memory on this machine's devices"
        trials = self.shared.trials(self.tuning.trials)
        if any(notes_of(other).steps is not None for other in trials):
            self.shared.finish(trial, this_worker(), None, f"failed: {reason}")
            return ""
        # No trial has trained yet: other processes may hold the memory.
        self.shared.fail(trial, this_worker(), reason)
        return reason

    def _note_taken(self, trial: Any, last: int) -> None:
        """Stores the steps and the time of a failed trial; it costs its share of ``last`` steps."""
        if not self.shared.owns(trial.number, this_worker()):
            return
        notes: dict[str, Any] = {"share": 0.0}
        with contextlib.suppress(SystolicError):  # it has no run
            run = load_run(self.tuning.run(trial.number))
            # A bad step has no train record.
            if steps := max(run.step, 0 if run.last is None else run.last.step):
                notes = {"share": min(steps / last, 1.0), "steps": steps, "seconds": run.seconds}
        self.shared.note(trial.number, **notes)

    def _give_up(self, number: int) -> str:
        """Leaves a trial to the worker that has taken it over."""
        reporter().warn(
            f"trial {number} sent no heartbeats and was taken over by another worker; its result here does not count"
        )
        return ""

    def _lost(self, number: int, notes: TrialNotes) -> str:
        """Why a trial is given up (its process died repeatedly after the same checkpoint), or an empty string."""
        steps = (self.tuning.run(number) / "checkpoints").glob("[0-9]*")
        at = max((int(path.name) for path in steps if path.name.isdigit()), default=0)
        before, times = notes.begun or (at, 0)
        times = times + 1 if before == at else 1
        self.shared.note(number, begun=(at, times))
        if times <= BEGUN:
            return ""
        return (
            f"its process died {BEGUN} times after step {at}; see {self.tuning.folder / 'workers'}"
        )

    def _source(self, values: Mapping[str, Any]) -> tuple[str, JobSource]:
        """Why the recipe refuses these values, or an empty string, and the source of the trial's job."""
        try:
            source = self.tuning.source(values)
            source.job.check_effects()
        except (OptionError, LayoutError) as error:
            return f"refused: {error}", JobSource(recipe=self.tuning.recipe, options={})
        return "", source

    def _forecast(self, record: Any, job: Job, notes: TrialNotes) -> tuple[str, TrialNotes]:
        """Forecasts a trial on the slice and stores its dollars; returns why it is refused, or an empty string, and its attributes.

        Raises:
            OverBudgetError: it would cost more than is left of the budget.
        """
        tuning = self.tuning
        assert tuning.on is not None
        if notes.dollars is None:
            # Learning rate and seed do not change a step's time: trials that differ only in these share one compile.
            alike = replace(job.optimizer, learning_rate=tuning.job.optimizer.learning_rate)
            on = slice(tuning.on)
            try:
                compiler = Compiler(flags=resolved("", on.chip))
                forecast = forecast_job(
                    replace(job, optimizer=alike, seed=tuning.job.seed),
                    on,
                    compiler=compiler.quick() if tuning.quick else compiler,
                    say=reporter().stage,
                )
            except (OptionError, LayoutError) as error:
                return f"refused: {error}", notes
            if not forecast.fits:
                need = forecast.need_bytes
                has = gibibytes(forecast.capacity_bytes)
                memory = (
                    f"{gibibytes(need)} per device needed, {has} available"
                    if need
                    else f"{has} per device available"
                )
                return f"refused: does not fit {tuning.on} ({memory})", notes
            seconds, price = forecast.step_seconds, hourly(on, tuning.price)
            known: dict[str, Any] = {
                "forecast_seconds": None if seconds is None else seconds * job.steps
            }
            if seconds is not None and price is not None:
                known["dollars"] = price * seconds * job.steps / HOUR
            # The dollars last, since a trial that has them is not forecast again.
            self.shared.note(record.number, **known)
            notes = msgspec.structs.replace(notes, **known)
        self._check_budget(record, notes.dollars)
        return "", notes

    def _check_budget(self, record: Any, usd: float | None) -> None:
        """Reserves a trial's dollars.

        Raises:
            OptionError: it has none.
            OverBudgetError: they are more than is left.
        """
        budget = self.tuning.budget_usd
        if budget is None:
            return
        if usd is None:
            raise OptionError(
                f"--budget is ${budget:g}, and {self.tuning.on} has no price or no forecast of the step's time; leave --budget out"
            )
        left = self.shared.grant(record, usd, budget)
        if usd > left:
            raise OverBudgetError(
                f"the next trial costs {dollars(usd)}, and {dollars(max(left, 0))} of {dollars(budget)} is left; raise --budget to continue"
            )

    def _train(self, source: JobSource, run: Path, watcher: "TrialWatcher") -> TrainResult:
        """Trains a trial's run, or continues it from its newest checkpoint."""
        with reporting(Reporter()):  # a search shows its trials, and no trial's session
            return self._trained(source, run, watcher)

    def _trained(self, source: JobSource, run: Path, watcher: "TrialWatcher") -> TrainResult:
        options = SessionOptions(diagnose=0)
        audience = Audience(watchers=(watcher,))
        if (run / JOB).is_file():
            with opened(run) as before:
                return continue_run(before, before.source(source.options), options, audience)
        if run.exists():
            shutil.rmtree(run)  # killed before the run was complete enough to continue
        return start(source, options, audience, run=run)

    def _judge(
        self, trial: Any, result: TrainResult, watcher: "TrialWatcher", notes: TrialNotes
    ) -> str:
        """Ends a trial with its run's summary; returns why it has no result, or an empty string.

        Raises:
            StoppedTrialError: a signal ended the training.
        """
        shared, worker = self.shared, this_worker()
        summary = whole(result)
        if not shared.owns(trial.number, worker):
            return self._give_up(trial.number)
        share = summary["steps"] / watcher.last
        taken = {name: summary[name] for name in ("seconds", "steps")}
        if summary["interrupted"] and not watcher.reason:
            # The cost so far, which counts if the trial is never continued.
            shared.note(trial.number, begun=(summary["steps"], 0), share=share, **taken)
            shared.release(trial.number, this_worker())
            raise StoppedTrialError
        shared.note(trial.number, share=share, **taken)
        if watcher.reason:
            shared.finish(trial, worker, None, watcher.reason)
            return ""
        usd = None if notes.dollars is None else notes.dollars * share
        size = notes.parameters if watcher.parameters is None else watcher.parameters
        values = [aim.of(summary, dollars=usd, parameters=size) for aim in self.tuning.aims]
        missing = [
            aim.name for aim, value in zip(self.tuning.aims, values, strict=True) if value is None
        ]
        if missing:
            reason = f"its run has no {missing[0]} on the validation split"
            shared.fail(trial, worker, reason)
            return reason
        shared.finish(trial, worker, [float(value) for value in values if value is not None], "")
        return ""


@dataclass(kw_only=True)
class TrialWatcher:
    """Watcher of a trial's run: reports its evaluations, and ends it when the pruner stops the trial.

    Args:
        trial: Optuna's trial.
        seen: Steps that were reported before the run was resumed.
        reports: Whether to report: only with a single objective, since Optuna does not prune with several.
        last: Steps of the job.
        metric: Metric to report.
        note: Stores attributes of the trial.
        taken: Set when another worker has taken the trial over, which ends the run here.
        owned: Whether the trial is still this worker's in the study.
    """

    trial: Any
    seen: frozenset[int]
    reports: bool
    last: int
    metric: str
    note: Callable[..., None]
    taken: threading.Event = field(default_factory=threading.Event)
    owned: Callable[[], bool] = lambda: True
    started: bool = False
    reason: str = ""
    """Why the run was ended here; empty if it was not."""
    parameters: int | None = None
    """Size of the model, from the run's first record."""

    def see(self, record: Mapping[str, Any]) -> None:
        """See :class:`systolic.runs.metrics.Watcher`."""
        if record["kind"] == "start":
            self.started = True
            self.parameters = record["num_parameters"]
            self.note(parameters=self.parameters)
        elif record["kind"] == "eval" and self.reports:
            self._evaluated(record)
        elif record["kind"] == "train" and self.taken.is_set() and record["step"] < self.last:
            self._end("taken over by another worker")

    def _evaluated(self, record: Mapping[str, Any]) -> None:
        value = record["metrics"].get(self.metric)
        step = record["step"]
        skip = record["final"] or step >= self.last or step in self.seen or self.reason
        if record["split"] != Split.validation.value or value is None or skip:
            return
        if not self.owned():
            self._end("taken over by another worker")
            return
        self.trial.report(float(value), step)
        if self.trial.should_prune():
            self._end(f"stopped early at step {step} of {self.last}")

    def _end(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            # The run saves a checkpoint and can be continued.
            end_training()

    def close(self) -> None:
        """Nothing to close."""


def whole(result: TrainResult) -> Mapping[str, Any]:
    """A run's summary with the time of all its sessions, from its records; the summary alone has that of the last session."""
    run = load_run(result.run)
    time = {**result.summary["time"], "step": run.step_seconds}
    return {**result.summary, "seconds": run.seconds, "time": time}


@contextlib.contextmanager
def beating(shared: SharedStudy, number: int, worker: str) -> Generator[threading.Event]:
    """Sends a trial's heartbeats during the block; the event is set when another worker has taken the trial over."""
    over, taken = threading.Event(), threading.Event()

    def beat() -> None:
        while not over.wait(shared.beat_seconds) and not taken.is_set():
            # A short outage of the database must not end the training.
            with contextlib.suppress(Exception):
                if not shared.beat(number, worker):
                    taken.set()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join()
