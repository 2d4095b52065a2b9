"""Profiles of real runs on a CPU with planted faults, and made-up ones of a TPU and a GPU: each cause is found."""

import json
import lzma
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from systolic.cli.main import main
from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.units import Origin
from systolic.explaining.causes import causes_of_profile
from systolic.explaining.profiles import figures, unjudged
from systolic.explaining.sources import step_of_profile
from systolic.explaining.step import Cause
from systolic.forecasting.display.xprof import STEPS, write_xprof
from systolic.job import Evaluation
from systolic.profile import open_profile
from systolic.profile.profile import timeline
from systolic.profile.trace import Backend, union
from systolic.profile.xplane import load, load_all
from systolic.runs import Run
from systolic.setup import set_up
from systolic.sim.timeline import Resource
from systolic.training.profile import WARM_UP, SessionTrace
from systolic.training.session import SessionOptions
from systolic.training.trainer import Trainer
from tests.explaining import planted
from tests.forecasting.display.recorded import small
from tests.profile.traces import Event, Plane, write

pytestmark = pytest.mark.own_programs

RECORDED = Path(__file__).parents[1] / "recorded" / "profile"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded profiles, unpacked."""
    folder = tmp_path_factory.mktemp("profiles")
    for packed in RECORDED.glob("*.xz"):
        (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    return folder


def explained(path: Path, mesh: dict[str, int] | None = None) -> dict[str, Cause]:
    return {cause.name: cause for cause in causes_of_profile(open_profile(path), mesh)}


# Real profiles


def test_a_recorded_step_is_a_timeline(recorded: Path):
    found = timeline(open_profile(recorded / "digits.xplane.pb"))
    assert found.origin is Origin.measured
    assert 0.01 < found.seconds < 0.1
    assert all(s.start >= 0 and s.start + s.seconds <= found.seconds + 1e-9 for s in found.spans)
    assert len(found.spans) == 258
    matmuls = [s for s in found.spans if s.resource is Resource.mxu]
    assert {s.source.split("/systolic/")[-1] for s in matmuls} >= {"models/layers.py:97"}
    # Three times the forward pass's 64 x 3.0e6, less the products with padding and the input's gradient.
    assert 0.6 < sum(s.flops for s in matmuls) / (3 * 64 * 2.99e6) < 1


def test_the_step_is_accounted_for(recorded: Path):
    profile = open_profile(recorded / "digits.xplane.pb")
    low, high = profile.step
    busy = union((max(o.start, low), min(o.end, high)) for o in profile.trace.ops)
    inside = sum(end - start for start, end in busy if end > start)
    assert sum(op.seconds for op in profile.ops) == pytest.approx(inside, rel=1e-6)
    assert sum(figures(profile)["shares"].values()) == pytest.approx(1)


def test_steps_are_annotated_by_the_trainer(recorded: Path):
    trace = load(recorded / "digits.xplane.pb")
    assert [mark.name for mark in trace.steps] == ["11", "12", "13"]
    assert {event.name for event in trace.loop} >= {"systolic.data_wait", "systolic.metrics_wait"}


def test_a_late_batch_is_waiting_for_input(recorded: Path):
    causes = explained(recorded / "late.xplane.pb")
    first = next(iter(causes.values()))
    assert first.name == "input-wait"
    assert first.share is not None
    assert 0.8 < first.share < 1
    assert first.seconds == pytest.approx(0.3, rel=0.15)
    assert "systolic.data_wait" in first.evidence[1]
    assert "input-wait" not in explained(recorded / "digits.xplane.pb")


def test_another_shape_is_a_recompilation(recorded: Path):
    causes = explained(recorded / "odd.xplane.pb")
    first = next(iter(causes.values()))
    assert first.name == "recompilation"
    assert first.share is not None
    assert first.share > 0.9
    text = "\n".join(first.evidence)
    assert "in step 13" in text
    assert "jit_train runs as 2 different programs" in text
    assert first.advice[0].startswith("batches of one shape")
    assert causes["host-synchronisation"].share == pytest.approx(0, abs=0.1)
    assert "recompilation" not in explained(recorded / "digits.xplane.pb")


def test_a_cpu_is_not_held_against_a_peak(recorded: Path):
    profile = open_profile(recorded / "digits.xplane.pb")
    names = {cause.name for cause in causes_of_profile(profile)}
    assert not names & {"unfilled-mxu", "f32-matmuls"}
    assert any("no peak of CPU:0" in note for note in unjudged(profile))


# A forecast's own profile has the planes and stats of a TPU's


def test_a_forecasts_profile_is_read_back(tmp_path: Path):
    forecast = small()
    path = write_xprof(forecast, tmp_path)
    profile = open_profile(path)
    assert profile.trace.backend is Backend.tpu
    assert len(profile.steps) == STEPS
    assert profile.seconds == pytest.approx(forecast.step_seconds)
    found = timeline(open_profile(tmp_path))
    simulated = {span.name: span for span, _ in forecast.timeline.leaves()}
    for span in found.spans:
        if span.name in simulated and span.lane == "core":
            assert span.flops == simulated[span.name].flops
            assert span.source == simulated[span.name].source
    causes = explained(tmp_path)
    assert causes["exposed-collectives-other"].seconds == pytest.approx(0.002)
    assert causes["memory-bound"].share == pytest.approx(1 / 3)


# A TPU's


def op(text: str, start: float, length: float, **constant: Any) -> Event:
    return Event(text, start, length, constant={"program_id": 7, **constant})


def tpu_step(at: float) -> list[Event]:
    """9 ms: a slow f32 matmul of 4, a copy of 2, an update of 1, an all-reduce of 2 in a loop."""
    return [
        op(
            "%dot.1 = f32[8,8]{1,0:T(8,128)} convolution(f32[8,8]{1,0} %a, f32[8,8]{1,0} %b)",
            at,
            4,
            hlo_category="convolution",
            flops=10**9,
            bytes_accessed=10**6,
            tf_op="jit(train)/jvp(layers)/mlp/dot_general:",
            source="model.py:5",
        ),
        op("%copy.2 = f32[8,8]{0,1} copy(f32[8,8]{1,0} %dot.1)", at + 4, 2, hlo_category="copy"),
        op(
            "%add.3 = f32[8]{0} fusion(f32[8]{0} %m), kind=kLoop, calls=%f",
            at + 6,
            1,
            hlo_category="loop fusion",
            bytes_accessed=10**6,
            tf_op="jit(train)/optimizer/add",
        ),
        op("%while.4 = (f32[8]{0}) while((f32[8]{0}) %t), condition=%c, body=%b", at + 7, 2),
        op(
            "%all-reduce.5 = f32[8]{0} all-reduce(f32[8]{0} %g), replica_groups={{0,1}}",
            at + 7.5,
            1.5,
            hlo_category="all-reduce",
        ),
    ]


def tpu(path: Path, waits: str, late: float = 0.0) -> Path:
    """Four steps of 9 ms, ``late`` apart, in which the host is in ``waits``."""
    starts = [n * (9 + late) for n in range(4)]
    device = Plane(
        "/device:TPU:0",
        {
            "XLA Modules": [Event("jit_train(7)", at, 9) for at in starts],
            "XLA Ops": [event for at in starts for event in tpu_step(at)],
        },
        {
            "device_type_string": "TPU v5 lite",
            "peak_teraflops_per_second": 197.0,
            "peak_hbm_bw_gigabytes_per_second": 819.0,
        },
    )
    loop = [Event(waits, at + 9, late) for at in starts[:-1] if late]
    loop += [Event("train", at, 9 + late, {"step_num": n}) for n, at in enumerate(starts)]
    loop += [Event("PjitFunction(train)", at, 0.001) for at in starts]
    return write(path, device, Plane("/host:CPU", {"python": loop}))


def test_a_tpus_ops_are_told_by_their_stats(tmp_path: Path):
    causes = explained(tpu(tmp_path / "a.xplane.pb", ""))
    expected = {
        "unfilled-mxu": 4 / 9,
        "f32-matmuls": 4 / 9,
        "layout-copies": 2 / 9,
        "optimizer-update": 1 / 9,
        "exposed-collectives-other": 1.5 / 9,
    }
    for name, share in expected.items():
        assert causes[name].share == pytest.approx(share, rel=0.01), name
    assert "mlp (model.py:5): 0% of the peak" in causes["unfilled-mxu"].evidence[0]
    assert "input-wait" not in causes
    assert "host-synchronisation" not in causes


@pytest.mark.parametrize(
    ("operand", "share"), [("bf16", 0.8), ("s8", 0.4), ("f8e4m3fn", 0.8), ("f32", 0.8)]
)
def test_a_matmul_is_held_against_the_peak_of_its_operands(
    tmp_path: Path, operand: str, share: float
):
    """v5e: 197 TFLOP/s in bf16, as the profile says, twice that in int8, and no fp8."""
    matmul = op(
        f"%dot.1 = f32[8,8]{{1,0}} dot({operand}[8,8]{{1,0}} %x, {operand}[8,8]{{1,0}} %y)",
        0,
        8,
        hlo_category="convolution",
        flops=int(0.8 * 197e12 * 8e-3),
    )
    device = Plane(
        "/device:TPU:0",
        {"XLA Modules": [Event("jit_train(7)", 0, 9)], "XLA Ops": [matmul]},
        {"device_type_string": "TPU v5 lite", "peak_teraflops_per_second": 197.0},
    )
    path = write(tmp_path / "a.xplane.pb", device, Plane("/host:CPU", {"python": []}))
    step = step_of_profile(open_profile(path), {})
    (found,) = step.ops
    assert step.fill(found) == pytest.approx(share, rel=3e-3)


def test_a_kernel_is_a_kernel_and_not_an_update(tmp_path: Path):
    kernel = op(
        '%matmul_optimized.1 = f32[8,8]{1,0} custom-call(f32[8,8]{1,0} %x, f32[8,8]{1,0} %y), custom_call_target="tpu_custom_call"',
        0,
        6,
        hlo_category="custom-call",
        flops=10**9,
        tf_op="jit(matmul_optimized)/pallas_call:",
    )
    device = Plane(
        "/device:TPU:0",
        {"XLA Modules": [Event("jit_matmul_optimized(7)", 0, 9)], "XLA Ops": [kernel]},
        {"device_type_string": "TPU v6 lite"},
    )
    causes = explained(write(tmp_path / "a.xplane.pb", device, Plane("/host:CPU", {"python": []})))
    assert causes["custom-kernels"].share == pytest.approx(6 / 9, rel=0.01)
    assert "optimizer-update" not in causes


@pytest.mark.parametrize(
    ("doing", "name"),
    [
        ("$feed.py:31 __next__", "input-wait"),
        ("systolic.data_wait", "input-wait"),
        ("$loop.py:12 log_metrics", "host-synchronisation"),
        ("backend_compile_and_load", "recompilation"),
    ],
)
def test_gaps_are_what_the_host_did(tmp_path: Path, doing: str, name: str):
    causes = explained(tpu(tmp_path / "a.xplane.pb", doing, late=3))
    waits = {"input-wait", "host-synchronisation", "recompilation"}
    assert waits & set(causes) == {name}
    assert causes[name].share == pytest.approx(0.2, rel=0.01)
    assert any(doing.removeprefix("$") in line for line in causes[name].evidence)


def test_what_runs_beside_is_told_from_what_is_waited_for(tmp_path: Path):
    """2 ms of an all-reduce's 7 are waited for; one that nothing hides takes 1."""
    array = "f32[8]{0}"
    ops = [
        op(f"%all-reduce-start.1 = {array} all-reduce-start({array} %g), replica_groups={{{{0,1}}}}", 0, 0),
        op(f"%dot.1 = {array} convolution({array} %a, {array} %b)", 0, 5, hlo_category="convolution"),
        op(f"%all-reduce-done.1 = {array} all-reduce-done({array} %all-reduce-start.1)", 5, 2),
        op(f"%all-gather.2 = {array} all-gather({array} %h), replica_groups={{{{0,1}}}}", 7, 1),
    ]  # fmt: skip
    device = Plane("/device:TPU:0", {"XLA Modules": [Event("jit_train(7)", 0, 8)], "XLA Ops": ops})
    found = figures(open_profile(write(tmp_path / "a.xplane.pb", device)))["beside"]
    assert found == {
        "collectives": {
            "exposed_seconds": pytest.approx(3e-3),
            "hidden_seconds": pytest.approx(5e-3),
        }
    }


