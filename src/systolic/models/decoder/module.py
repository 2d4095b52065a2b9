"""The decoder as a Flax NNX module: blocks stacked along a leading ``layers`` dim and run by a scan."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.attention import attention, plain_dtype
from systolic.models.decoder.cache import Cache, Sight, appended, attend_one, stored
from systolic.models.decoder.config import Decoder, Mlp
from systolic.models.decoder.moe import Mixture, balance
from systolic.models.decoder.ngrams import NGrams
from systolic.models.decoder.pipeline import run_stages
from systolic.models.decoder.stack import run_layers
from systolic.models.decoder.tiles import score_tiles
from systolic.models.masking import Logits, Masking, soft_cap
from systolic.models.order import Order, balanced
from systolic.models.parameters import weight
from systolic.models.product import product
from systolic.models.remat import name, rematerialise
from systolic.models.residual import STREAM, gathered

TIED_GAIN = 0.5
"""Standard deviation of the first logits where the output matrix is the embedding's transpose.

At 768 wide its entries are those of GPT-2 (0.02; Radford et al. 2019). Such a table is read without a
scale: raised to unit variance a token's own row would rule the residual stream, and the first prediction
be that token again, at a loss of about the root of the width.
"""


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


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (Su et al. 2021): x [batch, sequence, heads, head_dim], positions int32[batch, sequence]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(
        x.dtype
    )


ACTIVATIONS = {
    Mlp.swiglu: jax.nn.silu,
    Mlp.geglu: jax.nn.gelu,
    Mlp.gelu: jax.nn.gelu,
    Mlp.relu: jax.nn.relu,
}


class MLP(nnx.Module):
    """The feed-forward part, gated or not."""

    def __init__(self, config: Decoder, rngs: nnx.Rngs, target: Target) -> None:
        d, f = config.d_model, config.d_ff
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
        activate = ACTIVATIONS[self.config.mlp]
        if self.config.mlp.gated:
            gate = name(product(self.target, "bsd,df->bsf", x, self.gate[...]), "mlp")
            up = name(product(self.target, "bsd,df->bsf", x, self.up[...]), "mlp")
            hidden = activate(gate) * up
        else:
            up = name(product(self.target, "bsd,df->bsf", x, self.up[...]), "mlp")
            hidden = activate(up)
        hidden = self.target.constrain(hidden, "batch", "sequence", "mlp")
        down = product(self.target, "bsf,fd->bsd", hidden, self.down[...])
        return name(self.target.constrain(down, *STREAM), "down"), {}


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: Decoder, rngs: nnx.Rngs, target: Target) -> None:
        d, h, k, e = config.d_model, config.heads, config.kv_heads, config.head_dim
        self.attention_norm = RMSNorm(d, config.norm_eps, "norm")
        self.query = weight(rngs, (d, h, e), ("embed", "heads", "head_dim"), d)
        self.key = weight(rngs, (d, k, e), ("embed", "kv_heads", "head_dim"), d)
        self.value = weight(rngs, (d, k, e), ("embed", "kv_heads", "head_dim"), d)
        self.out = weight(
            rngs, (h, e, d), ("heads", "head_dim", "embed"), h * e, (2 * config.layers) ** -0.5
        )
        if config.qk_norm:
            self.query_norm = RMSNorm(e, config.norm_eps, "norm")
            self.key_norm = RMSNorm(e, config.norm_eps, "norm")
        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros((h,)), out_sharding=("heads",))
        self.mlp_norm = RMSNorm(d, config.norm_eps, "norm")
        self.mlp = (
            Mixture(config, rngs, target) if config.experts > 1 else MLP(config, rngs, target)
        )
        self.config, self.target = config, target

    @property
    def attention_logits(self) -> Logits:
        """What the products of queries and keys go through."""
        sinks = self.sinks[...] if self.config.sinks else None
        return Logits(scale=self.config.head_dim**-0.5, cap=self.config.attention_cap, sinks=sinks)

    def project(
        self, x: jax.Array, positions: jax.Array, window: int = 0
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values [batch, sequence, heads or kv_heads, head_dim] of x [batch, sequence, d_model]."""
        x = gathered(self.target, x)
        query = product(self.target, "bsd,dhe->bshe", x, self.query[...])
        key = product(self.target, "bsd,dhe->bshe", x, self.key[...])
        value = product(self.target, "bsd,dhe->bshe", x, self.value[...])
        if self.config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        theta = self.config.theta(window)
        return (
            name(rope(query, positions, theta), "query"),
            name(rope(key, positions, theta), "key"),
            name(value, "value"),
        )

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
            out = constrain(product(self.target, "bshe,hed->bsd", attended, self.out[...]), *STREAM)
            x = constrain(x + name(out, "out"), *STREAM)
        with jax.named_scope("mlp"):
            update, routing = self.mlp(self.mlp_norm(x), count, order)
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
        attended, _, _ = self.attend(x, positions, masking)
        return self.merge(x, attended, order=order)

    def attend(
        self, x: jax.Array, positions: jax.Array, masking: Masking
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What the heads read, [batch, sequence, heads, head_dim], and the keys and values of x [batch, sequence, d_model]."""
        with jax.named_scope("attention"):
            query, key, value = self.project(self.attention_norm(x), positions, masking.window)
            constrain = self.target.constrain
            query = constrain(query, "batch", "sequence", "heads", None)
            key, value = (
                constrain(part, "batch", "sequence", "kv_heads", None) for part in (key, value)
            )
            attended = attention(self.target, query, key, value, masking, self.attention_logits)
            return attended, key, value


class DecoderModule(nnx.Module):
    """Tokens to logits."""

    def __init__(self, config: Decoder, rngs: nnx.Rngs, target: Target) -> None:
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(axis_size=config.layers, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs, target)

        shape, gain = (config.vocab, config.d_model), TIED_GAIN if config.tie_embeddings else 1.0
        self.embedding = weight(rngs, shape, ("vocab", "embed"), config.d_model, gain)
        self.ngrams = NGrams(config, rngs, target) if config.ngrams else None
        self.blocks = blocks(rngs)
        self.norm = RMSNorm(config.d_model, config.norm_eps, "norm")
        if not config.tie_embeddings:
            # Zero: the first prediction is uniform, whatever the trunk says.
            shape = (config.d_model, config.vocab)
            self.unembedding = nnx.Param(jnp.zeros(shape), out_sharding=("embed", "vocab"))
        self.config, self.target = config, target

    def embed(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        recent: jax.Array,
        order: Order | None = None,
    ) -> jax.Array:
        """[batch, n, d_model] in ``order``: unit variance at the start, or the rows of a tied table as they are.

        tokens and positions int32[batch, n]; recent int32[batch, history] are the tokens before them.
        """
        # Whole rows on every device: a lookup in split rows would make the partitioner replicate its result.
        with jax.named_scope("embed"):
            # First split as it is stored: its gradient is summed into shards, not into whole copies.
            table = self.target.constrain(self.embedding[...], "vocab", "embed")
            table = self.target.constrain(table, "vocab", None)
            x = table[tokens if order is None else order.arrange(tokens)]
            if not self.config.tie_embeddings:
                x = x * self.config.d_model**0.5
            if self.ngrams is not None:
                x = x + self.ngrams(jnp.concatenate([recent, tokens], axis=1), positions, order)
            return self.target.constrain(x, *STREAM)

    def no_history(self, batch: int) -> jax.Array:
        """int32[batch, history]: no token (-1) before the first one."""
        return jnp.full((batch, max(self.config.ngrams - 1, 0)), -1, jnp.int32)

    def normed(self, x: jax.Array) -> jax.Array:
        """The residual stream [batch, sequence, d_model] as the output matrix takes it."""
        with jax.named_scope("logits"):
            return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """:meth:`hidden` [batch, sequence, d_model] to [batch, sequence, vocab]."""
        with jax.named_scope("logits"):
            matrix = self.embedding[...].T if self.config.tie_embeddings else self.unembedding[...]
            hidden = gathered(self.target, hidden)
            logits = self.target.constrain(hidden @ matrix, "batch", "sequence", "vocab")
            return soft_cap(logits, self.config.logit_cap)

    def score(
        self,
        read: Callable[[jax.Array, jax.Array], Any],
        targets: jax.Array,
        inputs: tuple[jax.Array, jax.Array, jax.Array],
    ) -> Any:
        """What ``read`` makes of the logits and targets int32[batch, sequence], under the layout's loss tiles.

        ``read`` turns logits [..., vocab] and targets [...] into a tree of arrays [...]; ``inputs``
        are the arguments of :meth:`hidden`.
        """
        order = balanced(self.target, targets.shape[1])
        hidden = self._trunk(*inputs, order)
        placed = targets if order is None else order.arrange(targets)
        if self.target.layout.loss_tiles == 1:
            scores = read(self.logits(hidden), placed)
        else:
            if self.config.tie_embeddings:
                matrix, axes = self.embedding[...], ("vocab", "embed")
            else:
                matrix, axes = self.unembedding[...], ("embed", "vocab")
            cap = self.config.logit_cap
            scores = score_tiles(
                lambda logits, targets: read(soft_cap(logits, cap), targets),
                hidden,
                matrix,
                axes,
                placed,
                self.target,
            )
        return scores if order is None else jax.tree.map(order.restore, scores)

    def __call__(self, tokens: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        """Logits [batch, sequence, vocab]; the arguments and what is sown are those of :meth:`hidden`."""
        return self.logits(self.hidden(tokens, segments, positions))

    def hidden(self, tokens: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        """What the output matrix takes, [batch, sequence, d_model], of tokens int32[batch, sequence].

        segments int32[batch, sequence]: a token sees earlier tokens of its own segment only.
        positions int32[batch, sequence]: within the segment. A mixture also sows ``router_loss`` and
        ``dropped``, f32[] each.
        """
        order = balanced(self.target, tokens.shape[1])
        hidden = self._trunk(tokens, segments, positions, order)
        return hidden if order is None else order.restore(hidden)

    def _trunk(
        self, tokens: jax.Array, segments: jax.Array, positions: jax.Array, order: Order | None
    ) -> jax.Array:
        """:meth:`hidden` of naturally ordered arguments, its result in ``order``."""
        graph, stacked = nnx.split(self.blocks)

        def layer(window: int) -> Callable[..., Any]:
            def plain(
                x: jax.Array, state: nnx.State, segments: jax.Array, positions: jax.Array
            ) -> tuple[jax.Array, dict[str, jax.Array]]:
                return nnx.merge(graph, state)(x, segments, positions, order, window)

            return rematerialise(plain, self.target.layout)

        layers = [layer(window) for window in self.config.windows]

        def run(x: jax.Array, state: nnx.State, *where: jax.Array) -> tuple[jax.Array, Any]:
            period = [lambda x, one, layer=layer: layer(x, one, *where) for layer in layers]
            return run_layers(period, x, state)

        x = self.embed(tokens, positions, self.no_history(tokens.shape[0]), order)
        if order is not None:
            segments, positions = order.arrange(segments), order.arrange(positions)
        if self.target.layout.pipeline > 1:
            x, routing = run_stages(run, stacked, x, segments, positions, self.target)
        else:
            x, routing = run(x, stacked, segments, positions)
        if self.config.experts > 1:
            routing["router_loss"] = balance(routing.pop("load"), routing.pop("score"))
            for what, by_layer in routing.items():
                self.sow(
                    nnx.Intermediate,
                    what,
                    jnp.mean(by_layer),
                    reduce_fn=lambda _, new: new,
                    init_fn=lambda: None,
                )
        return self.normed(x)

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> Cache:
        """Room for ``capacity`` positions of ``batch`` sequences."""
        shape = (self.config.layers, batch, self.config.kv_heads, capacity, self.config.head_dim)
        return Cache(
            jnp.zeros(shape, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros((batch,), jnp.int32),
            self.no_history(batch),
        )

    def prefill(
        self, tokens: jax.Array, count: jax.Array, capacity: int, dtype: jnp.dtype
    ) -> tuple[jax.Array, Cache]:
        """Runs the start of each sequence, with the attention of training.

        Args:
            tokens: int32[batch, n], padded at the end: no token sees what comes after it.
            count: int32[batch]: how many of the n are real.
            capacity: Positions that the cache has room for; keys and values beyond are dropped.
            dtype: Of the cache.

        Returns:
            What the output matrix takes, [batch, n, d_model], and the cache.
        """
        graph, stacked = nnx.split(self.blocks)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def step(
            x: jax.Array, state: nnx.State, window: int
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            block = nnx.merge(graph, state)
            masking = Masking(causal=True, window=window)
            attended, key, value = block.attend(x, positions, masking)
            kept = (
                stored(self.target, key, capacity, dtype),
                stored(self.target, value, capacity, dtype),
            )
            return block.merge(x, attended, count)[0], kept

        none = self.no_history(tokens.shape[0])
        x, (keys, values) = run_layers(
            [partial(step, window=window) for window in self.config.windows],
            self.embed(tokens, positions, none),
            stacked,
            in_place=True,
        )
        return self.normed(x), Cache(keys, values, count, _latest(none, tokens, count))

    def extend(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Runs the next token of each sequence.

        Args:
            tokens: int32[batch].
            cache: What came before.

        Returns:
            Logits [batch, vocab] and the cache with the tokens in it.
        """
        graph, stacked = nnx.split(self.blocks)
        positions, tokens = cache.length[:, None], tokens[:, None]

        def step(
            x: jax.Array, state: tuple[nnx.State, jax.Array, jax.Array], window: int
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            layer, keys, values = state
            block = nnx.merge(graph, layer)
            query, key, value = block.project(block.attention_norm(x), positions, window)
            wide = query.astype(plain_dtype(self.target, query.dtype))
            sight = Sight(positions=positions, window=window, logits=block.attention_logits)
            attended = attend_one(wide, (key, value), keys, values, sight)
            return block.merge(x, attended.astype(x.dtype))[0], (key, value)

        x, new = run_layers(
            [partial(step, window=window) for window in self.config.windows],
            self.embed(tokens, positions, cache.recent),
            (stacked, cache.key, cache.value),
            in_place=True,
        )
        keys, values = (
            appended(self.target, old, cache.length, rows[:, :, 0])
            for old, rows in zip((cache.key, cache.value), new, strict=True)
        )
        count = jnp.ones_like(cache.length)
        recent = _latest(cache.recent, tokens, count)
        logits = self.logits(self.normed(x))[:, 0]
        return logits, Cache(keys, values, cache.length + count, recent)


def _latest(recent: jax.Array, tokens: jax.Array, count: jax.Array) -> jax.Array:
    """The last tokens int32[batch, history] after ``count`` int32[batch] of tokens int32[batch, n] more."""
    seen = jnp.concatenate([recent, tokens], axis=1)
    last = count[:, None] + jnp.arange(recent.shape[1])
    return jnp.take_along_axis(seen, last, axis=1)
