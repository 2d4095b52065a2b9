"""Blocks of Whisper: norms before attention, cross attention and MLP, each added to its input."""

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.attention import attention
from systolic.models.layers import LayerNorm, zeros
from systolic.models.linear import product
from systolic.models.masking import Masking
from systolic.models.parameters import weight
from systolic.models.remat import name
from systolic.models.residual import STREAM, gathered
from systolic.models.whisper.config import Whisper

DEVIATION = 0.02
"""Standard deviation of all weights at the start, that of transformers' Whisper (``init_std``)."""
HEADS = ("batch", "sequence", "heads", None)
"""Logical names of the dims of queries, keys and values."""


def matrix(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """A weight of standard deviation :data:`DEVIATION`."""
    return weight(rngs, shape, axes, 1, DEVIATION)


class BiasedAttention(nnx.Module):
    """Projections of multi-head attention with biases, but for the keys."""

    def __init__(self, config: Whisper, rngs: nnx.Rngs, target: Target) -> None:
        d, h, e = config.d_model, config.heads, config.head_dim
        heads = (d, h, e), ("embed", "heads", "head_dim")
        self.query, self.key, self.value = (matrix(rngs, *heads) for _ in range(3))
        # Biases are vectors, which no optimizer decays: heads and their width in one dim.
        self.query_bias, self.value_bias = (zeros((d,), ("heads",)) for _ in range(2))
        self.out = matrix(rngs, (h, e, d), ("heads", "head_dim", "embed"))
        self.out_bias = zeros((d,), ("norm",))
        self.shape, self.target = (h, e), target

    def queries(self, x: jax.Array) -> jax.Array:
        """x [batch, n, d_model] to [batch, n, heads, head_dim]."""
        return self._project(x, self.query, self.query_bias, "query")

    def keys(self, x: jax.Array) -> jax.Array:
        """x [batch, n, d_model] to [batch, n, heads, head_dim]."""
        return self._project(x, self.key, None, "key")

    def values(self, x: jax.Array) -> jax.Array:
        """x [batch, n, d_model] to [batch, n, heads, head_dim]."""
        return self._project(x, self.value, self.value_bias, "value")

    def merge(self, attended: jax.Array) -> jax.Array:
        """Attention's output [batch, n, heads, head_dim] to [batch, n, d_model]."""
        attended = self.target.constrain(name(attended, "attention"), *HEADS)
        out = product(self.target, "bshe,hed->bsd", attended, self.out[...])
        return name(self.target.constrain(out, *STREAM), "out") + self.out_bias[...]

    def _project(
        self, x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None, label: str
    ) -> jax.Array:
        made = product(self.target, "bsd,dhe->bshe", x, kernel[...], heads=True)
        if bias is not None:
            made = made + bias[...].reshape(self.shape)
        return self.target.constrain(name(made, label), *HEADS)


class GeluMlp(nnx.Module):
    """Two matrices with biases and a GELU by the error function between them."""

    def __init__(self, config: Whisper, rngs: nnx.Rngs, target: Target) -> None:
        d, f = config.d_model, config.d_ff
        self.up, self.up_bias = matrix(rngs, (d, f), ("embed", "mlp")), zeros((f,), ("mlp",))
        self.down, self.down_bias = matrix(rngs, (f, d), ("mlp", "embed")), zeros((d,), ("norm",))
        self.target = target

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, n, d_model] to the same."""
        hidden = product(self.target, "bsd,df->bsf", x, self.up[...]) + self.up_bias[...]
        hidden = jax.nn.gelu(name(hidden, "mlp"), approximate=False)
        hidden = self.target.constrain(hidden, "batch", "sequence", "mlp")
        down = product(self.target, "bsf,fd->bsd", hidden, self.down[...])
        return name(self.target.constrain(down, *STREAM), "down") + self.down_bias[...]


class ListeningBlock(nnx.Module):
    """A layer of the encoder: every position sees all."""

    def __init__(self, config: Whisper, rngs: nnx.Rngs, target: Target) -> None:
        self.attention_norm = LayerNorm(config.d_model, config.norm_eps)
        self.attention = BiasedAttention(config, rngs, target)
        self.mlp_norm = LayerNorm(config.d_model, config.norm_eps)
        self.mlp = GeluMlp(config, rngs, target)
        self.target = target

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [batch, frames, d_model] to the same."""
        x = name(x, "layer_input")
        with jax.named_scope("attention"):
            normed, own = gathered(self.target, self.attention_norm(x)), self.attention
            query, key, value = own.queries(normed), own.keys(normed), own.values(normed)
            x = x + own.merge(attention(self.target, query, key, value))
        with jax.named_scope("mlp"):
            return x + self.mlp(gathered(self.target, self.mlp_norm(x)))


class WritingBlock(nnx.Module):
    """A layer of the decoder: a token sees itself, those before it, and all of the encoder's output."""

    def __init__(self, config: Whisper, rngs: nnx.Rngs, target: Target) -> None:
        self.attention_norm = LayerNorm(config.d_model, config.norm_eps)
        self.attention = BiasedAttention(config, rngs, target)
        self.cross_norm = LayerNorm(config.d_model, config.norm_eps)
        self.cross = BiasedAttention(config, rngs, target)
        self.mlp_norm = LayerNorm(config.d_model, config.norm_eps)
        self.mlp = GeluMlp(config, rngs, target)
        self.target = target

    def __call__(self, x: jax.Array, encoded: jax.Array) -> jax.Array:
        """x [batch, n, d_model] to the same; encoded [batch, frames, d_model]."""
        x = name(x, "layer_input")
        return self.run(x, *self.heard(encoded))[0]

    def heard(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of the encoder's output [batch, frames, d_model], each [batch, frames, heads, head_dim]."""
        with jax.named_scope("cross"):
            return self.cross.keys(encoded), self.cross.values(encoded)

    def run(
        self, x: jax.Array, cross_key: jax.Array, cross_value: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The stream after all tokens of the texts, and their keys and values; arguments as in :meth:`heard`."""
        query, key, value = self.own(x)
        x = self.after(x, attention(self.target, query, key, value, Masking(causal=True)))
        with jax.named_scope("cross"):
            asked = self.asked(x)
            x = x + self.cross.merge(attention(self.target, asked, cross_key, cross_value))
        return self.ended(x), (key, value)

    def own(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of the tokens, [batch, n, heads, head_dim] each."""
        with jax.named_scope("attention"):
            normed = gathered(self.target, self.attention_norm(x))
            own = self.attention
            return own.queries(normed), own.keys(normed), own.values(normed)

    def after(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """The stream with attention's output [batch, n, heads, head_dim] added."""
        with jax.named_scope("attention"):
            return x + self.attention.merge(attended)

    def asked(self, x: jax.Array) -> jax.Array:
        """Queries of cross attention, [batch, n, heads, head_dim]."""
        return self.cross.queries(gathered(self.target, self.cross_norm(x)))

    def ended(self, x: jax.Array) -> jax.Array:
        """The stream after the MLP."""
        with jax.named_scope("mlp"):
            return x + self.mlp(gathered(self.target, self.mlp_norm(x)))


def sinusoids(length: int, width: int) -> jax.Array:
    """Positions of the encoder, f32[length, width]: sines, then cosines, of wavelengths from 2 pi to 10,000 times that."""
    rates = jnp.exp(-jnp.log(10_000.0) / (width // 2 - 1) * jnp.arange(width // 2))
    angles = jnp.arange(length)[:, None] * rates[None, :]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
