"""How fast a model is: medians of its calls here, forecasts on slices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic.chips import Slice, slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiler, StepKind
from systolic.core.ranges import COUNT, NOT_NEGATIVE, check
from systolic.data.text.text_data import TextData
from systolic.forecasting import forecast_job
from systolic.forecasting.serving.capacity import forecast_serving
from systolic.forecasting.serving.forecast import Load, ServingPoint
from systolic.forecasting.serving.layout import engine_layout
from systolic.inference.model import (
    PreparedModel,
    TrainedModel,
    keep_programs,
    prepare_model,
    set_up_here,
)
from systolic.job import Batch, Job, Layout, Remat
from systolic.models.decoder.config import Decoder
from systolic.serving.text.converting import restored_on_cpu
from systolic.steps.lengths import longest_text

if TYPE_CHECKING:
    from systolic.inference.latency import CallSizes, TimedCall

Say = Callable[[str], None]
CHUNK = 256
"""Prompt tokens that a step of the forecast server reads."""


@dataclass(frozen=True, kw_only=True)
class SpeedOptions:
    """Options of timed calls here and of forecasts elsewhere.

    Raises:
        OptionError: a number outside its range, or an unknown slice.
    """

    rows: Annotated[int, COUNT] = 1
    """Texts, pictures or recordings of a timed call."""
    prompt_tokens: Annotated[int, COUNT] = 128
    """Tokens of a timed prompt."""
    output_tokens: Annotated[int, COUNT] = 16
    """New tokens of a timed prompt."""
    repeats: Annotated[int, NOT_NEGATIVE] = 5
    """Timed calls of each model; 0 times none."""
    on: str | None = None
    """Slices for forecasts, with commas between them; None forecasts nothing."""
    quick: bool = False
    """Stop the forecasts at the compiler's schedule."""

    def __post_init__(self) -> None:
        check(self)
        for name in self.slices:
            slice(name)

    @property
    def slices(self) -> Sequence[str]:
        """Names of the slices, each once."""
        names = [] if self.on is None else [name.strip() for name in self.on.split(",")]
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class ServerForecast:
    """Forecast of a decoder's server on a slice."""

    program: str
    fits: bool
    weights_bytes: int
    points: Sequence[ServingPoint]
    """One for the compared number of requests; none where it does not fit."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        points = [point.to_json() for point in self.points]
        return {
            "program": self.program,
            "fits": self.fits,
            "weights_bytes": self.weights_bytes,
            "points": points,
        }


@dataclass(frozen=True, kw_only=True)
class EvalForecast:
    """Forecast of the eval step of any other model on a slice."""

    program: str = "eval step"
    rows: int
    fits: bool
    step_seconds: float | None
    peak_bytes: int | None
    bound_by: str | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ModelSpeeds:
    """Speeds of one model."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Median seconds of each stage of a call here."""
    program: str | None = None
    """Name of the timed program, such as ``decode 1, 4 pages`` of a server; ``None`` without timed calls."""
    device: str | None = None
    """Device of the timed calls."""
    notes: Sequence[str] = ()
    """Notes on the timed calls, a line each."""
    forecasts: Mapping[str, ServerForecast | EvalForecast] = field(default_factory=dict)
    """By slice: of a server for decoders, of the eval step for others."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        each = {name: forecast.to_json() for name, forecast in self.forecasts.items()}
        return {
            "seconds": dict(self.seconds),
            "program": self.program,
            "device": self.device,
            "notes": list(self.notes),
            "forecasts": each,
        }


def speeds_of(
    models: Sequence[TrainedModel], options: SpeedOptions, say: Say
) -> tuple[list[ModelSpeeds], Mapping[str, int]]:
    """Speeds of models whose calls are timed in turn; and what a call computed."""
    measured, timed = _timed_in_turn(models, options, say)
    speeds = [
        replace(speed, forecasts=_forecasts(model.job, options, say))
        for model, speed in zip(models, measured, strict=True)
    ]
    return speeds, timed


def speeds_beside(
    paths: Sequence[Path], options: SpeedOptions, *, trust: bool, say: Say
) -> tuple[list[ModelSpeeds], Mapping[str, int]]:
    """Speeds of a model and of one made from it, and what a call computed. Calls are timed in turn where there is memory for both, else one model after the other.

    Raises:
        SystolicError: a model can't be opened; as :func:`systolic.open`.
    """
    if not options.repeats and not options.slices:
        return [ModelSpeeds() for _ in paths], {}
    keep_programs()
    prepared = {path: prepare_model(path, trust=trust) for path in paths}
    job = prepared[paths[0]].setup.job
    if most := longest_text(job):
        room = max(1, most - options.output_tokens)
        options = replace(options, prompt_tokens=min(options.prompt_tokens, room))
    together = [list(paths)] if _fit(list(prepared.values())) else [[path] for path in paths]
    all_speeds: list[ModelSpeeds] = []
    timed: Mapping[str, int] = {}
    for each in together:
        models = [
            TrainedModel(path, prepared[path].setup, prepared[path].read(), None) for path in each
        ]
        speeds, timed = _speeds_after_writing(models, options, say)
        all_speeds += speeds
    return all_speeds, timed


def _fit(models: Sequence[PreparedModel]) -> bool:
    """Whether there is memory for the weights of models, and as much again for what is computed with them."""
    from systolic.runs.weights import sizes_of
    from systolic.serving.text.converting import capacity_bytes

    devices = models[0].setup.machine.devices
    networks = [model.setup.steps.network for model in models]
    sizes = [
        sizes_of({**network.params, **network.model_state}).bytes_by_dtype for network in networks
    ]
    wanted = 2 * sum(sum(by_dtype.values()) for by_dtype in sizes)
    return wanted <= capacity_bytes(devices) * len(devices)


def _speeds_after_writing(
    models: Sequence[TrainedModel], options: SpeedOptions, say: Say
) -> tuple[list[ModelSpeeds], Mapping[str, int]]:
    from systolic.inference.latency import LargeCallError

    try:
        return speeds_of(models, options, say)
    except LargeCallError as error:
        what = str(error).partition("; ")[0]
        raise LargeCallError(
            f"{what}; all files are written, and systolic compare times smaller calls"
        ) from error


def _timed_in_turn(
    models: Sequence[TrainedModel], options: SpeedOptions, say: Say
) -> tuple[list[ModelSpeeds], Mapping[str, int]]:
    """Median seconds of each stage of each model's calls, made in turn; and what a call computed."""
    if not options.repeats:
        return [ModelSpeeds() for _ in models], {}
    from systolic.inference.latency import CallSizes, medians

    say("latency")
    sizes = CallSizes(
        rows=options.rows,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
    )
    calls = [server_call(model, sizes) for model in models]
    stage_seconds = medians(calls, options.repeats)
    speeds = [
        ModelSpeeds(
            seconds=seconds,
            program=call.program,
            device=model.setup.machine.name,
            notes=tuple(call.notes),
        )
        for model, call, seconds in zip(models, calls, stage_seconds, strict=True)
    ]
    return speeds, {**calls[0].sizes(), "repeats": options.repeats}


