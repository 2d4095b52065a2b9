"""A mixture of experts: the router, and experts with a bounded number of slots or without slots, whose rows lie by expert.

The partitioner can't split grouped matmuls, so the layer is wrapped in ``shard_map``: each device takes
the tokens of its batch shard. Over an expert axis the tokens of its devices are gathered, each computes
what is routed to its own experts, and the sums are scattered back: no token is dropped, and the memory is
bounded by the tokens, but each device has rows for the case that all tokens choose its experts. The
matmuls skip the rows that stay empty; picking, activation and sum take all of them. The few tokens of a server's
step on a TPU have a kernel of their own (:mod:`systolic.models.decoder.few`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from systolic.job import Target
from systolic.models.attention import BalancedOrder
from systolic.models.decoder.config import Decoder, Dispatch, Mlp
from systolic.models.decoder.few import few_product, takes
from systolic.models.decoder.layers import MLP, gated
from systolic.models.decoder.options import Router, Score
from systolic.models.grouped import Layered, grouped_product
from systolic.models.layers import gathered, name, weight
from systolic.models.linear import product
from systolic.models.quantized.codes import Quantized

Matrix = jax.Array | Quantized | Layered
Matrices = tuple[Matrix, Matrix, Matrix]
Biases = tuple[jax.Array, ...]
LEAST = 1e-20
"""Added to the sum of sigmoid scores before it divides (DeepSeek-V3's published code)."""


def dropless(
    target: Target,
    mlp: Mlp,
    x: jax.Array,
    routing: tuple[jax.Array, jax.Array],
    matrices: Matrices,
    biases: Biases = (),
) -> jax.Array:
    """The weighted sum of each token's experts, [batch, sequence, d_model].

    Args:
        target: Where the program will run.
        mlp: Kind of the experts, a gated one.
        x: [batch, sequence, d_model].
        routing: The chosen experts int32[batch, sequence, k], -1 for none, and their weights in
            the same shape.
        matrices: gate and up [experts, d_model, d_ff], down [experts, d_ff, d_model].
        biases: Of gate and up [experts, d_ff]; none for none.
    """
    layout = target.layout
    spec = target.fit(x.shape, ("batch", "sequence", None))
    batch = spec[0] if isinstance(spec[0], tuple) else (spec[0],)
    # A few rows of decode, which the axis does not divide, are whole on all of its devices.
    split = layout.expert > 1 and "expert" in batch
    (mlp_axis,) = target.spec("mlp")
    (experts,) = target.spec("routed")
    inward, outward = PartitionSpec(experts, None, mlp_axis), PartitionSpec(experts, mlp_axis, None)

    biased = PartitionSpec(experts, mlp_axis)
    gate, up, down = (
        matrix.joined() if isinstance(matrix, Quantized) else matrix for matrix in matrices
    )

    def local(
        x: jax.Array, routing: tuple[jax.Array, jax.Array], matrices: Matrices, biases: Biases
    ) -> jax.Array:
        chosen, weights = routing
        if split:
            x, chosen, weights = (
                jax.lax.all_gather(each, "expert", axis=0, tiled=True)
                for each in (x, chosen, weights)
            )
        if layout.expert > 1:
            chosen = chosen - jax.lax.axis_index("expert") * matrices[0].shape[0]
        out = _grouped(target, mlp, x, (chosen, weights), matrices, biases)
        whole = layout.expert > 1 and not split
        summed = [*(["tensor"] if layout.tensor > 1 else []), *(["expert"] if whole else [])]
        if summed:
            out = jax.lax.psum(out, tuple(summed))
        if split:
            out = jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)
        return out

    return jax.shard_map(
        local,
        mesh=target.mesh,
        in_specs=(spec, spec, _specs((gate, up, down), (inward, inward, outward)), biased),
        out_specs=spec,
        check_vma=False,
    )(x, routing, (gate, up, down), biases)


def _specs(matrices: Matrices, specs: tuple[PartitionSpec, ...]) -> tuple[Any, ...]:
    """Partition of each matrix; of one in int8 its scales are whole along dims of size 1."""

    def spec_of(matrix: Matrix, spec: PartitionSpec) -> Any:
        if isinstance(matrix, Layered):
            whole: Any = PartitionSpec()
            return Layered(stack=spec_of(matrix.stack, PartitionSpec(None, *spec)), number=whole)
        if not isinstance(matrix, Quantized):
            return spec
        sizes = zip(spec, matrix.scales.shape, strict=True)
        parts = PartitionSpec(*(None if size == 1 else axis for axis, size in sizes))
        return Quantized(codes=spec, scales=parts)  # ty: ignore[invalid-argument-type]

    return tuple(spec_of(*pair) for pair in zip(matrices, specs, strict=True))


