"""Formats of a model's matrices under a budget: each matrix's own cost is measured, and the worst get more bits."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.core.errors import OptionError
from systolic.core.files import cache_home, digest, write_json
from systolic.core.reporter import reporter
from systolic.inference.evaluation import splits
from systolic.inference.model import Metrics, TrainedModel
from systolic.job import Job, MatrixFormat, Quantization
from systolic.models.quantized.placement import INT8
from systolic.runs.bundle.record import EvaluationRecord, finite_metrics
from systolic.steps.step_functions import StepFunctions
from systolic.steps.tasks import LanguageModel

if TYPE_CHECKING:
    from systolic.quantizing.rounder import Rounder


SEARCH_BATCHES = 8
"""Batches that say what a matrix alone costs, at most."""
KEPT = "sensitivity"
"""Folder of the cache with what was measured."""
LEFT = 0.01
"""Share of its cost that a matrix is taken to keep after going from 4 bits to 8: the step is 16 times finer, the error's square 256. The same is
tried of one whose activations are no longer rounded."""


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
        return self.value / before.value - 1 if before.value else math.inf


def quality_of(job: Job, metrics: Metrics) -> Quality:
    """Perplexity of language models, else accuracy where there is one, else the loss."""
    if isinstance(job.task, LanguageModel):
        loss = metrics["loss"]  # of a ruined model beyond what a float holds the exponential of
        return Quality(name="perplexity", value=math.exp(loss) if loss < 700 else math.inf)
    if "accuracy" in metrics:
        return Quality(name="accuracy", value=metrics["accuracy"])
    return Quality(name="loss", value=metrics["loss"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """Cost of one matrix alone."""

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
    """Loss of all together, measured."""
    budget: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [
            {
                "path": sensitivity.path,
                "asked": sensitivity.asked,
                "lost": sensitivity.lost,
                "chosen": sensitivity.chosen,
            }
            for sensitivity in self.sensitivities
        ]
        return {"budget": self.budget, "lost": self.lost, "sensitivities": rows}


class Measure:
    """Quality of a model with some matrices rounded, by one compiled program: that of its Bundle, in which training rounds nothing."""

    beside = ""
    """Model that losses are measured beside, where it is not the model as it was trained."""

    def __init__(self, model: TrainedModel, data: Path | None, batches: int) -> None:
        from systolic.steps.programs import jit_evaluate

        self.model, self.data, self.batches = model, data, batches
        self.job = model.job_on(data)
        self.split = splits(self.job, None)[0]
        steps = model.setup.steps
        self.own = self.program = jit_evaluate(steps)
        if steps.network.rounded:
            bare = replace(steps.target, weight_format=None)
            self.program = jit_evaluate(StepFunctions(steps.job, bare, trains=False))
        self.known: dict[str, float] = {}
        self.file: Path | None = None
        self.metrics = self._evaluated(self.own, model.weights)

    @property
    def before(self) -> Quality:
        """Quality of the model's own weights, rounded as in its training."""
        return quality_of(self.job, self.metrics)

    @property
    def where(self) -> tuple[Any, ...]:
        """Conditions that losses depend on beside weights and data: dtype, platform, rows of a batch."""
        steps = self.model.setup.steps
        return steps.target.dtype, steps.target.platform, self._rows

    @property
    def _rows(self) -> int:
        """Examples of a batch."""
        from systolic.steps.programs import evaluation_rows

        return evaluation_rows(self.job, self.model.setup.steps)

    def record(self, before: Metrics, step: int) -> EvaluationRecord:
        """The metrics as bundle.json has them, beside those of the same model before quantization."""
        from systolic.inference.evaluation import num_batches

        steps, contents = self.model.setup.steps, self.job.data.contents(self.split)
        whole = num_batches(self.job, steps, self.split)
        return EvaluationRecord(
            on=self.split.value if self.data is None else self.data.name,
            metrics=finite_metrics(self.metrics),
            step=step,
            batches=num_batches(self.job, steps, self.split, self.batches * self._rows),
            of=whole,
            data=None if contents is None else contents.digest,
            before=finite_metrics(before),
        )

    def of(self, weights: Any) -> Metrics:
        """Metrics of weights as they are given."""
        return self._evaluated(self.program, weights)

    def _evaluated(self, program: Any, weights: Any) -> Metrics:
        from systolic.inference.evaluation import evaluate

        steps = self.model.setup.steps
        params, rest = weights.params, weights.model_state
        examples = self.batches * self._rows
        return evaluate(self.job, steps, program, params, rest, self.split, examples)

    def fewer(self, batches: int) -> "Measure":
        """The same over the first so many batches, if it reads more, beside a model in which nothing is rounded."""
        rounds = self.own is not self.program
        if 0 < self.batches <= batches and not rounds:
            return self
        measure = copy(self)
        measure.batches = min(batches, self.batches or batches)
        measure.own, measure.beside = self.program, "beside unrounded, " if rounds else ""
        measure.metrics = measure.of(self.model.weights)
        return measure

    def lost(self, rounder: "Rounder", formats: Mapping[str, MatrixFormat]) -> float:
        """Share of the quality that these formats cost; one that an earlier search measured is not measured again."""
        fitted = "fitted, " if rounder.moments else ""
        name = f"{self.beside}{fitted}{self.batches} batches: {Quantization.of(formats)}"
        if name not in self.known:
            rounded = rounder.rounded(self.model.weights, formats)
            self.known[name] = quality_of(self.job, self.of(rounded)).lost(self.before)
            if self.file is not None:
                write_json(self.file, self.known)
        return self.known[name]

    def keep(self, *about: Any) -> None:
        """Keeps what is measured on disk, for a search that was cut off.

        ``about``: what the losses depend on, beside the data: weights, calibration.
        """
        from systolic import __version__

        contents = self.job.data.contents(self.split)
        if contents is None:
            return
        name = digest([__version__, contents.digest, *about])
        self.file = cache_home() / KEPT / f"{name}.json"
        if self.file.is_file():
            with contextlib.suppress(ValueError, OSError):
                self.known |= json.loads(self.file.read_bytes())