# A GPU's


def kernel(name: str, start: float, length: float) -> Event:
    stats = {"hlo_op": name, "hlo_module": "jit_train", "correlation_id": 1}
    return Event(f"kernel_of_{name}", start, length, stats)


def test_a_gpus_streams_share_the_step(tmp_path: Path):
    starts = [0.0, 10.0, 20.0]
    compute = [e for at in starts for e in (kernel("gemm", at, 5), kernel("loop", at + 5, 2))]
    talk = [
        Event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", at + 6, 3, {"hlo_module": "jit_train"})
        for at in starts
    ]
    copies = [Event("MemcpyD2H", at + 9, 1, {"memcpy_details": "kind:pageable"}) for at in starts]
    streams = {"Stream #7(Compute)": compute, "Stream #8(Compute)": talk, "Stream #9": copies}
    path = write(tmp_path / "a.xplane.pb", Plane("/device:GPU:0", streams))
    profile = open_profile(path)
    assert profile.trace.backend is Backend.gpu
    assert len(profile.steps) == 3
    assert profile.seconds == pytest.approx(0.010)
    causes = explained(path)
    assert causes["exposed-collectives-other"].seconds == pytest.approx(0.002)
    assert causes["host-transfers"].seconds == pytest.approx(0.001)
    assert {span.lane for span in timeline(open_profile(path)).spans} == {
        "core",
        "core-2",
        "core-3",
    }


