"""Layers that the image models share."""

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.vision import Pixels

BATCH_NORM_MOMENTUM = 0.9
"""Share of the old running statistics kept per step (He et al. 2016)."""


def normalise(image: jax.Array, pixels: Pixels, dtype: jnp.dtype) -> jax.Array:
    """Bytes uint8[batch, height, width, channels] to ``dtype`` with about zero mean and unit variance."""
    mean = 255.0 * jnp.asarray(pixels.mean, jnp.float32)
    scale = 1.0 / (255.0 * jnp.asarray(pixels.std, jnp.float32))
    return ((image.astype(jnp.float32) - mean) * scale).astype(dtype)


class ConvNorm(nnx.Module):
    """Convolution without bias, then batch norm.

    The kernel starts normal with variance 2 / fan_out (He et al. 2015). Batch statistics and the
    running ones are float32 whatever the compute dtype; under a mesh they cover the whole batch.
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
        deviation = (2.0 / (kernel * kernel * conv_out)) ** 0.5
        shape = (kernel, kernel, conv_in, conv_out)
        self.kernel = nnx.Param(
            deviation * jax.random.normal(rngs.params(), shape, jnp.float32),
            out_sharding=(None, None, "conv_in", "conv_out"),
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

    def __init__(
        self, features: int, num_classes: int, rngs: nnx.Rngs, target: Target, deviation: float
    ) -> None:
        """The kernel starts normal with standard deviation ``deviation``, the bias at 0."""
        value = deviation * jax.random.normal(rngs.params(), (features, num_classes), jnp.float32)
        self.kernel = nnx.Param(value, out_sharding=("embed", "vocab"))
        self.bias = nnx.Param(jnp.zeros((num_classes,)), out_sharding=("vocab",))
        self.target = target

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, features] to [batch, num_classes]."""
        return self.target.constrain(x @ self.kernel[...] + self.bias[...], "batch", "vocab")
