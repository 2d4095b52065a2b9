"""One layer of the decoder: attention and a feed-forward part, each behind a norm and added to the residual stream."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.attention import attention, plain_dtype
from systolic.models.context_order import Order
from systolic.models.decoder.cache import ScorePart, Sight, attend_one
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.latent import LatentAttention
from systolic.models.decoder.layers import MLP, added, bias, norm, rope
from systolic.models.decoder.moe import Mixture
from systolic.models.linear import product
from systolic.models.masking import Logits, Masking
from systolic.models.parameters import weight
from systolic.models.remat import name
from systolic.models.residual import STREAM, gathered


class CacheRows(NamedTuple):
    """What new tokens bring to a cache."""

    queries: tuple[jax.Array, ...]
    """[batch, n, heads, size] of each part of the cache that is compared: keys; with latents the shared key and the latents."""
    rows: tuple[jax.Array, jax.Array]
    """Their own rows of both parts, [batch, n, kv_heads, size]; what is read is the second."""


class DecoderBlock(nnx.Module):
    """Attention and a feed-forward part, each behind a norm and added to the residual stream."""

    def __init__(self, config: Decoder, mixture: bool, rngs: nnx.Rngs, target: Target) -> None:
        d, h, k, e = config.d_model, config.heads, config.kv_heads, config.head_dim
        self.attention_norm = norm(config, d)
        self.latent = LatentAttention(config, rngs, target) if config.latent else None
        if self.latent is None:
            self.query = weight(rngs, (d, h, e), ("embed", "heads", "head_dim"), d)
            self.key = weight(rngs, (d, k, e), ("embed", "kv_heads", "head_dim"), d)
            self.value = weight(rngs, (d, k, e), ("embed", "kv_heads", "head_dim"), d)
        qkv = config.qkv_bias
        self.query_bias = bias(h * e, "heads") if qkv else None
        self.key_bias = bias(k * e, "kv_heads") if qkv else None
        self.value_bias = bias(k * e, "kv_heads") if qkv else None
        read = config.value_dim
        self.out = weight(
            rngs,
            (h, read, d),
            ("heads", "head_dim", "embed"),
            h * read,
            (2 * config.layers) ** -0.5,
        )
        self.out_bias = bias(d, "norm") if config.out_bias else None
        if config.qk_norm:
            self.query_norm = norm(config, e)
            self.key_norm = norm(config, e)
        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros((h,)), out_sharding=("heads",))
        self.post_attention_norm = norm(config, d) if config.post_norms else None
        self.post_mlp_norm = norm(config, d) if config.post_norms else None
        self.mlp_norm = norm(config, d)
        units = "dense_mlp" if config.experts > 1 else "mlp"
        self.mlp = (
            Mixture(config, rngs, target)
            if mixture
            else MLP(config, config.dense_width, rngs, target, units)
        )
        self.config, self.target = config, target

    @property
    def attention_logits(self) -> Logits:
        """Scale, soft cap and sinks of the products of queries and keys."""
        sinks = self.sinks[...] if self.config.sinks else None
        return Logits(scale=self.config.softmax_scale, cap=self.config.attention_cap, sinks=sinks)

    def project(
        self, x: jax.Array, positions: jax.Array, window: int = 0
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values [batch, sequence, heads or kv_heads, head_dim] of x [batch, sequence, d_model], without latents."""
        x = gathered(self.target, x)
        query = self._heads(x, self.query, self.query_bias)
        key = self._heads(x, self.key, self.key_bias)
        value = self._heads(x, self.value, self.value_bias)
        if self.config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if not self.config.learned_positions:
            rotary = self.config.rotary(window)
            query, key = rope(query, positions, rotary), rope(key, positions, rotary)
        return name(query, "query"), name(key, "key"), name(value, "value")

    def _heads(self, x: jax.Array, matrix: nnx.Param, bias: nnx.Param | None) -> jax.Array:
        made = product(
            self.target, "bsd,dhe->bshe", x, matrix[...], self.config.rounding, heads=True
        )
        return added(made, bias, dims=2)

    def merge(
        self,
        x: jax.Array,
        attended: jax.Array,
        count: jax.Array | None = None,
        order: Order | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The rest of the block after attention: the residual stream and how its tokens were routed.

        count int32[batch]: how many tokens of each row are real, the rest being padding; all without it.
        """
        constrain = self.target.constrain
        with jax.named_scope("attention"):
            attended = constrain(name(attended, "attention"), "batch", "sequence", "heads", None)
            # Scattered before it is named, so that what a policy keeps of it is split too.
            out = constrain(
                product(
                    self.target, "bshe,hed->bsd", attended, self.out[...], self.config.rounding
                ),
                *STREAM,
            )
            out = name(added(out, self.out_bias), "out")
            if self.post_attention_norm is not None:
                out = self.post_attention_norm(out)
            x = constrain(x + out, *STREAM)
        with jax.named_scope("mlp"):
            update, routing = self.mlp(self.mlp_norm(x), count, order)
            if self.post_mlp_norm is not None:
                update = self.post_mlp_norm(update)
            return constrain(x + update, *STREAM), routing

    def __call__(
        self,
        x: jax.Array,
        segments: jax.Array,
        positions: jax.Array,
        order: Order | None = None,
        window: int = 0,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x [batch, sequence, d_model], segments and positions int32[batch, sequence], all in ``order``; its own ``window``."""
        x = name(x, "layer_input")
        masking = Masking(segments=segments, causal=True, window=window, order=order)
        attended, _ = self.attend(x, positions, masking)
        return self.merge(x, attended, order=order)

    def attend(
        self, x: jax.Array, positions: jax.Array, masking: Masking
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Attention output [batch, sequence, heads, size of a value] of x [batch, sequence, d_model], and the rows for a cache.

        The rows are [batch, sequence, kv_heads, head_dim] each: keys and values, or a key shared by all heads and the latents.
        """
        with jax.named_scope("attention"):
            given = self.attention_norm(x)
            if self.latent is None:
                query, key, value = self.project(given, positions, masking.window)
                kept = (key, value)
            else:
                rotary = self.config.rotary(masking.window)
                query, key, value, kept = self.latent.project(given, positions, rotary)
            constrain = self.target.constrain
            query = constrain(query, "batch", "sequence", "heads", None)
            key, value = (
                constrain(part, "batch", "sequence", "kv_heads", None) for part in (key, value)
            )
            if self.latent is None:
                kept = (key, value)
            attended = attention(self.target, query, key, value, masking, self.attention_logits)
            return attended, kept

    def attend_next(
        self, x: jax.Array, positions: jax.Array, cached: tuple[jax.Array, jax.Array], window: int
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """:meth:`attend` for one new token x [batch, 1, d_model] over a layer of the cache, which holds the tokens before it."""
        asked = self.ask(x, positions, window)
        sight = Sight(positions, window, self.attention_logits, self.config.rolling)
        parts = [ScorePart(*part) for part in zip(asked.queries, asked.rows, cached, strict=False)]
        found = attend_one(parts[::-1], asked.rows[1], cached[1], sight).astype(x.dtype)
        return self.answer(found), asked.rows

    def ask(self, x: jax.Array, positions: jax.Array, window: int) -> CacheRows:
        """Queries and rows of new tokens x [batch, n, d_model] at ``positions`` int32[batch, n]."""
        given = self.attention_norm(x)
        dtype = plain_dtype(self.target, x.dtype)
        if self.latent is not None:
            queries, rows = self.latent.ask(given, positions, self.config.rotary(window))
            return CacheRows(tuple(query.astype(dtype) for query in queries), rows)
        query, key, value = self.project(given, positions, window)
        return CacheRows((query.astype(dtype),), (key, value))

    def answer(self, found: jax.Array) -> jax.Array:
        """What :meth:`merge` takes, of what was read of a cache's values, [batch, n, heads, size of a cached value]."""
        return found if self.latent is None else self.latent.answer(found)