def server_call(model: TrainedModel, sizes: "CallSizes") -> "TimedCall":
    """A call by the programs that ``systolic serve`` runs for a model on this machine: of a decoder an engine's steps, of any other the predict step.

    Raises:
        OptionError: a text is longer than the model takes.
    """
    if not isinstance(model.job.model, Decoder) or not isinstance(model.job.data, TextData):
        from systolic.inference.latency import timed_call

        return timed_call(model.setup.steps, model.weights, sizes)
    from systolic.compiling.program_store import ProgramStore
    from systolic.serving.text.opening import EngineSizes
    from systolic.serving.text.replicas import ReplicaPlacement
    from systolic.serving.text.timed import ServedTexts
    from systolic.steps.serving_layout import ServingLayout

    notes: list[str] = []
    placement = ReplicaPlacement(layout=ServingLayout(), sizes=EngineSizes())

    def place(job: Job, platform: str, devices: Sequence[Any]) -> Any:
        return placement.place(job, platform, devices, 0)

    held = restored_on_cpu(
        PreparedModel(setup=set_up_here(model.job, place=place), read=lambda: model.weights),
        lambda job: set_up_here(job, place=place),
        notes.append,
    )
    steps = held.setup.steps
    call = ServedTexts(steps, held.read, sizes, ProgramStore(steps))
    call.notes = notes
    return call


def _forecasts(
    job: Job, options: SpeedOptions, say: Say
) -> Mapping[str, ServerForecast | EvalForecast]:
    """By slice, a forecast of a server of a decoder, of the eval step of any other model."""
    return {name: _forecast(job, slice(name), options, say) for name in options.slices}


def _forecast(
    job: Job, on: Slice, options: SpeedOptions, say: Say
) -> ServerForecast | EvalForecast:
    compiler = Compiler(flags=resolved("", on.chip))
    compiler = compiler.quick() if options.quick else compiler
    if isinstance(job.model, Decoder) and isinstance(job.data, TextData):
        load = Load(
            prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens, chunk=CHUNK
        )
        job = replace(job, layout=engine_layout(job, on, load, options.rows).layout)
        forecast = forecast_serving(
            job, on, load, concurrency=(options.rows,), compiler=compiler, watch=say
        )
        return ServerForecast(
            program=forecast.program,
            fits=forecast.fits,
            weights_bytes=forecast.memory.weights_bytes,
            points=forecast.points,
        )
    layout = Layout(data=1, fsdp=-1, remat=Remat.none)
    rows = -(-options.rows // on.num_devices) * on.num_devices
    job = replace(job, layout=layout, batch=Batch(total=rows))
    step = forecast_job(job, on, verb=StepKind.eval, compiler=compiler, say=say)
    return EvalForecast(
        rows=rows,
        fits=step.fits,
        step_seconds=step.step_seconds,
        peak_bytes=None if step.memory is None else step.memory.peak_bytes,
        bound_by=step.bound_by,
    )
