"""Multi-head latent attention (MLA; DeepSeek-V2, section 2.1): keys and values are made of one narrow latent a token.

The cache keeps the latent, after its norm, and the rotated key that all heads share: 576 elements a token and
layer in DeepSeek-V3, where keys and values of 128 heads would be 40,960. Training and prompts make keys
and values of it and run the attention of other decoders, whose kernels take queries and keys of another width
than values. A new token is compared with the latents themselves: the matrices that make
keys and values are applied to its query and to what it read (absorbed), so that no key of the cache is made again.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.layers import norm, rope
from systolic.models.decoder.rotary import Rotary
from systolic.models.linear import product
from systolic.models.parameters import weight
from systolic.models.remat import name
from systolic.models.residual import STREAM, gathered


class LatentAttention(nnx.Module):
    """Queries, keys and values of latents; heads are split over the tensor axis, the latents are whole on it."""

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
        """What new tokens x [batch, n, d_model] compare with a cache, and their own rows of it.

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

    def answer(self, found: jax.Array) -> jax.Array:
        """Values [batch, n, heads, v_head_dim] of what was read of the latents, [batch, n, heads, kv_lora_rank]."""
        return product(
            self.target, "bshr,rhe->bshe", found, self.value[...], self.config.rounding, heads=True
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
            given = self._whole(self.query_norm(self._parted(narrow)))
        else:
            given = gathered(self.target, x)
        query = product(
            self.target, "bsr,rhe->bshe", given, self.query[...], self.config.rounding, heads=True
        )
        plain, turned = jnp.split(query, [self.config.latent.qk_nope_head_dim], axis=-1)
        return plain, rope(turned, positions, rotary)

    def _latents(
        self, x: jax.Array, positions: jax.Array, rotary: Rotary
    ) -> tuple[jax.Array, jax.Array]:
        """The key of all heads, rotated, [batch, sequence, rope], and the latent [batch, sequence, kv_lora_rank]."""
        made = self._parted(
            product(self.target, "bsd,dr->bsr", x, self.down[...], self.config.rounding, heads=True)
        )
        latent, shared = jnp.split(made, [self.config.latent.kv_lora_rank], axis=-1)
        both = self._whole(jnp.concatenate([self.norm(latent), shared], axis=-1))
        latent, shared = jnp.split(both, [self.config.latent.kv_lora_rank], axis=-1)
        return rope(shared[:, :, None], positions, rotary)[:, :, 0], latent

    def _parted(self, latent: jax.Array) -> jax.Array:
        """Latent of each device's own tokens where the stream is split by tokens: it is a fraction of the stream to gather."""
        return self.target.constrain(latent, *STREAM[:2], None)

    def _whole(self, latent: jax.Array) -> jax.Array:
        return name(self.target.constrain(latent, "batch", "sequence", None), "latent")
