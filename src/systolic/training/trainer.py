"""Training of a job in a run directory: start or resume, loop, evaluate, save, summarise."""

import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from systolic.compiling.executable import Loaded
from systolic.core.errors import RunError, SystolicError
from systolic.data.batches import first_reader
from systolic.data.input_files import FILES
from systolic.data.text.chat import Messages
from systolic.data.text.instructions import Instructions
from systolic.inference.generation import Generator
from systolic.job import GuardRule, Job, Mode, Sampling, Split
from systolic.runs import Run
from systolic.runs.checkpoint import Restored
from systolic.runs.metrics import Watcher
from systolic.runs.remote.store import origin
from systolic.runs.weights import plain_parameters
from systolic.setup import Setup, computed_in
from systolic.steps.programs import training
from systolic.steps.step_functions import StepFunctions
from systolic.training import distributed
from systolic.training.checkpointing import Checkpointer, TrainingProgress
from systolic.training.diagnosis import Probe
from systolic.training.distributed.consistency import (
    SameBatches,
    require_same_data,
    require_same_job,
)
from systolic.training.distributed.heartbeat import Heartbeat
from systolic.training.evaluate import Evaluator
from systolic.training.interrupt import Interrupt
from systolic.training.ledger import Ledger, Meter, Spent
from systolic.training.profile import DATA, FOLDER, METRICS, SessionTrace, part
from systolic.training.programs import CompiledStep
from systolic.training.session import SessionOptions

SAMPLE_TOKENS = 200
LONGEST_QUESTION = 60
"""Characters of a question that the next command asks."""
LAG = 3
"""Steps in flight: the loop reads a step's metrics this many steps later, so that devices never wait for the host."""
UNRATED = "the data has no validation split: training has no evaluations, and the last checkpoint counts as the best"
"""Warning without a validation split; test metrics never choose a checkpoint."""
NAMED = 100
"""Most damaged files named between two records; the summary counts all."""
RECORDS = 400
"""Approximate number of regular records of a job by default."""
LOG_SECONDS = 10.0
"""Longest interval between records; slower steps get records besides the regular ones."""


def summarise(
    *,
    setup: Setup,
    run: Path,
    progress: TrainingProgress,
    metrics: dict[str, float],
    meter: Meter,
    ledger: Ledger,
    checkpoint: str | None,
) -> dict[str, Any]:
    """Figures of a session under their published names.

    ``time`` adds up to ``seconds``, the wall time since the command started; ``goodput`` is the
    share of it in which steps were computed; throughput counts the loop without compiles,
    evaluations and saves. ``forecast`` has the step time of the plan's forecast and the measured
    one; it is empty for a run without a plan.
    """
    throughput, mfu = meter.overall()
    expected = setup.expected
    time = ledger.close()
    seconds = sum(time.values())
    return {
        "run": str(run),
        "steps": progress.step,
        "final": {"loss": progress.last.get("loss"), "metrics": metrics},
        f"{setup.unit}_per_second": throughput,
        "mfu": mfu,
        "goodput": time["step"] / max(seconds, 1e-9),
        "forecast": {} if expected is None else expected.against(meter.step_seconds()),
        "checkpoint": checkpoint,
        "seconds": seconds,
        "time": time,
        "bad_steps": progress.bad_steps,
    }


def next_command(job: Job, run: Path, *, unfinished: bool) -> str:
    """Command to type after this session."""
    folder = origin(run)
    where = shlex.quote(str(run) if folder is None else folder.url)
    if unfinished:
        return f"systolic train --resume {where}"
    if isinstance(job.data, Instructions):
        return f"systolic generate {where} --chat {shlex.quote(_question(job.data))}"
    if job.sample is not None:
        prompt = f" {shlex.quote(job.sample)}" if job.sample else ""
        return f"systolic generate {where}{prompt}"
    return f"systolic eval {where}"


