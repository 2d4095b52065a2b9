"""Image models small enough to compile in seconds, and random images for them."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from systolic.data.arrays import Arrays
from systolic.job import Batch, Job, Layout, Model, Optimizer, Remat
from systolic.job.data import MASK
from systolic.models.vision.config import (
    CNN,
    Depth,
    MobileNetV2,
    Pixels,
    Pooling,
    Positions,
    ResNet,
    Stem,
    ViT,
)
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget, make_mesh
from systolic.steps.tasks import Classification

COLOURED = Pixels(size=16)
CLASSES = 7

MODELS: dict[str, Model] = {
    "cnn": CNN(channels=(4, 8), num_classes=CLASSES, pixels=COLOURED),
    "resnet-basic": ResNet(
        depth=Depth.d10, width=4, stem=Stem.small, num_classes=CLASSES, pixels=COLOURED
    ),
    "resnet-bottleneck": ResNet(depth=Depth.d14, width=4, num_classes=CLASSES, pixels=COLOURED),
    "mobilenet": MobileNetV2(multiplier=0.1, num_classes=CLASSES, pixels=COLOURED),
    "vit-mean": ViT(
        layers=2, d_model=16, d_ff=32, heads=2, patch=4, num_classes=CLASSES, pixels=COLOURED
    ),
    "vit-token": ViT(
        layers=2,
        d_model=16,
        d_ff=32,
        heads=2,
        patch=4,
        pooling=Pooling.token,
        positions=Positions.learned,
        num_classes=CLASSES,
        pixels=COLOURED,
    ),
}


def steps(
    model: Model,
    dtype: str = "float32",
    remat: Remat = Remat.none,
    batch: int = 8,
    devices: int = 1,
    platform: str = "cpu",
) -> StepFunctions:
    """The programs of a job on ``model``."""
    pixels: Any = vars(type(model))["pixels"].__get__(model)
    shape = (2, pixels.size, pixels.size, pixels.channels)
    data = Arrays.of(train={"image": np.zeros(shape, np.uint8), "label": np.zeros(2, np.int32)})
    layout = Layout(remat=remat).on(devices)
    job = Job(
        name="tiny",
        model=model,
        task=Classification(),
        data=data,
        steps=60,
        batch=Batch(total=batch),
        optimizer=Optimizer(learning_rate=1e-2, weight_decay=0.0),
    )
    mesh = make_mesh(layout, jax.devices()[:devices])
    target = MeshTarget(platform=platform, layout=layout, dtype=dtype, mesh=mesh)
    return StepFunctions(replace(job, layout=layout), target)


def batch(of: StepFunctions, seed: int = 0) -> dict[str, np.ndarray]:
    """Random images whose brightness tells their class."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, CLASSES, of.batch_size).astype(np.int32)
    noise = rng.integers(0, 40, (of.batch_size, *of.job.data.fields()["image"].shape))
    image = (noise + 30 * label[:, None, None, None]).astype(np.uint8)
    return {"image": image, "label": label, MASK: np.ones(of.batch_size, np.float32)}


def noisy(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Parameters moved a little: those that start at zero would hide what is connected to what."""
    rng = np.random.default_rng(1)
    return {
        name: value + 0.1 * rng.normal(size=value.shape).astype(np.float32)
        for name, value in params.items()
    }
