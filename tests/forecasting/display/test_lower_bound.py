"""A kernel of unknown work makes a lower bound, and the verdict says so."""

import re
from pathlib import Path

from systolic.chips import slice
from systolic.forecasting import forecast_text
from systolic.forecasting.display import readings
from systolic.forecasting.display.text import lines
from systolic.report.terminal import plain
from tests.recorded import hlo


def test_a_kernel_without_known_work_is_a_lower_bound_in_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(re.sub(r'"counted":\{.*?\},"body"', '"body"', hlo.text("kernel-v6e-1")))
    made = forecast_text(path, slice("v6e-1"))
    assert made.is_lower_bound
    assert made.to_json()["lower_bound"]
    assert "lower bound" in readings.verdict(made).sentence
    shown = "\n".join(plain(lines(made, 80)))
    assert "at least" in shown
    assert "[lower bound]" in shown
    assert "HFU" not in shown


def test_a_step_of_known_work_is_none(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(hlo.text("lm-v5e-4"))
    made = forecast_text(path, slice("v5e-4"))
    assert not made.is_lower_bound
    assert "at least" not in "\n".join(plain(lines(made, 80)))
