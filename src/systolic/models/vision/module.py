"""Image models as Flax NNX modules."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from systolic.job import Target
from systolic.models.attention import attention
from systolic.models.layers import (
    BATCH_NORM_MOMENTUM,
    STREAM,
    ConvNorm,
    GroupedBatchNorm,
    Head,
    LayerNorm,
    convolve,
    convolve_on_cpu,
    gathered,
    max_pool,
    name,
    normalise,
    random,
    recomputed,
    stacked_layers,
    start,
    zeros,
)
from systolic.models.linear import product
from systolic.models.vision.config import (
    CNN,
    BlockSize,
    Gelu,
    MobileNetV2,
    Padding,
    Pooling,
    Positions,
    ResNet,
    Stem,
    ViT,
)

SINCOS_TEMPERATURE = 10_000.0
TOKEN_DEVIATION = 0.02
"""Standard deviation of learned positions and of the extra token (Dosovitskiy et al. 2021)."""


class CNNModule(nnx.Module):
    """Images to logits."""

    def __init__(self, config: CNN, rngs: nnx.Rngs, target: Target) -> None:
        convs, conv_in = [], config.pixels.channels
        for conv_out in config.channels:
            convs.append(ConvNorm(conv_in, conv_out, 3, rngs, target))
            convs.append(ConvNorm(conv_out, conv_out, 3, rngs, target))
            conv_in = conv_out
        self.convs = nnx.List(convs)
        self.head = Head(config.features, config.num_classes, target, deviation=0.01)
        self.config, self.target = config, target
        start(self, rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Logits [batch, num_classes] of image uint8[batch, size, size, channels]."""
        x = normalise(image, self.config.pixels, self.convs[0].kernel.dtype)
        x = self.target.constrain(x, "batch", None, None, None)
        for index, conv in enumerate(self.convs):
            x = jax.nn.relu(conv(x))
            if index % 2:
                x = max_pool(self.target, x, 2, 2, "SAME")
        return self.head(x.reshape(x.shape[0], -1))


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
            x = max_pool(self.target, x, 3, 2, ((1, 1), (1, 1)))
        for block in self.blocks:
            x = recomputed(block, x, self.target.layout)
        features = jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(x.dtype)
        return self.head(features)


class ViTBlock(nnx.Module):
    """Attention and a GELU MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ViT, target: Target) -> None:
        d, f, h, e = config.d_model, config.d_ff, config.heads, config.head_dim
        self.attention_norm = LayerNorm(d, config.norm_eps)
        # One matmul makes queries, keys and values; heads stay a dim of their own to be split.
        self.project = random((d, 3, h, e), ("embed", None, "heads", "head_dim"), d**-0.5)
        self.project_bias = zeros((3 * d,), ("norm",)) if config.projection_bias else None
        self.out = random((h, e, d), ("heads", "head_dim", "embed"), d**-0.5)
        self.out_bias = zeros((d,), ("norm",))
        self.mlp_norm = LayerNorm(d, config.norm_eps)
        self.up = random((d, f), ("embed", "mlp"), d**-0.5)
        self.up_bias = zeros((f,), ("mlp",))
        self.down = random((f, d), ("mlp", "embed"), f**-0.5)
        self.down_bias = zeros((d,), ("norm",))
        self.config, self.target = config, target

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, tokens, d_model] to the same."""
        constrain = self.target.constrain
        normed = gathered(self.target, self.attention_norm(x))
        projected = product(self.target, "bsd,dthe->tbshe", normed, self.project[...])
        if self.project_bias is not None:
            projected += self.project_bias[...].reshape(3, 1, 1, *projected.shape[-2:])
        query, key, value = (
            constrain(name(part, label), "batch", None, "heads", None)
            for part, label in zip(projected, ("query", "key", "value"), strict=True)
        )
        attended = attention(self.target, query, key, value)
        attended = constrain(attended, "batch", None, "heads", None)
        x = x + product(self.target, "bshe,hed->bsd", attended, self.out[...]) + self.out_bias[...]
        x = constrain(x, *STREAM)
        normed = gathered(self.target, self.mlp_norm(x))
        hidden = product(self.target, "bsd,df->bsf", normed, self.up[...])
        hidden = name(hidden + self.up_bias[...], "mlp")
        hidden = jax.nn.gelu(hidden, approximate=self.config.gelu is Gelu.tanh)
        hidden = constrain(hidden, "batch", None, "mlp")
        down = product(self.target, "bsf,fd->bsd", hidden, self.down[...])
        return constrain(x + down + self.down_bias[...], *STREAM)


