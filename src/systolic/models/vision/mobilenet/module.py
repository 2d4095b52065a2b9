"""MobileNetV2 as a Flax NNX module."""

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.layers import (
    BATCH_NORM_MOMENTUM,
    GroupedBatchNorm,
    Head,
    convolve,
    convolve_on_cpu,
    normalise,
    random,
    recomputed,
    start,
)
from systolic.models.vision.mobilenet.config import BlockSize, MobileNetV2, Padding


class MobileConv(nnx.Module):
    """A convolution without bias and its batch norm: dense, or of each channel by itself (``depthwise``)."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        config: MobileNetV2,
        rngs: nnx.Rngs,
        target: Target,
        *,
        stride: int = 1,
        depthwise: bool = False,
    ) -> None:
        """``sizes``: side of the kernel, channels in and out.

        The kernel starts with variance 2 / fan_out (He et al. 2015).
        """
        side, conv_in, conv_out = sizes
        fan_out = side * side * (1 if depthwise else conv_out)
        self.kernel = random(
            (side, side, 1 if depthwise else conv_in, conv_out),
            (None, None, None if depthwise else "conv_in", "conv_out"),
            (2.0 / fan_out) ** 0.5,
        )
        self.norm = GroupedBatchNorm(
            conv_out,
            examples=config.norm_examples,
            momentum=BATCH_NORM_MOMENTUM,
            epsilon=config.norm_eps,
            scale_metadata={"out_sharding": ("norm",)},
            bias_metadata={"out_sharding": ("norm",)},
            rngs=rngs,
        )
        self.stride, self.groups = stride, conv_out if depthwise else 1
        self.padding, self.target = config.padding, target

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, height, width, conv_in] to [batch, height / stride, width / stride, conv_out]."""
        pads = [self.pad(size) for size in x.shape[1:3]]
        on = convolve_on_cpu if self.target.platform == "cpu" else convolve
        x = on(x, self.kernel[...], self.stride, *pads, groups=self.groups)
        # The norm's statistics are float32, so it computes in float32 and its result is cast back.
        return self.target.constrain(self.norm(x).astype(x.dtype), "batch", None, None, None)

    def pad(self, size: int) -> tuple[int, int]:
        """Zeros before and after a dim of ``size``."""
        side = self.kernel.shape[0]
        if self.padding is Padding.torch:
            return (side - 1) // 2, (side - 1) // 2
        total = max(side - (size % self.stride or self.stride), 0)
        return total // 2, total - total // 2


class InvertedResidual(nnx.Module):
    """1x1 to more channels, 3x3 of each channel by itself, 1x1 to few, added to the input where sizes allow."""

    def __init__(
        self, size: BlockSize, config: MobileNetV2, rngs: nnx.Rngs, target: Target, *, expand: bool
    ) -> None:
        conv_in, inner, conv_out, stride = size
        self.expand = MobileConv((1, conv_in, inner), config, rngs, target) if expand else None
        self.depthwise = MobileConv(
            (3, inner, inner), config, rngs, target, stride=stride, depthwise=True
        )
        self.project = MobileConv((1, inner, conv_out), config, rngs, target)
        # The first block has no shortcut, also where a small multiplier makes its channels equal.
        self.residual = expand and stride == 1 and conv_in == conv_out

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, height, width, conv_in] to [batch, height / stride, width / stride, conv_out]."""
        inner = x if self.expand is None else jax.nn.relu6(self.expand(x))
        projected = self.project(jax.nn.relu6(self.depthwise(inner)))
        return x + projected if self.residual else projected


class MobileNetV2Module(nnx.Module):
    """Images to logits."""

    def __init__(self, config: MobileNetV2, rngs: nnx.Rngs, target: Target) -> None:
        self.stem = MobileConv(
            (3, config.pixels.channels, config.stem), config, rngs, target, stride=2
        )
        self.blocks = nnx.List(
            [
                InvertedResidual(size, config, rngs, target, expand=index > 0)
                for index, size in enumerate(config.blocks)
            ]
        )
        last = config.blocks[-1].conv_out
        self.last = MobileConv((1, last, config.features), config, rngs, target)
        self.head = Head(config.features, config.num_classes, target, deviation=0.01)
        self.config, self.target = config, target
        start(self, rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Logits [batch, num_classes] of image uint8[batch, height, width, channels]."""
        x = normalise(image, self.config.pixels, self.stem.kernel.dtype)
        x = jax.nn.relu6(self.stem(self.target.constrain(x, "batch", None, None, None)))
        for block in self.blocks:
            x = recomputed(block, x, self.target.layout)
        x = jax.nn.relu6(self.last(x))
        features = jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(x.dtype)
        return self.head(features)
