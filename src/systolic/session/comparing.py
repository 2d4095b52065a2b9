"""``systolic.compare_models``: two models side by side, in size, quality, answers, latency here and forecast."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from systolic.aot import Compiler, StepKind
from systolic.artifact.bundle import MANIFEST, RECORDED, open_bundle
from systolic.artifact.tensors import SUFFIX
from systolic.chips import Slice, slice
from systolic.chips.flags import resolved
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, check
from systolic.data.text.text_data import TextData
from systolic.forecasting import forecast_job
from systolic.forecasting.serving import Load
from systolic.job import Batch, Job, Layout, Remat
from systolic.models.decoder.config import Decoder
from systolic.session.agreement import Agreement, agreement
from systolic.session.capacity import forecast_serving
from systolic.session.server_layout import engine_layout
from systolic.session.trained import TrainedModel, in_files, keep_programs, prepare_model

Say = Callable[[str], None]
CHUNK = 256
"""Prompt tokens that a step of the forecast server reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonOptions:
    """What is measured.

    Raises:
        OptionError: a number outside its range.
    """

    data: Path | None = None
    """Data for both, read as ``systolic eval --path`` reads it; None measures no quality."""
    batches: Annotated[int, NOT_NEGATIVE] = 0
    """Batches of it; 0 is all."""
    rows: Annotated[int, COUNT] = 1
    """Texts, pictures or recordings of a timed call."""
    prompt_tokens: Annotated[int, COUNT] = 128
    """Tokens of a timed prompt."""
    output_tokens: Annotated[int, COUNT] = 16
    """New tokens of a timed prompt."""
    repeats: Annotated[int, NOT_NEGATIVE] = 5
    """Timed calls of each model, in turn; 0 times none."""
    on: str | None = None
    """A slice for a forecast of both; None forecasts nothing."""
    quick: bool = False
    """Stop the forecasts at the compiler's schedule."""

    def __post_init__(self) -> None:
        check(self)


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
    """Elements of trained and of frozen weights, adapters included."""
    bytes_by_dtype: Mapping[str, int]
    """Of all weights, as they are in memory here."""
    file_bytes: int | None
    """Of its weights' files; ``None`` for a run, whose checkpoints hold more."""
    recorded: list[dict[str, Any]]
    """Evaluations that its run measured."""
    measured: Mapping[str, float] | None = None
    """Metrics on the data that both were given."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Median seconds of each stage of a call here."""
    forecast: Mapping[str, Any] | None = None

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
            "bytes": self.bytes,
            "bytes_by_dtype": dict(self.bytes_by_dtype),
            "file_bytes": self.file_bytes,
            "evaluations": self.recorded,
            "measured": None if self.measured is None else dict(self.measured),
            "seconds": dict(self.seconds),
            "forecast": None if self.forecast is None else dict(self.forecast),
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
    on: str | None
    """Slice of the forecasts."""

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
            "on": self.on,
        }


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
    on = None if options.on is None else slice(options.on)
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
    sides = [
        _measured(side, model, options, say) for side, model in zip(sides, models, strict=True)
    ]
    sides, timed = _timed(sides, models, options, say)
    if on is not None:
        sides = [
            replace(side, forecast=_forecast(model.job, on, options, say))
            for side, model in zip(sides, models, strict=True)
        ]
    return Comparison(
        a=sides[0],
        b=sides[1],
        agreement=agreed if isinstance(agreed, Agreement) else None,
        disagreement=agreed if isinstance(agreed, str) else None,
        device=models[0].setup.machine.name,
        timed=timed,
        data=None if options.data is None else str(options.data),
        on=options.on,
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
    from systolic.artifact.weights import sizes_of

    job, weights = model.job, model.weights
    frozen = model.setup.steps.network.frozen
    counted = weights.params | {p: one for p, one in weights.model_state.items() if p in frozen}
    return ComparedModel(
        path=model.path,
        kind=type(job.model).__name__,
        task=type(job.task).__name__,
        precision=job.precision.resolve(model.setup.machine.platform).value,
        parameters=sizes_of(counted).elements,
        bytes_by_dtype=sizes_of({**weights.params, **weights.model_state}).bytes_by_dtype,
        file_bytes=_file_bytes(model.path),
        recorded=_recorded(model),
    )


def _file_bytes(path: Path) -> int | None:
    """Bytes of the files of a model's weights."""
    if not in_files(path):
        return None
    from systolic.interop.bundled import BundleSource
    from systolic.interop.source import TransformersSource, open_source

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
    from systolic.session.exporting_bundle import evaluations_of

    if not in_files(model.path):
        found = evaluations_of(model.path, model.step)
    elif (model.path / MANIFEST).is_file():
        found = open_bundle(model.path).record.evaluations
    else:
        found = []
    return [msgspec.to_builtins(one) for one in found]


def _measured(
    side: ComparedModel, model: TrainedModel, options: ComparisonOptions, say: Say
) -> ComparedModel:
    if options.data is None:
        return side
    say(f"{side.path.name} on {options.data}")
    (metrics,) = model.evaluate(path=options.data, batches=options.batches).values()
    return replace(side, measured=metrics)


def _timed(
    sides: list[ComparedModel], models: list[TrainedModel], options: ComparisonOptions, say: Say
) -> tuple[list[ComparedModel], dict[str, int]]:
    if not options.repeats:
        return sides, {}
    from systolic.predicting.latency import CallSizes, medians, timed_call

    say("latency")
    sizes = CallSizes(
        rows=options.rows,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
    )
    calls = [timed_call(model.setup.steps, model.weights, sizes) for model in models]
    found = medians(calls, options.repeats)
    ran = {**calls[0].sizes(), "repeats": options.repeats}
    return [replace(s, seconds=one) for s, one in zip(sides, found, strict=True)], ran


def _forecast(job: Job, on: Slice, options: ComparisonOptions, say: Say) -> dict[str, Any]:
    """Forecast of a server of a decoder, of the eval step of any other model."""
    compiler = Compiler(flags=resolved("", on.chip))
    compiler = compiler.quick() if options.quick else compiler
    if isinstance(job.model, Decoder) and isinstance(job.data, TextData):
        load = Load(
            prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens, chunk=CHUNK
        )
        job = replace(job, layout=engine_layout(job, on, load, options.rows))
        made = forecast_serving(
            job, on, load, concurrency=(options.rows,), compiler=compiler, watch=say
        )
        weights = made.memory.weights_bytes
        points = [point.to_json() for point in made.points]
        return {
            "program": made.program,
            "fits": made.fits,
            "weights_bytes": weights,
            "points": points,
        }
    layout = Layout(data=1, fsdp=-1, remat=Remat.none)
    rows = -(-options.rows // on.num_devices) * on.num_devices
    job = replace(job, layout=layout, batch=Batch(total=rows))
    step = forecast_job(job, on, verb=StepKind.eval, compiler=compiler, say=say)
    return {
        "program": "eval step",
        "rows": rows,
        "fits": step.fits,
        "step_seconds": step.step_seconds,
        "peak_bytes": None if step.memory is None else step.memory.peak_bytes,
        "bound_by": step.bound_by,
    }
