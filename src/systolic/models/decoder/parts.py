"""Parts of a decoder block: norm, rotary embedding, dense feed-forward part."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.decoder.config import Decoder, Mlp
from systolic.models.decoder.rotary import Rotary, Stretching
from systolic.models.order import Order
from systolic.models.parameters import weight
from systolic.models.product import product
from systolic.models.remat import name
from systolic.models.residual import STREAM, gathered


class RMSNorm(nnx.Module):
    """Root mean square norm over the last dim, in float32, with a learned scale."""

    def __init__(self, size: int, eps: float, axis: str) -> None:
        self.scale = nnx.Param(jnp.ones((size,)), out_sharding=(axis,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size], same dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def frequencies(rotary: Rotary, size: int) -> jax.Array:
    """Radians per position of each pair of ``size`` dims, f32[size / 2]; formulas of ``ROPE_INIT_FUNCTIONS`` in transformers 5.23."""
    half, scaling = size // 2, rotary.scaling
    plain = rotary.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    stretched = plain / scaling.factor
    match scaling.kind:
        case Stretching.none:
            return plain
        case Stretching.linear:
            return stretched
        case Stretching.llama3:
            rotations = plain * (scaling.original_positions / (2 * math.pi))
            width = scaling.high_freq_factor - scaling.low_freq_factor
            share = jnp.clip((rotations - scaling.low_freq_factor) / width, 0, 1)
            return share * plain + (1 - share) * stretched
        case Stretching.yarn:
            low, high = rotary.ramp(size)
            share = jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / (high - low), 0, 1)
            return (1 - share) * plain + share * stretched


def rope(x: jax.Array, positions: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotary position embedding (Su et al. 2021): x [batch, sequence, heads, head_dim], positions int32[batch, sequence]."""
    angle = positions[:, :, None, None].astype(jnp.float32) * frequencies(rotary, x.shape[-1])
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    if (magnitude := rotary.scaling.magnitude) != 1:
        sin, cos = sin * magnitude, cos * magnitude
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(
        x.dtype
    )


CLAMP_LIMIT = 7.0
"""Largest gate, and largest magnitude of up, of Mlp.swiglu_clamped (gpt-oss: swiglu_limit)."""
CLAMP_SLOPE = 1.702
"""Slope inside the sigmoid of Mlp.swiglu_clamped (gpt-oss: swiglu_alpha)."""
ACTIVATIONS = {
    Mlp.swiglu: jax.nn.silu,
    Mlp.geglu: jax.nn.gelu,
    Mlp.gelu: jax.nn.gelu,
    Mlp.relu: jax.nn.relu,
}


def gated(mlp: Mlp, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Hidden units [...] of a gated feed-forward part, of its gate and up [...]."""
    if mlp is not Mlp.swiglu_clamped:
        return ACTIVATIONS[mlp](gate) * up
    gate, up = jnp.minimum(gate, CLAMP_LIMIT), jnp.clip(up, -CLAMP_LIMIT, CLAMP_LIMIT)
    return gate * jax.nn.sigmoid(CLAMP_SLOPE * gate) * (up + 1)


class MLP(nnx.Module):
    """A dense feed-forward part of ``d_ff`` hidden units, gated or not."""

    def __init__(self, config: Decoder, d_ff: int, rngs: nnx.Rngs, target: Target) -> None:
        d, f = config.d_model, d_ff
        if config.mlp.gated:
            self.gate = weight(rngs, (d, f), ("embed", "mlp"), d)
        self.up = weight(rngs, (d, f), ("embed", "mlp"), d)
        self.down = weight(rngs, (f, d), ("mlp", "embed"), f, (2 * config.layers) ** -0.5)
        self.config, self.target = config, target

    def __call__(
        self, x: jax.Array, count: jax.Array | None = None, order: Order | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """[batch, sequence, d_model] to the same, and a router loss of 0; neither padding nor order changes anything."""
        del count, order
        x = gathered(self.target, x)
        if self.config.mlp.gated:
            gate = name(
                product(self.target, "bsd,df->bsf", x, self.gate[...], self.config.rounding), "mlp"
            )
            up = name(
                product(self.target, "bsd,df->bsf", x, self.up[...], self.config.rounding), "mlp"
            )
            hidden = gated(self.config.mlp, gate, up)
        else:
            up = name(
                product(self.target, "bsd,df->bsf", x, self.up[...], self.config.rounding), "mlp"
            )
            hidden = ACTIVATIONS[self.config.mlp](up)
        hidden = self.target.constrain(hidden, "batch", "sequence", "mlp")
        down = product(self.target, "bsf,fd->bsd", hidden, self.down[...], self.config.rounding)
        return name(self.target.constrain(down, *STREAM), "down"), {}
