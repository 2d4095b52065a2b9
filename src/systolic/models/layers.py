"""Layers that the image models share."""

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.parameters import TRUNCATED_DEVIATION
from systolic.models.vision import Pixels

BATCH_NORM_MOMENTUM = 0.9
"""Share of the old running statistics kept per step (He et al. 2016)."""


DEVIATION = "deviation"
"""Name of the standard deviation that a parameter carries."""


def zeros(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """A float32 parameter of zeros."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), out_sharding=axes)


def random(shape: tuple[int, ...], axes: tuple[str | None, ...], deviation: float) -> nnx.Param:
    """A float32 parameter that :func:`start` fills: normal, cut at two standard deviations."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), out_sharding=axes, deviation=deviation)


def start(module: nnx.Module, rngs: nnx.Rngs) -> None:
    """Fills the :func:`random` parameters of a whole network from one draw.

    The compiler spends half a second or more on each draw of another shape, which for a ResNet of
    50 layers is half a minute before the first step.
    """
    found = [
        (path, parameter)
        for path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param))
        if DEVIATION in parameter.get_metadata()
    ]
    sizes = [parameter.size for _, parameter in found]
    draw = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, (sum(sizes),), jnp.float32)
    filled, offset = [], 0
    for (path, parameter), size in zip(found, sizes, strict=True):
        scale = parameter.get_metadata(DEVIATION) / TRUNCATED_DEVIATION
        part = jax.lax.slice_in_dim(draw, offset, offset + size)
        filled.append((path, parameter.replace(scale * part.reshape(parameter.shape))))
        offset += size
    nnx.update(module, nnx.from_flat_state(filled))


def normalise(image: jax.Array, pixels: Pixels, dtype: jnp.dtype) -> jax.Array:
    """Bytes uint8[batch, height, width, channels] to ``dtype`` with about zero mean and unit variance."""
    mean = 255.0 * jnp.asarray(pixels.mean, jnp.float32)
    scale = 1.0 / (255.0 * jnp.asarray(pixels.std, jnp.float32))
    return ((image.astype(jnp.float32) - mean) * scale).astype(dtype)


class ConvNorm(nnx.Module):
    """Convolution without bias, then batch norm.

    The kernel starts with variance 2 / fan_out (He et al. 2015). Batch statistics and the running
    ones are float32 whatever the compute dtype; under a mesh they cover the whole batch.
    """

    def __init__(
        self,
        conv_in: int,
        conv_out: int,
        kernel: int,
        rngs: nnx.Rngs,
        target: Target,
        *,
        stride: int = 1,
        gain: float = 1.0,
    ) -> None:
        """``gain`` is the first scale of the norm: 0 makes a residual branch start as nothing."""
        self.kernel = random(
            (kernel, kernel, conv_in, conv_out),
            (None, None, "conv_in", "conv_out"),
            (2.0 / (kernel * kernel * conv_out)) ** 0.5,
        )
        self.norm = nnx.BatchNorm(
            conv_out,
            momentum=BATCH_NORM_MOMENTUM,
            scale_init=nnx.initializers.constant(gain),
            scale_metadata={"out_sharding": ("norm",)},
            bias_metadata={"out_sharding": ("norm",)},
            rngs=rngs,
        )
        self.stride, self.target = stride, target

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, height, width, conv_in] to [batch, height / stride, width / stride, conv_out]."""
        half = (self.kernel.shape[0] - 1) // 2
        x = jax.lax.conv_general_dilated(
            x,
            self.kernel[...],
            (self.stride, self.stride),
            [(half, half), (half, half)],
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        # The norm's statistics are float32, so it computes in float32 and its result is cast back.
        return self.target.constrain(self.norm(x).astype(x.dtype), "batch", None, None, None)


class Head(nnx.Module):
    """Features to logits."""

    def __init__(self, features: int, num_classes: int, target: Target, deviation: float) -> None:
        """The kernel starts with standard deviation ``deviation``, the bias at 0."""
        self.kernel = random((features, num_classes), ("embed", "vocab"), deviation)
        self.bias = zeros((num_classes,), ("vocab",))
        self.target = target

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, features] to [batch, num_classes]."""
        return self.target.constrain(x @ self.kernel[...] + self.bias[...], "batch", "vocab")
