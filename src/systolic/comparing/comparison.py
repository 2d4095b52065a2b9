"""``systolic.compare_models``: two models side by side, in size, quality, answers, latency here and forecast."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.text import Text

from systolic.comparing.agreement import Agreement, agreement
from systolic.comparing.speeds import ModelSpeeds, SpeedOptions, speeds_of
from systolic.core.arguments import with_types
from systolic.core.errors import OptionError, called
from systolic.core.ranges import NOT_NEGATIVE
from systolic.data.text.instructions import Instructions
from systolic.formats.registry import in_files
from systolic.inference.model import TrainedModel, keep_programs, prepare_model
from systolic.inference.scoring import NO_ANSWERS, AnswerOptions, check_answers, scores_of
from systolic.job import Job
from systolic.runs.bundle.folder import MANIFEST, RECORDED, open_bundle
from systolic.runs.bundle.tensors import SUFFIX
from systolic.steps.lengths import longest_text

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(SpeedOptions):
    """What is measured, speeds and quality.

    Raises:
        OptionError: a number outside its range, or an unknown slice.
    """

    data: Path | None = None
    """Data for both, read as ``systolic eval --path`` reads it; None measures no quality."""
    batches: Annotated[int, NOT_NEGATIVE] = 0
    """Batches of it; 0 is all."""
    answers: AnswerOptions = NO_ANSWERS
    """How answers to the conversations of the data are scored."""


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


@with_types
def compare_models(
    a: Path | str,
    b: Path | str,
    options: ComparisonOptions = ComparisonOptions(),
    *,
    trust: bool = False,
    warn: Callable[[str], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Measures two models on the same inputs, in turn.

    Args:
        a: A run, a Bundle, a Hugging Face folder or a GGUF file.
        b: Another one of the same task.
        options: What is measured.
        trust: Execute the runs' recipes although they are not yours, now and later.
        warn: Called with each warning, one line.
        say: Called with each stage.

    Raises:
        OptionError: the models have different tasks, or the data is not of their kind.
        NotFoundError: a model or the data is not there.
        SystolicError: a model can't be opened; as :func:`systolic.open`.
    """
    keep_programs()
    check_answers(options.answers, options.data)
    paths = [Path(a), Path(b)]
    prepared = [prepare_model(path, trust=trust, warn=warn) for path in paths]
    _refuse_other_tasks(paths, [one.setup.job for one in prepared])
    say("weights")
    models = [
        TrainedModel(path, one.setup, one.read(), warn)
        for path, one in zip(paths, prepared, strict=True)
    ]
    sides = [_described(model) for model in models]
    say("the same inputs")
    agreed = agreement(*models)
    sequence = _common_rows(models, options)
    sides = [
        _measured(side, model, options, sequence, say)
        for side, model in zip(sides, models, strict=True)
    ]
    speeds, timed = speeds_of(models, options, say)
    sides = [replace(side, speeds=one) for side, one in zip(sides, speeds, strict=True)]
    return Comparison(
        a=sides[0],
        b=sides[1],
        agreement=agreed if isinstance(agreed, Agreement) else None,
        disagreement=agreed if isinstance(agreed, str) else None,
        device=models[0].setup.machine.name,
        timed=timed,
        data=None if options.data is None else str(options.data),
        on=options.slices,
    )


def _refuse_other_tasks(paths: list[Path], jobs: list[Job]) -> None:
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
def _common_rows(models: Sequence[TrainedModel], options: ComparisonOptions) -> int | None:
    """Tokens of a row for both where the data is conversations, so that they are cut at the same place: the longer row, at most what both models take."""
    if options.data is None:
        return None
    jobs = [model.job_on(options.data) for model in models]
    sizes = [job.data.sequence for job in jobs if isinstance(job.data, Instructions)]
    limits = [most for job in jobs if (most := longest_text(job)) is not None]
    return min([max(sizes), *limits]) if len(sizes) == len(jobs) else None


@called("--data")
def _measured(
    side: ComparedModel,
    model: TrainedModel,
    options: ComparisonOptions,
    sequence: int | None,
    say: Say,
) -> ComparedModel:
    if options.data is None:
        return side
    say(f"{side.path.name} on {options.data}")
    (metrics,) = model.evaluate(
        path=options.data, batches=options.batches, sequence=sequence
    ).values()
    return replace(side, measured=metrics | scores_of(model, options.data, options.answers, say))
