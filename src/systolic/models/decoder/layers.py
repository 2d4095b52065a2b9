"""Parts of a decoder block: norms, rotary embedding, dense feed-forward part, hashed n-gram embeddings."""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.attention import BalancedOrder
from systolic.models.decoder.config import Decoder, Mlp, NormKind
from systolic.models.decoder.options import CLAMP_LIMIT, CLAMP_SLOPE, Rotary, Stretching
from systolic.models.layers import STREAM, LayerNorm, gathered, name, weight
from systolic.models.linear import product, products

ACTIVATIONS = {
    Mlp.swiglu: jax.nn.silu,
    Mlp.geglu: jax.nn.gelu,
    Mlp.geglu_exact: partial(jax.nn.gelu, approximate=False),
    Mlp.gelu: jax.nn.gelu,
    Mlp.gelu_exact: partial(jax.nn.gelu, approximate=False),
    Mlp.relu: jax.nn.relu,
}
MULTIPLIER = 0x9E3779B1
"""The 32-bit golden ratio prime of multiplicative hashing (Knuth, TAOCP 3, 6.4)."""
GAIN = 8.0
"""Factor of the tables, which start at zero: rare rows need larger steps than the dense weights."""


class RMSNorm(nnx.Module):
    """Root mean square norm over the last dim, in float32, with a learned scale.

    The scale is the parameter plus ``offset``, and starts at 1.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        self.scale = nnx.Param(jnp.full((size,), 1.0 - offset), out_sharding=("norm",))
        self.eps, self.offset = eps, offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size], same dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        if self.offset:
            scale = scale + self.offset
        return (wide * scale).astype(x.dtype)


def norm(config: Decoder, size: int, eps: float = 0.0) -> RMSNorm | LayerNorm:
    """A norm of the decoder's kind over ``size`` elements; an epsilon of 0 takes the decoder's."""
    eps = eps or config.norm_eps
    match config.norm:
        case NormKind.rms:
            return RMSNorm(size, eps)
        case NormKind.rms_offset:
            return RMSNorm(size, eps, offset=1.0)
        case NormKind.layer:
            return LayerNorm(size, eps)


def added(x: jax.Array, bias: nnx.Param | None, dims: int = 1) -> jax.Array:
    """x [..., sizes of ``dims`` dims] with their bias, which is flat; x itself without one."""
    return x if bias is None else x + bias[...].reshape(x.shape[-dims:])


def bias(size: int, axis: str) -> nnx.Param:
    """A bias [size] that starts at zero; flat over heads and their dims, so that optimizers see a vector."""
    return nnx.Param(jnp.zeros((size,)), out_sharding=(axis,))


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


def gated(mlp: Mlp, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Hidden units [...] of a gated feed-forward part, of its gate and up [...]."""
    if mlp is not Mlp.swiglu_clamped:
        return ACTIVATIONS[mlp](gate) * up
    gate, up = jnp.minimum(gate, CLAMP_LIMIT), jnp.clip(up, -CLAMP_LIMIT, CLAMP_LIMIT)
    return gate * jax.nn.sigmoid(CLAMP_SLOPE * gate) * (up + 1)


