"""Forecasts for the local CPU, compiled for real, and for absent GPUs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import pytest
from jax.sharding import PartitionSpec

from systolic.chips import Slice, slice
from systolic.compiling import Compiler, FunctionProgram, Outcome, compile, gpu_compiler
from systolic.compiling.gpu_compiler import compiler
from systolic.compiling.host_backend import MOST_DEVICES
from systolic.compiling.outcome import CompiledMemory
from systolic.core.errors import NotFoundError, OptionError
from systolic.core.units import Origin, duration
from systolic.forecasting import Forecast, Spread, forecast_program
from systolic.forecasting.cautions import errors
from systolic.forecasting.display import readings
from systolic.forecasting.display.text import lines
from systolic.forecasting.function import function_program
from systolic.forecasting.platforms import STAND_IN, of_overlap, of_pool, of_triton
from systolic.forecasting.run import of_outcome
from systolic.hlo import Groups, parse
from systolic.report.terminal import plain
from systolic.sim.network import switched
from systolic.sim.roofline import ModuleSource, Peaks, gpu_peaks, roofline
from systolic.sim.simulate import simulate
from systolic.sim.timeline import PricedBy

roofline_only = pytest.mark.skipif(
    compiler() is not None, reason="the extra gpu-forecast is here: GPUs are no rooflines"
)
ROWS, WIDE, DEEP = 4096, 1024, 2048
MATMUL = 2.0 * ROWS * WIDE * DEEP


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    """A gradient step: w sharded by rows, gathered for the product, its gradient scattered."""
    gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w).astype(jnp.float32)))(w)
    return w - gradient


def large(x: jax.Array) -> jax.Array:
    """Three arrays of 32 GiB at once."""
    return jnp.cumsum(x, axis=0) + x[::-1]


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", is_causal=True)


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def program(function: object, args: tuple, on: Slice, specs: tuple | None) -> FunctionProgram:
    return function_program(function, args, {}, on, Spread(in_specs=specs))  # ty: ignore


def ask(root: Path, function: object, args: tuple, on: str, specs: tuple | None = None) -> Forecast:
    where = slice(on)
    asked = replace(program(function, args, where, specs), model_flops=MATMUL)
    return forecast_program(asked, "made", where, compiler=Compiler(root=root))


SHARDED = (PartitionSpec("devices"), PartitionSpec("devices"))


@pytest.fixture(scope="module")
def cpu(root: Path) -> Forecast:
    args = (array(ROWS, WIDE, dtype="float32"), array(WIDE, DEEP, dtype="float32"))
    return ask(root, layer, args, "cpu")


@pytest.fixture(scope="module")
def h100(root: Path) -> Forecast:
    return ask(root, layer, (array(ROWS, WIDE), array(WIDE, DEEP)), "h100")


SHARDED = (PartitionSpec("devices"), PartitionSpec("devices"))


@pytest.fixture(scope="module")
def scattered(root: Path) -> Outcome:
    on = slice("8xh100")
    asked = program(step, (array(WIDE, DEEP), array(ROWS, WIDE)), on, SHARDED)
    return compile(asked, on, Compiler(root=root))


@pytest.fixture(scope="module")
def eight(scattered: Outcome) -> Forecast:
    return of_outcome(scattered, "made", slice("8xh100"), 1.0)


def test_the_cpu_at_hand_is_compiled_for(cpu: Forecast) -> None:
    found = cpu.to_json()
    assert found["compiler"]["built_for"] == "cpu"
    assert (found["origin"], found["hbm"]["origin"]) == ("simulated", "compiled")
    # Arguments and the result in f32; the compiler may add little to them.
    held = 4 * (ROWS * WIDE + WIDE * DEEP + ROWS * DEEP)
    assert held <= found["hbm"]["peak_bytes"] < 1.6 * held
    assert cpu.hardware_flops == MATMUL
    assert found["step_seconds_low"] < found["step_seconds"] < found["step_seconds_high"]
    assert sum(found["time_by_resource"].values()) == pytest.approx(found["step_seconds"])
    assert any("measured" in note for note in found["notes"])


def test_what_no_source_gives_is_none(cpu: Forecast) -> None:
    found = cpu.to_json()
    for name in ("mfu", "hfu", "usd_per_hour", "usd_per_million_calls", "kwh_per_million_calls"):
        assert found[name] is None
    assert found["calls_per_second"] == pytest.approx(1 / found["step_seconds"])
    assert "examples_per_second" not in found
    assert json.loads(json.dumps(cpu.to_json())) == cpu.to_json()


def test_virtual_devices_share_the_machine(root: Path) -> None:
    args = (array(WIDE, DEEP, dtype="float32"), array(ROWS, WIDE, dtype="float32"))
    four = ask(root, step, args, "4xcpu", SHARDED)
    assert four.capacity_bytes == slice("cpu").chip.hbm_bytes // 4
    assert any(span.opcode in ("all-gather", "all-reduce") for span, _ in four.timeline.leaves())
    assert four.to_json()["hbm"]["origin"] == "compiled"


@roofline_only
def test_an_absent_gpu_is_a_roofline_and_says_so(h100: Forecast) -> None:
    found = h100.to_json()
    assert (found["origin"], found["hbm"]["origin"]) == ("assumed", "assumed")
    assert found["compiler"]["built_for"] == "cpu"
    assert STAND_IN in found["notes"]
    assert any("memory is estimated" in note for note in found["notes"])
    # The program is bf16 as it would be there, not the f32 that a CPU computes in.
    assert found["hbm"]["peak_bytes"] < 1.6 * 2 * (ROWS * WIDE + WIDE * DEEP + ROWS * DEEP)
    assert h100.hardware_flops == MATMUL


@roofline_only
def test_the_roofline_is_the_catalogues(h100: Forecast) -> None:
    peaks = gpu_peaks(slice("h100"))
    (product,) = [span for span, _ in h100.timeline.leaves() if span.flops]
    assert product.seconds == pytest.approx(
        MATMUL / slice("h100").chip.source("measured_matmul_bf16_flops_per_second").value
    )
    for span, _ in h100.timeline.leaves():
        assert span.seconds >= max(
            span.flops / peaks.of("bf16"), span.bytes / peaks.memory, peaks.launch_seconds
        ) * (1 - 1e-9)
    assert h100.mfu == pytest.approx(MATMUL / h100.step_seconds / 989e12)
    assert 0 < h100.mfu < 0.81
    past = errors()["gpu"]["roofline"]["h100"]
    assert h100.low == pytest.approx(h100.step_seconds / (1 + past["high"]))
    assert h100.high == pytest.approx(h100.step_seconds / (1 + past["low"]))
    assert f"{past['held']} of {past['rows']} published training steps on h100" in h100.interval


@pytest.mark.parametrize(
    ("on", "form", "peak"),
    [
        ("h100", "bf16", 989e12),
        ("h100", "tf32", 494.7e12),
        ("h100", "f32", 2 * 132 * 128 * 1.98e9),
        ("h100", "fp8", 1979e12),
        ("b300", "int8", 150e12),  # hardly any units: less than bf16's 2,250
    ],
)
def test_executed_flops_are_compared_with_the_peak_of_their_format(
    h100: Forecast, on: str, form: str, peak: float
) -> None:
    made = replace(h100, on=slice(on), flops_by_format={form: MATMUL})
    assert made.hfu == pytest.approx(MATMUL / h100.step_seconds / peak, rel=1e-3)
    said = dict(readings.speed(made))["HFU"]
    assert said.endswith("%" if form == "bf16" else f"% of the {form} peak")


def test_a_product_of_f32_is_of_the_tf32_peak(root: Path) -> None:
    made = ask(
        root,
        layer,
        (array(ROWS, WIDE, dtype="float32"), array(WIDE, DEEP, dtype="float32")),
        "h100",
    )
    assert made.flops_by_format == {"tf32": MATMUL}
    assert 0.3 < made.hfu < 0.81


@pytest.mark.parametrize(("fraction", "pooled"), [("", "58.37 GiB"), ("0.9", "69.64 GiB")])
def test_a_short_memory_keeps_collectives_beside_nothing(
    fraction: str, pooled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA's scheduler leaves 5 % free of what arguments leave of 80 % of 79.11 GiB, on a GPU of the pool, 75 % of them by itself."""
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", fraction)
    text = """HloModule step, is_scheduled=true, num_partitions=8

ENTRY %main (p0: bf16[4096,4096]) -> bf16[32768,4096] {
  %p0 = bf16[4096,4096]{1,0} parameter(0)
  %all = (bf16[4096,4096]{1,0}, bf16[32768,4096]{1,0}) all-gather-start(%p0), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, backend_config={"collective_backend_config":{"is_sync":SYNC}}
  ROOT %done = bf16[32768,4096]{1,0} all-gather-done(%all)
}
"""
    on = slice("8xh100")
    alone, beside = (simulate(parse(text.replace("SYNC", word)), on) for word in ("true", "false"))
    short = CompiledMemory(
        argument_size_in_bytes=40 * 2**30,
        output_size_in_bytes=40 * 2**30,
        alias_size_in_bytes=40 * 2**30,
        temp_size_in_bytes=30 * 2**30,
    )
    (line,) = of_overlap(on, alone, short, ())
    assert duration(alone.seconds) in line
    assert "--xla_gpu_memory_limit_slop_factor=125" in line
    assert "keeps to 62.12 GiB here" in line
    assert f"to {pooled} on a GPU" in line
    enough = msgspec.structs.replace(short, temp_size_in_bytes=20 * 2**30)
    assert not of_overlap(on, alone, enough, ())
    assert not of_overlap(on, alone, short, ["--xla_gpu_memory_limit_slop_factor=110"])
    assert not of_overlap(on, beside, short, ())