def sincos(side: int, d_model: int) -> np.ndarray:
    """Fixed positions f32[side * side, d_model]: a quarter each of sin and cos of column and row."""
    frequency = SINCOS_TEMPERATURE ** -(np.arange(d_model // 4) / (d_model // 4))
    rows, columns = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    angles = [axis.reshape(-1, 1) * frequency for axis in (columns, rows)]
    parts = [function(angle) for angle in angles for function in (np.sin, np.cos)]
    return np.concatenate(parts, axis=1).astype(np.float32)


class ViTModule(nnx.Module):
    """Images to logits."""

    def __init__(self, config: ViT, rngs: nnx.Rngs, target: Target) -> None:
        @nnx.vmap(axis_size=config.layers, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def blocks() -> ViTBlock:
            return ViTBlock(config, target)

        d, taps = config.d_model, config.patch**2 * config.pixels.channels
        self.embedding = random((taps, d), (None, "embed"), taps**-0.5)
        self.embedding_bias = zeros((d,), ("norm",))
        side = config.pixels.size // config.patch
        if config.positions is Positions.learned:
            self.positions = random((side * side, d), (None, "embed"), TOKEN_DEVIATION)
        if config.pooling is Pooling.token:
            self.token = random((d,), ("norm",), TOKEN_DEVIATION)
        if config.token_position:
            self.token_position = random((d,), ("norm",), TOKEN_DEVIATION)
        self.blocks = blocks()
        self.norm = LayerNorm(d, config.norm_eps)
        self.head = Head(d, config.num_classes, target, deviation=0.0)
        self.config, self.target = config, target
        start(self, rngs)

    def embed(self, image: jax.Array) -> jax.Array:
        """uint8[batch, size, size, channels] to tokens [batch, tokens, d_model]."""
        config = self.config
        kernel = self.embedding[...]
        x = normalise(image, config.pixels, kernel.dtype)
        batch, height, width, channels = x.shape
        p = config.patch
        # Patches don't overlap, so their convolution is one matmul.
        x = x.reshape(batch, height // p, p, width // p, p, channels).swapaxes(2, 3)
        x = x.reshape(batch, -1, p * p * channels) @ kernel + self.embedding_bias[...]
        if config.positions is Positions.learned:
            x = x + self.positions[...]
        else:
            x = x + jnp.asarray(sincos(config.pixels.size // p, config.d_model), x.dtype)
        if config.pooling is Pooling.token:
            token = self.token[...]
            if config.token_position:
                token = token + self.token_position[...]
            token = jnp.broadcast_to(token, (batch, 1, config.d_model))
            x = jnp.concatenate([token, x], axis=1)
        return self.target.constrain(x, *STREAM)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Logits [batch, num_classes] of image uint8[batch, size, size, channels]."""
        graph, stacked = nnx.split(self.blocks)

        def apply(x: jax.Array, state: nnx.State) -> jax.Array:
            return nnx.merge(graph, state)(x)

        x = stacked_layers(apply, self.embed(image), stacked, self.target)
        x = self.norm(x)
        pooled = x[:, 0] if self.config.pooling is Pooling.token else jnp.mean(x, axis=1)
        return self.head(pooled)
