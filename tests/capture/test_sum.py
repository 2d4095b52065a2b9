"""A step of several programs: its bounds, and what is moved between them, from a program that is captured."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from systolic.capture import capture
from systolic.capture.program import ArrayMoves, Captured
from systolic.chips import slice
from systolic.forecasting.captured import HELD, forecast_parts, parts_of
from systolic.forecasting.costs import place_of
from systolic.sim.calibration import Calibration, CostKind, Factor
from systolic.sim.incomplete import Given

pytestmark = pytest.mark.usefixtures("forked_programs")

PROGRAM = Path(__file__).parent / "programs" / "branches.py"
MATMUL = 2 * 4096**3
PEAK = 197e12
"""Of a v5e, bf16."""
GIB = 2**30


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    folder = tmp_path_factory.mktemp("branches")
    (folder / "answer").mkdir()
    command = [sys.executable, str(shutil.copy(PROGRAM, folder / PROGRAM.name))]
    return capture(command, slice("v5e-1"), folder / "answer", quick=True)


def test_a_step_of_two_programs_has_the_range_of_its_open_branch(branches: Captured) -> None:
    on = slice("v5e-1")
    parts = parts_of(branches, on)
    assert [part.program.name for part in parts] == ["solve", "smooth"]
    solve, smooth = (part.timeline for part in parts)
    assert solve is not None
    assert smooth is not None
    assert solve.incomplete
    assert solve.least is not None
    forecast = forecast_parts(branches, parts, on)
    assert forecast.timeline is not None
    assert forecast.timeline.least is not None
    assert forecast.timeline.least.seconds == pytest.approx(solve.least.seconds + smooth.seconds)
    # The short branch writes x anew, the long one is three matmuls more.
    assert forecast.timeline.seconds - forecast.timeline.least.seconds > 2.9 * MATMUL / PEAK
    assert (solve.most is None) == (forecast.timeline.most is None)
    assert forecast.low is not None
    assert forecast.low < 2 * MATMUL / PEAK


def test_moves_between_calls_take_the_calibrated_rate_of_the_host(branches: Captured) -> None:
    on = slice("v5e-1")
    moves = {"put": ArrayMoves(host=GIB, times=1)}
    moving = replace(branches, answer=msgspec.structs.replace(branches.answer, moves=moves))
    rate = Factor(value=GIB, low=GIB, high=GIB, ops=3, works=3, seconds=3.0)
    calibration = Calibration(name="mine", chip="v5e", factors={CostKind.host: rate})
    given = Given(calibration=calibration)
    still = forecast_parts(branches, parts_of(branches, on, given), on, given)
    moved = forecast_parts(moving, parts_of(moving, on, given), on, given)
    published = forecast_parts(moving, parts_of(moving, on), on)
    assert still.step_seconds
    assert moved.step_seconds
    assert published.step_seconds
    assert moved.step_seconds - still.step_seconds == pytest.approx(1.0)
    assert published.step_seconds < moved.step_seconds


def test_moves_are_ops_of_their_own_by_what_they_are_for(branches: Captured) -> None:
    on = slice("v5e-1")
    moves = {"put": ArrayMoves(host=GIB, times=1), "read": ArrayMoves(host=2 * GIB, times=1)}
    moving = replace(branches, answer=msgspec.structs.replace(branches.answer, moves=moves))
    forecast = forecast_parts(moving, parts_of(moving, on), on)
    assert forecast.timeline is not None
    places = {place_of(span): span.seconds for span in forecast.timeline.spans}
    assert places["arrays read"] == pytest.approx(2 * places["device_put"], rel=0.01)


def test_arrays_that_are_too_few_to_help_are_no_remedy(branches: Captured) -> None:
    on = slice("v5e-1")
    parts = [
        replace(part, memory=replace(part.memory, peak_bytes=32 * GIB, by_kind={HELD: 2**20}))
        for part in parts_of(branches, on)
    ]
    forecast = forecast_parts(branches, parts, on)
    assert forecast.rejected is not None
    assert "1.0 MiB" not in " ".join(forecast.rejected.remedies)


def test_what_does_not_fit_on_one_of_several_devices_is_told_to_donate_and_to_shard(
    tmp_path: Path,
) -> None:
    on, program = slice("v5e-8"), PROGRAM.with_name("undonated.py")
    command = [sys.executable, str(shutil.copy(program, tmp_path / program.name))]
    (tmp_path / "answer").mkdir()
    captured = capture(command, on, tmp_path / "answer", quick=True)
    forecast = forecast_parts(captured, parts_of(captured, on), on)
    assert not forecast.fits
    assert forecast.rejected is not None
    (remedy,) = forecast.rejected.remedies
    assert "donate arguments that it makes anew (jax.jit's donate_argnums; up to 20.0" in remedy
    assert "runs on one of them" in remedy
    assert "larger slice" not in remedy
