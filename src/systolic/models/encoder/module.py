"""The encoder as a Flax NNX module: blocks stacked along a leading ``layers`` dim and run by a scan."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.attention import Masking, attention
from systolic.models.encoder.config import Encoder, FeedForward
from systolic.models.layers import STREAM, LayerNorm, gathered, name, stacked_layers, weight, zeros
from systolic.models.linear import product

DEVIATION = 0.02
"""Standard deviation of all weights at the start (Devlin et al. 2019)."""


def matrix(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """A weight of standard deviation :data:`DEVIATION`."""
    return weight(rngs, shape, axes, 1, DEVIATION)


def again(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """An elementwise function or a norm whose backward pass computes it once more from what it took.

    That costs next to nothing, fused into what takes its gradient; kept, its inner values in float32 are
    near half of all activations (BERT-large, 14 rows of 512 a device: 19.4 GiB with them, 12.2 without).
    """
    return jax.checkpoint(function, prevent_cse=False)


class EncoderBlock(nnx.Module):
    """Attention and an MLP, each added to its input and normed after the sum."""

    def __init__(self, config: Encoder, rngs: nnx.Rngs, target: Target) -> None:
        d, f, h, e = config.d_model, config.d_ff, config.heads, config.head_dim
        heads = (d, h, e), ("embed", "heads", "head_dim")
        self.query, self.key, self.value = (matrix(rngs, *heads) for _ in range(3))
        # Biases are vectors, which no optimizer decays: heads and their width in one dim.
        self.query_bias, self.key_bias, self.value_bias = (zeros((d,), ("heads",)) for _ in "qkv")
        self.out = matrix(rngs, (h, e, d), ("heads", "head_dim", "embed"))
        self.out_bias = zeros((d,), ("norm",))
        self.attention_norm = LayerNorm(d, config.norm_eps)
        if config.mlp.gated:
            self.gate = matrix(rngs, (d, f), ("embed", "mlp"))
            self.gate_bias = zeros((f,), ("mlp",))
        self.up = matrix(rngs, (d, f), ("embed", "mlp"))
        self.up_bias = zeros((f,), ("mlp",))
        self.down = matrix(rngs, (f, d), ("mlp", "embed"))
        self.down_bias = zeros((d,), ("norm",))
        self.mlp_norm = LayerNorm(d, config.norm_eps)
        self.config, self.target = config, target

    def __call__(self, x: jax.Array, segments: jax.Array) -> jax.Array:
        """x [batch, sequence, d_model] to the same; segments int32[batch, sequence]."""
        constrain = self.target.constrain
        x = name(x, "layer_input")
        with jax.named_scope("attention"):
            attended = self.attend(gathered(self.target, x), segments)
            out = product(self.target, "bshe,hed->bsd", attended, self.out[...])
            out = name(constrain(out, *STREAM), "out")
            x = self.summed(self.attention_norm, x, out, self.out_bias[...])
        with jax.named_scope("mlp"):
            hidden = self.hidden(gathered(self.target, x))
            down = product(self.target, "bsf,fd->bsd", hidden, self.down[...])
            down = name(constrain(down, *STREAM), "down")
            return self.summed(self.mlp_norm, x, down, self.down_bias[...])

    def summed(self, norm: LayerNorm, x: jax.Array, more: jax.Array, bias: jax.Array) -> jax.Array:
        """The norm of x + more + bias, the first two [batch, sequence, d_model]."""

        def make(x: jax.Array, more: jax.Array, bias: jax.Array) -> jax.Array:
            return norm(self.target.constrain(x + more + bias, *STREAM))

        return again(make)(x, more, bias)

    def attend(self, x: jax.Array, segments: jax.Array) -> jax.Array:
        """Attention output [batch, sequence, heads, head_dim]: a place sees all of its own segment."""
        shape, constrain = (self.config.heads, self.config.head_dim), self.target.constrain

        def project(kernel: nnx.Param, bias: nnx.Param, label: str) -> jax.Array:
            projected = product(self.target, "bsd,dhe->bshe", x, kernel[...]) + bias[...].reshape(
                shape
            )
            return constrain(name(projected, label), "batch", "sequence", "heads", None)

        query = project(self.query, self.query_bias, "query")
        key = project(self.key, self.key_bias, "key")
        value = project(self.value, self.value_bias, "value")
        attended = attention(self.target, query, key, value, Masking(segments=segments))
        return constrain(attended, "batch", "sequence", "heads", None)

    def hidden(self, x: jax.Array) -> jax.Array:
        """The MLP's hidden units [batch, sequence, d_ff]."""
        into = partial(product, self.target, "bsd,df->bsf", x)
        hidden = name(into(self.up[...]) + self.up_bias[...], "mlp")
        if self.config.mlp.gated:
            gate = name(into(self.gate[...]) + self.gate_bias[...], "mlp")
            hidden = again(lambda hidden, gate: hidden * jax.nn.silu(gate))(hidden, gate)
        else:
            hidden = again(partial(activated, self.config))(hidden)
        return self.target.constrain(hidden, "batch", "sequence", "mlp")


