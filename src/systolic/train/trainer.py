"""Trains a job in a run directory: start or resume, loop, evaluate, save, sum up."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from systolic.artifact import CheckpointStore, Run
from systolic.core.errors import RunError
from systolic.job import GuardRule, Mode, Split
from systolic.train.evaluate import evaluate
from systolic.train.feed import training
from systolic.train.interrupt import Interrupt
from systolic.train.ledger import Ledger
from systolic.train.meter import Meter
from systolic.train.programs import Program
from systolic.train.setup import Setup, jit_evaluate, jit_train
from systolic.train.watch import Watcher

LAG = 3
"""Steps in flight: the loop reads a step's metrics this many steps later, so that devices never wait for it."""

LOG_SECONDS = 10.0
"""A record at least this often, besides the regular ones."""


class Pending(NamedTuple):
    """A step whose metrics are still being computed."""

    step: int
    metrics: dict[str, jax.Array]
    batch: dict[str, jax.Array]


@dataclass(kw_only=True)
class Trainer:
    """One training session in one run.

    Args:
        setup: The job on this machine.
        run: Its directory, open for writing.
        watchers: See every record.
        workers: Processes that read data.
        ledger: Opened when the command started, so that start-up counts.
    """

    setup: Setup
    run: Run
    watchers: Sequence[Watcher] = ()
    workers: int = 0
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        self.job, self.steps = self.setup.job, self.setup.steps
        rules = self.job.checkpoints
        self.store = CheckpointStore(
            self.run.checkpoints,
            keep_last=rules.keep_last,
            keep_best=rules.keep_best,
            metric=self.job.evaluation.metric,
            mode=self.job.evaluation.mode,
        )
        self.train_program = Program("train", jit_train(self.steps), self.ledger, self.event)
        self.eval_program = Program("eval", jit_evaluate(self.steps), self.ledger, self.event)
        self.log_every = max(1, self.job.steps // 400)
        self.best: float | None = None
        self.stale = 0
        self.bad_steps = 0
        self.step = 0
        self.last: dict[str, float] = {}
        self.stop_reason = ""
        self.in_a_row = 0
        self._first = True
        self.meter = Meter(self.setup, self.ledger, 0)

    # Records

    def say(self, kind: str, **values: Any) -> None:
        """One record, to disk and to the watchers."""
        record = {"kind": kind, "step": self.step, "time": time.time()} | values
        self.run.append(record)
        for watcher in self.watchers:
            watcher.see(record)

    def event(self, name: str, seconds: float, detail: str) -> None:
        """Something worth a line."""
        self.say("event", name=name, seconds=seconds, detail=detail)

    # The session

    def train(self, resume: bool = False) -> dict[str, Any]:
        """Runs to the job's last step, an early stop or an interruption; returns the summary.

        Raises:
            RunError: the loss went bad under the guard's rule, or a checkpoint could not be written.
        """
        with Interrupt() as interrupt:
            feed = training(self.job, self.steps, self.workers)
            try:
                state = self._start(feed, resume)
                self.meter = Meter(self.setup, self.ledger, self.step)
                with self.ledger.spend("step"):
                    state = self._loop(state, feed, interrupt)
                return self._finish(state, feed, interrupt)
            finally:
                feed.close()
                self.store.close()

    def _start(self, feed: Any, resume: bool) -> Any:
        """The first state: fresh, or the newest intact checkpoint."""
        restored = None
        if resume and self.store.latest_step() is not None:
            with self.ledger.spend("checkpoint"):
                restored = self.store.restore(self.steps.abstract_state)
            feed.set_state(restored.extra["data"])
            self.best, self.stale = restored.extra["best"], restored.extra["stale"]
            self.step = restored.step
            self.run.truncate(restored.step)
            self.store.discard_after(restored.step)
        machine = self.setup.machine
        self.say(
            "start",
            name=self.job.name,
            steps=self.job.steps,
            unit=self.setup.unit,
            num_parameters=self.steps.network.num_parameters,
            devices=machine.name,
            precision=self.steps.target.dtype,
            batch=self.steps.batch_size,
            layout=self.job.layout.mesh_shape,
            resumed_from=None if restored is None else restored.step,
        )
        if restored is not None:
            for step, reason in restored.skipped:
                self.event(
                    "resume",
                    0.0,
                    f"checkpoint of step {step} is damaged ({reason}); using the one of step {restored.step}",
                )
            self.event("resume", 0.0, f"from step {restored.step}")
            return restored.state
        with self.ledger.spend("compile"):
            init = jax.jit(self.steps.init, out_shardings=self.steps.shardings)
            return jax.block_until_ready(init(jax.random.key(self.job.seed)))

    def _loop(self, state: Any, feed: Any, interrupt: Interrupt) -> Any:
        """Steps until the job's last one, an early stop or a signal."""
        pending: deque[Pending] = deque()
        clock, ledger = self.ledger.clock, self.ledger
        while self.step < self.job.steps and not interrupt.signal and not self.stop_reason:
            asked = clock()
            batch = next(feed)
            ledger.add("data_wait", clock() - asked)
            state, metrics = self.train_program(state, batch)
            if self._first:
                self._notes()
            self.step += 1
            pending.append(Pending(self.step, metrics, batch))
            while len(pending) > LAG:
                self._check(pending.popleft())
            if self._due(self.job.evaluation.every) or self._due(self.job.checkpoints.every):
                self._drain(pending)
                self._milestone(state, feed)
        self._drain(pending)
        if interrupt.signal:
            self.event(
                "interrupt", 0.0, f"{interrupt.signal.name} at step {self.step}: saving and leaving"
            )
        return state

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0 and self.step < self.job.steps

    def _notes(self) -> None:
        """What tracing the first step had to say."""
        self._first = False
        for note in self.steps.target.notes:
            self.event("kernel", 0.0, note)

    def _drain(self, pending: deque[Pending]) -> None:
        while pending:
            self._check(pending.popleft())

    def _check(self, done: Pending) -> None:
        """Looks at a finished step: is it bad, is it time for a record?"""
        values = {name: float(value) for name, value in jax.device_get(done.metrics).items()}
        bad = values.pop("bad")
        if bad:
            self._bad(done, values["loss"])
        else:
            self.last = values
            self.in_a_row = 0
        self.meter.done()
        if (
            done.step % self.log_every == 0
            or done.step == self.job.steps
            or self.meter.quiet_seconds > LOG_SECONDS
        ):
            self.say("train", step=done.step, **values, **self.meter.read())

    def _bad(self, done: Pending, loss: float) -> None:
        """A step that the guard found bad; its update was not applied.

        Raises:
            RunError: under the rule ``stop``, or after too many in a row under ``skip``.
        """
        guard = self.job.guard
        if guard.rule is GuardRule.ignore:
            return
        self.bad_steps += 1
        self.in_a_row += 1
        path = self.run.write_bad(
            done.step,
            {name: np.asarray(array) for name, array in jax.device_get(done.batch).items()},
        )
        what = "is not a number" if not np.isfinite(loss) else f"jumped to {loss:.4g}"
        name = "skip" if guard.rule is GuardRule.skip else "bad_step"
        self.event(name, 0.0, f"the loss of step {done.step} {what}; its batch is in {path}")
        if guard.rule is GuardRule.stop or self.in_a_row >= guard.patience:
            self.store.wait()
            kept = self.store.latest_step()
            back = (
                f"the checkpoint of step {kept} is intact"
                if kept is not None
                else "there is no checkpoint yet"
            )
            raise RunError(
                f"the loss of step {done.step} {what}, the batch is kept in {path} and {back}; lower the learning rate, or resume with --guard.rule skip"
            )

    def _milestone(self, state: Any, feed: Any) -> None:
        """An evaluation, a checkpoint, or both."""
        metrics = None
        if self._due(self.job.evaluation.every):
            metrics = self._evaluate(state, Split.validation, self.job.evaluation.batches)
            self._judge(metrics)
        if self._due(self.job.checkpoints.every) or (
            metrics is not None and self.job.checkpoints.keep_best
        ):
            self._save(state, feed, metrics)

    def _evaluate(self, state: Any, split: Split, batches: int) -> dict[str, float]:
        start = self.ledger.clock()
        with self.ledger.spend("eval"):
            params = state.params if state.ema is None else state.ema
            metrics = evaluate(
                self.job, self.steps, self.eval_program, params, state.rest, split, batches
            )
        self.say("eval", split=split.value, metrics=metrics, seconds=self.ledger.clock() - start)
        return metrics

    def _judge(self, metrics: dict[str, float]) -> None:
        """Early stopping."""
        rule = self.job.evaluation
        if rule.metric not in metrics:
            raise RunError(
                f"evaluation.metric {rule.metric!r} is not reported; choose one of {', '.join(sorted(metrics))}"
            )
        value = metrics[rule.metric] * (1 if rule.mode is Mode.min else -1)
        if self.best is None or value < self.best:
            self.best, self.stale = value, 0
            return
        self.stale += 1
        if rule.patience and self.stale >= rule.patience:
            self.stop_reason = f"{rule.metric} has not improved in {self.stale} evaluations"
            self.event("stop", 0.0, self.stop_reason)

    def _save(self, state: Any, feed: Any, metrics: dict[str, float] | None) -> None:
        start = self.ledger.clock()
        with self.ledger.spend("checkpoint"):
            extra = {"data": feed.get_state(), "best": self.best, "stale": self.stale}
            if self.store.save(self.step, state, extra=extra, metrics=metrics):
                self.event("checkpoint", self.ledger.clock() - start, f"step {self.step}")

    def _finish(self, state: Any, feed: Any, interrupt: Interrupt) -> dict[str, Any]:
        """The last evaluation and checkpoint, a sample, the summary."""
        final: dict[str, float] = dict(self.job.data.references())
        last = None
        if not interrupt.signal:
            for split in (Split.validation, Split.test):
                if self.job.data.size(split) != 0:
                    metrics = self._evaluate(state, split, 0)
                    last = last or metrics
                    final |= {f"{split.value}_{name}": value for name, value in metrics.items()}
        self._save(state, feed, last)
        with self.ledger.spend("checkpoint"):
            self.store.wait()
        throughput, mfu = self.meter.overall()
        kept = self.store.latest_step()
        summary = {
            "run": str(self.run.path),
            "steps": self.step,
            "interrupted": interrupt.signal.name if interrupt.signal else None,
            "stopped": self.stop_reason or None,
            "final": {"loss": self.last.get("loss"), "metrics": final},
            f"{self.setup.unit}_per_second": throughput,
            "mfu": mfu,
            "goodput": self.ledger.goodput,
            "forecast": {},
            "checkpoint": None if kept is None else str(self.store.path(kept)),
            "seconds": self.ledger.seconds,
            "time": self.ledger.close(),
            "bad_steps": self.bad_steps,
            "recompiles": self.train_program.recompiles,
        }
        return summary
