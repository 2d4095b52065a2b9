"""Forecasts of dumps: programs that others compiled."""

from dataclasses import replace
from pathlib import Path

import pytest

from systolic.chips import slice
from systolic.core.errors import DataError, OptionError
from systolic.core.units import Origin
from systolic.forecasting import forecast_text
from systolic.forecasting.cautions import errors
from systolic.forecasting.command import forecast_dump
from systolic.forecasting.display import readings
from systolic.forecasting.display.text import lines
from systolic.hlo import parse
from systolic.hlo.parse import check
from systolic.report.terminal import plain
from systolic.sim.simulate import simulate
from tests.recorded import hlo as recorded


@pytest.mark.parametrize("name", recorded.NAMES)
def test_a_dump_of_another_program(name: str, tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(recorded.text(name))
    on = slice(recorded.report(name)["slice"])
    found = forecast_text(path, on).to_json()
    assert found["fits"]
    assert found["step_seconds_low"] < found["step_seconds"] < found["step_seconds_high"]
    assert sum(found["time_by_resource"].values()) == pytest.approx(found["step_seconds"])
    assert sum(found["hbm"]["by_kind"].values()) == found["hbm"]["peak_bytes"]
    assert 0.9 < found["priced_fraction"] <= 1.0
    assert found["model_flops_per_step"] is None
    assert "peak memory is from the schedule, not from the compiler" in found["notes"]


def test_opcodes_of_a_newer_compiler_are_no_damage_of_what_it_just_wrote() -> None:
    """libtpu 0.0.52 multiplies for the high half, and the next one does something else."""
    text = recorded.text("lm-v5e-4")
    check(parse(text.replace(" exponential(", " mulhi(")))
    newer = parse(text.replace(" exponential(", " not-yet-known("))
    with pytest.raises(DataError, match="opcode 'not-yet-known', which HLO does not have"):
        check(newer)
    check(newer, newer=True)


@pytest.mark.parametrize(
    ("content", "on", "says"),
    [
        (recorded.text("lm-v5e-4"), "v5e-16", "runs on 4 devices but v5e-16 has 16"),
        (recorded.text("lm-v5e-4").replace("is_scheduled=true, ", ""), "v5e-4", "not scheduled"),
        ("module @jit_f {}", "v5e-4", "no line begins with HloModule"),
        (None, "v5e-4", "could not be read"),
        (
            recorded.text("lm-v5e-4").replace("calls=%fused_computation.629,", "calls=%gone.629,"),
            "v5e-4",
            "calls gone.629, which the text does not have",
        ),
        (
            recorded.text("lm-v5e-4").replace(" exponential(", " exponentail("),
            "v5e-4",
            "opcode 'exponentail', which HLO does not have; did you mean exponential",
        ),
        (
            recorded.text("lm-v5e-4").replace("bf16[4,4,1024,128]", "bf61[4,4,1024,128]"),
            "v5e-4",
            "'bf61' is not a dtype",
        ),
        (
            recorded.text("lm-v5e-4").replace("f32[4,512,128]", "f33[4,512,128]"),
            "v5e-4",
            "'f33' is not a dtype",
        ),
        (
            recorded.text("scatter-v5e-1").replace("fusion(%rows.1)", "fusion(%j.1)"),
            "v5e-1",
            "reads j.1, which its computation does not have",
        ),
        (recorded.text("scatter-v5e-1").replace("S(1)", "S(3)"), "v5e-1", "common memory"),
        (
            recorded.text("between-4xv5e-16"),
            "v5e-16",
            "runs on 4 slices of 16 devices but v5e-16 has 1 of 16",
        ),
        (
            recorded.text("between-2xv5e-16"),
            "2xv5e-8",
            "runs on 2 slices of 16 devices but 2xv5e-8 has 2 of 8",
        ),
    ],
)
def test_what_is_no_dump_for_the_slice_is_one_line(
    content: str | None, on: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "dump.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=says) as raised:
        forecast_text(path, slice(on))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "on", "says"),
    [
        ("lm-v5e-4", "2xv5e-4", "no traffic between the 2 slices of 2xv5e-4"),
        ("between-2xv5e-16", "4xv5e-16", "runs on 2 of the 4 slices of 4xv5e-16"),
    ],
)
def test_slices_that_a_dump_leaves_alone_are_on_the_bill(
    name: str, on: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(recorded.text(name))
    caution = forecast_text(path, slice(on)).cautions[0]
    assert says in caution
    assert f"choose {name.partition('-')[2]}, or compile it for {on}" in caution
    own = forecast_text(path, slice(name.partition("-")[2]))
    assert not any("slices of" in line for line in own.cautions)


def test_a_cpu_s_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="whose schedules are not simulated"):
        forecast_text(tmp_path / "dump.txt", slice("cpu"))


