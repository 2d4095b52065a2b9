"""Whisper as a Flax NNX module: blocks stacked along a leading ``layers`` dim and run by scans."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.decoder.cache import ScorePart, Sight, appended, attend_one, stored
from systolic.models.layers import LayerNorm, zeros
from systolic.models.masking import Logits
from systolic.models.remat import rematerialise
from systolic.models.residual import STREAM, gathered
from systolic.models.whisper.blocks import ListeningBlock, WritingBlock, matrix, sinusoids
from systolic.models.whisper.cache import TextCache, attend_all, heads_out
from systolic.models.whisper.config import STRIDE, TAPS, Whisper

UNROLLED_LAYERS = 6
"""Layers up to which a CPU program unrolls them: a loop keeps XLA from fusing across layers."""


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

        x = self._run(layer, x, states, self.config.encoder_layers)
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
        return self.norm(self._run(layer, x, states, self.config.decoder_layers))

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
            return x, (*rows, *(heads_out(part, dtype) for part in heard))

        x = self.embed(tokens, jnp.arange(tokens.shape[1]))
        x, kept = jax.lax.scan(layer, x, states)
        length = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
        return self.logits(self.norm(x[:, -1:]))[:, 0], TextCache(*kept, length)

    def extend(self, tokens: jax.Array, cache: TextCache) -> tuple[jax.Array, TextCache]:
        """Reads the next token of each text, int32[batch]: logits [batch, vocab] and the cache with the tokens in it."""
        graph, states = nnx.split(self.decoder)
        positions = cache.length[:, None]
        sight = Sight(positions, 0, Logits(scale=self.config.head_dim**-0.5))

        def layer(x: jax.Array, given: Any) -> tuple[jax.Array, Any]:
            state, (key, value, cross_key, cross_value) = given
            block = nnx.merge(graph, state)
            query, own_key, own_value = block.own(x)
            part = ScorePart(query, own_key, key)
            x = block.after(x, attend_one([part], own_value, value, sight))
            heard = attend_all(block.asked(x), cross_key, cross_value)
            return block.ended(x + block.cross.merge(heard)), (own_key[:, 0], own_value[:, 0])

        x = self.embed(tokens[:, None], positions)
        x, (keys, values) = jax.lax.scan(layer, x, (states, cache[:4]))
        return self.logits(self.norm(x))[:, 0], cache._replace(
            key=appended(self.target, cache.key, cache.length, keys),
            value=appended(self.target, cache.value, cache.length, values),
            length=cache.length + 1,
        )

    def _run(
        self, layer: Callable[..., jax.Array], x: jax.Array, states: Any, layers: int
    ) -> jax.Array:
        """``x`` after all layers, under the layout's rematerialisation."""
        again = rematerialise(layer, self.target.layout)
        unroll = self.target.platform == "cpu" and layers <= UNROLLED_LAYERS
        x, _ = jax.lax.scan(lambda x, state: (again(x, state), None), x, states, unroll=unroll or 1)
        return x


def convolve(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """x [batch, frames, in] with kernel [taps, in, out], a frame of padding at both ends: [batch, frames / stride, out]."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride,), [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC")
    )
