"""The decoder as a Flax NNX module: blocks stacked along a leading ``layers`` dim and run by a scan, and scores of tokens without the whole logits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.core.errors import OptionError
from systolic.job import IncrementalDecoder, Remat, Target, TokenScorer
from systolic.models.attention import BalancedOrder, Masking, balanced, soft_cap
from systolic.models.decoder.block import DecoderBlock
from systolic.models.decoder.cache import Cache, appended_rows, latest, no_rows, stored_rows
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.layer_groups import Step, Stretch, at, run_layers, run_stages, stack
from systolic.models.decoder.layers import NGrams, norm
from systolic.models.decoder.moe import Mixture, balance, moved
from systolic.models.layers import STREAM, gathered, rematerialise, weight
from systolic.models.linear import Turned, alone_on_cpu, plain_product, product
from systolic.models.quantized.codes import Quantized

MOST_UNROLLED = 12
"""Layers that are written out in a program for a CPU, which takes a sixth less of a step's time and 0.3 s more of the compiler's for each."""
TIED_GAIN = 0.5
"""Standard deviation of the first logits where the output matrix is the embedding's transpose.

At 768 wide its entries are those of GPT-2 (0.02; Radford et al. 2019). Such a table is read without a
scale: raised to unit variance a token's own row would rule the residual stream, and the first prediction
be that token again, at a loss of about the root of the width.
"""


def score_chunks(
    score: Callable[[jax.Array, jax.Array], Any],
    hidden: jax.Array,
    matrix: jax.Array,
    axes: tuple[str, str],
    targets: jax.Array,
    target: Target,
) -> Any:
    """``score`` of all tokens, part by part.

    The backward pass computes the logits of a part again. What a part adds to the gradient of the
    output matrix stays on its device until all parts are through: each shard of the tokens has a copy
    of the matrix of its own, so that the sum over shards comes once, after the loop.

    Args:
        score: Logits [..., vocab] and targets int32[...] to a tree of arrays [...].
        hidden: [batch, sequence, d_model].
        matrix: The output matrix; as it is stored, for a transposed copy would double it.
        axes: Its logical axes: "embed" and "vocab", in either order.
        targets: int32[batch, sequence].
        target: Its layout says how many parts; they divide the sequence of each of its shards.

    Returns:
        The tree, its arrays [batch, sequence].
    """
    layout, (batch, sequence) = target.layout, targets.shape
    shards = layout.batch_ways if batch % layout.batch_ways == 0 else 1
    pieces, chunks = layout.context, layout.loss_chunks
    split = (shards, batch // shards, pieces, chunks, sequence // (pieces * chunks))

    def cut(array: jax.Array) -> jax.Array:
        """[chunks, shards, pieces, batch / shards, sequence / (pieces x chunks), ...]; no token moves."""
        parts = jnp.moveaxis(array.reshape(*split, *array.shape[2:]), (3, 0, 2), (0, 1, 2))
        return target.constrain(parts, None, "batch", "sequence", *[None] * (parts.ndim - 3))

    def join(parts: jax.Array) -> jax.Array:
        whole = jnp.moveaxis(parts, (0, 1, 2), (3, 0, 2)).reshape(batch, sequence)
        return target.constrain(whole, "batch", "sequence")

    dims = "".join("v" if axis == "vocab" else "d" for axis in axes)

    def part(hidden: jax.Array, targets: jax.Array, copies: jax.Array) -> Any:
        with jax.named_scope("logits"):
            logits = jnp.einsum(f"cpbsd,cp{dims}->cpbsv", hidden, copies)
            logits = target.constrain(logits, "batch", "sequence", None, None, "vocab")
        return score(logits, targets)

    kept = jax.checkpoint_policies.save_only_these_names("normaliser")
    again = jax.checkpoint(part, policy=kept, prevent_cse=False)
    with jax.named_scope("logits"):
        # Split as the parameter is, so that its gradient is summed into shards, not into whole copies.
        stored = target.constrain(matrix, *axes)
        copies = jnp.broadcast_to(stored, (shards, pieces, *matrix.shape))
        gathered = [axis if axis == "vocab" else None for axis in axes]
        copies = target.constrain(copies, "batch", "sequence", *gathered)
    _, scores = jax.lax.scan(
        lambda _, xs: (None, again(*xs, copies)), None, (cut(hidden), cut(targets))
    )
    return jax.tree.map(join, scores)


class DecoderModule(nnx.Module, TokenScorer, IncrementalDecoder):
    """Tokens to logits."""

    def __init__(self, config: Decoder, rngs: nnx.Rngs, target: Target) -> None:
        def blocks(layers: int, mixture: bool) -> DecoderBlock:
            @nnx.split_rngs(splits=layers)
            @nnx.vmap(axis_size=layers, transform_metadata={nnx.PARTITION_NAME: "layers"})
            def stacked(rngs: nnx.Rngs) -> DecoderBlock:
                return DecoderBlock(config, mixture, rngs, target)

            return stacked(rngs)

        shape, gain = (config.vocab, config.d_model), TIED_GAIN if config.tie_embeddings else 1.0
        self.embedding = weight(rngs, shape, ("vocab", "embed"), config.table_width, gain)
        if config.learned_positions:
            shape = (config.learned_positions, config.d_model)
            self.positions = weight(rngs, shape, (None, "embed"), config.table_width, TIED_GAIN)
        self.ngrams = NGrams(config, rngs, target) if config.ngrams else None
        mixtures = config.mixtures or config.layers
        dense = config.layers - mixtures
        self.dense_blocks = blocks(dense, mixture=False) if dense else None
        self.blocks = blocks(mixtures, mixture=config.experts > 1)
        self.norm = norm(config, config.d_model)
        if not config.tie_embeddings:
            # Zero: the first prediction is uniform, whatever the trunk says.
            shape = (config.d_model, config.vocab)
            self.unembedding = nnx.Param(jnp.zeros(shape), out_sharding=("embed", "vocab"))
        self.config, self.target = config, target
        self.deterministic = False  # Flax sets it in evaluation, where router biases stay.

    @property
    def stretches(self) -> list[Stretch]:
        """All layers, in order: the dense ones before mixtures, then the others."""
        dense, windows = self.config.dense_layers, self.config.windows
        if self.dense_blocks is None:
            return [Stretch(((self.blocks, 1),), 0, self.config.layers, windows)]
        if (every := self.config.mixture_every) > 1:
            kinds = ((self.dense_blocks, every - 1), (self.blocks, 1))
            return [Stretch(kinds, 0, self.config.mixtures, windows)]
        turn, rest = dense % len(windows), self.config.layers - dense
        last = Stretch(((self.blocks, 1),), dense, rest, windows[turn:] + windows[:turn])
        return [Stretch(((self.dense_blocks, 1),), 0, dense, windows), last]

    def embed(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        recent: jax.Array,
        order: BalancedOrder | None = None,
    ) -> jax.Array:
        """[batch, n, d_model] in ``order``: unit variance at the start, or the rows of a tied table as they are.

        tokens and positions int32[batch, n]; recent int32[batch, history] are the tokens before them.
        """
        with jax.named_scope("embed"):
            table: jax.Array | Quantized = self.embedding[...]
            x = self._looked_up(table, tokens if order is None else order.arrange(tokens))
            if self.config.embedding_factor != 1:
                x = x * self.config.embedding_factor
            if self.config.learned_positions:
                x = x + self._position(positions, order)
            if self.ngrams is not None:
                x = x + self.ngrams(jnp.concatenate([recent, tokens], axis=1), positions, order)
            return self.target.constrain(x, *STREAM)

    def _looked_up(self, table: jax.Array | Quantized, tokens: jax.Array) -> jax.Array:
        """Rows of the embedding."""
        if isinstance(table, Quantized):
            dtype = jnp.dtype(self.target.dtype)
            codes, scales = (
                self._looked_up(part, tokens).astype(dtype) for part in (table.codes, table.scales)
            )
            return codes * scales
        # First split as it is stored: its gradient is summed into shards, not into whole copies. Then whole rows on every
        # device: a lookup in split rows would make the partitioner replicate its result.
        table = self.target.constrain(table, "vocab", "embed")
        rows = self.target.constrain(table, "vocab", None)[tokens]
        # A server on a CPU may hold a table of 16 bits as float32, see PagedSteps.
        return rows.astype(self.target.dtype) if self.target.serves else rows

    def _position(self, positions: jax.Array, order: BalancedOrder | None) -> jax.Array:
        """Learned embeddings [batch, n, d_model] of int32[batch, n], in ``order``."""
        limit = self.config.learned_positions
        if positions.shape[1] > limit:
            raise OptionError(
                f"a sequence has {positions.shape[1]} tokens and model.learned-positions is {limit}; use shorter sequences"
            )
        table = self.target.constrain(self.positions[...], None, None)
        return table[positions if order is None else order.arrange(positions)]

    @property
    def max_positions(self) -> int | None:
        """See :class:`systolic.job.IncrementalDecoder`."""
        return self.config.learned_positions or None

    def no_history(self, batch: int) -> jax.Array:
        """int32[batch, history]: no token (-1) before the first one."""
        return jnp.full((batch, max(self.config.ngrams - 1, 0)), -1, jnp.int32)

    def normed(self, x: jax.Array) -> jax.Array:
        """The residual stream [batch, sequence, d_model] as the output matrix takes it."""
        with jax.named_scope("logits"):
            normed, factor = self.norm(x), self.config.output_factor
            return normed if factor == 1 else normed * factor

    def logits(self, hidden: jax.Array) -> jax.Array:
        """:meth:`hidden` [batch, sequence, d_model] to [batch, sequence, vocab]."""
        with jax.named_scope("logits"):
            tied = self.config.tie_embeddings
            matrix = (self.embedding if tied else self.unembedding)[...]
            hidden = gathered(self.target, hidden)
            spec = "bsd,vd->bsv" if tied else "bsd,dv->bsv"
            if isinstance(matrix, Quantized):
                logits = product(self.target, spec, hidden, matrix)
            elif isinstance(matrix, Turned) or alone_on_cpu(self.target):
                logits = plain_product(self.target, spec, hidden, matrix)
            else:
                logits = hidden @ (matrix.T if tied else matrix)
            logits = self.target.constrain(logits, "batch", "sequence", "vocab")
            return soft_cap(logits, self.config.logit_cap)

    def score(
        self,
        read: Callable[[jax.Array, jax.Array], Any],
        targets: jax.Array,
        inputs: tuple[jax.Array, jax.Array, jax.Array],
    ) -> Any:
        """Result of ``read`` on the logits and targets int32[batch, sequence], under the layout's loss chunks.

        ``read`` turns logits [..., vocab] and targets [...] into a tree of arrays [...]; ``inputs``
        are the arguments of :meth:`hidden`.
        """
        order = balanced(self.target, targets.shape[1])
        hidden = self._trunk(*inputs, order)
        placed = targets if order is None else order.arrange(targets)
        if self.target.layout.loss_chunks == 1:
            scores = read(self.logits(hidden), placed)
        else:
            if self.config.tie_embeddings:
                matrix, axes = self.embedding[...], ("vocab", "embed")
            else:
                matrix, axes = self.unembedding[...], ("embed", "vocab")
            if isinstance(matrix, Quantized):
                matrix = matrix.restored(self.target.dtype)
            cap = self.config.logit_cap
            scores = score_chunks(
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
        """Input of the output matrix, [batch, sequence, d_model], for tokens int32[batch, sequence].

        segments int32[batch, sequence]: a token sees earlier tokens of its own segment only.
        positions int32[batch, sequence]: within the segment. A mixture also sows ``router_loss`` and
        ``dropped``, f32[] each.
        """
        order = balanced(self.target, tokens.shape[1])
        hidden = self._trunk(tokens, segments, positions, order)
        return hidden if order is None else order.restore(hidden)

    def _trunk(
        self,
        tokens: jax.Array,
        segments: jax.Array,
        positions: jax.Array,
        order: BalancedOrder | None,
    ) -> jax.Array:
        """:meth:`hidden` of naturally ordered arguments, its result in ``order``."""
        x = self.embed(tokens, positions, self.no_history(tokens.shape[0]), order)
        if order is not None:
            segments, positions = order.arrange(segments), order.arrange(positions)
        *before, last = self.stretches
        for stretch in before:  # Beside a pipeline: each of its devices runs them.
            run, stacked = self._runner(stretch, order)
            x, _ = run(x, stacked, segments, positions)
        run, stacked = self._runner(last, order)
        if self.target.layout.pipeline > 1:
            x, routing = run_stages(run, stacked, x, segments, positions, self.target)
        else:
            x, routing = run(x, stacked, segments, positions)
        if self.config.experts > 1:
            self._routed(routing)
        return self.normed(x)

    def _runner(
        self, stretch: Stretch, order: BalancedOrder | None
    ) -> tuple[Callable[..., Any], Any]:
        """``run(x, stacked, segments, positions)`` of some of a stretch's layers, and the arrays of all of them."""
        graphs, stacked = stretch.split()

        def run(x: jax.Array, states: Any, *where: jax.Array) -> tuple[jax.Array, Any]:
            def step(graph: Any, window: int) -> Step:
                def plain(
                    x: jax.Array, state: nnx.State, segments: jax.Array, positions: jax.Array
                ) -> tuple[jax.Array, dict[str, jax.Array]]:
                    return nnx.merge(graph, state)(x, segments, positions, order, window)

                again = rematerialise(plain, self.target.layout)
                return lambda x, state, _=None: again(x, state, *where)

            # Of a unit only the last layer, a mixture, says how it routed.
            period = stretch.period(graphs, step, lambda said: said[-1])
            return run_layers(period, x, states, unroll=self._writes_out(stretch))

        return run, stacked

    def _writes_out(self, stretch: Stretch) -> bool:
        """Whether a stretch's layers are written out where they could be a loop: a few, on a CPU; rematerialisation needs the loop."""
        few = stretch.units <= MOST_UNROLLED and self.target.layout.remat is Remat.none
        return few and alone_on_cpu(self.target)

    def _routed(self, routing: dict[str, jax.Array]) -> None:
        """Sows the losses of routing [layers, ...], and moves the biases of experts while training."""
        if self.config.router.bias:
            mixture, chosen = self.blocks.mlp, routing.pop("chosen")
            assert isinstance(mixture, Mixture)
            if not self.deterministic:
                # Each pass of an accumulated step moves its part.
                rate = self.config.router_bias_rate / self.target.layout.accumulate
                bias, shares = mixture.bias[...], jax.lax.stop_gradient(chosen)
                mixture.bias.set_value(moved(bias, shares, rate))
        routing["router_loss"] = balance(routing.pop("load"), routing.pop("score"))
        for what, by_layer in routing.items():
            self.sow(
                nnx.Intermediate,
                what,
                jnp.mean(by_layer),
                reduce_fn=lambda _, new: new,
                init_fn=lambda: None,
            )

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> Cache:
        """Room for ``capacity`` positions of ``batch`` sequences, or for a window of them."""
        config, latent = self.config, self.config.latent
        heads, key, value = config.kv_heads, config.head_dim, config.head_dim
        if latent:
            heads, key, value = 1, latent.qk_rope_head_dim, latent.kv_lora_rank
        shape = (config.layers, batch, heads, self._rows(capacity))
        return Cache(
            no_rows((*shape, key), dtype),
            no_rows((*shape, value), dtype),
            jnp.zeros((batch,), jnp.int32),
            self.no_history(batch),
        )

    def cache_axes(self) -> Any:
        """See :class:`systolic.job.IncrementalDecoder`."""
        rows, row = (None, "batch", "kv_heads", None, None), ("batch",)
        axes: Any = Cache
        return axes(key=rows, value=rows, length=row, recent=(*row, None))

    def _rows(self, capacity: int) -> int:
        """Rows of a cache for ``capacity`` positions."""
        return min(capacity, self.config.window) if self.config.rolling else capacity

    def prefill(
        self, tokens: jax.Array, count: jax.Array, capacity: int, dtype: jnp.dtype
    ) -> tuple[jax.Array, Cache]:
        """Runs the start of each sequence, with the attention of training.

        Args:
            tokens: int32[batch, n], padded at the end: no token sees what comes after it.
            count: int32[batch]: how many of the n are real.
            capacity: Positions that the cache has room for; keys and values beyond are dropped, or before the
                window where every layer has one.
            dtype: Of the cache.

        Returns:
            Input of the output matrix, [batch, n, d_model], and the cache.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        none = self.no_history(tokens.shape[0])
        x, parts = self.embed(tokens, positions, none), []
        capacity = self._rows(capacity)
        cut = self.config.rolling and tokens.shape[1] > capacity

        def step(graph: Any, window: int) -> Step:
            def layer(x: jax.Array, state: nnx.State, _: Any = None) -> tuple[jax.Array, Any]:
                block = nnx.merge(graph, state)
                masking = Masking(causal=True, window=window)
                attended, kept = block.attend(x, positions, masking)
                if cut:
                    kept = tuple(latest(each, count, capacity) for each in kept)
                rows = tuple(stored_rows(self.target, each, capacity, dtype) for each in kept)
                return block.merge(x, attended, count)[0], rows

            return layer

        for stretch in self.stretches:
            graphs, stacked = stretch.split()
            stacked, joined = self._held(stretch, stacked)
            period = [
                lambda x, unit_inputs, unit=unit, joined=joined: unit(x, joined(*unit_inputs))
                for unit in stretch.period(graphs, step, stack)
            ]
            x, rows = run_layers(period, x, (stacked, jnp.arange(stretch.units)), in_place=True)
            parts.append(stretch.flat(rows))
        keys, values = _joined(parts)
        return self.normed(x), Cache(keys, values, count, _latest(none, tokens, count))

    def extend(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Runs the next token of each sequence.

        Args:
            tokens: int32[batch].
            cache: The tokens before.

        Returns:
            Logits [batch, vocab] and the cache with the tokens in it.
        """
        positions, tokens = cache.length[:, None], tokens[:, None]
        x, parts = self.embed(tokens, positions, cache.recent), []
        rows = (cache.key, cache.value)
        alone = self.dense_blocks is None

        def step(graph: Any, window: int) -> Step:
            def layer(x: jax.Array, state: nnx.State, own: Any) -> tuple[jax.Array, Any]:
                block = nnx.merge(graph, state)
                cached = own if alone else at(rows, own)
                attended, new = block.attend_next(x, positions, cached, window)
                return block.merge(x, attended)[0], new

            return layer

        for stretch in self.stretches:
            graphs, stacked = stretch.split()
            # Beside another kind each layer is read by its number: a part of the cache would be a copy.
            own = rows if alone else stretch.numbers
            stacked, joined = self._held(stretch, stacked)
            period = [
                lambda x, unit_inputs, unit=unit, joined=joined: unit(
                    x, joined(unit_inputs[0], unit_inputs[1]), unit_inputs[2]
                )
                for unit in stretch.period(graphs, step, stack)
            ]
            unit_inputs = (stacked, jnp.arange(stretch.units), own)
            x, new = run_layers(period, x, unit_inputs, in_place=True)
            parts.append(stretch.flat(new))
        capacity, places = cache.key.shape[3], cache.length
        if self.config.rolling:
            places = places % capacity
        elif 0 < self.config.window < capacity:
            self.target.note(
                f"layers with a window of {self.config.window} keep and read all {capacity} positions of the cache: where windows differ by layer they save nothing in decode"
            )
        keys, values = (
            appended_rows(self.target, old, places, rows[:, :, 0])
            for old, rows in zip((cache.key, cache.value), _joined(parts), strict=True)
        )
        count = jnp.ones_like(cache.length)
        recent = _latest(cache.recent, tokens, count)
        logits = self.logits(self.normed(x))[:, 0]
        return logits, Cache(keys, values, cache.length + count, recent)

    def _held(self, stretch: Stretch, stacked: Any) -> tuple[Any, Callable[[Any, jax.Array], Any]]:
        """See :meth:`Stretch.held`; nothing is held back where experts have no kernel that takes whole matrices."""
        if self.config.grouped and self.target.platform == "tpu":
            return stretch.held(stacked)
        return stacked, _same


def _same(state: Any, number: jax.Array) -> Any:
    del number
    return state


def _latest(recent: jax.Array, tokens: jax.Array, count: jax.Array) -> jax.Array:
    """The last tokens int32[batch, history] after ``count`` int32[batch] of tokens int32[batch, n] more."""
    seen = jnp.concatenate([recent, tokens], axis=1)
    last = count[:, None] + jnp.arange(recent.shape[1])
    return jnp.take_along_axis(seen, last, axis=1)


def _joined(parts: list[Any]) -> Any:
    """Trees of arrays [layers, ...] of one stretch after the other as one."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *each: jnp.concatenate(each), *parts)