def _grouped(
    target: Target,
    mlp: Mlp,
    x: jax.Array,
    routing: tuple[jax.Array, jax.Array],
    matrices: Matrices,
    biases: Biases,
) -> jax.Array:
    """Contribution of these experts to ``x``; choices outside of 0 to their number are others'."""
    gate, up, down = matrices
    own, (chosen, weights) = gate.shape[0], routing
    width, each = x.shape[-1], chosen.shape[-1]
    tokens, flat = x.reshape(-1, width), chosen.reshape(-1)
    if takes(target, mlp, tokens.shape[0], matrices):
        routing = (chosen.reshape(-1, each), weights.reshape(-1, each))
        return few_product(target, mlp, tokens, routing, matrices, biases).reshape(x.shape)
    flat = jnp.where((flat >= 0) & (flat < own), flat, own)
    # A token chooses an expert at most once, so that no more rows can be theirs.
    rows = tokens.shape[0] * min(each, own)
    order = jnp.argsort(flat, stable=True)[:rows]
    sizes = jnp.bincount(flat, length=own + 1)[:own].astype(jnp.int32)
    # Rows behind the last group are no one's: a kernel may leave anything there, also in gradients.
    real = (jnp.arange(rows) < sizes.sum())[:, None]
    routed = jnp.where(real, tokens[order // each], 0)

    expected = min(rows, math.ceil(flat.shape[0] / target.layout.expert))

    def product(x: jax.Array, matrices: Matrix, *, turned: bool = False) -> jax.Array:
        return grouped_product(target, x, matrices, sizes, expected, turned=turned)

    projected = [
        name(product(routed, matrix, turned=target.serves), "mlp") for matrix in (gate, up)
    ]
    if biases:
        expert = jnp.minimum(flat[order], own - 1)
        projected = [rows + bias[expert] for rows, bias in zip(projected, biases, strict=True)]
    hidden = gated(mlp, *projected)
    done = jnp.where(real, product(hidden, down), 0)
    done = done * weights.reshape(-1)[order][:, None].astype(done.dtype)
    return jnp.zeros_like(tokens).at[order // each].add(done).reshape(x.shape)


class RouterBias(nnx.Variable):
    """Bias of each expert, f32[experts]; not a parameter, since no gradient moves it."""


def choose(
    router: Router, each: int, logits: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses the best ``each`` experts of tokens.

    Args:
        router: The switches.
        each: Experts a token.
        logits: f32[..., experts].
        bias: f32[experts], which counts for the choice only; None for none.

    Returns:
        All scores f32[..., experts], the weights f32[..., each] of the chosen, and their numbers
        int32[..., each], the best first.
    """
    sigmoid = router.score is Score.sigmoid
    scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits, axis=-1)
    ranked = scores if bias is None else scores + bias
    if router.top_groups < router.groups:
        # ``ranked`` f32[..., experts], minus infinity outside of each token's best groups.
        grouped = ranked.reshape(*ranked.shape[:-1], router.groups, -1)
        if router.score is Score.sigmoid:
            rank = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
        else:
            rank = grouped.max(axis=-1)
        best = jax.lax.top_k(rank, router.top_groups)[1]
        kept = jax.nn.one_hot(best, router.groups, dtype=jnp.bool_).any(axis=-2)
        ranked = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(ranked.shape)
    weights, chosen = jax.lax.top_k(ranked, each)
    if ranked is not scores:
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if router.normalise:
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / (total + LEAST if sigmoid else total)
    if router.scale != 1:
        weights = weights * router.scale
    return scores, weights, chosen


def routed_as(router: Router, scores: jax.Array, chosen: jax.Array) -> dict[str, jax.Array]:
    """``load`` and ``score`` f32[experts] of scores f32[..., experts] and choices int32[..., k].

    Scores that don't add up to 1 are divided by their sum first. Where experts have biases also
    ``chosen`` f32[experts], each one's share of all choices.
    """
    first = jax.nn.one_hot(chosen[..., 0], scores.shape[-1], dtype=jnp.float32)
    if router.score is Score.sigmoid:
        scores = scores / (scores.sum(axis=-1, keepdims=True) + LEAST)
    figures = {"load": first.mean(axis=(0, 1)), "score": scores.mean(axis=(0, 1))}
    if router.bias:
        every = jax.nn.one_hot(chosen, scores.shape[-1], dtype=jnp.float32)
        figures["chosen"] = every.mean(axis=(0, 1, 2))
    return figures


def balance(load: jax.Array, score: jax.Array) -> jax.Array:
    """The load balancing loss f32[...] of ``load`` and ``score`` f32[..., experts] (Switch, Fedus et al. 2021).

    1 where experts are chosen evenly, their number where one gets all. It is a product of means, so
    these are averaged over a pipeline's microbatches before it is taken.
    """
    return load.shape[-1] * jnp.sum(load * score, axis=-1)


def moved(bias: jax.Array, chosen: jax.Array, rate: float) -> jax.Array:
    """Biases f32[..., experts] after a step in which experts had these shares of the choices (DeepSeek-V3, section 2.1.2)."""
    even = 1 / chosen.shape[-1]
    return bias + rate * jnp.sign(even - chosen)


def capacity(config: Decoder, sequence: int) -> int:
    """Slots of one expert for one sequence."""
    if config.capacity_factor <= 0:
        return sequence
    return min(
        sequence,
        math.ceil(sequence * config.experts_per_token * config.capacity_factor / config.experts),
    )


class Mixture(nnx.Module):
    """Top-k routing over gated experts (GShard, Lepikhin et al. 2020), and beside them those that all tokens share (DeepSeekMoE, Dai et al. 2024).

    Routing is decided within each sequence, so the result is the same under every layout. Tokens move
    to the devices that hold their experts where the array's sharding changes from the batch axes to
    the expert axis: the partitioner turns that into an all-to-all.
    """

    def __init__(self, config: Decoder, rngs: nnx.Rngs, target: Target) -> None:
        e, d, f = config.experts, config.d_model, config.d_ff

        self.router = weight(rngs, (d, e), ("embed", None), d, config.shrinkage**0.5)
        self.gate = weight(rngs, (e, d, f), ("experts", "expert_embed", "mlp"), d)
        self.up = weight(rngs, (e, d, f), ("experts", "expert_embed", "mlp"), d)
        self.down = weight(
            rngs, (e, f, d), ("experts", "mlp", "expert_embed"), f, (2 * config.layers) ** -0.5
        )
        if config.router.logit_bias:
            self.router_bias = nnx.Param(jnp.zeros((e,)), out_sharding=(None,))
        if config.expert_bias:
            inner, outer = ("experts", "mlp"), ("experts", "expert_embed")
            self.gate_bias = nnx.Param(jnp.zeros((e, f)), out_sharding=inner)
            self.up_bias = nnx.Param(jnp.zeros((e, f)), out_sharding=inner)
            self.down_bias = nnx.Param(jnp.zeros((e, d)), out_sharding=outer)
        if config.router.bias:
            self.bias = RouterBias(jnp.zeros((e,), jnp.float32), out_sharding=(None,))
        shared = config.shared_experts
        self.shared = MLP(config, shared * f, rngs, target) if shared else None
        self.config, self.target = config, target

    def __call__(
        self, x: jax.Array, count: jax.Array | None = None, order: BalancedOrder | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x [batch, sequence, d_model] in ``order`` to the same, and how its tokens were routed.

        count int32[batch]: how many tokens of each row are real; the padding after them takes no
        slot, and the slots are those of a row of so many tokens. Without it all are real.

        ``load`` f32[experts] is the share of first choices of each expert and ``score`` f32[experts] its
        mean probability, see :func:`~systolic.models.decoder.moe.balance`; ``dropped`` f32[] is the share of choices whose expert
        had no slot left. All are means over tokens, so that parts of a batch average exactly.
        """
        config = self.config
        whole = gathered(self.target, x)
        bias = self.bias[...] if config.router.bias else None
        # Rounded to bfloat16, logits would tie or change places (DeepSeek's published code has float32 too).
        logits = jnp.matmul(whole, self.router[...], preferred_element_type=jnp.float32)
        if config.router.logit_bias:
            logits = logits + self.router_bias[...].astype(jnp.float32)
        scores, weights, chosen = choose(config.router, config.experts_per_token, logits, bias)
        routing = routed_as(config.router, scores, chosen)
        if config.dispatch is Dispatch.dropless or self._alone(x):
            out = self._dropless(whole, chosen, weights, count)
        else:
            places = _places(config, chosen, capacity(config, x.shape[1]), count, order)
            weights = weights * places[0]
            out = self._slots(whole, weights, places[1])
            routing["dropped"] = 1 - places[0].astype(jnp.float32).mean()
        if config.expert_bias:
            out = out + self._down_biases(weights, chosen, out.dtype)
        if self.shared is not None:
            out = out + self.shared(x)[0]
        return out, routing

    def _alone(self, x: jax.Array) -> bool:
        """Whether a server's tokens [tokens, 1, d_model] are routed each for itself: all their choices have a slot, and kernels of a TPU read the chosen experts alone."""
        return self.target.serves and self.target.platform == "tpu" and x.shape[1] == 1

    def _slots(self, x: jax.Array, weights: jax.Array, address: jax.Array) -> jax.Array:
        config, constrain = self.config, self.target.constrain
        batch, sequence, d = x.shape
        slots = capacity(config, sequence)
        tokens = jnp.broadcast_to(jnp.arange(sequence)[None, :, None], address.shape).reshape(
            batch, -1
        )
        source = jnp.full((batch, config.experts * slots + 1), sequence, jnp.int32)
        source = jax.vmap(lambda into, at, what: into.at[at].set(what))(
            source, address.reshape(batch, -1), tokens
        )[:, :-1]
        padded = jnp.concatenate([x, jnp.zeros((batch, 1, d), x.dtype)], axis=1)
        routed = jnp.take_along_axis(padded, source[:, :, None], axis=1).reshape(
            batch, config.experts, slots, d
        )

        # Picked where the tokens are, then sent: else the partitioner sends the indices too.
        routed = constrain(routed, "batch", None, None, None)
        routed = constrain(routed, "expert_batch", "routed", None, None)
        gate = name(
            product(self.target, "becd,edf->becf", routed, self.gate[...], self.config.rounding),
            "mlp",
        )
        up = name(
            product(self.target, "becd,edf->becf", routed, self.up[...], self.config.rounding),
            "mlp",
        )
        if config.expert_bias:
            gate = gate + self.gate_bias[...][:, None]
            up = up + self.up_bias[...][:, None]
        hidden = gated(config.mlp, gate, up)
        hidden = constrain(hidden, "expert_batch", "routed", None, "mlp")
        done = constrain(
            product(self.target, "becf,efd->becd", hidden, self.down[...], self.config.rounding),
            "expert_batch",
            "routed",
            None,
            None,
        )

        done = constrain(done.reshape(batch, config.experts * slots, d), "batch", None, None)
        done = jnp.concatenate([done, jnp.zeros((batch, 1, d), done.dtype)], axis=1)
        picked = jnp.take_along_axis(done, address.reshape(batch, -1)[:, :, None], axis=1)
        picked = picked.reshape(batch, sequence, config.experts_per_token, d)
        return (picked * weights[..., None].astype(x.dtype)).sum(axis=2)

    def _dropless(
        self, x: jax.Array, chosen: jax.Array, weights: jax.Array, count: jax.Array | None
    ) -> jax.Array:
        if self.target.matmul_format is not None:
            self.target.note(
                f"experts without slots have no {self.target.matmul_format} matmuls: theirs stay in {self.target.dtype}"
            )
        if count is not None:
            real = jnp.arange(x.shape[1]) < count[:, None]
            chosen = jnp.where(real[:, :, None], chosen, -1)
        biases = (self.gate_bias[...], self.up_bias[...]) if self.config.expert_bias else ()
        matrices = (self.gate[...], self.up[...], self.down[...])
        return dropless(self.target, self.config.mlp, x, (chosen, weights), matrices, biases)

    def _down_biases(self, weights: jax.Array, chosen: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The biases of down, weighted: [batch, sequence, d_model] of weights and choices [batch, sequence, k].

        As one product of all experts, which the partitioner splits; padding has them too, and no one reads it.
        """
        one_hot = jax.nn.one_hot(chosen, self.config.experts, dtype=jnp.float32)
        shares = (one_hot * weights[..., None]).sum(axis=2).astype(dtype)
        return shares @ self.down_bias[...]


def _places(
    config: Decoder,
    chosen: jax.Array,
    slots: int,
    count: jax.Array | None,
    order: BalancedOrder | None,
) -> tuple[jax.Array, jax.Array]:
    """Slot of each choice, of ``chosen`` int32[batch, sequence, experts_per_token] in ``order``.

    Returns:
        Whether each choice found a slot, and the slot's number over all experts, their number for none.
    """
    batch, sequence, _ = chosen.shape
    one_hot = jax.nn.one_hot(chosen, config.experts, dtype=jnp.int32)
    limit: jax.Array | int = slots
    if count is not None:
        # A row has the slots that it would have without its padding, which has none.
        table = jnp.array([capacity(config, size) for size in range(sequence + 1)], jnp.int32)
        limit = table[count][:, None, None]
        one_hot = one_hot * (jnp.arange(sequence) < count[:, None])[:, :, None, None]
    # First choices take slots before second choices, in the sequence's natural order.
    natural = one_hot if order is None else order.restore(one_hot)
    by_rank = natural.swapaxes(1, 2).reshape(batch, -1, config.experts)
    place = ((jnp.cumsum(by_rank, axis=1) - 1) * by_rank).sum(-1)
    place = place.reshape(batch, config.experts_per_token, sequence).swapaxes(1, 2)
    place = place if order is None else order.arrange(place)
    fits = place < limit
    if count is not None:
        fits = fits & one_hot.any(axis=-1)
    return fits, jnp.where(fits, chosen * slots + place, config.experts * slots)
