"""One layer of the decoder: attention (also over latents, as DeepSeek-V2 has it) and a feed-forward part, each behind a norm and added to the residual stream."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.attention import BalancedOrder, Logits, Masking, attention, plain_dtype
from systolic.models.decoder.cache import ScorePart, Sight, attend_one
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.layers import MLP, added, bias, norm, rope
from systolic.models.decoder.moe import Mixture
from systolic.models.decoder.options import Rotary
from systolic.models.layers import STREAM, gathered, name, weight
from systolic.models.linear import product, products


class LatentAttention(nnx.Module):
    """Queries, keys and values of latents; heads are split over the tensor axis, the latents are whole on it.

    The cache keeps the latent, after its norm, and the rotated key that all heads share: 576 elements a token and
    layer in DeepSeek-V3, where keys and values of 128 heads would be 40,960. Training and prompts make keys
    and values of it and run the attention of other decoders, whose kernels take queries and keys of another width
    than values. A new token is compared with the latents themselves: the matrices that make
    keys and values are applied to its query and to what it read (absorbed), so that no key of the cache is made again.
    """

    def __init__(self, config: Decoder, rngs: nnx.Rngs, target: Target) -> None:
        d, h, sizes = config.d_model, config.heads, config.latent
        q, r = sizes.q_lora_rank, sizes.kv_lora_rank
        heads, eps = ("embed", "heads", "head_dim"), sizes.norm_eps or config.norm_eps
        if q:
            self.query_down = weight(rngs, (d, q), ("embed", None), d)
            self.query_norm = norm(config, q, eps)
        self.query = weight(rngs, (q or d, h, sizes.query_dim), heads, q or d)
        self.down = weight(rngs, (d, r + sizes.qk_rope_head_dim), ("embed", None), d)
        self.norm = norm(config, r, eps)
        self.key = weight(rngs, (r, h, sizes.qk_nope_head_dim), heads, r)
        self.value = weight(rngs, (r, h, sizes.v_head_dim), heads, r)
        self.config, self.target = config, target

    def project(
        self, x: jax.Array, positions: jax.Array, rotary: Rotary
    ) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
        """Queries and keys [batch, sequence, heads, nope + rope], values [batch, sequence, heads, v_head_dim], and the rows of the cache, of x [batch, sequence, d_model]."""
        plain, turned = self._queries(x, positions, rotary)
        shared, latent = self._latents(x, positions, rotary)
        key = product(
            self.target, "bsr,rhe->bshe", latent, self.key[...], self.config.rounding, heads=True
        )
        value = product(
            self.target, "bsr,rhe->bshe", latent, self.value[...], self.config.rounding, heads=True
        )
        every = jnp.broadcast_to(shared[:, :, None], (*key.shape[:3], shared.shape[-1]))
        return (
            name(jnp.concatenate([plain, turned], axis=-1), "query"),
            name(jnp.concatenate([key, every], axis=-1), "key"),
            name(value, "value"),
            (shared[:, :, None], latent[:, :, None]),
        )

    def ask(
        self, x: jax.Array, positions: jax.Array, rotary: Rotary
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        """Queries of new tokens x [batch, n, d_model], and their own rows of the cache.

        Returns:
            Queries of the shared keys, [batch, n, heads, rope], and of the latents, [batch, n, heads,
            kv_lora_rank]; and the rows [batch, n, 1, rope] and [batch, n, 1, kv_lora_rank].
        """
        plain, turned = self._queries(x, positions, rotary)
        shared, latent = (row[:, :, None] for row in self._latents(x, positions, rotary))
        narrow = product(
            self.target, "bshe,rhe->bshr", plain, self.key[...], self.config.rounding, heads=True
        )
        return (turned, narrow), (shared, latent)

    def answer(self, weighted: jax.Array) -> jax.Array:
        """Values [batch, n, heads, v_head_dim] of what was read of the latents, [batch, n, heads, kv_lora_rank]."""
        return product(
            self.target,
            "bshr,rhe->bshe",
            weighted,
            self.value[...],
            self.config.rounding,
            heads=True,
        )

    def _queries(
        self, x: jax.Array, positions: jax.Array, rotary: Rotary
    ) -> tuple[jax.Array, jax.Array]:
        """The parts [batch, sequence, heads, nope] and, rotated, [batch, sequence, heads, rope] of queries."""
        if self.config.latent.q_lora_rank:
            narrow = product(
                self.target,
                "bsd,dr->bsr",
                x,
                self.query_down[...],
                self.config.rounding,
                heads=True,
            )
            inputs = self._whole(self.query_norm(self._parted(narrow)))
        else:
            inputs = gathered(self.target, x)
        query = product(
            self.target, "bsr,rhe->bshe", inputs, self.query[...], self.config.rounding, heads=True
        )
        plain, turned = jnp.split(query, [self.config.latent.qk_nope_head_dim], axis=-1)
        return plain, rope(turned, positions, rotary)

    def _latents(
        self, x: jax.Array, positions: jax.Array, rotary: Rotary
    ) -> tuple[jax.Array, jax.Array]:
        """The key of all heads, rotated, [batch, sequence, rope], and the latent [batch, sequence, kv_lora_rank]."""
        projected = self._parted(
            product(self.target, "bsd,dr->bsr", x, self.down[...], self.config.rounding, heads=True)
        )
        latent, shared = jnp.split(projected, [self.config.latent.kv_lora_rank], axis=-1)
        both = self._whole(jnp.concatenate([self.norm(latent), shared], axis=-1))
        latent, shared = jnp.split(both, [self.config.latent.kv_lora_rank], axis=-1)
        return rope(shared[:, :, None], positions, rotary)[:, :, 0], latent

    def _parted(self, latent: jax.Array) -> jax.Array:
        """Latent of each device's own tokens where the stream is split by tokens: it is a fraction of the stream to gather."""
        return self.target.constrain(latent, *STREAM[:2], None)

    def _whole(self, latent: jax.Array) -> jax.Array:
        return name(self.target.constrain(latent, "batch", "sequence", None), "latent")