# What is no profile


def test_the_newest_of_a_directory_is_read(tmp_path: Path):
    for run in ("2026_01_01", "2026_01_02"):
        for host in ("a", "b"):
            tpu(tmp_path / "plugins" / "profile" / run / f"{host}.xplane.pb", "")
    trace = load(tmp_path)
    assert trace.path.parent.name == "2026_01_02"
    assert trace.notes == [
        "an older profile than plugins/profile/2026_01_02: plugins/profile/2026_01_01"
    ]
    assert [one.device for one in load_all(tmp_path)] == ["a TPU:0", "b TPU:0"]
    found = figures(open_profile(tmp_path))
    assert found["hosts"] == ["a", "b"]
    assert found["devices"] == 2


def test_what_is_no_profile_is_refused(tmp_path: Path, recorded: Path):
    with pytest.raises(NotFoundError, match="holds no"):
        load(tmp_path)
    bad = tmp_path / "bad.xplane.pb"
    bad.write_bytes((recorded / "late.xplane.pb").read_bytes()[:100_000])
    with pytest.raises(DataError, match="no profile, or damaged"):
        load(bad)
    host = Plane("/host:CPU", {"python": [Event("train", 0, 1, {"step_num": 0})]})
    with pytest.raises(DataError, match="nothing runs on a device"):
        load(write(bad, host))


