"""PyTorch and Keras models train to the same losses under data and fsdp as on one device, and resume exactly."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import systolic
from systolic.core.errors import OptionError
from systolic.data.arrays import Arrays
from systolic.job import Batch, Checkpoints, Job, Precision
from systolic.models.program.config import KerasModel, TorchModule, load_keras
from systolic.steps.tasks import ArrayClassification

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


def hooked() -> Any:
    import torch

    from tests.models.program import crooked

    return crooked.Hooked(), torch.zeros(2, 4)


def test_a_module_that_trains_otherwise_than_in_torch_does_not_start(tmp_path: Path) -> None:
    """The comparison is on the data's first examples: the module's own are zeros."""
    rng = np.random.default_rng(0)
    table = {"x": rng.normal(size=(8, 4)).astype(np.float32), "label": np.arange(8) % 2}
    job = Job(
        name="hooked", model=TorchModule(hooked), task=ArrayClassification(),
        data=Arrays.of(train=table), steps=1, batch=Batch(total=4),
    )  # fmt: skip
    with pytest.raises(OptionError, match=r"the gradient of back\.(weight|bias) differs by 0\.9"):
        systolic.train(job, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("where", "settings", "told"),
    [
        ("Dense", {"kernel_regularizer": "l2"}, "adds 1 loss to its own, such as that of"),
        ("Dense", {"activity_regularizer": "l1"}, "adds 1 loss to its own, which"),
        ("Dense", {"kernel_constraint": "non_neg"}, "has the constraint NonNeg"),
        ("ActivityRegularization", {"l1": 0.1}, "adds 1 loss to its own, which"),
    ],
)
def test_losses_and_constraints_of_keras_are_refused(
    where: str, settings: Any, told: str, tmp_path: Path
) -> None:
    keras = load_keras()

    def make() -> Any:
        if where == "Dense":
            layers = [keras.layers.Dense(2, **settings)]
        else:
            layers = [keras.layers.Dense(2), getattr(keras.layers, where)(**settings)]
        return keras.Sequential([keras.Input((4,), name="x"), *layers])

    table = {"x": np.ones((8, 4), np.float32), "label": np.arange(8) % 2}
    job = Job(
        name="regular", model=KerasModel(make), task=ArrayClassification(), precision=Precision.f32,
        data=Arrays.of(train=table), steps=1, batch=Batch(total=4),
    )  # fmt: skip
    with pytest.raises(OptionError) as caught:
        systolic.train(job, run=tmp_path / "run")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
