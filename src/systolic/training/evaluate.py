"""Evaluations of a training session."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from systolic.inference import evaluation
from systolic.inference.evaluation import HaltedError, never, num_batches, reads_all
from systolic.job import Job, Split
from systolic.setup import Setup
from systolic.steps.step_functions import StepFunctions
from systolic.training.distributed.consistency import SameBatches
from systolic.training.interrupt import Interrupt
from systolic.training.ledger import Ledger, Spent
from systolic.training.programs import CompiledStep


def evaluate(
    job: Job,
    steps: StepFunctions,
    program: Any,
    params: Any,
    model_state: Any,
    split: Split,
    examples: int = 0,
    halt: Callable[[int], bool] = never,
) -> dict[str, float]:
    """Means over a split as :func:`systolic.inference.evaluation.evaluate`, of batches that are the same in all processes.

    Raises:
        DataError: the split is empty, or processes read different data for it.
        HaltedError: ``halt`` returned True.
    """
    same = SameBatches()

    def checked(params: Any, model_state: Any, batch: Any) -> Any:
        same.check(batch)
        return program(params, model_state, batch)

    return evaluation.evaluate(job, steps, checked, params, model_state, split, examples, halt)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluations of a training session: recorded, shown while they run, ended early by a signal.

    Args:
        setup: The job on this machine.
        program: The eval step.
        ledger: Ledger for their time.
        say: Makes a record from its kind and values.
        show: Called with records for watchers only.
    """

    setup: Setup
    program: CompiledStep
    ledger: Ledger
    say: Callable[..., None]
    show: Callable[[dict[str, Any]], None]

    def __call__(
        self, state: Any, split: Split, batches: int, interrupt: Interrupt, final: bool = False
    ) -> dict[str, float] | None:
        """Metrics of the first ``batches`` of a split (0: all); ``None`` where a signal ended it.

        ``batches`` are those of the layout that the job is meant for. ``final`` marks the record of an evaluation
        at the end of a run.
        """
        job, steps, clock = self.setup.job, self.setup.steps, self.ledger.clock
        examples = self._examples(batches)
        start, batch_count, of = clock(), 0, num_batches(job, steps, split, examples)

        def halt(done: int) -> bool:
            nonlocal batch_count
            batch_count += 1
            self.show({"kind": "evaluating", "split": split.value, "batches": done, "of": of})
            return interrupt.soon()

        with self.ledger.spend(Spent.eval):
            while not self.program.wait(0.1):
                if interrupt.alone():
                    return None
            arguments = (job, steps, self.program, state.evaluated, state.model_state)
            try:
                metrics = evaluate(*arguments, split, examples, halt)
            except HaltedError:
                return None
        seconds = clock() - start
        whole = num_batches(job, steps, split)
        values = {"split": split.value, "metrics": metrics, "seconds": seconds}
        self.say("eval", **values, batches=batch_count, of=whole, final=final)
        return metrics

    def is_comparable(self) -> bool:
        """Whether the last evaluation reads as many batches as those during training, so that their metrics compare."""
        job, rule, split = self.setup.job, self.setup.job.evaluation, Split.validation
        last, others = self._examples(self._final_batches()), self._examples(rule.batches)
        if not rule.every or job.data.size(split) == 0 or last == others:
            return True
        return reads_all(job, split, last) and reads_all(job, split, others)

    def ranking(self, state: Any, interrupt: Interrupt) -> dict[str, float] | None:
        """Validation metrics for ranking checkpoints, over the batches that evaluations during training read."""
        if interrupt.agreed():
            return None
        return self(state, Split.validation, self.setup.job.evaluation.batches, interrupt)

    def final(self, state: Any, interrupt: Interrupt) -> dict[Split, dict[str, float]]:
        """Metrics of the held-out splits at the end; without those that a signal ended."""
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
        """Baselines of the data; none if the last evaluation reads less than the full splits that they are of."""
        job, examples = self.setup.job, self._examples(self._final_batches())
        if not all(reads_all(job, split, examples) for split in self._held_out()):
            return {}
        return dict(job.data.baselines())

    def _held_out(self) -> list[Split]:
        data = self.setup.job.data
        return [split for split in (Split.validation, Split.test) if data.size(split) != 0]

    def _final_batches(self) -> int:
        rule = self.setup.job.evaluation
        return rule.batches if rule.final_batches is None else rule.final_batches

    def _examples(self, batches: int) -> int:
        """Examples in so many batches of an evaluation on all devices that the job is meant for."""
        setup = self.setup
        return batches * (
            setup.steps.batch_size // (setup.intended_layout or setup.job.layout).accumulate
        )
