"""The step of a static batch of a decoder, which published engines measured; ``systolic serve`` batches continuously.

The program of a static batch, all of its layers apart, takes the compiler minutes. Its inner layers are alike, so that two
programs of a few layers are compiled, and each further period of layers costs the difference between them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from apart import ApartProgram

from systolic.chips import Slice
from systolic.compiling import Compiler
from systolic.core.errors import OptionError
from systolic.forecasting import Forecast, forecast_program
from systolic.forecasting.serving.capacity import floor_seconds
from systolic.forecasting.serving.layout import with_heads_for
from systolic.job import Job, Served
from systolic.models.decoder.config import Decoder
from systolic.sim.rates import rates_of
from systolic.sim.simulate import memory_seconds

PERIODS = (2, 4)
"""Periods of layers after the dense ones in the programs that are compiled; the ends hide no more of a longer one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticBatch:
    """A token of each text of a batch."""

    seconds: float
    floor_seconds: float
    """Seconds that bytes and FLOPs take at the chip's peak rates."""
    hbm_bytes: float
    """Bytes on one device."""
    capacity_bytes: int
    compiled: tuple[Forecast, ...]
    """Forecasts of a few layers."""

    @property
    def fits(self) -> bool:
        """Whether a device holds weights, cache and temporaries."""
        return self.hbm_bytes <= self.capacity_bytes


def forecast_static(
    job: Job,
    on: Slice,
    sizes: tuple[int, int],
    served: Served,
    compiler: Compiler,
    watch: Callable[[str], None] = lambda _: None,
) -> StaticBatch:
    """The step of a batch, all layers in arrays of their own.

    Args:
        job: A decoder under the layout that serves it.
        on: The slice.
        sizes: Texts, and positions of the cache of each.
        served: Formats, and the use of the expert axis.
        compiler: Flags and effort.
        watch: Called with each stage, a few words.

    Raises:
        OptionError: the model is no decoder, or a part of it does not fit.
    """
    job = with_heads_for(job, job.layout.on(on.num_devices, on.num_slices), served)
    model = job.model
    if not isinstance(model, Decoder):
        raise OptionError(f"{job.name} is no decoder; forecast it with systolic forecast --serve")
    program = ApartProgram(job=job, rows=sizes[0], tokens=1, context=sizes[1], served=served)
    few, more = (
        _few_layers(program, model, layers, on, compiler, watch) for layers in depths(model)
    )
    low, high = depths(model)

    def whole(value: Callable[[Forecast], float]) -> float:
        each = (value(more) - value(few)) / max(high - low, 1)
        return value(more) + each * (model.layers - high)

    return StaticBatch(
        # A few layers may find all of their weights fetched beside the ends of the program; all layers do not.
        seconds=max(whole(lambda forecast: forecast.step_seconds or 0.0), whole(_memory_seconds)),
        floor_seconds=whole(lambda forecast: floor_seconds(forecast) or math.nan),
        hbm_bytes=whole(
            lambda forecast: forecast.memory.peak_bytes if forecast.memory else math.nan
        ),
        capacity_bytes=few.capacity_bytes,
        compiled=(few, more),
    )


def _few_layers(
    program: ApartProgram,
    model: Decoder,
    layers: int,
    on: Slice,
    compiler: Compiler,
    watch: Callable[[str], None],
) -> Forecast:
    """The program with so many layers."""
    job = program.job
    forecast = forecast_program(
        replace(program, job=replace(job, model=replace(model, layers=layers))),
        job.name,
        on,
        compiler=compiler,
        say=lambda stage: watch(f"{layers} layers: {stage}"),
    )
    if not forecast.fits or forecast.step_seconds is None:
        raise OptionError(
            f"{layers} layers of {model.layers} need {forecast.need_bytes} bytes, more than a device of {on.name} has; take a larger slice"
        )
    return forecast


def _memory_seconds(forecast: Forecast) -> float:
    rates = rates_of(forecast.on)
    return 0.0 if forecast.timeline is None else memory_seconds(forecast.timeline, rates)


def depths(model: Decoder) -> tuple[int, int]:
    """Layers of the two programs: whole periods of windows and mixtures after the dense layers."""
    period = math.lcm(len(model.windows), model.mixture_every)
    few, more = (min(model.dense_layers + count * period, model.layers) for count in PERIODS)
    return few, more