def _question(data: Instructions) -> str:
    """A short question of the held-out conversations, to ask the model; an ellipsis where there is none."""
    try:
        question = said(data.question() or "")
    except SystolicError:  # the data was moved meanwhile
        question = ""
    short = len(question) <= LONGEST_QUESTION and "\n" not in question
    return question if question and short else "…"


def sample_prompt(job: Job) -> str | Messages | None:
    """Prompt of a job's samples: ``job.sample``, for conversations as a message, and the first held-out conversation in place of an empty one; ``None`` for no sample."""
    if job.sample is None or not isinstance(job.data, Instructions):
        return job.sample
    return [{"role": "user", "content": job.sample}] if job.sample else job.data.question()


def said(prompt: str | Messages) -> str:
    """A prompt as text: of messages the last."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")


def sample(functions: StepFunctions, params: Any, model_state: Any, prompt: str | Messages) -> str:
    """Text that a language model generates after ``prompt``; its likeliest answer to messages."""
    sampling = Sampling() if isinstance(prompt, str) else Sampling(temperature=0.0)
    generator = Generator(functions, params, model_state, sampling)
    return "".join(generator.stream(prompt, tokens=SAMPLE_TOKENS, seed=functions.job.seed))


def _nothing(*_: Any) -> None:
    """Does nothing; the default of ``accept`` and ``warn``."""


class Pending(NamedTuple):
    """Step whose metrics are still being computed."""

    step: int
    metrics: dict[str, jax.Array]
    batch: dict[str, jax.Array]

    def is_ready(self) -> bool:
        """Whether the devices have finished it."""
        return all(value.is_ready() for value in self.metrics.values())  # ty: ignore[missing-attribute]


@dataclass(kw_only=True)
class Trainer:
    """Training session in a run.

    Args:
        setup: The job on this machine.
        run: The run directory, open for writing in the first process and for reading in the others.
        watchers: Called with every record.
        options: How the session runs; of several processes the first one traces.
        ledger: Ledger opened when the command started, so that start-up counts.
        loaded: Train step compiled elsewhere.
        accept: Called when all checks have passed, before the session writes anything.
        warn: Called with the text of each event that is a warning.
    """

    setup: Setup
    run: Run
    watchers: Sequence[Watcher] = ()
    options: SessionOptions = SessionOptions()  # noqa: RUF009 (frozen)
    ledger: Ledger = field(default_factory=Ledger)
    loaded: Loaded | None = None
    accept: Callable[[], None] = _nothing
    warn: Callable[[str], None] = _nothing

    def __post_init__(self) -> None:
        self.job, self.functions = self.setup.job, self.setup.steps
        self.checkpointer = Checkpointer(self.setup, self.run, self.ledger, self.event)
        self.store = self.checkpointer.store
        self.train_program = CompiledStep("train", self.setup.jitted_train, self.ledger, self.event)
        self.eval_program = CompiledStep(
            "eval", self.setup.jitted_evaluate, self.ledger, self.event
        )
        self.evaluator = Evaluator(
            setup=self.setup,
            program=self.eval_program,
            ledger=self.ledger,
            say=self.say,
            show=self.show,
        )
        self.meter = Meter(self.setup, self.ledger, 0)
        self.probe = Probe(self.setup, self.ledger, self.event, self.options.diagnose)
        traced = self.options.profile if distributed.is_first() else 0
        self.trace = SessionTrace(self.run.path / FOLDER, traced, self.job.steps, self.event)
        self.examples = self.job.data.size(Split.train)
        self.validates = self.job.data.size(Split.validation) != 0
        self.interval = self.options.log_every or max(1, self.job.steps // RECORDS)
        self.progress = TrainingProgress()
        self.stop_reason = ""
        self._sampled: int | None = None
        """Step of the last sample; -1 after a failure."""
        self.notes_told = 0
        self.same = SameBatches()
        self.heartbeat = Heartbeat(
            self.ledger,
            lambda: self.progress.step,
            self.caution,
            lambda name, detail: self.event(name, 0.0, detail),
        )

    # Records

    def say(self, kind: str, /, **values: Any) -> None:
        """Writes a record and gives it to the watchers, in the first process only."""
        if not distributed.is_first():
            return
        record = {"kind": kind, "step": self.progress.step, "time": time.time()} | values
        self.run.append(record)
        for watcher in self.watchers:
            watcher.see(record)

    def show(self, record: dict[str, Any]) -> None:
        """Gives the watchers a record that is not written."""
        if distributed.is_first():
            for watcher in self.watchers:
                watcher.see({"step": self.progress.step} | record)

    def event(self, name: str, seconds: float, detail: str) -> None:
        """Records an event."""
        self.say("event", name=name, seconds=seconds, detail=detail)

    def caution(self, name: str, detail: str) -> None:
        """Records an event that is a warning."""
        self.event(name, 0.0, detail)
        self.warn(detail)

    # The session

    def train(self, *, resume: bool = False) -> dict[str, Any]:
        """Trains to the job's last step, an early stop or an interruption; returns the summary.

        Raises:
            RunError: the loss went bad under the guard's rule, a checkpoint could not be written, or
                processes were given different settings.
            OptionError: the task does not report the evaluation's metric, or the run to resume has
                more steps than the job.
            DataError: the run to resume was trained on other data, or processes have different data.
        """
        self.setup.check_metric()
        FILES.clear()
        require_same_job(self.setup)
        require_same_data(self.job.data)
        with self.heartbeat, Interrupt() as interrupt:
            feed = training(
                self.job, self.functions, self.options.workers, self.setup.intended_layout
            )
            try:
                state = self._begin(feed, resume, interrupt)
                self._await_program(interrupt)
                self.ledger.claim_rest(Spent.start)
                self.meter = Meter(self.setup, self.ledger, self.progress.step)
                with self.ledger.spend(Spent.step):
                    state = self._loop(state, feed, interrupt)
                return self._finish(state, feed, interrupt)
            finally:
                self.trace.close()
                feed.close()
                self.store.close()

    def _begin(self, feed: Any, resume: bool, interrupt: Interrupt) -> Any:
        """The first state, new or from the newest intact checkpoint, while the train step compiles.

        ``None`` where the process was asked to stop before.
        """
        functions = self.functions
        if resume:
            self.checkpointer.check()
        if self.loaded is None:
            self.train_program.prepare(functions.abstract_state, functions.abstract_batch())
        self.probe.prepare()
        # Imports for the first save and the feed's thread, while XLA compiles. Not in a thread, since
        # two threads that import the same modules can see them partly initialised.
        for name in ("systolic.runs.backend", "grain"):
            import_module(name)
        restored = self._restore(feed) if resume else None
        self.accept()
        if resume:
            self.checkpointer.go_back(restored, self._comes_again)
        feed.start()
        self.say(
            "start",
            name=self.job.name,
            steps=self.job.steps,
            unit=self.setup.unit,
            num_parameters=functions.network.num_parameters,
            total_parameters=plain_parameters(functions),
            devices=self.setup.machine.name,
            num_devices=len(self.setup.machine.devices),
            device_kind=self.setup.machine.kind,
            precision=computed_in(functions.target),
            flags=list(self.setup.flags),
            batch=functions.batch_size,
            examples=self.examples,
            workers=self.options.workers,
            layout=self.job.layout.mesh_shape,
            resumed_from=None if restored is None else restored.step,
            shares=list(self.job.task.shares),
        )
        for note in self.job.data.notes():
            self.caution("data", note)
        if not self.validates:
            self.caution("data", UNRATED)
        if (shorter := self.job.schedule.note(self.job.steps)) is not None:
            self.caution("schedule", shorter)
        self._say_restored(restored, resume)
        if self.loaded is not None:
            loaded = self.loaded
            self.train_program.adopt(functions.abstract_batch(), loaded.compiled, loaded.seconds)
        state = self._first_state(interrupt) if restored is None else restored.state
        if self.validates and not interrupt.alone():
            self.eval_program.prepare(*self.setup.abstract_evaluation)
        return state

    def _first_state(self, interrupt: Interrupt) -> Any:
        """The state before the first step, whose program is compiled; ``None`` where the process was asked to stop before."""
        started = self.ledger.clock()
        with self.ledger.spend(Spent.compile):
            state = self.setup.first_state(interrupt.alone)
        if state is not None:
            self.event("compile", self.ledger.clock() - started, "initial weights")
        return state

    def _restore(self, feed: Any) -> Restored | None:
        """The newest intact checkpoint, ``None`` where there is none yet; changes nothing on disk."""
        restored = self.checkpointer.restore(feed)
        if restored is not None:
            self.progress = TrainingProgress.from_json(restored.extra["progress"])
            self._judge_patience()
        return restored

    def _comes_again(self, record: Mapping[str, Any]) -> bool:
        """Whether a record of the checkpoint's step, made before a kill, will be made again."""
        if record["step"] != self.progress.step:
            return False
        ends = self.progress.step >= self.job.steps or bool(self.stop_reason)
        if record["kind"] == "eval":
            last = ends and self._unranked()
            return ends if record.get("final") else self.progress.evaluation_pending or last
        return ends and record["kind"] == "sample"

    def _say_restored(self, restored: Any, resume: bool) -> None:
        if restored is None:
            if resume:
                self.event("resume", 0.0, "no checkpoint yet: from the start")
            return
        for step, reason in restored.skipped:
            self.caution(
                "resume",
                f"checkpoint of step {step} is damaged ({reason}); using the one of step {restored.step}",
            )
        self.event("resume", 0.0, f"from step {restored.step}")

    def _await_program(self, interrupt: Interrupt) -> None:
        """Waits until the train step is compiled or the process is asked to stop."""
        while not self.train_program.wait(0.1):
            if interrupt.alone():
                return

    def _loop(self, state: Any, feed: Any, interrupt: Interrupt) -> Any:
        """Runs steps to the job's last one, an early stop or a signal."""
        pending: deque[Pending] = deque()
        ledger, progress = self.ledger, self.progress
        if progress.evaluation_pending:
            self._milestone(state, feed, interrupt)
        while progress.step < self.job.steps and not self.stop_reason:
            if interrupt.soon():
                break
            with self.trace.step(progress.step + 1):
                with ledger.spend(Spent.data_wait), part(DATA):
                    batch = next(feed)
                self.same.check(batch)
                if self.probe.due(progress.step + 1):
                    self._drain(pending)
                    self._probe(state, batch, feed)
                state, metrics = self.train_program(state, batch)
                self._notes()
                progress.step += 1
                pending.append(Pending(progress.step, metrics, batch))
                self._notice(pending)
                while len(pending) > LAG:
                    self._check(pending.popleft())
            self.trace.done(metrics)
            if self._evaluates() or self._due(self.job.checkpoints.every):
                self._drain(pending)
                self._milestone(state, feed, interrupt)
        self._drain(pending)
        return state

    def _probe(self, state: Any, batch: dict[str, jax.Array], feed: Any) -> None:
        """Records a gradient probe of the next step."""
        figures = self.probe.measure(self.progress.step + 1, state, batch)
        if figures is not None and distributed.is_first():
            now = {"time": time.time(), "epochs": self._epochs(feed)}
            self.run.append_diagnosis(now | figures)

    def _epochs(self, feed: Any) -> float | None:
        """Passes over the training data so far; ``None`` where it is unknown."""
        if self.examples:
            return self.progress.step * self.functions.batch_size / self.examples
        return self.job.data.epochs(first_reader(feed.get_state()))

    def _due(self, every: int) -> bool:
        step = self.progress.step
        return bool(every) and step % every == 0 and step < self.job.steps

    def _evaluates(self) -> bool:
        return self.validates and self._due(self.job.evaluation.every)

    def _notes(self) -> None:
        """Reports notes on kernels from tracing since the last call."""
        notes = self.functions.target.notes
        for note in notes[self.notes_told :]:
            self.event("kernel", 0.0, note)
        self.notes_told = len(notes)

    def _drain(self, pending: deque[Pending]) -> None:
        while pending:
            self._notice(pending)
            self._check(pending.popleft())

    def _notice(self, pending: deque[Pending]) -> None:
        """Counts the steps that the devices have finished, without waiting for any."""
        finished = takewhile(Pending.is_ready, pending)
        self.meter.notice(sum(1 for _ in finished))

    def _check(self, done: Pending) -> None:
        """Reads a finished step's metrics, handles a bad loss, and makes a record if one is due."""
        began = self.ledger.clock()
        with part(METRICS):
            values = {name: float(value) for name, value in jax.device_get(done.metrics).items()}
        self.meter.waited_for_device(self.ledger.clock() - began)
        if values.pop("bad") and self.job.guard.rule is not GuardRule.ignore:
            self._bad(done, values["loss"])
        else:
            self.progress.take(values)
            self.progress.in_a_row = 0
        self.meter.done()
        regular = done.step % self.interval == 0 or done.step == self.job.steps
        if regular or self.meter.quiet_seconds > LOG_SECONDS:
            # Without a good step there is no mean, and the record shows the last step.
            means = self.progress.last if self.progress.summed else values
            self.say("train", step=done.step, **means, **self.meter.read())
            # Raises the failure of a background save now, not at the next one.
            self.store.poll()
            # Processes make this record at different steps, so they must not communicate here.
            if not distributed.several():
                self._skipped()
        if regular:  # Depends on the step alone, so that a resumed run has the same means.
            self.progress.record()

    def _skipped(self) -> None:
        """Reports damaged files left out since the last call, in any process.

        All processes call it at the same point.
        """
        for line in distributed.share_lines(FILES)[:NAMED]:
            self.caution("skipped_file", f"{line}; it was left out")

    def _bad(self, done: Pending, loss: float) -> None:
        """Handles a step that the guard found bad and whose update was dropped.

        Raises:
            RunError: under the rule ``stop``, or after too many in a row under ``skip``.
        """
        guard, progress = self.job.guard, self.progress
        progress.bad_steps += 1
        progress.in_a_row += 1
        batch = distributed.gather(done.batch)
        path = self.run.path / "bad" / f"step-{done.step}.npz"
        if distributed.is_first():
            self.run.write_bad(done.step, batch)
        what = "is not a number" if not np.isfinite(loss) else f"jumped to {loss:.4g}"
        name = "skip" if guard.rule is GuardRule.skip else "bad_step"
        detail = f"the loss of step {done.step} {what}; its batch is in {path}"
        self.say("event", step=done.step, name=name, seconds=0.0, detail=detail)
        if guard.rule is GuardRule.skip and progress.in_a_row < guard.patience:
            self.warn(detail)
            return
        self.store.wait()
        kept = self.store.latest_step()
        back = "the run has no checkpoint yet"
        if kept is not None:
            back = f"the checkpoint of step {kept} is intact"
        row = f" (bad steps in a row: {progress.in_a_row})" if progress.in_a_row > 1 else ""
        raise RunError(
            f"the loss of step {done.step} {what}{row} and {back}; inspect its batch with systolic train --replay {shlex.quote(str(path))}, lower the learning rate, or continue with systolic train --resume {shlex.quote(str(self.run.path))} --guard.rule skip"
        )

    # Milestones

    def _milestone(self, state: Any, feed: Any, interrupt: Interrupt) -> None:
        """Evaluates, saves a checkpoint, or both."""
        metrics, self.progress.evaluation_pending = None, False
        if self._evaluates():
            batches = self.job.evaluation.batches
            metrics = self.evaluator(state, Split.validation, batches, interrupt)
            self.progress.evaluation_pending = metrics is None
        if metrics is not None:
            rule = self.job.evaluation
            sign = 1 if rule.mode is Mode.min else -1
            self.progress.judge(metrics[rule.metric] * sign)
            self._judge_patience()
            if isinstance(self.job.data, Instructions):
                with self.ledger.spend(Spent.sample):
                    self._sample(state)
        if self._due(self.job.checkpoints.every) or (
            metrics is not None and self.job.checkpoints.keep_best
        ):
            self.checkpointer.save(state, feed, self.progress, metrics)
        self._skipped()
        if self.stop_reason:
            self.event("stop", 0.0, self.stop_reason)

    def _judge_patience(self) -> None:
        """Stops early when the metric has not improved for long enough."""
        rule, stale = self.job.evaluation, self.progress.stale
        if rule.patience and stale >= rule.patience:
            self.stop_reason = f"{rule.metric} has not improved in {stale} evaluations"

    # The end

    def _finish(self, state: Any, feed: Any, interrupt: Interrupt) -> dict[str, Any]:
        """Saves the last checkpoint, evaluates, makes a sample and the summary.

        The checkpoint comes first, since the process may be killed during the evaluation.
        """
        self.checkpointer.save(state, feed, self.progress, None)
        ranked = self.evaluator.ranking(state, interrupt) if self._unranked() else None
        measured = self.evaluator.final(state, interrupt)
        if self.evaluator.is_comparable():
            # Ranks by validation only, so that test metrics stay unbiased.
            ranked = measured.get(Split.validation)
        if ranked is not None:
            self.checkpointer.rate(self.progress.step, ranked)
        final = {f"{s.value}_{k}": v for s, metrics in measured.items() for k, v in metrics.items()}
        with self.ledger.spend(Spent.checkpoint):
            self.store.wait()
        # All processes agree, so that they end in the same way.
        stopped = interrupt.signal if interrupt.agreed() else None
        if stopped:
            where = f"{stopped.name} at step {self.progress.step}"
            self.event("interrupt", 0.0, where)
        else:
            with self.ledger.spend(Spent.eval):
                final |= self.evaluator.baselines()
            with self.ledger.spend(Spent.sample):
                self._sample(state)
        self._skipped()
        summary = summarise(
            setup=self.setup,
            run=self.run.path,
            progress=self.progress,
            metrics=final,
            meter=self.meter,
            ledger=self.ledger,
            checkpoint=self.checkpointer.path(),
        ) | {
            "interrupted": stopped.name if stopped else None,
            "stopped": self.stop_reason or None,
            "epochs": self._epochs(feed),
            "skipped_files": FILES.count,
            "recompiles": self.train_program.recompiles + self.eval_program.recompiles,
            "next": next_command(self.job, self.run.path, unfinished=bool(stopped)),
        }
        self.say("end", **summary)
        if distributed.is_first():
            self.run.write_summary(summary)
        return summary

    def _unranked(self) -> bool:
        """Whether the last checkpoint needs its own evaluation to be compared with earlier ones."""
        unrated = self.checkpointer.unrated(self.progress.step)
        return (
            unrated and bool(self.job.checkpoints.keep_best) and not self.evaluator.is_comparable()
        )

    def _sample(self, state: Any) -> None:
        """Records the text that a language model generates after the job's prompt; once a step, and no more after a failure."""
        if self._sampled in (self.progress.step, -1) or distributed.several():
            return
        try:
            prompt = sample_prompt(self.job)
            if prompt is None:
                return
            text = sample(self.functions, state.evaluated, state.model_state, prompt)
        except Exception as error:  # a failed sample must not fail the run
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.caution("sample", f"no sample: {reason}")
            self._sampled = -1
            return
        self._sampled = self.progress.step
        self.say("sample", prompt=said(prompt), text=text)
        if distributed.is_first():
            record = {"step": self.progress.step, "prompt": said(prompt), "text": text}
            self.run.append_sample(record)
