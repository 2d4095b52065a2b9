"""Causes of a simulated step: they account for its time, and name the axis that is waited for."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import systolic
from systolic.chips import slice
from systolic.cli.main import main
from systolic.compiling.gpu_compiler import compiler
from systolic.core.errors import OptionError
from systolic.core.units import duration
from systolic.explaining.causes import causes_of_forecast, causes_of_profile, causes_of_programs
from systolic.explaining.display.text import profile_remark, step_remarks
from systolic.explaining.profiles import figures
from systolic.explaining.rules import RULES, empty_slots, memory_bound, unfilled
from systolic.explaining.sources import StepProgram, step_of_forecast
from systolic.explaining.step import OpKind, Step, axes_of
from systolic.forecasting import Forecast, forecast_text
from systolic.forecasting.display.xprof import write_xprof
from systolic.hlo import parse
from systolic.job import Layout, Model
from systolic.models.decoder.config import Decoder
from systolic.profile import open_profile
from systolic.sim import gpu
from systolic.sim.timeline import Resource
from tests.planning.jobs import decoder_job
from tests.recorded import hlo, loops

NAMES = {"lm-v5e-4": "v5e-4", "moe-2xv6e-4": "2xv6e-4"}
EIGHT = slice("8xh100")
GPU_STEP = "step-8xh100"
OF_TPUS = re.compile(
    r"mxu|matrix unit|vector unit|\bici\b|vmem|\bslices?\b|\bchips?\b|tpu|xla_jf|pallas|sparsecore|torus|dcn|data-cent",
    re.I,
)
BATCH, HEADS, TOKENS, HEAD = 1, 8, 2048, 128


def made(name: str, tmp_path) -> Forecast:
    path = tmp_path / "dump.txt"
    path.write_text(hlo.text(name))
    return forecast_text(path, slice(NAMES[name]))


@pytest.mark.parametrize("name", NAMES)
def test_causes_account_for_the_step(name: str, tmp_path) -> None:
    forecast = made(name, tmp_path)
    found = causes_of_forecast(forecast, hlo.module(name))
    assert found
    shares = [cause.share or 0.0 for cause in found]
    assert shares == sorted(shares, reverse=True)
    for cause in found:
        assert cause.seconds is not None
        assert 0 < (cause.share or 0) <= 1
        assert cause.evidence
        assert cause.advice
        assert cause.seconds == pytest.approx((cause.share or 0) * (forecast.step_seconds or 0))
    waited = sum(c.seconds or 0 for c in found if c.name.startswith("exposed-collectives"))
    # What is too small to be a cause is left out.
    assert waited <= forecast.time_by_resource["ici"] * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_simulated_step_and_its_profile_have_the_same_causes(name: str, tmp_path) -> None:
    forecast = made(name, tmp_path)
    write_xprof(forecast, tmp_path)
    simulated = {c.name: c.share for c in causes_of_forecast(forecast, hlo.module(name))}
    measured = {c.name: c.share for c in causes_of_profile(open_profile(tmp_path))}
    # The profile has no names of JAX's transformations: what hangs on them is not told from it.
    both = [n for n in simulated if n.startswith(("exposed-collectives", "dcn", "attention"))]
    assert len(both) >= 2
    for cause in both:
        assert measured[cause] == pytest.approx(simulated[cause], rel=1e-3)


def test_slots_of_experts_are_counted_where_the_model_is_known(tmp_path) -> None:
    name = "moe-2xv6e-4"
    forecast, module = made(name, tmp_path), hlo.module(name)

    def slots(model: Model | None) -> float:
        causes = {c.name: c for c in causes_of_forecast(forecast, module, model)}
        found = causes.get("empty-expert-slots")
        return (found.seconds or 0.0) if found else 0.0

    assert slots(None) == 0
    assert slots(Decoder(vocab=64)) == 0
    assert slots(Decoder(vocab=64, experts=4, capacity_factor=1.0)) == 0
    # Routing takes most of so small a model's step: of a factor below 3 the slots are under 1 % of it.
    some = slots(Decoder(vocab=64, experts=4, capacity_factor=4.0))
    most = slots(Decoder(vocab=64, experts=4, capacity_factor=8.0))
    assert 0 < some < most < (forecast.step_seconds or 0)
    assert most == pytest.approx(some * (7 / 8) / (3 / 4))


def test_slots_are_of_experts_and_of_no_dense_layer(tmp_path) -> None:
    name = "moe-2xv6e-4"
    model = Decoder(vocab=64, experts=4, capacity_factor=4.0)
    step = step_of_forecast(made(name, tmp_path), hlo.module(name), model)
    (slots,) = empty_slots(step)
    dense = [replace(op, source="src/systolic/models/decoder/layers.py:40") for op in step.ops]
    both = [*step.ops, *dense]
    assert next(iter(empty_slots(replace(step, ops=both)))).seconds == slots.seconds
    assert not list(empty_slots(replace(step, ops=dense)))


def test_places_of_several_ops_say_so(tmp_path) -> None:
    found = causes_of_forecast(made("lm-v5e-4", tmp_path), hlo.module("lm-v5e-4"))
    lines = [line for cause in found for line in cause.evidence]
    assert any("ops, the largest" in line for line in lines)


def test_a_print_on_a_tpu_calls_python(tmp_path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(loops.texts()["prints"])
    found = causes_of_forecast(forecast_text(path, slice("v5e-1")), loops.module("prints"))
    assert found[0].name == "python-callbacks"
    assert (found[0].share or 0) > 0.9


@pytest.mark.parametrize(("precision", "passes"), [("default", 1), ("bf16_3x", 3), ("highest", 6)])
def test_f32_matmuls_take_the_passes_of_their_precision(
    precision: str, passes: int, tmp_path
) -> None:
    name = f"f32_{precision}-v5e-1"
    path = tmp_path / "dump.txt"
    path.write_text(hlo.text(name))
    forecast, module = forecast_text(path, slice("v5e-1")), hlo.module(name)
    one = causes_of_forecast(forecast, module)
    assert forecast.timeline is not None
    many = causes_of_programs(forecast, [StepProgram(module=module, timeline=forecast.timeline)])
    for found in (one, many):
        names = {cause.name: cause for cause in found}
        if passes == 1:
            assert "f32-matmuls" not in names
            continue
        cause = names["f32-matmuls"]
        assert f"{passes} passes of the matrix units each" in cause.title
        assert f"{passes} passes" in cause.evidence[0]
        assert (cause.share or 0) > 0.9
        # The units are full with all passes.
        assert "unfilled-mxu" not in names


def test_a_part_lost_stands_beside_the_whole(tmp_path) -> None:
    step = step_of_forecast(made("lm-v5e-4", tmp_path), hlo.module("lm-v5e-4"), None)
    op = next(op for op in step.ops if op.kind is OpKind.matmul)
    peak = op.flops / (step.peak(op.dtype) or 1)
    slow = replace(op, seconds=4 * peak, resource=Resource.mxu)
    (cause,) = unfilled(replace(step, ops=[slow]))
    assert cause.evidence[0].startswith(f"{duration(3 * peak)} of {duration(4 * peak)} lost in ")
    assert cause.seconds == pytest.approx(3 * peak)


def test_a_schedule_written_as_a_profile_says_so(tmp_path, capsys) -> None:
    write_xprof(made("lm-v5e-4", tmp_path), tmp_path)
    told = figures(open_profile(tmp_path))
    assert told["simulated_by"] == "systolic forecast"
    remark = profile_remark(told)
    assert "simulated by systolic forecast, no measurement" in remark
    assert "median" not in remark
    page = tmp_path / "page.html"
    assert main(["explain", str(tmp_path), "--html", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["simulated_by"] == "systolic forecast"
    assert "simulated by systolic forecast" in page.read_text()
    # The simulator would be corrected by itself.
    assert main(["calibrate", str(tmp_path), "--name", "own"]) == 1
    assert "is a schedule that systolic forecast wrote, no measurement" in capsys.readouterr().err


def test_a_narrow_matmul_waits_for_memory(tmp_path) -> None:
    step = step_of_forecast(made("lm-v5e-4", tmp_path), hlo.module("lm-v5e-4"), None)
    op = next(op for op in step.ops if op.kind is OpKind.matmul)
    slow = replace(op, seconds=1e3 * op.seconds, op_name="")
    narrow = replace(step, ops=[replace(slow, resource=Resource.hbm)])
    assert [cause.name for rule in (unfilled, memory_bound) for cause in rule(narrow)] == [
        "memory-bound"
    ]
    odd = replace(step, ops=[replace(slow, resource=Resource.mxu)])
    assert [cause.name for rule in (unfilled, memory_bound) for cause in rule(odd)] == [
        "unfilled-mxu"
    ]


def test_a_forecast_that_does_not_fit_has_no_causes_of_time(tmp_path) -> None:
    forecast = replace(made("lm-v5e-4", tmp_path), timeline=None, step_seconds=None)
    assert causes_of_forecast(forecast, hlo.module("lm-v5e-4")) == []


GROUPS = {
    "{{0,1,2,3},{4,5,6,7}}": ("tensor",),
    "{{0,4},{1,5},{2,6},{3,7}}": ("fsdp",),
    "{{0,1,2,3,4,5,6,7}}": ("fsdp", "tensor"),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_a_collective_names_the_axes_that_its_group_spans(groups: str) -> None:
    text = f"""HloModule m, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[1024]) -> f32[1024] {{
  %x = f32[1024]{{0}} parameter(0)
  ROOT %r = f32[1024]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add
}}
"""
    module = parse(text)
    found = axes_of(module, module.entry, module.entry.root, {"data": 1, "fsdp": 2, "tensor": 4})
    assert found == GROUPS[groups]
    assert axes_of(module, module.entry, module.entry.root, {}) == ()
    assert axes_of(module, module.entry, module.entry.root, {"fsdp": 4}) == ()


# A GPU's step: its own units and links, with remedies that a GPU has


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Step:
    path = tmp_path_factory.mktemp("gpu") / "dump.txt"
    path.write_text(hlo.text(GPU_STEP))
    return step_of_forecast(forecast_text(path, EIGHT), hlo.module(GPU_STEP), None)


def test_each_op_of_a_recorded_step_has_a_kind(step: Step) -> None:
    for op in step.ops:
        target = op.place.instruction.target if op.place else ""
        if target.startswith("__cublas"):
            assert op.kind in (OpKind.matmul, OpKind.launch)
        elif target.startswith("__cudnn$fmha"):
            assert op.kind is OpKind.kernel
        else:
            assert op.kind is not OpKind.kernel


def test_attention_loses_what_a_large_matmul_would_not_take(step: Step) -> None:
    (cause,) = [c for rule in RULES for c in rule(step) if c.name == "attention-kernel"]
    call = {"batch": BATCH, "heads": HEADS, "kv_heads": HEADS, "q_len": TOKENS, "kv_len": TOKENS}
    call |= {"head_dim": HEAD, "causal": True, "window": 0, "dtype": "bf16"}
    forward = gpu.attention_seconds(EIGHT.chip, **call, backward=False)
    backward = gpu.attention_seconds(EIGHT.chip, **call, backward=True)
    rate = 2 * 8192**3 / gpu.matmul_seconds(EIGHT.chip, 1, 8192, 8192, 8192, "bf16", "bf16", "bf16")
    pairs = BATCH * HEADS * TOKENS**2 / 2
    # Four layers, each of them forward twice (once recomputed) with two products, and backward with five.
    layer = 2 * (forward - 4 * pairs * HEAD / rate) + backward - 10 * pairs * HEAD / rate
    assert cause.seconds == pytest.approx(4 * layer, rel=1e-6)


def test_short_kernels_are_mostly_their_start_and_end(step: Step) -> None:
    launches = [op for op in step.ops if op.kind is OpKind.launch]
    assert launches
    for op in launches:
        work = op.bytes / op.times / gpu.memory_rate(EIGHT.chip)
        assert work < 0.51 * op.seconds / op.times < 5.2e-6
    (cause,) = [c for rule in RULES for c in rule(step) if c.name == "kernel-launches"]
    assert cause.seconds == pytest.approx(sum(op.seconds for op in launches))
    assert not [c for rule in RULES for c in rule(step) if c.name == "host-transfers"]


@pytest.mark.parametrize("foreign", [False, True])
def test_no_message_of_a_gpu_is_a_tpu_s(step: Step, foreign: bool) -> None:
    first = next(op for op in step.ops if op.place and "fmha" in op.place.instruction.target)
    names = ("jit(train)/transpose(jvp(attention))/rematted_computation/dot", "jit(train)/update")
    ops = [
        replace(
            first,
            kind=kind,
            resource=resource,
            op_name=name,
            dtype=dtype,
            seconds=0.1,
            times=1,
            flops=1e9,
            windowed=True,
            source="decoder/moe.py:3",
            place=place,
        )
        for kind, resource, name, dtype, place in itertools.product(
            OpKind, Resource, names, ("bf16", "f32"), (first.place, None)
        )
    ]
    planted = replace(
        step,
        ops=ops,
        seconds=0.1 * len(ops),
        foreign=foreign,
        microbatches=4,
        slots_per_token=2.0,
        mesh={"pipeline": 2, "fsdp": 4},
    )
    causes = [cause for rule in RULES for cause in rule(planted)]
    assert {"network", "kernel-launches", "unfilled-tensor-cores", "f32-matmuls"} <= {
        cause.name for cause in causes
    }
    assert len(causes) >= 14
    for cause in causes:
        for text in (cause.name, cause.title, *cause.evidence, *cause.advice):
            assert not OF_TPUS.search(text), text


def test_a_gpu_without_its_compiler_is_refused_with_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("systolic.compiling.gpu_compiler.compiler", lambda: None)
    with pytest.raises(
        OptionError, match=r"its own compiler; .*pip install 'systolic\[gpu-forecast\]'"
    ):
        systolic.explain(decoder_job(), on="8xh100")


def test_a_dump_of_a_gpu_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(hlo.text(GPU_STEP))
    explained = systolic.explain(path, on="8xh100")
    assert explained.causes
    remarks = step_remarks(explained.forecast, ())
    assert any("kernels priced by their sizes" in remark for remark in remarks)
    assert not [remark for remark in remarks if "cycles" in remark]


@pytest.mark.skipif(compiler() is None, reason="needs the extra gpu-forecast, of 174 MB")
def test_a_job_on_gpus_is_explained_with_changes() -> None:
    job = replace(decoder_job(), layout=Layout(fsdp=2))
    explained = systolic.explain(job, on="2xh100", remedies=1)
    assert explained.causes
    assert explained.remedies[0].step_seconds
