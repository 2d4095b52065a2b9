"""Whisper as a Flax NNX module: blocks in stacks that scans run, and the keys and values of a transcription."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.attention import Logits, Masking, attention
from systolic.models.decoder.cache import ScorePart, Sight, appended, attend_one, stored
from systolic.models.layers import STREAM, LayerNorm, gathered, name, stacked_layers, weight, zeros
from systolic.models.linear import product
from systolic.models.whisper.config import STRIDE, TAPS, Whisper

DEVIATION = 0.02
"""Standard deviation of all weights at the start, that of transformers' Whisper (``init_std``)."""
HEADS = ("batch", "sequence", "heads", None)
"""Logical names of the dims of queries, keys and values."""


class TextCache(NamedTuple):
    """Keys and values, heads outside as the matmuls of attention read them."""

    key: jax.Array
    """Keys of the tokens, [layers, batch, heads, capacity, head_dim]."""
    value: jax.Array
    """Like key."""
    cross_key: jax.Array
    """Keys of the encoder's output, [layers, batch, heads, frames, head_dim]."""
    cross_value: jax.Array
    """Like cross_key."""
    length: jax.Array
    """int32[batch]: tokens seen."""


def attend_all(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention of tokens to every position of a cache.

    Args:
        query: [batch, n, heads, head_dim].
        key: [batch, heads, positions, head_dim].
        value: Like key.

    Returns:
        [batch, n, heads, head_dim] in the dtype of ``query``.
    """
    scores = jnp.einsum(
        "bqhe,bhse->bhqs", query, key.astype(query.dtype), preferred_element_type=jnp.float32
    )
    weights = jax.nn.softmax(scores * query.shape[-1] ** -0.5, axis=-1).astype(query.dtype)
    return jnp.einsum("bhqs,bhse->bqhe", weights, value.astype(query.dtype))


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
        attended = self.target.constrain(attended, *HEADS)
        out = product(self.target, "bshe,hed->bsd", attended, self.out[...])
        return name(self.target.constrain(out, *STREAM), "out") + self.out_bias[...]

    def _project(
        self, x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None, label: str
    ) -> jax.Array:
        projected = product(self.target, "bsd,dhe->bshe", x, kernel[...], heads=True)
        if bias is not None:
            projected = projected + bias[...].reshape(self.shape)
        return self.target.constrain(name(projected, label), *HEADS)


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
            cross_query = self.cross_query(x)
            x = x + self.cross.merge(attention(self.target, cross_query, cross_key, cross_value))
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

    def cross_query(self, x: jax.Array) -> jax.Array:
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


class Fixed(nnx.Variable):
    """An array that is not trained."""


class WhisperModule(nnx.Module):
    """Spectrograms and the starts of their texts to logits of the next tokens."""

    def __init__(self, config: Whisper, rngs: nnx.Rngs, target: Target) -> None:
        def stacked(block: type[nnx.Module], layers: int) -> Any:
            @nnx.split_rngs(splits=layers)
            @nnx.vmap(axis_size=layers, transform_metadata={nnx.PARTITION_NAME: "layers"})
            def build(rngs: nnx.Rngs) -> Any:
                make: Any = block
                return make(config, rngs, target)

            return build(rngs)

        d, conv = config.d_model, (None, "conv_in", "conv_out")
        self.conv1 = matrix(rngs, (TAPS, config.mels, d), conv)
        self.conv1_bias = zeros((d,), ("norm",))
        self.conv2 = matrix(rngs, (TAPS, d, d), conv)
        self.conv2_bias = zeros((d,), ("norm",))
        # As they were published: a checkpoint in float16 has rounded sines.
        self.frames = Fixed(sinusoids(config.frames, d))
        self.encoder = stacked(ListeningBlock, config.encoder_layers)
        self.encoder_norm = LayerNorm(d, config.norm_eps)
        self.embedding = matrix(rngs, (config.vocab, d), ("vocab", "embed"))
        self.positions = matrix(rngs, (config.positions, d), (None, "embed"))
        self.decoder = stacked(WritingBlock, config.decoder_layers)
        self.norm = LayerNorm(d, config.norm_eps)
        self.config, self.target = config, target

    def encode(self, features: jax.Array) -> jax.Array:
        """[batch, frames, d_model] of a log-mel spectrogram f32[batch, 2 x frames, mels]."""
        constrain = self.target.constrain
        with jax.named_scope("stem"):
            x = features.astype(self.target.dtype)
            x = jax.nn.gelu(convolve(x, self.conv1[...], 1) + self.conv1_bias[...], False)
            x = constrain(x, "batch", None, None)
            x = jax.nn.gelu(convolve(x, self.conv2[...], STRIDE) + self.conv2_bias[...], False)
            x = constrain(x + self.frames[...].astype(x.dtype), *STREAM)
        graph, states = nnx.split(self.encoder)

        def layer(x: jax.Array, state: nnx.State) -> jax.Array:
            return nnx.merge(graph, state)(x)

        x = stacked_layers(layer, x, states, self.target)
        return gathered(self.target, self.encoder_norm(x))

    def __call__(self, features: jax.Array, tokens: jax.Array) -> jax.Array:
        """Logits [batch, n, vocab] of the tokens after each of tokens int32[batch, n]; features as :meth:`encode` takes."""
        return self.logits(self.decode(tokens, self.encode(features)))

    def decode(self, tokens: jax.Array, encoded: jax.Array) -> jax.Array:
        """Input of the logits' matrix, [batch, n, d_model], for the encoder's output [batch, frames, d_model]."""
        graph, states = nnx.split(self.decoder)

        def layer(x: jax.Array, state: nnx.State) -> jax.Array:
            return nnx.merge(graph, state)(x, encoded)

        x = self.embed(tokens, jnp.arange(tokens.shape[1]))
        return self.norm(stacked_layers(layer, x, states, self.target))

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """[batch, n, d_model] of tokens int32[batch, n] at positions int32[n] or int32[batch, n]."""
        with jax.named_scope("embed"):
            # Whole rows on every device, and the gradient summed into shards.
            table = self.target.constrain(self.embedding[...], "vocab", "embed")
            x = self.target.constrain(table, "vocab", None)[tokens]
            return self.target.constrain(x + self.positions[...][positions], *STREAM)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [batch, n, vocab] of the last layer's normed output [batch, n, d_model]."""
        with jax.named_scope("logits"):
            hidden = gathered(self.target, hidden)
            logits = hidden @ self.embedding[...].T
            return self.target.constrain(logits, "batch", "sequence", "vocab")

    def prefill(
        self, tokens: jax.Array, encoded: jax.Array, capacity: int
    ) -> tuple[jax.Array, TextCache]:
        """Reads the start of each text.

        Args:
            tokens: int32[batch, n], of the same length in every row.
            encoded: The encoder's output, [batch, frames, d_model].
            capacity: Tokens that the cache has room for.

        Returns:
            Logits [batch, vocab] of the next token, and the cache.
        """
        graph, states = nnx.split(self.decoder)
        dtype = jnp.dtype(self.target.dtype)

        def layer(x: jax.Array, state: nnx.State) -> tuple[jax.Array, Any]:
            block = nnx.merge(graph, state)
            heard = block.heard(encoded)
            x, own = block.run(x, *heard)
            rows = tuple(stored(self.target, part, capacity, dtype) for part in own)
            return x, (*rows, *(jnp.swapaxes(part, 1, 2).astype(dtype) for part in heard))

        x = self.embed(tokens, jnp.arange(tokens.shape[1]))
        x, kept = jax.lax.scan(layer, x, states)
        length = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
        return self.logits(self.norm(x[:, -1:]))[:, 0], TextCache(*kept, length)

    def extend(self, tokens: jax.Array, cache: TextCache) -> tuple[jax.Array, TextCache]:
        """Reads the next token of each text, int32[batch]: logits [batch, vocab] and the cache with the tokens in it."""
        graph, states = nnx.split(self.decoder)
        positions = cache.length[:, None]
        sight = Sight(positions, 0, Logits(scale=self.config.head_dim**-0.5))

        def layer(x: jax.Array, layer_parts: Any) -> tuple[jax.Array, Any]:
            state, (key, value, cross_key, cross_value) = layer_parts
            block = nnx.merge(graph, state)
            query, own_key, own_value = block.own(x)
            part = ScorePart(query, own_key, key)
            x = block.after(x, attend_one([part], own_value, value, sight))
            heard = attend_all(block.cross_query(x), cross_key, cross_value)
            return block.ended(x + block.cross.merge(heard)), (own_key[:, 0], own_value[:, 0])

        x = self.embed(tokens[:, None], positions)
        x, (keys, values) = jax.lax.scan(layer, x, (states, cache[:4]))
        return self.logits(self.norm(x))[:, 0], cache._replace(
            key=appended(self.target, cache.key, cache.length, keys),
            value=appended(self.target, cache.value, cache.length, values),
            length=cache.length + 1,
        )


def convolve(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """x [batch, frames, in] with kernel [taps, in, out], a frame of padding at both ends: [batch, frames / stride, out]."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride,), [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC")
    )