def test_a_gpu_s_dump_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt"
    path.write_text(recorded.text("step-8xh100"))
    found = forecast_text(path, slice("8xh100"))
    assert found.origin is Origin.simulated
    assert found.memory_origin is Origin.simulated
    assert found.step_seconds == simulate(recorded.module("step-8xh100"), slice("8xh100")).seconds
    past = errors()["gpu"]["compiler"]["h100"]
    assert found.low == pytest.approx((found.step_seconds or 0.0) / (1 + past["high"]))
    assert found.high == pytest.approx((found.step_seconds or 0.0) / (1 + past["low"]))
    assert any("does not name its chip" in note for note in found.notes)
    with pytest.raises(DataError, match="is a GPU's schedule"):
        forecast_text(path, slice("v5e-8"))
    with pytest.raises(DataError, match="runs on 8 devices but h100 has 1"):
        forecast_text(path, slice("h100"))
    other = tmp_path / "tpu.txt"
    other.write_text(recorded.text("lm-v5e-4"))
    with pytest.raises(DataError, match="is a TPU's schedule and 4xh100 is a GPU slice"):
        forecast_text(other, slice("4xh100"))


def test_the_files_beside_a_gpu_s_dump_name_it_and_its_memory(tmp_path: Path) -> None:
    stem = "module_0001.jit_step"
    path = tmp_path / f"{stem}.sm_9.0a_gpu_after_optimizations.txt"
    path.write_text(recorded.text("step-8xh100"))
    report = path.with_name(path.name.replace(".txt", "-memory-usage-report.txt"))
    report.write_text("Memory Space: default (color=0)\nTotal bytes: 182526618 (174.07MiB)\n")
    described = tmp_path / f"{stem}.gpu_target_config.pbtxt"
    described.write_text('device_description_str: "NVIDIA H100 80GB HBM3"\n')
    found = forecast_text(path, slice("8xh100"))
    assert (found.need_bytes, found.memory_origin) == (182526618, Origin.compiled)
    assert found.compiled_for == "h100"
    assert "priced as if h200 ran it" in forecast_text(path, slice("8xh200")).cautions[0]
    assert forecast_dump(path).on.name == "8xh100"
    described.unlink()
    with pytest.raises(OptionError, match="does not name its chip; add on="):
        forecast_dump(path)