@roofline_only
@pytest.mark.parametrize(
    ("dtype", "form", "peak"),
    [
        ("float8_e4m3fn", "fp8", 1979e12),
        ("float8_e5m2", "fp8", 1979e12),
        ("int8", "int8", 1979e12),
    ],
)
def test_a_narrow_product_is_at_the_peak_of_its_format(
    root: Path, dtype: str, form: str, peak: float
) -> None:
    """Not at that of wider operands, whose copies a CPU would make and a GPU does not: one op, which reads a byte a number."""
    out = jnp.int32 if dtype == "int8" else jnp.bfloat16

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot(x, w, preferred_element_type=out)

    made = ask(
        root, product, (array(ROWS, WIDE, dtype=dtype), array(WIDE, DEEP, dtype=dtype)), "h100"
    )
    (span,) = [span for span, _ in made.timeline.leaves()]
    assert made.flops_by_format == {form: MATMUL}
    assert span.bytes == ROWS * WIDE + WIDE * DEEP + out(0).nbytes * ROWS * DEEP
    reached = slice("h100").chip.source("measured_matmul_bf16_flops_per_second").value / 989e12
    least = max(MATMUL / (peak * reached), span.bytes / gpu_peaks(slice("h100")).memory)
    assert span.seconds == pytest.approx(least, rel=1e-3)


