"""Traces: loops unroll to the step, caps are said, and what is written reads back."""

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from systolic.compiling import Compiled, dump
from systolic.compiling.outcome import PROTO
from systolic.forecasting import Forecast
from systolic.forecasting.display.trace import CAP, trace, tracks, unroll, write_trace
from systolic.forecasting.display.xprof import STEPS, category, utilization, varint, write_xprof
from systolic.sim.timeline import Resource, Span
from tests.forecasting.display.recorded import fitting, small, small_timeline


def test_loops_unroll_to_the_step() -> None:
    unrolled = unroll(small_timeline(), 1000)
    assert len(unrolled.events) == unrolled.total == 3 + 4 * 3
    dots = [event.start for event in unrolled.events if event.span.name == "dot"]
    assert dots == pytest.approx([1e-3, 3e-3, 5e-3, 7e-3])
    assert max(e.start + e.seconds for e in unrolled.events) == pytest.approx(12e-3)


def test_a_cap_takes_the_last_turns_and_says_so() -> None:
    unrolled = unroll(small_timeline(), 10)
    assert unrolled.iterations == 2
    assert len(unrolled.events) == 3 + 2 * 3
    assert unrolled.note == "9 of 15 events: of each loop the first 2 iterations"


def test_transfers_that_overlap_get_tracks_of_their_own() -> None:
    def transfer(start: float, seconds: float) -> Span:
        return Span("t", "all-gather", start, seconds, Resource.ici, lane="ici")

    spans = (transfer(0.0, 2.0), transfer(1.0, 2.0), transfer(2.0, 1.0))
    timeline = small_timeline()
    events = unroll(type(timeline)(timeline.origin, 3.0, spans), 10).events
    rows = [[event.start for event in row] for _, row in tracks(events)]
    assert rows == [[0.0, 2.0], [1.0]]


def test_the_trace_of_a_real_step() -> None:
    forecast = fitting()
    assert forecast.timeline is not None
    made = trace(forecast, forecast.timeline)
    spans = [event for event in made["traceEvents"] if event["ph"] == "X"]
    end = max(event["ts"] + event["dur"] for event in spans)
    assert end == pytest.approx(forecast.timeline.seconds * 1e6, rel=1e-6)
    names = {e["args"]["name"] for e in made["traceEvents"] if e["name"] == "thread_name"}
    assert {"TensorCore", "links between chips"} <= names
    assert len(spans) <= CAP
    assert made["otherData"]["events"].startswith("all ")
    assert made["otherData"]["origin"] == "simulated"


def test_the_core_runs_one_op_at_a_time() -> None:
    forecast = fitting()
    assert forecast.timeline is not None
    core = [
        event
        for event in unroll(forecast.timeline, CAP).events
        if event.span.lane == "core" and not event.span.inside
    ]
    ends = [event.start + event.seconds for event in core]
    starts = [event.start for event in core]
    assert all(start >= end - 1e-9 for end, start in zip(ends, starts[1:], strict=False))


def test_a_name_that_ends_in_gz_is_compressed(tmp_path: Path) -> None:
    write_trace(small(), tmp_path / "a.json")
    write_trace(small(), tmp_path / "a.json.gz")
    plain = (tmp_path / "a.json").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == plain
    assert json.loads(plain)["otherData"]["recipe"] == "small"


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(0, "00"), (1, "01"), (127, "7f"), (300, "ac02"), (-1, "ffffffffffffffffff01")],
)
def test_varints(value: int, encoded: str) -> None:
    assert varint(value).hex() == encoded


def test_a_profile_reads_back(tmp_path: Path) -> None:
    from jax.profiler import ProfileData

    path = write_xprof(small(), tmp_path)
    assert path.relative_to(tmp_path).as_posix() == "plugins/profile/forecast/systolic.xplane.pb"
    plane, host = ProfileData.from_file(str(path)).planes
    assert host.name == "/host:CPU"
    # 4 turns of 2e11 FLOPs and 1e8 bytes, 5e8 and 2e9 bytes, in 12 ms.
    assert dict(host.stats) == pytest.approx(
        {
            "matrix_unit_utilization_percent": 100 * 8e11 / 12e-3 / 197e12,
            "hbm_utilization_percent": 100 * 2.9e9 / 12e-3 / 819e9,
        }
    )
    assert plane.name == "/device:TPU:0"
    assert dict(plane.stats)["device_type_string"] == "TPU v5 lite"
    assert dict(plane.stats)["peak_teraflops_per_second"] == 197.0
    lines = {line.name: list(line.events) for line in plane.lines}
    assert [event.name for event in lines["Steps"]] == [str(n) for n in range(STEPS)]
    assert [event.duration_ns for event in lines["Steps"]] == pytest.approx([12e6] * STEPS)
    ops = lines["XLA Ops"]
    assert len(ops) == STEPS * (3 + 2 * 4)
    assert {dict(op.stats)["group_id"] for op in ops} == set(range(STEPS))
    assert len(lines["Async XLA Ops"]) == STEPS * 4
    last = next(op for op in ops if op.name == "%last = fusion()")
    assert (last.start_ns, last.duration_ns) == pytest.approx((9e6, 3e6))


