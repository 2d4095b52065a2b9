"""Decode of decoders in bf16, int8 and int4 on TPU slices: ``python benchmarks/serve/quantized_forecast.py MODEL [SLICE ...]``.

The step is that of ``systolic serve`` over pages under the layout that it would choose, :data:`ROWS` texts an engine of 1,152 positions
each. Programs with :data:`DEPTHS` layers are compiled and simulated, and all layers take what these differ by, as forecasts of static batches do; models
of fewer than :data:`SMALL` parameters are compiled whole, as the layers of short programs lie in vector memory.
The floor is the bytes of weights, keys and values over the rate of the memory, counted of all layers; ``bound`` names what takes most of
the larger program's time, ``bytes`` says how much of the step the floor is.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any

from systolic.chips import Slice, slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiler, PagedProgram
from systolic.forecasting import Forecast, forecast_program
from systolic.forecasting.serving.capacity import floor_seconds
from systolic.forecasting.serving.forecast import Load
from systolic.forecasting.serving.layout import engine_layout
from systolic.forecasting.serving.server_steps import server_steps, with_formats
from systolic.job import Job, ServedWeights
from systolic.recipes.jobs import source_of

ROWS, DEPTHS = 16, (2, 4)
SMALL = 1e9
LOAD = Load(prompt_tokens=1024, output_tokens=256)
WEIGHTS = (ServedWeights.plain, ServedWeights.int8, ServedWeights.int4)
SLICES = ("v5e-8", "v6e-8")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Decode of one model in one format on one slice."""

    layout: str
    tokens_per_second: float
    seconds: float
    floor_seconds: float
    bound: str

    @property
    def share(self) -> float:
        """Of the step that the floor is."""
        return self.floor_seconds / self.seconds


def job_of(name: str, on: Slice, weights: ServedWeights) -> Job:
    """A published model under the layout of a server."""
    job = with_formats(source_of(name, {}).job, name, weights)
    return replace(job, layout=engine_layout(job, on, LOAD, ROWS).layout)


def program_of(job: Job, on: Slice, layers: int) -> PagedProgram:
    """The step with so many layers, whose matrices have the job's formats."""
    model: Any = job.model
    program = server_steps(replace(job, model=replace(model, layers=layers)), on, LOAD, 64, None)
    made = program.program((ROWS, 1))
    assert isinstance(made, PagedProgram)
    return made


def row(name: str, on: Slice, weights: ServedWeights) -> Row:
    """Compiles, simulates and extrapolates."""
    job = job_of(name, on, weights)
    compiler = Compiler(flags=resolved("", on.chip)).quick()
    model: Any = job.model
    depths = DEPTHS if model.num_parameters >= SMALL else (model.layers,)
    made = [
        forecast_program(program_of(job, on, layers), name, on, compiler=compiler)
        for layers in depths
    ]

    def whole(values: list[float]) -> float:
        if len(values) == 1:
            return values[0]
        few, more = values
        return more + (more - few) / (DEPTHS[1] - DEPTHS[0]) * (model.layers - DEPTHS[1])

    seconds = whole([_known(one.step_seconds, one) for one in made])
    layout = job.layout
    return Row(
        layout=f"{layout.data} engines of tensor {layout.tensor}",
        tokens_per_second=ROWS * layout.data / seconds,
        seconds=seconds,
        floor_seconds=whole([_known(floor_seconds(one), one) for one in made]),
        bound=str(made[-1].bound_by),
    )


def _known(seconds: float | None, made: Forecast) -> float:
    if seconds is None:
        raise SystemExit(f"{made.name} does not fit or has no time: {made.rejected}")
    return seconds


def main(name: str, *slices: str) -> None:
    """Prints a row for each slice and format."""
    print(
        "| model | slice | weights | layout | decode tokens/s | step ms | floor ms | bytes | bound |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for on in map(slice, slices or SLICES):
        for weights in WEIGHTS:
            one = row(name, on, weights)
            kind = "bf16" if weights is ServedWeights.plain else weights.value
            figures = f"{one.tokens_per_second:,.0f} | {one.seconds * 1e3:.2f} | {one.floor_seconds * 1e3:.2f} | {one.share:.0%}"
            print(
                f"| {name} | {on.name} | {kind} | {one.layout} | {figures} | {one.bound} |",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