class CacheRows(NamedTuple):
    """Rows that new tokens add to a cache."""

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
        matrices, rounding = (self.query, self.key, self.value), self.config.rounding
        biases = self.query_bias, self.key_bias, self.value_bias
        projected = products(self.target, "bsd,dhe->bshe", x, matrices, rounding, heads=True)
        query, key, value = (
            added(part, bias, dims=2) for part, bias in zip(projected, biases, strict=True)
        )
        if self.config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if not self.config.learned_positions:
            rotary = self.config.rotary(window)
            query, key = rope(query, positions, rotary), rope(key, positions, rotary)
        return name(query, "query"), name(key, "key"), name(value, "value")

    def merge(
        self,
        x: jax.Array,
        attended: jax.Array,
        count: jax.Array | None = None,
        order: BalancedOrder | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The rest of the block after attention: the residual stream and how its tokens were routed.

        count int32[batch]: how many tokens of each row are real, the rest being padding; all without it.
        """
        constrain = self.target.constrain
        with jax.named_scope("attention"):
            attended = constrain(attended, "batch", "sequence", "heads", None)
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
        order: BalancedOrder | None = None,
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
            normed = self.attention_norm(x)
            if self.latent is None:
                query, key, value = self.project(normed, positions, masking.window)
                kept = (key, value)
            else:
                rotary = self.config.rotary(masking.window)
                query, key, value, kept = self.latent.project(normed, positions, rotary)
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
        cache_rows = self.ask(x, positions, window)
        sight = Sight(positions, window, self.attention_logits, self.config.rolling)
        parts = [
            ScorePart(*part)
            for part in zip(cache_rows.queries, cache_rows.rows, cached, strict=False)
        ]
        weighted = attend_one(parts[::-1], cache_rows.rows[1], cached[1], sight).astype(x.dtype)
        return self.answer(weighted), cache_rows.rows

    def ask(self, x: jax.Array, positions: jax.Array, window: int) -> CacheRows:
        """Queries and rows of new tokens x [batch, n, d_model] at ``positions`` int32[batch, n]."""
        normed = self.attention_norm(x)
        dtype = plain_dtype(self.target, x.dtype)
        if self.latent is not None:
            queries, rows = self.latent.ask(normed, positions, self.config.rotary(window))
            return CacheRows(tuple(query.astype(dtype) for query in queries), rows)
        query, key, value = self.project(normed, positions, window)
        return CacheRows((query.astype(dtype),), (key, value))

    def answer(self, weighted: jax.Array) -> jax.Array:
        """Input of :meth:`merge` from the attended values of a cache, [batch, n, heads, size of a cached value]."""
        return weighted if self.latent is None else self.latent.answer(weighted)
