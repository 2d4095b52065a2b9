"""Windowed einsums are seen in real schedules, as loops or unrolled, and only there."""

import re
from pathlib import Path

from systolic.chips import slice
from systolic.explaining.causes import causes_of_forecast
from systolic.forecasting import forecast_text
from systolic.forecasting.costs import OFF, names, windowed
from systolic.sim.rates import rates_of
from systolic.sim.simulate import simulate
from tests.recorded import hlo


def test_the_matmuls_that_travel_in_permutes() -> None:
    module = hlo.module("lm-v5e-4")
    found = names(module)
    # grep "collective-permute-start(" | sort -u by op_name, in the recorded text.
    assert len(found) == 7
    assert "jit(train)/jvp()/while/body/closed_call/bsd,dhe->bshe/dot_general" in found
    assert not names(hlo.module("moe-2xv6e-4"))  # its permutes are those of experts


def test_their_time_is_above_what_their_matmuls_need_and_below_the_step() -> None:
    module, on = hlo.module("lm-v5e-4"), slice("v5e-4")
    timeline = simulate(module, on)
    found = windowed(module, timeline)
    assert found is not None
    # 2 layers x 4 matmuls of attention: 2 * 16 rows * 1024 tokens / 4 devices * 512 * 512 and so on are
    # above a tenth of the model's FLOPs, which the recorded report has.
    model = hlo.report("lm-v5e-4")["program"]["model_flops"] / 4
    assert 0.1 * model / rates_of(on).peak("bf16") < found.seconds < timeline.seconds


def test_a_forecast_and_its_explanation_name_them(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(hlo.text("lm-v5e-4"))
    made = forecast_text(path, slice("v5e-4"))
    (warning,) = made.warnings
    assert re.fullmatch(
        r"7 windowed einsums take [\d.]+ ms \(\d\d%\); turn them off with (.*)", warning
    )
    assert warning.endswith(OFF)
    assert made.to_json()["notes"][0] == warning
    causes = {cause.name: cause for cause in causes_of_forecast(made, hlo.module("lm-v5e-4"))}
    (advice,) = causes["windowed-einsums"].advice
    assert "--flags=--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000" in advice


def test_what_is_off_is_not_advised(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(hlo.text("moe-2xv6e-4"))
    made = forecast_text(path, slice("2xv6e-4"))
    assert not made.warnings
    for cause in causes_of_forecast(made, hlo.module("moe-2xv6e-4")):
        assert not any("windowed" in text for text in cause.advice)
