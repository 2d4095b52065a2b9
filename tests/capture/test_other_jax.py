"""Programs in an environment with another jax: ``SYSTOLIC_JAX_PYTHON`` is its Python, with libtpu or without."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from systolic.capture import capture
from systolic.capture.program import Captured
from systolic.chips import slice
from systolic.forecasting import Forecast
from systolic.forecasting.captured import forecast_captured

PYTHON = os.environ.get("SYSTOLIC_JAX_PYTHON", "")
PROGRAMS = Path(__file__).parent / "programs"
EXAMPLE = Path(__file__).parents[2] / "examples/plain_trainer.py"
ON = slice("v5e-8")
pytestmark = pytest.mark.skipif(
    not PYTHON,
    reason="python -m venv old && old/bin/pip install jax==0.5.2 'jaxlib<=0.5.2', then SYSTOLIC_JAX_PYTHON=old/bin/python",
)


@pytest.fixture(autouse=True)
def no_flags_of_this_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the tests' own ``XLA_FLAGS``, which another jaxlib may not know."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def captured_of(script: Path, folder: Path, *words: str, quick: bool = True) -> Captured:
    answer = folder / "answer"
    answer.mkdir()
    program = shutil.copy(script, folder / script.name)
    return capture([PYTHON, str(program), *words], ON, answer, quick=quick)


def forecast_of(script: Path, folder: Path, *words: str, quick: bool = True) -> Forecast:
    return forecast_captured(captured_of(script, folder, *words, quick=quick), ON)


def test_a_full_compile(tmp_path: Path) -> None:
    forecast = forecast_of(PROGRAMS / "lambdas.py", tmp_path, quick=False)
    assert forecast.recipe == "lambda at lambdas.py:9 + lambda at lambdas.py:10"
    assert forecast.step_seconds


def test_the_example_of_the_page(tmp_path: Path) -> None:
    forecast = forecast_of(EXAMPLE, tmp_path, "--layers", "2", "--width", "256")
    assert forecast.recipe == "train_step"
    assert forecast.step_seconds
    # By hand: float32 weights, twelve matrices of width x width a layer and an embedding of bytes.
    assert forecast.memory is not None
    weights = 4 * 256 * (2 * 12 * 256 + 256)
    assert forecast.memory.by_kind["inputs"] == pytest.approx(weights, rel=0.02)


def test_results_lie_where_that_jax_puts_them(tmp_path: Path) -> None:
    real, here = tmp_path / "real.json", tmp_path / "here.json"
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [PYTHON, str(PROGRAMS / "results.py"), str(real)]
    subprocess.run(command, env={**os.environ, **flags}, check=True)
    captured_of(PROGRAMS / "results.py", tmp_path, str(here))
    # The class of a sharding is jax's own affair: before 0.7 some are GSPMDSharding.
    expected, captured = (
        {
            name: [kind[1:] for kind in ([places] if isinstance(places[0], str) else places)]
            for name, places in json.loads(path.read_text()).items()
            if name
            != "largest"  # compiled for its sharding: libtpu 0.0.52 keeps whole what a CPU splits
        }
        for path in (real, here)
    )
    assert captured == expected


@pytest.mark.parametrize("name", ["large_initial", "pmapped"])
def test_a_program_is_answered(name: str, tmp_path: Path) -> None:
    captured = captured_of(PROGRAMS / f"{name}.py", tmp_path)
    assert captured.answer.versions["jax"] == _version()
    assert forecast_captured(captured, ON).need_bytes


def _version() -> str:
    command = [PYTHON, "-c", "import jax; print(jax.__version__)"]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