@pytest.fixture
def compiled(tmp_path: Path) -> Forecast:
    """A forecast whose entry of the store has the message that XLA wrote of its module."""
    import jax

    options = dump.dump_options(tmp_path / "dump")
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    jax.jit(jax.numpy.matmul).lower(shape, shape).compile(compiler_options=options)
    module = dump.proto(tmp_path / "dump")
    assert module is not None
    (tmp_path / PROTO).write_bytes(gzip.compress(module))
    return replace(small(), answer=Compiled(tmp_path, "made", True))


def test_a_profile_carries_the_compilers_module(tmp_path: Path, compiled: Forecast) -> None:
    from jax.profiler import ProfileData

    path = write_xprof(compiled, tmp_path)
    names = [plane.name for plane in ProfileData.from_file(str(path)).planes]
    assert names == ["/device:TPU:0", "/host:CPU", "/host:metadata"]
    assert compiled.answer is not None
    module = compiled.answer.proto
    assert module is not None
    assert b"jit_matmul" in module
    assert module in path.read_bytes()


@pytest.mark.parametrize("tool", ["memory_viewer", "graph_viewer"])
def test_xprof_draws_the_compilers_module(tmp_path: Path, compiled: Forecast, tool: str) -> None:
    convert = pytest.importorskip("xprof.convert.raw_to_tool_data", reason="xprof is not installed")
    path = write_xprof(compiled, tmp_path)
    name = "jit_matmul(1)"
    graph = {"node_name": "", "module_name": name, "program_id": "1", "graph_width": 3}
    graph |= {"show_metadata": False, "merge_fusion": False, "type": "short_txt", "format": "html"}
    convert.xspace_to_tool_names(
        [str(path)]
    )  # as the page asks first; xprof then takes the module out
    asked = {"tqx": "out:json", "host": name, "module_name": name, "graph_viewer_options": graph}
    made, _ = convert.xspace_to_tool_data([str(path)], tool, asked)
    text = made.decode() if isinstance(made, bytes) else made
    assert "dot" in text
    assert "64,64" in text


@pytest.mark.parametrize("make", [small, fitting])
def test_xprof_shows_the_timelines_utilization(tmp_path: Path, make: Callable[[], Any]) -> None:
    convert = pytest.importorskip("xprof.convert.raw_to_tool_data", reason="xprof is not installed")
    forecast = make()
    timeline = forecast.timeline
    path = write_xprof(forecast, tmp_path)

    def page(tool: str) -> Any:
        made, _ = convert.xspace_to_tool_data([str(path)], tool, {"tqx": "out:json"})
        return json.loads(made)

    mxu, hbm = utilization(forecast, timeline).values()
    assert mxu > 10
    assert hbm > 5
    overview = {name: value for table in page("overview_page") for name, value in shown(table)}
    assert overview["device_type"] == "TPU v5 lite"
    assert overview["mxu_utilization_percent"] == f"{mxu:.1f}%"
    assert overview["hbm_utilization_percent"] == f"{hbm:.1f}%"
    assert float(overview["steptime_ms_average"]) == pytest.approx(timeline.seconds * 1e3, abs=5e-3)
    program = page("op_profile")["byProgram"]["metrics"]
    assert program["flops"] * 100 == pytest.approx(mxu, rel=1e-4)
    assert program["bandwidthUtils"][0] * 100 == pytest.approx(hbm, rel=1e-4)
    roofline = page("roofline_model")[0]
    names = [column["id"] for column in roofline["cols"]]
    whole = dict(zip(names, (cell["v"] for cell in roofline["rows"][0]["c"]), strict=True))
    assert whole["operation"] == "Program"
    assert whole["compute_efficiency"] * 100 == pytest.approx(mxu, rel=1e-4)
    assert whole["max_mem_bw_utilization"] * 100 == pytest.approx(hbm, rel=1e-4)


def shown(table: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    return (table.get("p") or {}).items()


@pytest.mark.parametrize(
    ("opcode", "resource", "named"),
    [
        ("fusion", Resource.mxu, "convolution fusion"),
        ("fusion", Resource.hbm, "loop fusion"),
        ("wait all-gather", Resource.ici, "all-gather-done"),
        ("transpose", Resource.vpu, "data formatting"),
        ("custom-call", Resource.mxu, "custom-call"),
    ],
)
def test_categories_are_those_of_xla(opcode: str, resource: Resource, named: str) -> None:
    assert category(Span("a", opcode, 0.0, 1.0, resource)) == named
