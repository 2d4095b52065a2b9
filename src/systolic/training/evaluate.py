"""The task's metrics over a split."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from systolic.core.errors import DataError
from systolic.job import Job, Split
from systolic.steps.steps import StepFunctions
from systolic.training.feed import evaluation
from systolic.training.interrupt import Interrupt
from systolic.training.ledger import Ledger, Spent
from systolic.training.programs import CompiledStep
from systolic.training.same import SameBatches
from systolic.training.setup import Setup


class HaltedError(Exception):
    """An evaluation that was asked to end early."""


def never(done: int) -> bool:
    """Goes on to the end."""
    del done
    return False


def num_batches(job: Job, steps: StepFunctions, split: Split, limit: int = 0) -> int | None:
    """Batches of an evaluation that reads at most ``limit`` of them (0: all); ``None`` where only reading tells."""
    size = job.data.size(split)
    if size is None:
        return limit or None
    whole = -(-size // (steps.batch_size // job.layout.accumulate))
    return min(whole, limit) if limit else whole


def reads_all(job: Job, steps: StepFunctions, split: Split, limit: int) -> bool:
    """Whether so many batches (0: all) are known to be the whole split."""
    whole = num_batches(job, steps, split)
    return not limit or (whole is not None and whole <= limit)


def evaluate(
    job: Job,
    steps: StepFunctions,
    program: Any,
    params: Any,
    model_state: Any,
    split: Split,
    batches: int = 0,
    halt: Callable[[int], bool] = never,
) -> dict[str, float]:
    """Means over a split, weighted exactly (by token or example), name to value.

    Args:
        job: What is evaluated.
        steps: Its programs.
        program: ``steps.evaluate``, jitted or compiled.
        params: Weights.
        model_state: Other variables.
        split: Which part of the data.
        batches: Reads only the first so many batches; 0 reads all.
        halt: Asked before each batch, with the number of batches done, whether to give up.

    Raises:
        DataError: the split is empty, or processes read different data for it.
        HaltedError: ``halt`` said so.
    """
    feed = evaluation(job, steps, split)
    total: Any = None
    same = SameBatches()
    try:
        for done, batch in enumerate(itertools.islice(feed, batches or None)):
            # The batch before last has been computed: the devices have work for one batch, and an
            # evaluation that is asked to end does so after that one.
            if halt(max(done - 1, 0)):
                raise HaltedError
            same.check(batch)
            sums = program(params, model_state, batch)
            jax.block_until_ready(total)
            total = sums if total is None else jax.tree.map(lambda a, b: a + b, total, sums)
    finally:
        feed.close()
    if total is None:
        raise DataError(
            f"the {split.value} split of {job.name} is empty; give the recipe data for it"
        )
    return {
        name: float(mean.total) / max(float(mean.weight), 1e-9)
        for name, mean in jax.device_get(total).items()
    }


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """A training session's evaluations: on record, shown while they run, ended early by a signal.

    Args:
        setup: The job on this machine.
        program: The eval step.
        ledger: Where their time is claimed.
        say: Makes a record: (kind, its values).
        show: Takes a record that only watchers see.
    """

    setup: Setup
    program: CompiledStep
    ledger: Ledger
    say: Callable[..., None]
    show: Callable[[dict[str, Any]], None]

    def __call__(
        self, state: Any, split: Split, batches: int, interrupt: Interrupt, final: bool = False
    ) -> dict[str, float] | None:
        """Metrics of the first so many batches of a split (0: all); ``None`` where a signal ended it.

        ``final`` marks the record of an evaluation at the end of a run.
        """
        job, steps, clock = self.setup.job, self.setup.steps, self.ledger.clock
        start, asked, of = clock(), 0, num_batches(job, steps, split, batches)

        def halt(done: int) -> bool:
            nonlocal asked
            asked += 1
            self.show({"kind": "evaluating", "split": split.value, "batches": done, "of": of})
            return interrupt.soon()

        with self.ledger.spend(Spent.eval):
            while not self.program.wait(0.1):
                if interrupt.alone():
                    return None
            arguments = (job, steps, self.program, state.evaluated, state.model_state)
            try:
                metrics = evaluate(*arguments, split, batches, halt)
            except HaltedError:
                return None
        seconds = clock() - start
        whole = num_batches(job, steps, split)
        values = {"split": split.value, "metrics": metrics, "seconds": seconds}
        self.say("eval", **values, batches=asked, of=whole, final=final)
        return metrics

    def alike(self) -> bool:
        """Whether the last evaluation reads as much of the data as those during training, so that all compare."""
        job, steps, rule = self.setup.job, self.setup.steps, self.setup.job.evaluation
        split, limit = Split.validation, self._final_batches()
        if not rule.every or job.data.size(split) == 0 or limit == rule.batches:
            return True
        return reads_all(job, steps, split, limit) and reads_all(job, steps, split, rule.batches)

    def ranking(self, state: Any, interrupt: Interrupt) -> dict[str, float] | None:
        """Validation metrics of the batches that evaluations during training read, by which checkpoints are ranked."""
        if interrupt.agreed():
            return None
        return self(state, Split.validation, self.setup.job.evaluation.batches, interrupt)

    def final(self, state: Any, interrupt: Interrupt) -> dict[Split, dict[str, float]]:
        """Metrics of the held-out splits at the end, as far as no signal ends it."""
        measured: dict[Split, dict[str, float]] = {}
        for split in self._held_out():
            if interrupt.agreed():
                break
            metrics = self(state, split, self._final_batches(), interrupt, final=True)
            if metrics is None:
                break
            measured[split] = metrics
        return measured

    def baselines(self) -> dict[str, float]:
        """Baselines of the data to compare with; they are of full splits, so none if the last evaluation reads less."""
        job, steps = self.setup.job, self.setup.steps
        limit = self._final_batches()
        if not all(reads_all(job, steps, split, limit) for split in self._held_out()):
            return {}
        return dict(job.data.baselines())

    def _held_out(self) -> list[Split]:
        data = self.setup.job.data
        return [split for split in (Split.validation, Split.test) if data.size(split) != 0]

    def _final_batches(self) -> int:
        rule = self.setup.job.evaluation
        return rule.batches if rule.final_batches is None else rule.final_batches
