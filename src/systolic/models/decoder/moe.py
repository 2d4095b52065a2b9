"""A mixture of experts: each token goes to its best experts, each expert has a bounded number of slots.

Routing is decided within each sequence, so the result is the same under every layout. Tokens move
to the devices that hold their experts where the array's sharding changes from the batch axes to
the expert axis: the partitioner turns that into an all-to-all.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.context_order import Order
from systolic.models.decoder.config import Decoder, Dispatch
from systolic.models.decoder.dropless import dropless
from systolic.models.decoder.layers import MLP, gated
from systolic.models.decoder.router import RouterBias, choose, routed_as
from systolic.models.linear import product
from systolic.models.parameters import weight
from systolic.models.remat import name
from systolic.models.residual import gathered


def capacity(config: Decoder, sequence: int) -> int:
    """Slots of one expert for one sequence."""
    if config.capacity_factor <= 0:
        return sequence
    return min(
        sequence,
        math.ceil(sequence * config.experts_per_token * config.capacity_factor / config.experts),
    )


class Mixture(nnx.Module):
    """Top-k routing over gated experts (GShard, Lepikhin et al. 2020), and beside them those that all tokens share (DeepSeekMoE, Dai et al. 2024)."""

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
        self, x: jax.Array, count: jax.Array | None = None, order: Order | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x [batch, sequence, d_model] in ``order`` to the same, and how its tokens were routed.

        count int32[batch]: how many tokens of each row are real; the padding after them takes no
        slot, and the slots are those of a row of so many tokens. Without it all are real.

        ``load`` f32[experts] is the share of first choices of each expert and ``score`` f32[experts] its
        mean probability, see :func:`~systolic.models.decoder.router.balance`; ``dropped`` f32[] is the share of choices whose expert
        had no slot left. All are means over tokens, so that parts of a batch average exactly.
        """
        config = self.config
        given = gathered(self.target, x)
        bias = self.bias[...] if config.router.bias else None
        # Rounded to bfloat16, logits would tie or change places (DeepSeek's published code has float32 too).
        logits = jnp.matmul(given, self.router[...], preferred_element_type=jnp.float32)
        if config.router.logit_bias:
            logits = logits + self.router_bias[...].astype(jnp.float32)
        scores, weights, chosen = choose(config.router, config.experts_per_token, logits, bias)
        routing = routed_as(config.router, scores, chosen)
        if config.dispatch is Dispatch.dropless or self._alone(x):
            out = self._dropless(given, chosen, weights, count)
        else:
            places = _places(config, chosen, capacity(config, x.shape[1]), count, order)
            weights = weights * places[0]
            out = self._slots(given, weights, places[1])
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
    order: Order | None,
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
