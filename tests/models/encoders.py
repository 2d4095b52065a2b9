"""An encoder small enough to compile in seconds, on texts that tell what is hidden in them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from systolic.data.text.documents import StandardLibrary
from systolic.data.text.masked import Masked, hide
from systolic.job import Batch, Job, Layout, Optimizer
from systolic.job.data import MASK
from systolic.models.encoder.config import Encoder
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget, make_mesh
from systolic.steps.tasks import MaskedTokens

MODEL = Encoder(layers=2, d_model=32, d_ff=64, heads=4, vocab=384, positions=32)
DATA = Masked(text=StandardLibrary(sequence=32, root=Path("nowhere")), predictions=6, share=0.2)
"""Shapes only; batches come from :func:`batch`."""


def job(**changes: Any) -> Job:
    given = {
        "name": "tiny",
        "model": MODEL,
        "task": MaskedTokens(),
        "data": DATA,
        "steps": 40,
        "batch": Batch(total=16),
        "optimizer": Optimizer(learning_rate=1e-2, weight_decay=0.0),
    }
    return Job(**{**given, **changes})


def steps(of: Job, num_devices: int = 1, dtype: str = "float32") -> StepFunctions:
    of = replace(of, layout=of.layout.on(num_devices))
    mesh = make_mesh(of.layout, jax.devices()[:num_devices])
    return StepFunctions(of, MeshTarget(platform="cpu", layout=of.layout, dtype=dtype, mesh=mesh))


def batch(of: StepFunctions, seed: int) -> dict[str, jax.Array]:
    """Two documents a row, each of one letter, so that neighbours tell a hidden token."""
    rng = np.random.default_rng(seed)
    size, sequence = of.batch_size, of.job.data.fields()["tokens"].shape[0]
    segments = np.sort(rng.integers(1, 3, (size, sequence)), axis=1).astype(np.int32)
    letters = rng.integers(97, 105, (size, 3)).astype(np.int32)
    places = np.arange(sequence, dtype=np.int32)
    first = np.argmax(segments == segments[:, -1:], axis=1)[:, None]
    rows = {
        "tokens": np.take_along_axis(letters, segments, axis=1),
        "segments": segments,
        "positions": np.where(places >= first, places - first, places).astype(np.int32),
        MASK: np.ones(size, np.float32),
    }
    data = of.job.data
    assert isinstance(data, Masked)
    hidden = hide(rows, data, seed)
    return {name: jax.device_put(a, of.batch_shardings[name]) for name, a in hidden.items()}


def run(of: StepFunctions, count: int = 3) -> tuple[list[float], Any]:
    """The losses of the first steps, and the state after them."""
    state = jax.jit(of.init, out_shardings=of.shardings)(jax.random.key(0))
    train = jax.jit(
        of.train,
        in_shardings=(of.shardings, of.batch_shardings),
        out_shardings=(of.shardings, None),
    )
    losses = []
    for index in range(count):
        state, metrics = train(state, batch(of, index))
        losses.append(float(metrics["loss"]))
    return losses, state


ONE_DEVICE = Layout(fsdp=1)