def activated(config: Encoder, x: jax.Array) -> jax.Array:
    """The activation of the MLP where nothing gates it, same shape and dtype; GELU for a gated one's head."""
    if config.mlp is FeedForward.relu:
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=config.mlp is not FeedForward.gelu)


class EncoderModule(nnx.Module):
    """Tokens to the output of the last block, and to logits of some places."""

    def __init__(self, config: Encoder, rngs: nnx.Rngs, target: Target) -> None:
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(axis_size=config.layers, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def blocks(rngs: nnx.Rngs) -> EncoderBlock:
            return EncoderBlock(config, rngs, target)

        d = config.d_model
        self.embedding = matrix(rngs, (config.vocab, d), ("vocab", "embed"))
        self.positions = matrix(rngs, (config.positions, d), (None, "embed"))
        self.token_types = matrix(rngs, (config.token_types, d), (None, "embed"))
        self.embedding_norm = LayerNorm(d, config.norm_eps)
        self.blocks = blocks(rngs)
        if config.head:
            self.transform = matrix(rngs, (d, d), ("embed", "mlp"))
            self.transform_bias = zeros((d,), ("norm",))
            self.transform_norm = LayerNorm(d, config.norm_eps)
            self.logits_bias = zeros((config.vocab,), ("vocab",))
        if config.pooler:
            self.pooler = matrix(rngs, (d, d), ("embed", "mlp"))
            self.pooler_bias = zeros((d,), ("norm",))
        self.config, self.target = config, target

    def embed(
        self, tokens: jax.Array, positions: jax.Array, types: jax.Array | None = None
    ) -> jax.Array:
        """[batch, sequence, d_model] of tokens, positions and types int32[batch, sequence]; all of type 0 without types."""
        with jax.named_scope("embed"):
            # Whole rows on every device, and the gradient summed into shards.
            table = self.target.constrain(self.embedding[...], "vocab", "embed")
            x = self.target.constrain(table, "vocab", None)[tokens]
            x = x + self.positions[...][positions]
            kinds = self.token_types[...]
            x = x + (kinds[0] if types is None else kinds[types])
            return self.target.constrain(self.embedding_norm(x), *STREAM)

    def __call__(
        self,
        tokens: jax.Array,
        segments: jax.Array,
        positions: jax.Array,
        types: jax.Array | None = None,
    ) -> jax.Array:
        """Output of the last block, [batch, sequence, d_model], for tokens int32[batch, sequence].

        segments int32[batch, sequence]: a token sees all tokens of its own segment, before and after it.
        positions int32[batch, sequence]: within the segment. types int32[batch, sequence], or all 0.
        """
        graph, stacked = nnx.split(self.blocks)

        def apply(x: jax.Array, state: nnx.State) -> jax.Array:
            return nnx.merge(graph, state)(x, segments)

        return stacked_layers(apply, self.embed(tokens, positions, types), stacked, self.target)

    def logits(self, hidden: jax.Array, places: jax.Array) -> jax.Array:
        """Logits [batch, predictions, vocab] of some places int32[batch, predictions] of hidden [batch, sequence, d_model]."""
        constrain = self.target.constrain
        with jax.named_scope("logits"):
            # The few places that are asked for, whole on each device of the other axes, whatever split the rest.
            whole = constrain(hidden, "batch", None, None)
            picked = jax.vmap(partial(jnp.take, axis=0))(whole, places)
            transformed = constrain(picked, "batch", None, None) @ self.transform[...]
            transformed = activated(self.config, transformed + self.transform_bias[...])
            transformed = self.transform_norm(constrain(transformed, "batch", None, None))
            logits = transformed @ self.embedding[...].T + self.logits_bias[...]
            return constrain(logits, "batch", None, "vocab")

    def pooled(self, hidden: jax.Array) -> jax.Array:
        """[batch, d_model] for a text as a whole, of hidden [batch, sequence, d_model]: tanh of a dense layer on the first place."""
        return jnp.tanh(hidden[:, 0] @ self.pooler[...] + self.pooler_bias[...])
