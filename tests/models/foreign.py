"""Models of transformers with random weights, beside ours with the same ones."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from systolic.job import Layout, Model
from systolic.models.families import Config, Family
from systolic.steps.network import ModelStructure
from systolic.steps.target import MeshTarget, make_mesh

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported


@dataclass
class Held:
    """A tensor in memory."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def read(self) -> np.ndarray:
        return self.array


def held(module: Any) -> dict[str, Held]:
    """The state of a PyTorch module, tied tensors once."""
    return {name: Held(value.numpy()) for name, value in module.state_dict().items()}


def saved(module: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Held]]:
    """The config.json and the tensors that transformers writes of a model, which it may name otherwise than the module does."""
    module.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    return config, {name: Held(value) for name, value in tensors.items()}


def structure(model: Model, dtype: str = "float32", platform: str = "cpu") -> ModelStructure:
    """A model on one CPU device, traced for a platform."""
    layout = Layout(data=1, fsdp=1)
    target = MeshTarget(
        platform=platform,
        layout=layout,
        dtype=dtype,
        matmul_format=None,
        mesh=make_mesh(layout, jax.devices()[:1]),
    )
    return ModelStructure(model, target)


def converted(family: Family, config: Config, tensors: Mapping[str, Held]) -> Any:
    """Our module with the weights of a file, in evaluation mode."""
    made = structure(family.model(config))
    rules = family.conversion(config)
    rules.check(tensors, "the model")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {
        path: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=one)
        for path, shape in {**made.params, **made.model_state}.items()
    }
    arrays = rules.arrays(tensors, like)
    params = {path: arrays[path] for path in made.params}
    state = {path: arrays[path] for path in made.model_state if path in arrays}
    return made.module(params, state, train=False), arrays


def returned(family: Family, config: Config, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Our arrays as the file's tensors."""
    return dict(family.conversion(config).tensors(arrays))


def continued(net: Any, tokens: jax.Array, prompt: int) -> jax.Array:
    """Logits after each token behind a padded prompt, through a cache."""

    def extend(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        logits, cache = net.extend(token, cache)
        return cache, logits

    rows, length = tokens.shape
    padded = jnp.full((rows, prompt + 2), 5).at[:, :prompt].set(tokens[:, :prompt])
    _, cache = net.prefill(padded, jnp.full(rows, prompt), length + 3, jnp.float32)
    return jax.lax.scan(extend, cache, tokens[:, prompt:].T)[1].swapaxes(0, 1)


def relative(ours: Any, theirs: Any) -> float:
    """Largest difference over the largest magnitude."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
