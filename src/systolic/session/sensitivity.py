"""Formats of a model's matrices under a budget: each matrix's own cost is measured, and the worst get more bits."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.artifact.bundle_record import EvaluationRecord, finite_metrics
from systolic.core.errors import OptionError
from systolic.job import Job, MatrixFormat, WeightFormat
from systolic.session.trained import Metrics, TrainedModel, splits
from systolic.steps.tasks.language import LanguageModel

if TYPE_CHECKING:
    from systolic.interop.quantizing import Matrix

INT8 = MatrixFormat(format=WeightFormat.int8)
LEFT = 0.01
"""Share of its cost that a matrix is taken to keep after going from 4 bits to 8: the step is 16 times finer, the error's square 256."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """A figure of an evaluation that a budget is about."""

    name: str
    """``perplexity``, ``accuracy`` or ``loss``."""
    value: float

    def lost(self, before: "Quality") -> float:
        """Share that is lost: of accuracy in points / 100, of perplexity and loss relative; negative for a gain."""
        if self.name == "accuracy":
            return before.value - self.value
        return self.value / before.value - 1


def quality_of(job: Job, metrics: Metrics) -> Quality:
    """Perplexity of language models, else accuracy where there is one, else the loss."""
    if isinstance(job.task, LanguageModel):
        return Quality(name="perplexity", value=math.exp(metrics["loss"]))
    if "accuracy" in metrics:
        return Quality(name="accuracy", value=metrics["accuracy"])
    return Quality(name="loss", value=metrics["loss"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """What one matrix alone costs."""

    path: str
    asked: str
    """Format that it was measured in."""
    lost: float
    chosen: str
    """Its format in the end; the dtype that it had where it was left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Formats under a budget."""

    formats: Mapping[str, MatrixFormat]
    """By path; matrices that were left in their dtype are not in it."""
    sensitivities: Sequence[Sensitivity]
    """The worst first."""
    lost: float
    """Of all together, measured."""
    budget: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [
            {"path": one.path, "asked": one.asked, "lost": one.lost, "chosen": one.chosen}
            for one in self.sensitivities
        ]
        return {"budget": self.budget, "lost": self.lost, "sensitivities": rows}


class Measure:
    """Quality of a model with some matrices rounded, by one compiled program."""

    def __init__(self, model: TrainedModel, data: Path | None, batches: int) -> None:
        from systolic.steps.programs import jit_evaluate

        self.model, self.data, self.batches = model, data, batches
        self.job = model.job_on(data)
        self.split = splits(self.job, None)[0]
        self.program = jit_evaluate(model.setup.steps)
        self.metrics = self.of(model.weights)

    @property
    def before(self) -> Quality:
        """Of the model's own weights."""
        return quality_of(self.job, self.metrics)

    def record(self, before: Metrics, step: int) -> EvaluationRecord:
        """The metrics as bundle.json has them, beside those of the same model before quantization."""
        from systolic.training.evaluate import num_batches

        steps, contents = self.model.setup.steps, self.job.data.contents(self.split)
        whole = num_batches(self.job, steps, self.split)
        return EvaluationRecord(
            on=self.split.value if self.data is None else self.data.name,
            metrics=finite_metrics(self.metrics),
            step=step,
            batches=num_batches(self.job, steps, self.split, self.batches),
            of=whole,
            data=None if contents is None else contents.digest,
            before=finite_metrics(before),
        )

    def of(self, weights: Any) -> Metrics:
        """Metrics of weights."""
        from systolic.training.evaluate import evaluate

        steps = self.model.setup.steps
        params, rest = weights.params, weights.model_state
        return evaluate(self.job, steps, self.program, params, rest, self.split, self.batches)

    def lost(self, matrices: "Mapping[str, Matrix]", formats: Mapping[str, MatrixFormat]) -> float:
        """Share of the quality that these formats cost."""
        from systolic.interop.quantizing import rounded_weights

        rounded = rounded_weights(self.model.weights, matrices, formats)
        return quality_of(self.job, self.of(rounded)).lost(self.before)


def choose(
    measure: Measure,
    matrices: "Mapping[str, Matrix]",
    formats: Mapping[str, MatrixFormat],
    budget: float,
    say: Callable[[str], None],
) -> Choice:
    """Formats that keep the loss of quality within a budget.

    The cost of each matrix alone says which is the worst; it goes to int8, from there to its own dtype, and all
    together are measured, until the loss is met.

    Raises:
        OptionError: no formats meet it.
    """
    alone: dict[str, float] = {}
    for number, (path, how) in enumerate(formats.items()):
        say(f"sensitivity {number + 1} of {len(formats)}: {path}")
        alone[path] = measure.lost(matrices, {path: how})
    current, cost = dict(formats), {path: max(lost, 0.0) for path, lost in alone.items()}
    say("all together")
    lost = measure.lost(matrices, current)
    while lost > budget:
        expected, known = lost, sum(cost[path] for path in current)
        while expected > budget and current:
            path = max(current, key=lambda one: cost[one])
            own = lost * cost[path] / known if known else lost
            if current[path].format.bits == 4:
                current[path], cost[path] = INT8, LEFT * cost[path]
                expected -= (1 - LEFT) * own
            else:
                del current[path]
                expected -= own
        if not current:
            raise OptionError(
                f"no matrix can be quantized within --budget {budget:.3g}; give a larger budget, more batches to measure on, or a wider format"
            )
        say(f"{len(formats) - len(current)} left, measured again")
        lost = measure.lost(matrices, current)
    rows = [
        Sensitivity(
            path=path,
            asked=str(formats[path]),
            lost=alone[path],
            chosen=str(current.get(path, matrices[path].dtype.name)),
        )
        for path in sorted(formats, key=lambda one: -alone[one])
    ]
    return Choice(formats=current, sensitivities=rows, lost=lost, budget=budget)
