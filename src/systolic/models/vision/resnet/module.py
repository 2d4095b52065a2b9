"""The residual network as a Flax NNX module."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.layers import ConvNorm, Head, normalise, recomputed, start
from systolic.models.vision.resnet.config import ResNet, Stem


class ResidualBlock(nnx.Module):
    """Two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1, added to the (projected) input."""

    def __init__(
        self, conv_in: int, inner: int, stride: int, config: ResNet, rngs: nnx.Rngs, target: Target
    ) -> None:
        expansion, examples = config.depth.expansion, config.norm_examples
        conv_out = inner * expansion
        make = partial(ConvNorm, rngs=rngs, target=target, examples=examples)
        if expansion > 1:
            convs = [
                make(conv_in, inner, 1),
                make(inner, inner, 3, stride=stride),
                make(inner, conv_out, 1, gain=0.0),
            ]
        else:
            convs = [
                make(conv_in, inner, 3, stride=stride),
                make(inner, conv_out, 3, gain=0.0),
            ]
        self.convs = nnx.List(convs)
        self.shortcut = (
            make(conv_in, conv_out, 1, stride=stride) if stride > 1 or conv_in != conv_out else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, height, width, conv_in] to [batch, height / stride, width / stride, conv_out]."""
        branch = x
        for conv in self.convs[:-1]:
            branch = jax.nn.relu(conv(branch))
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return jax.nn.relu(self.convs[-1](branch) + shortcut)


class ResNetModule(nnx.Module):
    """Images to logits."""

    def __init__(self, config: ResNet, rngs: nnx.Rngs, target: Target) -> None:
        self.large = config.stem in (Stem.imagenet, Stem.paired)
        kernel = 7 if self.large else 3
        stride = 1 if config.stem is Stem.small else 2
        self.stem = ConvNorm(
            config.pixels.channels,
            config.width,
            kernel,
            rngs,
            target,
            stride=stride,
            examples=config.norm_examples,
        )
        blocks = []
        conv_in = config.width
        for stage, num_blocks in enumerate(config.depth.blocks):
            inner = config.width * 2**stage
            for index in range(num_blocks):
                stride = 2 if stage and not index else 1
                blocks.append(ResidualBlock(conv_in, inner, stride, config, rngs, target))
                conv_in = inner * config.depth.expansion
        self.blocks = nnx.List(blocks)
        # A small head keeps the first loss near log(num_classes) (Goyal et al. 2017).
        self.head = Head(conv_in, config.num_classes, target, deviation=0.01)
        self.config, self.target = config, target
        start(self, rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Logits [batch, num_classes] of image uint8[batch, height, width, channels]."""
        x = normalise(image, self.config.pixels, self.stem.kernel.dtype)
        first = self.stem.by_pairs if self.config.stem is Stem.paired else self.stem
        x = jax.nn.relu(first(self.target.constrain(x, "batch", None, None, None)))
        if self.large:
            x = nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for block in self.blocks:
            x = recomputed(block, x, self.target.layout)
        features = jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(x.dtype)
        return self.head(features)