def choose(
    measure: Measure,
    rounder: "Rounder",
    formats: Mapping[str, MatrixFormat],
    budget: float,
) -> Choice:
    """Formats that keep the loss of quality within a budget.

    The cost of each matrix alone, over :data:`SEARCH_BATCHES`, and the bytes that more bits take say which is the worst;
    it goes to int8, from there to its own dtype, and all together are measured, until the loss is met.

    Raises:
        OptionError: no formats meet it.
    """
    alone: dict[str, float] = {}
    few = measure.fewer(SEARCH_BATCHES)
    for number, (path, how) in enumerate(formats.items()):
        reporter().stage(f"sensitivity {number + 1} of {len(formats)}: {path}")
        alone[path] = few.lost(rounder, {path: how})
    current, cost = dict(formats), {path: _cost(lost) for path, lost in alone.items()}
    reporter().stage("all together")
    lost = measure.lost(rounder, current)
    while not lost <= budget:  # a loss that is no number keeps no budget
        expected, known = lost, sum(cost[path] for path in current)
        while current and not expected <= budget:
            path = max(
                current,
                key=lambda candidate: (
                    cost[candidate] / _more_bytes(rounder, candidate, current[candidate])
                ),
            )
            own = lost * cost[path] / known if known else lost
            if (kind := current[path].format).bits == 4 or kind.activations:
                current[path], cost[path] = INT8, LEFT * cost[path]
                expected -= (1 - LEFT) * own
            else:
                del current[path]
                expected -= own
            if not math.isfinite(expected):
                break
        if not current:
            raise OptionError(
                f"no matrix can be quantized within --budget {budget:.3g}; give a larger budget, more batches to measure on, or a wider format"
            )
        reporter().stage(f"{len(formats) - len(current)} left, measured again")
        lost = measure.lost(rounder, current)
    rows = [
        Sensitivity(
            path=path,
            asked=str(formats[path]),
            lost=alone[path],
            chosen=str(current.get(path, rounder.matrices[path].dtype.name)),
        )
        for path in sorted(formats, key=lambda candidate: -_cost(alone[candidate]))
    ]
    return Choice(formats=current, sensitivities=rows, lost=lost, budget=budget)


def _cost(lost: float) -> float:
    """Cost of a matrix alone; infinite where the model's outputs are no numbers with it."""
    return math.inf if math.isnan(lost) else max(lost, 0.0)


def _more_bytes(rounder: "Rounder", path: str, how: MatrixFormat) -> int:
    """Bytes that a matrix takes more with more bits; for one whose activations get them its own, by which its product costs more."""
    wider = INT8 if how.format.bits == 4 else None
    matrix = rounder.matrices[path]
    if how.format.activations:
        return matrix.bytes(how)
    return max(matrix.bytes(wider) - matrix.bytes(how), 1)
