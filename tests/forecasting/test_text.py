from pathlib import Path

import pytest

from systolic.chips import slice
from systolic.core.errors import DataError, OptionError
from systolic.forecasting import forecast_text
from systolic.forecasting.interval import interval_of
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


@pytest.mark.parametrize(
    ("content", "on", "says"),
    [
        (recorded.text("lm-v5e-4"), "v5e-16", "runs on 4 devices but v5e-16 has 16"),
        (recorded.text("lm-v5e-4").replace("is_scheduled=true, ", ""), "v5e-4", "not scheduled"),
        ("module @jit_f {}", "v5e-4", "no line begins with HloModule"),
        (None, "v5e-4", "could not be read"),
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


def test_other_platforms_are_told(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="only TPU slices"):
        forecast_text(tmp_path / "dump.txt", slice("h100"))


def test_an_interval_holds_the_forecast() -> None:
    for generation in ("v5e", "v6e", "no such chip"):
        low, high, text = interval_of(generation, 2.0)
        assert low < 2.0 < high
        assert text
