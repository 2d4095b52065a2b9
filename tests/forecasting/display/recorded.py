"""Forecasts made of recorded answers of the compiler, in no time and with no compiler."""

import gzip
import tempfile
from functools import cache
from pathlib import Path

import msgspec

from systolic.chips import slice
from systolic.compiling import Compiled, Rejected
from systolic.compiling.outcome import HLO, REPORT, Buffer, CompileReport
from systolic.core.units import Origin
from systolic.forecasting import Forecast, forecast_text
from systolic.forecasting.cost import bill_of
from systolic.forecasting.run import of_outcome
from systolic.sim.timeline import PricedBy, Resource, Span, Timeline
from tests.recorded import hlo

FOLDER = Path(__file__).parents[2] / "recorded" / "hlo"
ON = slice("v5e-4")


@cache
def fitting() -> Forecast:
    """A language model of two layers on v5e-4, as the compiler answered."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / HLO).write_bytes((FOLDER / "lm-scoped-v5e-4.hlo.gz").read_bytes())
        (folder / REPORT).write_bytes((FOLDER / "lm-scoped-v5e-4.json").read_bytes())
        return of_outcome(Compiled(folder, "recorded", True), "lm", ON, 0.5)


@cache
def dumped() -> Forecast:
    """The same schedule as a text that came without anything else."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "dump.txt"
        path.write_bytes(gzip.decompress((FOLDER / "lm-scoped-v5e-4.hlo.gz").read_bytes()))
        return forecast_text(path, ON)


def refused() -> Forecast:
    """One that needs more memory than there is."""
    buffer = Buffer(
        bytes=12 << 30,
        op="jit(train)/jvp()/logits/dot_general",
        shape="f32[64,2048,32768]{2,1,0:T(8,128)}",
        source="model.py:196",
        kind="saved activation",
    )
    small = Buffer(bytes=1 << 30, op="state.params['embedding']", shape="f32[32768,8192]")
    report = msgspec.convert(hlo.report("lm-scoped-v5e-4"), CompileReport)
    outcome = Rejected(
        space="hbm",
        need_bytes=(20 << 30) + (1 << 29),
        have_bytes=(15 << 30) + (3 << 28),
        buffers=(buffer, small),
        digest="recorded",
        cached=True,
        report=report,
    )
    return of_outcome(outcome, "lm", ON, 0.5)


def _span(name: str, start: float, seconds: float, resource: Resource, **more: object) -> Span:
    given = {
        "opcode": "fusion",
        "layer": "mlp",
        "source": "/src/model.py:7",
        "priced_by": PricedBy.cycles,
    }
    return Span(name=name, start=start, seconds=seconds, resource=resource, **{**given, **more})  # ty: ignore


def small_timeline() -> Timeline:
    """A loop of four turns, each with an op and a gather beside it, between two ops: 12 ms."""
    inside = (
        _span("dot", 0.0, 1.5e-3, Resource.mxu, flops=2e11, bytes=1e8),
        _span("gather", 0.0, 2e-3, Resource.ici, lane="ici", opcode="all-gather", bytes=1e7),
        _span("gather", 1.5e-3, 0.5e-3, Resource.ici, opcode="wait all-gather", layer="gather"),
    )
    loop = _span("while", 1e-3, 8e-3, Resource.idle, opcode="while", repeat=4, inside=inside)
    spans = (
        _span("first", 0.0, 1e-3, Resource.vpu, bytes=5e8, layer="embed"),
        loop,
        _span("last", 9e-3, 3e-3, Resource.hbm, bytes=2e9, layer="", source=""),
    )
    return Timeline(origin=Origin.simulated, seconds=12e-3, spans=spans)


def small() -> Forecast:
    """A forecast of :func:`small_timeline`."""
    return Forecast(
        recipe="small",
        on=ON,
        origin=Origin.simulated,
        fits=True,
        capacity_bytes=16 << 30,
        timeline=small_timeline(),
        step_seconds=12e-3,
        low=10e-3,
        high=14e-3,
        unit="tokens",
        units=4096,
        model_flops=2e12,
        bill=bill_of(ON),
    )