def test_a_cpu_s_schedule_is_not_forecast_for_a_tpu(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp

    compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(jnp.ones((64, 64))).compile()
    path = tmp_path / "dump.txt"
    path.write_text(compiled.as_text())
    with pytest.raises(DataError, match="is a CPU's schedule"):
        forecast_text(path, slice("v5e-1"))


# The form in which libtpu prints a matmul's fusion and its cycles.
MATMUL = """HloModule jit_f, is_scheduled=true

%fused (p0: bf16[8192,8192], p1: bf16[8192,8192]) -> bf16[8192,8192] {{
  %p0 = bf16[8192,8192]{{1,0:T(8,128)(2,1)}} parameter(0)
  %p1 = bf16[8192,8192]{{1,0:T(8,128)(2,1)}} parameter(1)
  ROOT %c = bf16[8192,8192]{{1,0:T(8,128)(2,1)}} convolution(%p0, %p1), dim_labels=bf_io->bf
}}

ENTRY %main (x: bf16[8192,8192], y: bf16[8192,8192]) -> bf16[8192,8192] {{
  %x = bf16[8192,8192]{{1,0:T(8,128)(2,1)}} parameter(0)
  %y = bf16[8192,8192]{{1,0:T(8,128)(2,1)}} parameter(1)
  ROOT %f = bf16[8192,8192]{{1,0:T(8,128)(2,1)}} fusion(%x, %y), kind=kOutput, calls=%fused, backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}
}}
"""


def test_cycles_name_the_generation_and_another_is_priced_as_assumed(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    # 2 x 8192^3 FLOPs at 95 % of v5e's 131,333 a cycle.
    path.write_text(MATMUL.format(cycles=int(2 * 8192**3 / 131_333 / 0.95)))
    own = forecast_text(path, slice("v5e-1"))
    assert (own.compiled_for, own.doubt, own.origin) == ("v5e", "", Origin.simulated)
    for on in ("v6e-1", "v5p-8", "tpu7x-8"):
        made = forecast_text(path, slice(on))
        assert made.origin is Origin.assumed
        assert made.to_json()["compiled_for"] == "v5e"
        assert made.to_json()["notes"][0].startswith("the dump was scheduled for v5e by")
        assert readings.verdict(made).sentence.startswith("Scheduled for v5e, not ")
        shown = "\n".join(plain(lines(made, 80)))
        assert "[assumed]" in shown
        assert "choose a slice of v5e" in " ".join(shown.split())


def test_several_generations_that_fit_are_all_named(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(recorded.text("int8-v5e-1"))
    # 8-bit matmuls of v4 run at the rate of bf16, so that v5e's cycles fit it too.
    made = forecast_text(path, slice("v6e-1"))
    assert made.origin is Origin.assumed
    assert made.to_json()["compiled_for"] is None
    assert made.doubt.startswith("scheduled for v4 or v5e, not v6e")
    assert "choose a slice of v4 or v5e" in made.cautions[0]
    own = forecast_text(path, slice("v5e-1"))
    assert (own.compiled_for, own.doubt, own.origin) == (None, "", Origin.simulated)
    assert own.notes[0].endswith("its cycles fit v4 and v5e")


@pytest.mark.parametrize("which", ["topology", "arguments"])
def test_the_files_beside_xlas_dump_name_the_generation(which: str, tmp_path: Path) -> None:
    # As libtpu 0.0.42.1 writes them; the module itself has no cycles then.
    stem = "module_0000.jit_f.cl_933746096"
    path = tmp_path / f"{stem}.after_optimizations.txt"
    path.write_text(MATMUL.replace('"estimated_cycles":"{cycles}"', "").format())
    if which == "topology":
        (tmp_path / stem).mkdir()
        (tmp_path / stem / "topology.textproto").write_text(
            'platform_name: "tpu"\nplatform_version: "TFRT TPU v5 lite\\nBuilt on Jun 17 2026"\n'
        )
    else:
        (tmp_path / f"{stem}.target_arguments.txt").write_text(
            'tpu_topology_args {\n  version: TPU_VERSION_VIPERFISH\n  variant: "lite"\n}\n'
        )
    own = forecast_text(path, slice("v5e-1"))
    assert (own.compiled_for, own.doubt) == ("v5e", "")
    assert "scheduled for v5e, as" in own.notes[0]
    made = forecast_text(path, slice("v6e-1"))
    assert (made.compiled_for, made.origin) == ("v5e", Origin.assumed)
    assert "beside it says" in made.cautions[0]


def test_a_dump_that_nothing_names_says_so(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(MATMUL.replace('"estimated_cycles":"{cycles}"', "").format())
    made = forecast_text(path, slice("v6e-1"))
    assert made.compiled_for is None
    assert made.notes[0] == "the dump does not name its chip: taken as scheduled for v6e"


def test_a_faster_chip_s_schedule_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(MATMUL.format(cycles=int(2 * 8192**3 / 524_571 / 0.9)))
    with pytest.raises(DataError, match="times the peak of v5e"):
        forecast_text(path, slice("v5e-1"))


def test_a_dump_that_does_not_fit_says_so(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    wide = MATMUL.format(cycles=2**39).replace("8192,8192", "131072,131072")
    path.write_text(wide)
    made = forecast_text(path, slice("v5e-1"))
    assert not made.fits
    assert made.step_seconds is None
    assert made.rejected is not None
    assert made.rejected.need_bytes == 3 * 2 * 131072**2


def test_what_the_compiler_fitted_is_timed(tmp_path: Path) -> None:
    """Two operands of 5.5 GiB fit into 15.75 GiB, and the compiler may have shared what their product takes."""
    stem = "module_0000.jit_f"
    path = tmp_path / f"{stem}.after_optimizations.txt"
    path.write_text(MATMUL.format(cycles=2**39).replace("8192,8192", "54272,54272"))
    made = forecast_text(path, slice("v5e-1"))
    assert made.fits
    assert made.step_seconds is not None
    assert made.cautions[-1].startswith(
        "the schedule's arrays are 16.46 GiB at their peak, 726.0 MiB"
    )
    told = "16.46 GiB by the lifetimes of its arrays, 15.75 GiB available."
    assert (readings.verdict(made).word, readings.verdict(made).sentence) == ("may fit", told)
    # Of a program whose report is beside it, as libtpu 0.0.42.1 writes that, and of one that it refused.
    report = tmp_path / f"{stem}.after_optimizations-memory-usage-report.txt"
    report.write_text("Memory Space: default (color=0)\nTotal bytes: 15051276320 (14.02GiB)\n")
    made = forecast_text(path, slice("v5e-1"))
    assert (list(made.cautions), made.memory_origin) == ([], Origin.compiled)
    assert made.memory is not None
    assert made.memory.peak_bytes == 15_051_276_320
    assert "from the schedule" not in " ".join(made.notes)
    report.write_text("Memory Space: default (color=0)\nTotal bytes: 17051276320 (15.88GiB)\n")
    assert not forecast_text(path, slice("v5e-1")).fits
    refused = path.rename(tmp_path / f"{stem}.oom_intermediate_module.txt")
    assert not forecast_text(refused, slice("v5e-1")).fits


def test_no_format_is_used_above_its_peak(tmp_path: Path) -> None:
    path = tmp_path / "int8.txt"
    path.write_text(recorded.text("int8-v5e-1"))
    made = forecast_text(path, slice("v5e-1"))
    assert made.flops_by_format == {"int8": 2 * 8192**3}
    assert made.step_seconds is not None
    assert made.hfu == pytest.approx(2 * 8192**3 / 393e12 / made.step_seconds)
    assert 0.9 < made.hfu <= 1
    assert dict(readings.speed(made))["HFU"] == f"{made.hfu * 100:.1f} % of the int8 peak"
    # FLOPs of a model are compared with the bf16 peak, whatever ran.
    model = replace(made, model_flops=made.hardware_flops)
    assert model.mfu == pytest.approx(2 * 8192**3 / 197e12 / made.step_seconds)
    assert dict(readings.speed(model))["MFU"] == f"{model.mfu * 100:.1f} % of the bf16 peak"
    assert made.to_json()["executed_flops_by_format"] == {"int8": 2 * 8192**3}
    # Half of the work in each format: each at its own peak.
    halves = {"int8": made.hardware_flops / 2, "bf16": made.hardware_flops / 2}
    assert replace(made, flops_by_format=halves).hfu == pytest.approx(
        made.hfu * (1 + 393 / 197) / 2
    )
    # bf16 alone has one peak, which needs no name.
    plain = replace(made, flops_by_format={"bf16": made.hardware_flops})
    assert dict(readings.speed(plain))["HFU"].endswith(" %")


def test_a_dump_for_one_device_says_that_the_bill_is_for_all(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(recorded.text("blocks-v5e-1"))
    one, eight = (forecast_text(path, slice(name)) for name in ("v5e-1", "v5e-8"))
    assert eight.step_seconds == one.step_seconds
    assert eight.hfu == pytest.approx(one.hfu / 8)
    (caution,) = set(eight.cautions) - set(one.cautions)
    assert (
        "dump.txt runs on one of the 8 devices of v5e-8, and MFU, HFU and the bill are of all"
        in caution
    )
