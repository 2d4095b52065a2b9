"""A forecast beside its measurement: ops matched by name, or priced alone from their lines."""

import json
from pathlib import Path

import pytest

from systolic.chips import slice
from systolic.cli.main import main
from systolic.explaining.alone import devices_of, module_of, priced_alone, waiting_module
from systolic.forecasting.display.xprof import write_xprof
from systolic.forecasting.profiled import beside, by_name
from systolic.hlo import parse
from systolic.profile import open_profile
from systolic.profile.table import ProfileTable
from systolic.sim.rates import rates_of
from systolic.sim.simulate import simulate
from tests.forecasting.display.recorded import small
from tests.profile.real import BF16, EXCERPTS, HOST_OFFLOAD, KERNEL, whole

COPY = "%copy.9 = f32[8,128]{0,1:T(8,128)} copy(f32[8,128]{1,0:T(8,128)} %a)"
SUM = "%all-reduce.1 = f32[1024]{0} all-reduce(f32[1024]{0} %a), channel_id=3, replica_groups=[1,2]<=[2], use_global_device_ids=true, to_apply=%add.2.clone"
FUSION = "%fusion.1 = f32[8]{0} fusion(f32[8]{0} %a), kind=kLoop, calls=%fused_computation"


def test_a_profile_written_from_a_forecast_has_no_difference(tmp_path: Path):
    forecast = small()
    assert forecast.timeline is not None
    table = ProfileTable(open_profile(write_xprof(forecast, tmp_path)))
    program = table.programs[0].name
    found = beside(table, by_name(forecast.timeline, program), forecast.timeline.seconds)
    # The written profile names waits otherwise than a chip does.
    leaves = [span for span, _ in forecast.timeline.leaves()]
    waits = {span.name for span in leaves if span.opcode.startswith("wait ")}
    ops = [op for op in found.ops if op.name not in waits]
    assert ops
    assert found.measured_step == pytest.approx(found.simulated_step)
    for op in ops:
        assert op.measured == pytest.approx(op.simulated, rel=1e-6, abs=1e-11), op.name


def test_ops_are_priced_alone_where_their_line_is_enough():
    for text in (COPY, SUM):
        module = module_of(text, 2)
        assert simulate(parse(module), slice("tpu7x-2")).seconds > 0
    assert module_of(FUSION, 2) == ""
    assert module_of(COPY[:-6], 2) == ""
    array, host = "f32[8,128]{1,0}", "f32[8,128]{1,0:S(5)}"
    begun = f"%copy-start = ({array}, {host}, u32[]) copy-start({host} %p)"
    done = f"%copy-done = {array} copy-done(({array}, {host}, u32[]) %copy-start)"
    made = simulate(parse(waiting_module(begun, done, 1)), slice("v6e-1"))
    assert made.seconds > 8 * 128 * 4 / 64e9


def test_matmuls_of_a_chip_are_priced_by_what_the_profile_counts():
    """Of one serving step of a TPU7x; times are the chip's."""
    on = slice("tpu7x-2")
    table = ProfileTable(open_profile(EXCERPTS / BF16, "tpu7x"))
    found = beside(table, priced_alone(table, on)[0], whole=False)
    rows = {row.op.raw.name: row for row in table.ops}
    matmuls = [op for op in found.ops if op.kind == "matmuls" and op.measured > 30e-6]
    assert len({rows[op.name].op.flops for op in matmuls}) > 2
    for op in matmuls:
        assert op.simulated > rows[op.name].op.flops / rates_of(on).peaks["bf16"]
        assert op.simulated == pytest.approx(op.measured, rel=0.25), op.name


def test_copies_and_all_reduces_of_a_chip_beside_the_simulator():
    """What is measured is known; what is simulated may come nearer to it, and is within a factor of four."""
    table = ProfileTable(open_profile(EXCERPTS / HOST_OFFLOAD))
    assert devices_of(table) == 8
    seconds, left = priced_alone(table, slice("v6e-8"))
    found = beside(table, seconds, whole=False)
    by = {op.name: op for op in found.ops}
    assert by["all-reduce"].measured == pytest.approx(121.69e-3, rel=2e-4)
    assert by["all-reduce"].program == "jit__psum"
    # From its start to its end, not the time of waiting for it.
    assert by["copy-done.2"].measured == pytest.approx(0.2022, rel=0.01)
    assert by["broadcast.2"].measured == pytest.approx(4.444e-3, rel=1e-4)
    assert all(op.ratio is None or 1 / 4 < op.ratio < 4 for op in found.ops)
    assert (
        left == 5
    )  # three sums, whose computations the profile lacks, and two copies that nothing waits for
    assert [op.difference for op in found.ops] == sorted(
        (op.difference for op in found.ops), key=abs, reverse=True
    )


def test_a_kernel_beside_its_dump(capsys: pytest.CaptureFixture[str]):
    path = whole(KERNEL)
    dump = whole("v6e-1-pallas-matmul.hlo.txt")
    assert main(["explain", str(path), "--against", str(dump), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["against"]
    (op,) = told["ops"]
    assert op["name"] == "matmul_optimized.1"
    assert op["measured_seconds"] == pytest.approx(75.75e-6, rel=1e-3)
    assert told["measured_step_seconds"] == pytest.approx(75.79e-6, rel=1e-3)
    assert 0.5 < op["simulated_seconds"] / op["measured_seconds"] < 2


def test_the_programs_that_a_profile_holds(capsys: pytest.CaptureFixture[str]):
    path = str(whole(HOST_OFFLOAD))
    assert main(["explain", path, "--against", "program", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["against"]
    assert told["program"] == "jit_f"
    assert told["measured_step_seconds"] == pytest.approx(0.784, rel=1e-3)
    by = {(op["program"], op["name"]): op for op in told["ops"]}
    added = by["jit_f", "broadcast_add_fusion.2"]
    assert added["simulated_seconds"] == pytest.approx(7.904e-3, rel=1e-3)
    summed = by["jit__psum", "all-reduce"]
    # In pairs, as its line has it: 1.2 times what was measured.
    assert summed["simulated_seconds"] == pytest.approx(0.1455, rel=1e-2)
    assert summed["measured_seconds"] == pytest.approx(0.1217, rel=1e-3)


def test_a_profile_without_its_program_says_so(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(EXCERPTS / HOST_OFFLOAD), "--against", "program"]) != 0
    shown = capsys.readouterr()
    assert shown.out == "", "before anything is explained, or compiled for a run's profile"
    (line,) = shown.err.strip().splitlines()
    assert "does not hold its programs; give the program's dump" in line


def test_the_command_prints_kinds_and_what_differs_most(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(EXCERPTS / HOST_OFFLOAD), "--against", "lines"]) == 0
    shown = capsys.readouterr().out
    assert "ratio: p10  median     p90  kind" in shown
    assert "host transfers, 4" in shown
    assert "all-reduce, " in shown


@pytest.mark.parametrize(
    ("name", "against", "said"),
    [
        (HOST_OFFLOAD, "nowhere.txt", "nowhere.txt is no file"),
        (HOST_OFFLOAD, "other.txt", "other.txt is jit_other, and the profile ran jit_f, "),
        (BF16, "lines", "add --chip tpu7x"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, against: str, said: str
):
    module = module_of(COPY, 8).replace("HloModule alone", "HloModule jit_other")
    (tmp_path / "other.txt").write_text(module)
    given = against if against == "lines" else str(tmp_path / against)
    assert main(["explain", str(EXCERPTS / name), "--against", given]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