def test_eight_gpus_gather_and_scatter_over_their_links(eight: Forecast) -> None:
    spans = [span for span, _ in eight.timeline.leaves()]
    moved = {span.opcode: span for span in spans if span.priced_by is PricedBy.network}
    assert "all-gather" in moved
    # An eighth of the gradient is all that each device keeps of the sum.
    assert "reduce-scatter" in moved
    assert moved["all-gather"].bytes == 2 * WIDE * DEEP * 7 / 8
    assert moved["all-gather"].seconds > 2 * WIDE * DEEP * 7 / 8 / 370e9
    assert {span.resource.value for span in moved.values()} == {"ici"}
    assert eight.exposed_collective_seconds > 0
    # Forward and the gradient of w, each an eighth of the rows.
    assert eight.hardware_flops == pytest.approx(2 * MATMUL / 8)


def test_two_hosts_are_slower_than_one() -> None:
    links = switched(slice("16xh100"))
    inside = Groups((tuple(range(8)),))
    across = Groups((tuple(range(16)),))
    apart = Groups(((0, 8),))
    size = 1e9
    one, two, thin = (
        links.collective("all-gather", groups, size, size / groups.size)
        for groups in (inside, across, apart)
    )
    assert one.lanes == ("nvlink",)
    assert two.lanes == thin.lanes == ("dcn",)
    # XLA's table: 1 GiB over eight in 2.73 ms, reduced in 4.72 ms.
    assert one.seconds == pytest.approx(2.73e-3 * 1e9 / 2**30, rel=0.05)
    # A ring takes 15/16 of it through both hosts' cards, 0.9 x 400 GB/s, and NVLink is as slow; alone a GPU has one card.
    assert two.seconds == pytest.approx(size * 15 / 16 / (0.785 * 450e9), rel=0.05)
    assert thin.seconds == pytest.approx(size / 2 / (400e9 / 8 * 0.9), rel=0.05)
    reduced = links.collective("all-reduce", inside, size, size)
    assert reduced.seconds == pytest.approx(4.72e-3 * 1e9 / 2**30, rel=0.05)


@roofline_only
def test_a_missing_rate_leaves_the_time_out_but_not_the_memory(
    scattered: Outcome, eight: Forecast
) -> None:
    made = of_outcome(scattered, "made", slice("8xl4"), 1.0)
    found = made.to_json()
    assert found["step_seconds"] is None
    assert found["hbm"]["peak_bytes"] == eight.memory.peak_bytes
    assert any("no step time: the catalogue has no rate" in note for note in found["notes"])
    assert "fits" in "\n".join(plain(lines(made, 90)))


