"""Checkpoints of a training session (restored, saved, rated), with the run's progress beside the arrays."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from systolic.core.errors import OptionError
from systolic.runs import CheckpointStore, Run
from systolic.runs.checkpoint import Restored
from systolic.setup import Setup
from systolic.training import distributed
from systolic.training.ledger import Ledger, Spent

RATE = "learning_rate"


@dataclass(kw_only=True, slots=True)
class TrainingProgress:
    """Progress of training; the same after a resume as without one."""

    step: int = 0
    """Steps started."""
    best: float | None = None
    """The best evaluation so far, negated where larger is better."""
    stale: int = 0
    """Evaluations since the best one."""
    evaluation_pending: bool = False
    """Whether a signal ended this step's evaluation early; in files ``owed``."""
    bad_steps: int = 0
    in_a_row: int = 0
    """Bad steps since the last good one."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of the metrics of the steps since the last regular record."""
    summed: int = 0
    """Number of those steps without bad ones, whose updates were dropped."""
    last: dict[str, float] = field(default_factory=dict)
    """Mean of those steps; before the first of them that of the last record."""

    def to_json(self) -> dict[str, Any]:
        """Progress as plain values."""
        plain = asdict(self)
        plain["owed"] = plain.pop("evaluation_pending")
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "TrainingProgress":
        """Inverse of :meth:`to_json`."""
        fields = {**plain}
        return cls(evaluation_pending=fields.pop("owed", False), **fields)

    def take(self, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a good step.

        ``last`` holds the step's own learning rate and the means of the other metrics.
        """
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in metrics.items()}
        self.summed += 1
        self.last = {name: total / self.summed for name, total in self.sums.items()}
        if RATE in metrics:
            self.last[RATE] = metrics[RATE]

    def record(self) -> None:
        """Begins the next interval, after the means were recorded."""
        self.sums, self.summed = {}, 0

    def judge(self, value: float) -> bool:
        """Adds an evaluation (smaller is better); returns whether it is the best so far."""
        if not math.isnan(value) and (self.best is None or value < self.best):
            self.best, self.stale = value, 0
            return True
        self.stale += 1
        return False


class Checkpointer:
    """Saves and restores states with the position in the data and the progress.

    Args:
        setup: The job on this machine.
        run: The run directory.
        ledger: Ledger for the time.
        event: Makes a record from name, seconds and detail.
    """

    def __init__(
        self, setup: Setup, run: Run, ledger: Ledger, event: Callable[[str, float, str], None]
    ) -> None:
        self._setup, self._run, self._ledger, self._event = setup, run, ledger, event
        rules, evaluation = setup.job.checkpoints, setup.job.evaluation
        self.store = CheckpointStore(
            run.checkpoints,
            keep_last=rules.keep_last,
            keep_best=rules.keep_best,
            metric=evaluation.metric,
            mode=evaluation.mode,
            peers=replace(distributed.peers(), part=run.part),
        )
        self._kept: tuple[int, bool] = (0, False)
        """Step of the last checkpoint, and whether it holds metrics."""

    def check(self) -> None:
        """Checks before any compile that the newest checkpoint is of this model.

        Raises:
            RunError: it is of another model; names the first array that differs.
        """
        # Several processes must refuse together, which they do when they restore.
        if not distributed.several():
            steps = self._setup.steps
            self.store.require_same(steps.saved(steps.abstract_state))

    def restore(self, feed: Any) -> Restored | None:
        """The newest intact checkpoint, ``None`` where there is none yet; changes nothing on disk.

        ``feed`` is moved to its position.

        Raises:
            OptionError: it has more steps than the job.
            DataError: it was trained on other data.
        """
        job = self._setup.job
        if not distributed.any_of(self.store.latest_step() is not None):
            return None
        with self._ledger.spend(Spent.checkpoint):
            steps = self._setup.steps
            restored = self.store.restore(steps.saved(steps.abstract_state))
            restored = replace(restored, state=self._setup.whole(restored.state))
        feed.set_states([extra["data"] for extra in restored.extras])
        if TrainingProgress.from_json(restored.extra["progress"]).step > job.steps:
            raise OptionError(
                f"steps is {job.steps}, but {self._run.path} has a checkpoint of step {restored.step}; give --steps {restored.step} or more"
            )
        self._kept = (restored.step, job.evaluation.metric in restored.metrics)
        return restored

    def go_back(
        self, restored: Restored | None, again: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        """Drops what the run holds beyond the restored checkpoint, and records that will come ``again``."""
        part = self._run.part
        if distributed.is_first():
            self._run.truncate(0 if restored is None else restored.step, again)
        if not (distributed.is_first() if part is None else part.leads):
            return
        if restored is not None and self.store.discard_after(restored.step) and part is not None:
            # Before another host sends a part of a checkpoint of the same step.
            self._run.send()

    def save(
        self, state: Any, feed: Any, progress: TrainingProgress, metrics: Mapping[str, float] | None
    ) -> None:
        """Begins to write a checkpoint, unless this step has one that holds as much."""
        step, measured = progress.step, metrics is not None
        if step == 0 or (self._kept[0] == step and self._kept[1] >= measured):
            return
        start = self._ledger.clock()
        with self._ledger.spend(Spent.checkpoint):
            extra = {"data": feed.get_state(), "progress": progress.to_json()}
            kept = self._setup.steps.saved(state)
            self._run.sync()
            self.store.save(step, kept, extra=extra, metrics=metrics)
        self._kept = (step, measured)
        self._event("checkpoint", self._ledger.clock() - start, f"step {step}")

    def rate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the last evaluation's metrics to the checkpoint of the last step, where it has none."""
        if not self.unrated(step):
            return
        with self._ledger.spend(Spent.checkpoint):
            self.store.rate(step, metrics)
        self._kept = (step, True)

    def unrated(self, step: int) -> bool:
        """Whether the last checkpoint is of this step and holds no metrics."""
        return self._kept == (step, False)

    def path(self) -> str | None:
        """The newest checkpoint."""
        kept = self.store.latest_step()
        return None if kept is None else str(self.store.path(kept))