class MLP(nnx.Module):
    """A dense feed-forward part of ``d_ff`` hidden units, gated or not; ``units`` is the logical name of their dim."""

    def __init__(
        self, config: Decoder, d_ff: int, rngs: nnx.Rngs, target: Target, units: str = "mlp"
    ) -> None:
        d, f = config.d_model, d_ff
        if config.mlp.gated:
            self.gate = weight(rngs, (d, f), ("embed", units), d)
        self.up = weight(rngs, (d, f), ("embed", units), d)
        self.down = weight(rngs, (f, d), (units, "embed"), f, (2 * config.layers) ** -0.5)
        if config.mlp_bias:
            self.gate_bias = bias(f, units) if config.mlp.gated else None
            self.up_bias = bias(f, units)
            self.down_bias = bias(d, "norm")
        else:
            self.gate_bias = self.up_bias = self.down_bias = None
        self.config, self.target, self.units = config, target, units

    def __call__(
        self, x: jax.Array, count: jax.Array | None = None, order: BalancedOrder | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """[batch, sequence, d_model] to the same, and a router loss of 0; neither padding nor order changes anything."""
        del count, order
        x = gathered(self.target, x)
        if self.config.mlp.gated:
            biases = (self.gate_bias, self.up_bias)
            hidden = gated(self.config.mlp, *self._hidden(x, (self.gate, self.up), biases))
        else:
            (hidden,) = self._hidden(x, (self.up,), (self.up_bias,))
            hidden = ACTIVATIONS[self.config.mlp](hidden)
        hidden = self.target.constrain(hidden, "batch", "sequence", self.units)
        down = product(self.target, "bsf,fd->bsd", hidden, self.down[...], self.config.rounding)
        down = added(self.target.constrain(down, *STREAM), self.down_bias)
        return name(down, "down"), {}

    def _hidden(
        self, x: jax.Array, matrices: Sequence[nnx.Param], biases: Sequence[nnx.Param | None]
    ) -> list[jax.Array]:
        hidden = products(self.target, "bsd,df->bsf", x, matrices, self.config.rounding)
        return [name(added(each, bias), "mlp") for each, bias in zip(hidden, biases, strict=True)]


def hashes(tokens: jax.Array, history: int, positions: jax.Array, rows: int) -> jax.Array:
    """Table rows of the n-grams that end at each token.

    Args:
        tokens: int32[batch, history + n]: the n tokens after ``history`` earlier ones; -1 is no token.
        history: One less than the longest n-gram.
        positions: int32[batch, n]: of the n tokens in their documents; what lies before a document is not seen.
        rows: Of a table; a power of two.

    Returns:
        int32[batch, n, history]: rows of the 2-gram, 3-gram, ...
    """
    count = positions.shape[1]
    code = tokens[:, history:].astype(jnp.uint32) + 1
    codes = []
    for back in range(1, history + 1):
        earlier = tokens[:, history - back : history - back + count].astype(jnp.uint32) + 1
        code = code * jnp.uint32(MULTIPLIER) + jnp.where(positions >= back, earlier, 0)
        mixed = (code ^ (code >> 15)) * jnp.uint32(MULTIPLIER)
        codes.append((mixed >> 16) ^ mixed)
    return (jnp.stack(codes, axis=-1) & jnp.uint32(rows - 1)).astype(jnp.int32)


class NGrams(nnx.Module):
    """One table for each n from 2 to ``config.ngrams``, concatenated and projected to the model's width.

    A row of a table stands for all n-grams that hash to it. The lookups cost next to no arithmetic and
    give a small model what it would otherwise spend layers on (Pagnoni et al. 2024, section 3.2.1, use
    the same for bytes).
    """

    def __init__(self, config: Decoder, rngs: nnx.Rngs, target: Target) -> None:
        orders = config.ngrams - 1
        self.tables = nnx.Param(
            jnp.zeros((orders, config.ngram_rows, config.ngram_dim)),
            out_sharding=("orders", "vocab", "embed"),
        )
        self.out = weight(
            rngs,
            (orders * config.ngram_dim, config.d_model),
            (None, "embed"),
            orders * config.ngram_dim,
        )
        self.config, self.target = config, target

    @property
    def history(self) -> int:
        """Earlier tokens that a lookup needs."""
        return self.config.ngrams - 1

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, order: BalancedOrder | None = None
    ) -> jax.Array:
        """int32[batch, history + n] tokens and int32[batch, n] positions to [batch, n, d_model] in ``order``."""
        ids = hashes(tokens, self.history, positions, self.config.ngram_rows)
        if order is not None:
            ids = order.arrange(ids)
        tables = self.target.constrain(self.tables[...], None, "vocab", None)
        looked = [tables[longer][ids[:, :, longer]] for longer in range(self.history)]
        embedded, out = jnp.concatenate(looked, axis=-1) * GAIN, self.out[...]
        if isinstance(out, jax.Array):
            return embedded @ out  # in float in every precision of training
        return product(self.target, "bsn,nd->bsd", embedded, out)
