"""Measurement of two models side by side:  size, quality, answers, latency here and forecast."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from systolic.comparing.agreement import Agreement, agreement
from systolic.comparing.speeds import ModelSpeeds, SpeedOptions, speeds_of
from systolic.core.errors import OptionError, called
from systolic.core.reporter import reporter
from systolic.data.text.instructions import Instructions
from systolic.formats.registry import in_files
from systolic.inference.model import TrainedModel, keep_programs, prepare_model
from systolic.inference.scoring import AnswerOptions, check_answers, scores_of
from systolic.job import Job
from systolic.runs.bundle.folder import MANIFEST, RECORDED, open_bundle
from systolic.runs.bundle.tensors import SUFFIX
from systolic.steps.lengths import longest_text


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """One of the two."""

    path: Path
    kind: str
    """Class of its model."""
    task: str
    precision: str
    """Compute dtype here."""
    parameters: int
    """Elements of its weights; of a run with adapters those of its model, in which they are merged."""
    adapter_parameters: int
    """Elements of a run's adapters; 0 without."""
    bytes_by_dtype: Mapping[str, int]
    """Of all weights, as they are in memory here."""
    file_bytes: int | None
    """Of its weights' files; ``None`` for a run, whose checkpoints hold more."""
    recorded: list[dict[str, Any]]
    """Evaluations that its run measured."""
    measured: Mapping[str, float] | None = None
    """Metrics on the data that both were given."""
    speeds: ModelSpeeds = field(default_factory=ModelSpeeds)

    @property
    def bytes(self) -> int:
        """Of all weights in memory."""
        return sum(self.bytes_by_dtype.values())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "task": self.task,
            "precision": self.precision,
            "parameters": self.parameters,
            "adapter_parameters": self.adapter_parameters,
            "bytes": self.bytes,
            "bytes_by_dtype": dict(self.bytes_by_dtype),
            "file_bytes": self.file_bytes,
            "evaluations": self.recorded,
            "measured": None if self.measured is None else dict(self.measured),
            **self.speeds.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two models side by side."""

    a: ComparedModel
    b: ComparedModel
    agreement: Agreement | None
    disagreement: str | None
    """Why their outputs were not compared; ``None`` where they were."""
    device: str
    """Where they were measured."""
    timed: Mapping[str, int]
    """Rows, tokens and repeats of the timed calls; {} without."""
    data: str | None
    """Data of the measured quality."""
    on: Sequence[str]
    """Slices of the forecasts."""

    def __repr__(self) -> str:
        """Both models and whether they agree, on one line."""
        found = str(self.agreement or self.disagreement)
        return f"<Comparison of {self.a.path} and {self.b.path}: {found}>"

    def _repr_html_(self) -> str:
        from systolic.comparing.display.text import lines
        from systolic.report.notebook import screen

        return screen([Text(line) for line in lines(self)])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "a": self.a.to_json(),
            "b": self.b.to_json(),
            "agreement": None if self.agreement is None else self.agreement.to_json(),
            "not_compared": self.disagreement,
            "device": self.device,
            "timed": dict(self.timed),
            "data": self.data,
            "on": list(self.on),
        }


def compared(
    paths: Sequence[Path],
    speeds: SpeedOptions,
    answers: AnswerOptions,
    *,
    data: Path | None,
    batches: int,
    trust: bool,
) -> Comparison:
    """Measures two models on the same inputs, in turn; see :func:`systolic.compare_models`."""
    warn, stage = reporter().warn, reporter().stage
    keep_programs()
    check_answers(answers, data)
    prepared = [prepare_model(path, trust=trust, warn=warn) for path in paths]
    _refuse_other_tasks(paths, [each.setup.job for each in prepared])
    stage("weights")
    models = [
        TrainedModel(path, each.setup, each.read(), warn)
        for path, each in zip(paths, prepared, strict=True)
    ]
    sides = [_described(model) for model in models]
    stage("the same inputs")
    agreed = agreement(*models)
    if data is not None:
        sequence = _common_rows(models, data)
        sides = [
            replace(side, measured=_measured(model, data, batches, sequence, answers))
            for side, model in zip(sides, models, strict=True)
        ]
    measured, timed = speeds_of(models, speeds, stage)
    sides = [replace(side, speeds=each) for side, each in zip(sides, measured, strict=True)]
    return Comparison(
        a=sides[0],
        b=sides[1],
        agreement=agreed if isinstance(agreed, Agreement) else None,
        disagreement=agreed if isinstance(agreed, str) else None,
        device=models[0].setup.machine.name,
        timed=timed,
        data=None if data is None else str(data),
        on=speeds.slices,
    )


def _refuse_other_tasks(paths: Sequence[Path], jobs: Sequence[Job]) -> None:
    """Raises OptionError for models that do different things."""
    names = [type(job.task).__name__ for job in jobs]
    if type(jobs[0].task) is not type(jobs[1].task):
        told = [
            f"{path} is a {type(job.model).__name__} for {name}"
            for path, job, name in zip(paths, jobs, names, strict=True)
        ]
        raise OptionError(f"{' and '.join(told)}; compare two models of one task")


def _described(model: TrainedModel) -> ComparedModel:
    from systolic.runs.weights import sizes_of

    job, weights = model.job, model.weights
    frozen = model.setup.steps.network.frozen
    held = {path: one for path, one in weights.model_state.items() if path in frozen}
    counted = held if job.adapter else weights.params | held
    return ComparedModel(
        path=model.path,
        kind=type(job.model).__name__,
        task=type(job.task).__name__,
        precision=job.precision.resolve(model.setup.machine.platform).value,
        parameters=sizes_of(counted).elements,
        adapter_parameters=sizes_of(weights.params).elements if job.adapter else 0,
        bytes_by_dtype=sizes_of({**weights.params, **weights.model_state}).bytes_by_dtype,
        file_bytes=_file_bytes(model.path),
        recorded=_recorded(model),
    )


def _file_bytes(path: Path) -> int | None:
    """Bytes of the files of a model's weights."""
    if not in_files(path):
        return None
    from systolic.formats.bundle import BundleSource
    from systolic.formats.source import TransformersSource, open_source

    source = open_source(path)
    if isinstance(source, BundleSource):
        own = source.bundle.record.files.items()
        return sum(
            one.bytes
            for name, one in own
            if name.endswith(SUFFIX) and not name.startswith(RECORDED)
        )
    if isinstance(source, TransformersSource):
        return sum(file.stat().st_size for file in source.weight_files)
    return None