@roofline_only
def test_attention_is_cudnns_though_it_is_not_here(root: Path) -> None:
    heads, head_dim, length = 8, 128, 1024
    args = (array(1, length, heads, head_dim),) * 3
    whole = (PartitionSpec(),) * 3
    made = ask(root, attend, args, "h100", whole)
    (kernel,) = [span for span, _ in made.timeline.leaves() if span.priced_by is PricedBy.kernel]
    # Two matmuls over the lower triangle.
    assert kernel.flops == 4 * heads * length**2 * head_dim / 2
    assert kernel.seconds == pytest.approx(kernel.flops / (0.61 * 989e12))
    # The logits are nowhere in memory.
    assert made.memory.peak_bytes < 4 * 2 * heads * length * head_dim * 1.5


@roofline_only
def test_what_does_not_fit_names_its_buffers(root: Path) -> None:
    made = ask(root, large, (array(1 << 17, 1 << 17),), "h100", (PartitionSpec(),))
    found = made.to_json()
    assert not found["fits"]
    assert made.origin is Origin.assumed
    assert found["rejected"]["need_bytes"] > found["rejected"]["have_bytes"] == 80 * 10**9
    assert found["rejected"]["buffers"][0]["bytes"] == 2 << 34
    assert found["step_seconds"] is None
    assert "does not fit" in "\n".join(plain(lines(made, 90)))


@roofline_only
def test_the_screen_says_what_is_assumed(h100: Forecast, cpu: Forecast, eight: Forecast) -> None:
    shown = "\n".join(plain(lines(h100, 100)))
    assert "[assumed]" in shown
    assert "for h100 itself: pip install 'systolic[gpu-forecast]'" in shown
    assert "[assumed; kinds estimated]" in shown
    assert "roofline, not compiled for this GPU" in shown
    assert "million calls" in shown
    shown = "\n".join(plain(lines(cpu, 100)))
    assert "[compiled; kinds estimated]" in shown
    assert readings.money(cpu) == readings.energy(cpu) == ""
    assert readings.words(eight)["dcn"] == "waiting for the network"


@roofline_only
def test_requests_that_cannot_be_met_are_one_line(root: Path) -> None:
    args = (array(ROWS, WIDE), array(WIDE, DEEP))
    many = slice(f"{2 * MOST_DEVICES}xh100")
    with pytest.raises(OptionError, match="choose a smaller slice") as raised:
        forecast_program(
            program(layer, args, many, None), "made", many, compiler=Compiler(root=root)
        )
    assert "\n" not in str(raised.value)
    one = slice("h100")
    asked = program(layer, args, one, None)
    with pytest.raises(OptionError, match="leave --save out"):
        forecast_program(asked, "made", one, compiler=Compiler(root=root, save=True))
    with pytest.raises(NotFoundError, match="did you mean"):
        slice("h1000")


GEMM = """\
HloModule m, is_scheduled=true

ENTRY %main (a: bf16[512,256], b: bf16[256,1024]) -> bf16[512,1024] {
  %a = bf16[512,256]{1,0} parameter(0)
  %b = bf16[256,1024]{1,0} parameter(1)
  %g = (bf16[512,1024]{1,0}, s8[33554432]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %r = bf16[512,1024]{1,0} get-tuple-element(%g), index=0
}
"""


def test_a_gpu_compilers_own_products() -> None:
    peaks = Peaks(matmul={"bf16": 1e12}, memory=math.inf)
    made = roofline(parse(GEMM), peaks, 1, ModuleSource.compiled)
    assert made.seconds == pytest.approx(2 * 512 * 256 * 1024 / 1e12)
    assert made.origin is Origin.simulated


def test_a_pool_that_is_too_small_is_told_with_a_share_that_suffices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on, need = slice("h100"), 70 * 10**9
    for name in gpu_compiler.FRACTIONS:
        monkeypatch.delenv(name, raising=False)
    # The driver tells 84.9e9 bytes: 75 % of them are 63.7e9, and 70e9 and the context 84 %.
    (line,) = of_pool(need, on)
    assert "XLA takes 75% of a GPU's memory, 59.33 GiB" in line
    assert line.endswith("set XLA_CLIENT_MEM_FRACTION=0.84")
    assert of_pool(60 * 10**9, on) == []
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    assert of_pool(need, on) == []
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    assert of_pool(need, on) == []


def test_a_flag_of_another_name_leaves_the_line_on_triton() -> None:
    (line,) = of_triton(["--xla_gpu_enable_triton_gemm_int4=true"], "train")
    assert "Triton's matmuls are off" in line
    assert of_triton(["--xla_gpu_enable_triton_gemm=true"], "train") == []
