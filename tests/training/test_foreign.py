"""PyTorch and Keras models train to the same losses under data and fsdp as on one device, and resume exactly."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import systolic
from systolic.job import Checkpoints

ROOT = Path(__file__).parents[2]
RELATIVE = 2e-5


def child(name: str, devices: int, **layout: int) -> dict[str, Any]:
    env = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
    }
    args = [sys.executable, "-m", "tests.training.foreign_child", name, json.dumps(layout)]
    done = subprocess.run(args, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch_digits", "keras_diabetes"])
def test_layouts_agree_with_one_device(name: str) -> None:
    alone = child(name, 1, data=1, fsdp=1)["losses"]
    assert len(set(alone)) == 4
    for layout in ({"data": 4, "fsdp": 1}, {"data": 2, "fsdp": 2}):
        made = child(name, 4, **layout)
        assert made["losses"] == pytest.approx(alone, rel=RELATIVE)
        # Keras' layers there are smaller than what is worth sharding.
        assert (made["sharded"] > 0) == (name == "torch_digits" and layout["fsdp"] > 1)


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(tmp_path: Path) -> None:
    from examples import frameworks

    job = replace(frameworks.torch_digits(steps=6), checkpoints=Checkpoints(every=3))
    whole = systolic.train(job, run=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    again = systolic.resume(tmp_path / "run", job=job)
    assert again.summary["final"] == whole.summary["final"]
    assert again.summary["steps"] == 6


@pytest.mark.slow
def test_a_module_is_forecast_for_a_slice_without_one() -> None:
    from examples import frameworks

    found = systolic.forecast(frameworks.torch_digits(), on="v5e-4", quick=True)
    assert found.on.name == "v5e-4"
    assert found.fits
    assert found.step_seconds is not None
    # Forward and twice that backward, of 64 images: a 3x3 convolution of 1 to 32 channels on 8 x 8, and two layers.
    assert found.model_flops == 3 * 64 * 2 * (8 * 8 * 32 * 9 + 512 * 128 + 128 * 10)