def _recorded(model: TrainedModel) -> list[dict[str, Any]]:
    """Evaluations of the weights that the run, or the Bundle, has on record."""
    from systolic.formats.bundle import evaluations_of

    if not in_files(model.path):
        found = evaluations_of(model.path, model.step)
    elif (model.path / MANIFEST).is_file():
        found = open_bundle(model.path).record.evaluations
    else:
        found = []
    return [msgspec.to_builtins(one) for one in found]


@called("--data")
def _common_rows(models: Sequence[TrainedModel], data: Path) -> int | None:
    """Tokens of a row for both where the data is conversations, so that they are cut at the same place: the longer row, at most what both models take."""
    jobs = [model.job_on(data) for model in models]
    sizes = [job.data.sequence for job in jobs if isinstance(job.data, Instructions)]
    limits = [most for job in jobs if (most := longest_text(job)) is not None]
    return min([max(sizes), *limits]) if len(sizes) == len(jobs) else None


@called("--data")
def _measured(
    model: TrainedModel, data: Path, batches: int, sequence: int | None, answers: AnswerOptions
) -> Mapping[str, float]:
    """Metrics of a model on the data, those of its answers among them."""
    stage = reporter().stage
    stage(f"{model.path.name} on {data}")
    (metrics,) = model.evaluate(path=data, batches=batches, sequence=sequence).values()
    return metrics | scores_of(model, data, answers, stage)
