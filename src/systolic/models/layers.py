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

    :func:`start_kernels` gives the kernel its first values. Batch statistics and the running ones
    are float32 whatever the compute dtype; under a mesh they cover the whole batch.
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
        self.kernel = nnx.Param(
            jnp.zeros((kernel, kernel, conv_in, conv_out), jnp.float32),
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


def start_kernels(module: nnx.Module, rngs: nnx.Rngs) -> None:
    """Fills the kernels of all ConvNorms in ``module``: normal, variance 2 / fan_out (He et al. 2015).

    One draw serves them all, because the compiler spends about half a second on each draw of
    another shape, which is half a minute for 50 layers.
    """
    convs = [part for _, part in nnx.iter_modules(module) if isinstance(part, ConvNorm)]
    draw = jax.random.normal(rngs.params(), (sum(conv.kernel.size for conv in convs),), jnp.float32)
    start = 0
    for conv in convs:
        shape = conv.kernel.shape
        deviation = (2.0 / (shape[0] * shape[1] * shape[3])) ** 0.5
        part = jax.lax.slice_in_dim(draw, start, start + conv.kernel.size)
        conv.kernel[...] = deviation * part.reshape(shape)
        start += conv.kernel.size


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
