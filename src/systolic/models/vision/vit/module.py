"""The vision transformer as a Flax NNX module: blocks stacked along a leading ``layers`` dim."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from systolic.job import Target
from systolic.models.attention import attention
from systolic.models.layers import (
    STREAM,
    Head,
    LayerNorm,
    gathered,
    name,
    normalise,
    random,
    rematerialise,
    start,
    zeros,
)
from systolic.models.linear import product
from systolic.models.vision.vit.config import Gelu, Pooling, Positions, ViT

SINCOS_TEMPERATURE = 10_000.0
TOKEN_DEVIATION = 0.02
"""Standard deviation of learned positions and of the extra token (Dosovitskiy et al. 2021)."""
UNROLLED_LAYERS = 6
"""Layers up to which a CPU program unrolls them: a loop keeps XLA from fusing across layers."""


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
        attended = name(attention(self.target, query, key, value), "attention")
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

        layer = rematerialise(apply, self.target.layout)
        unroll = self.target.platform == "cpu" and self.config.layers <= UNROLLED_LAYERS
        x, _ = jax.lax.scan(
            lambda x, state: (layer(x, state), None), self.embed(image), stacked, unroll=unroll
        )
        x = self.norm(x)
        pooled = x[:, 0] if self.config.pooling is Pooling.token else jnp.mean(x, axis=1)
        return self.head(pooled)
