"""Experts without slots: the tokens of each expert lie in a row and its matmuls take as many as there are.

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
from jax.sharding import PartitionSpec

from systolic.job import Target
from systolic.models.decoder.config import Mlp
from systolic.models.decoder.few import few_product, takes
from systolic.models.decoder.layers import gated
from systolic.models.grouped import grouped_product
from systolic.models.layered import Layered
from systolic.models.quantized.codes import Quantized
from systolic.models.remat import name

Matrix = jax.Array | Quantized | Layered
Matrices = tuple[Matrix, Matrix, Matrix]
Biases = tuple[jax.Array, ...]


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
    gate, up, down = (one.joined() if isinstance(one, Quantized) else one for one in matrices)

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

    def one(matrix: Matrix, spec: PartitionSpec) -> Any:
        if isinstance(matrix, Layered):
            whole: Any = PartitionSpec()
            return Layered(stack=one(matrix.stack, PartitionSpec(None, *spec)), number=whole)
        if not isinstance(matrix, Quantized):
            return spec
        sizes = zip(spec, matrix.scales.shape, strict=True)
        parts = PartitionSpec(*(None if size == 1 else axis for axis, size in sizes))
        return Quantized(codes=spec, scales=parts)  # ty: ignore[invalid-argument-type]

    return tuple(one(*pair) for pair in zip(matrices, specs, strict=True))


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

    made = [name(product(routed, matrix, turned=target.serves), "mlp") for matrix in (gate, up)]
    if biases:
        expert = jnp.minimum(flat[order], own - 1)
        made = [rows + bias[expert] for rows, bias in zip(made, biases, strict=True)]
    hidden = gated(mlp, *made)
    done = jnp.where(real, product(hidden, down), 0)
    done = done * weights.reshape(-1)[order][:, None].astype(done.dtype)
    return jnp.zeros_like(tokens).at[order // each].add(done).reshape(x.shape)