# The command


def test_the_command_explains_a_profile(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = str(recorded / "late.xplane.pb")
    assert main(["explain", path]) == 0
    shown = capsys.readouterr().out
    assert "steps wait for their batches" in shown
    assert "a step on CPU:0 takes" in shown
    assert main(["explain", path, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "profile"
    assert told["causes"][0]["name"] == "input-wait"
    assert told["figures"]["steps"] == 5
    assert main(["explain", str(tmp_path)]) == 2


# The trainer's own trace


def steps_of(trace: SessionTrace, count: int) -> None:
    function = jax.jit(lambda x: x @ x)
    x = jnp.ones((64, 64))
    for step in range(1, count + 1):
        with trace.step(step):
            x = function(x)
        trace.done(x)


def test_the_trainer_traces_steps_after_warm_up(tmp_path: Path):
    told: list[str] = []
    trace = SessionTrace(tmp_path, 3, 100, lambda name, _, detail: told.append(f"{name} {detail}"))
    steps_of(trace, WARM_UP + 5)
    assert told == [f"profile systolic explain {tmp_path}"]
    found = load(tmp_path)
    assert [int(mark.name) for mark in found.steps] == [WARM_UP + n for n in (1, 2, 3)]
    assert len({op.run for op in found.ops}) >= 3


def test_a_run_is_traced_where_asked(tmp_path: Path):
    job = planted.job(steps=6, evaluation=Evaluation(every=0))
    with Run.create(tmp_path / "run", {"job": {"name": job.name}}) as run:
        options = SessionOptions(diagnose=0, profile=2)
        Trainer(setup=set_up(job), run=run, options=options).train()
        assert not run.read_summary()["recompiles"]
    trace = load(tmp_path / "run" / "profile")
    assert [mark.name for mark in trace.steps] == ["5", "6"]
    lines = {
        span.source.split("/")[-1].split(":")[0]
        for span in timeline(open_profile(trace.path)).spans
    }
    assert "planted.py" in lines


def test_a_short_session_is_traced_sooner(tmp_path: Path):
    trace = SessionTrace(tmp_path, 3, 5, lambda *_: None)
    steps_of(trace, 5)
    assert [mark.name for mark in load(tmp_path).steps] == ["3", "4", "5"]


def test_a_profiler_that_fails_stops_nothing(tmp_path: Path):
    told: list[str] = []
    trace = SessionTrace(tmp_path / "mine", 2, 4, lambda name, _, detail: told.append(detail))
    with jax.profiler.trace(tmp_path / "other"):
        steps_of(trace, 4)
    trace.close()
    assert len(told) == 1
    assert told[0].startswith("no profile: ")
    with pytest.raises(OptionError, match="profile is -1"):
        SessionTrace(tmp_path, -1, 4, lambda *_: None)


def test_a_cpu_profile_is_not_judged_as_a_chip(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ops against a TPU's peaks were problems of the program: matmuls at 0 % of the matrix units."""
    assert main(["explain", str(recorded / "digits.xplane.pb"), "--chip", "v5e"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--chip is v5e, and the profile is of a CPU" in line
    assert "leave --chip out" in line
