"""Normalization, gated linear unit and triangle multiplication in plain operations, with tokamax's semantics.

They compute in f32 and return the dtype of ``x``; the matmuls of the gated linear unit are bf16 with f32
accumulation, rounded to the operands' dtype.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from arrays import array, like

ACTIVATIONS = {"silu": jax.nn.silu, "swish": jax.nn.silu, "sigmoid": jax.nn.sigmoid}
EPSILON = 1e-6


def norm(
    x: jax.Array, scale: jax.Array, offset: jax.Array, *, axis: int, residuals: bool
) -> jax.Array | tuple[jax.Array, ...]:
    y = x.astype(jnp.float32)
    mean = jnp.mean(y, axis, keepdims=True)
    y = y - mean
    rate = jax.lax.rsqrt(jnp.mean(jnp.square(y), axis, keepdims=True) + EPSILON)
    others = [dim for dim in range(x.ndim) if dim != axis % x.ndim]
    y = y * rate * jnp.expand_dims(scale, others) + jnp.expand_dims(offset, others)
    made = y.astype(x.dtype)
    return (made, mean, rate) if residuals else made


def norm_backward(
    dout: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    offset: jax.Array,
    mean: jax.Array,
    rate: jax.Array,
    *,
    axis: int,
) -> tuple[jax.Array, ...]:
    others = [dim for dim in range(x.ndim) if dim != axis % x.ndim]
    dout = dout.astype(jnp.float32)
    normed = (x.astype(jnp.float32) - mean) * rate
    doffset = jnp.sum(dout, others).astype(offset.dtype)
    dscale = jnp.sum(dout * normed, others).astype(scale.dtype)
    dout = dout * jnp.expand_dims(scale.astype(jnp.float32), others)
    dx = dout - jnp.mean(dout * normed, axis=axis, keepdims=True) * normed
    dx = (dx - jnp.mean(dout, axis=axis, keepdims=True)) * rate
    return dx.astype(x.dtype), dscale, doffset


def gated(x: jax.Array, weights: jax.Array, *, activation: Any, precision: Any) -> jax.Array:
    """``x`` is ``[..., K]``, ``weights`` ``[K, 2, N]``."""
    made = jnp.einsum("...k,kjn->...jn", x, weights, precision=precision)
    made = made.reshape(*made.shape[:-2], -1).astype(jnp.float32)
    gate, other = jnp.split(made, 2, axis=-1)
    return (activation(gate) * other).astype(x.dtype)


def triangle(arrays: Mapping[str, jax.Array], *, outgoing: bool) -> jax.Array:
    """``x`` is ``[N, N, C]``, projections ``[C, 2, H, 2]``, ``[H, D]`` and ``[C, D]``."""
    x, weights = arrays["x"], arrays["projection"]
    channels, hidden = x.shape[-1], weights.shape[2]
    left = norm(x, arrays["scale_in"], arrays["offset_in"], axis=-1, residuals=False)
    made = gated(
        left,
        weights.reshape(channels, 2, -1),
        activation=jax.nn.sigmoid,
        precision=None,
    )
    made = arrays["mask"][..., None] * made
    made = made.reshape(*x.shape[:2], 2, hidden).transpose(2, 3, 0, 1)
    equation = "cik,cjk->ijc" if outgoing else "ckj,cki->ijc"
    act = jnp.einsum(equation, made[0], made[1])
    act = norm(act, arrays["scale_out"], arrays["offset_out"], axis=-1, residuals=False)
    act = jnp.dot(act, arrays["out"])
    return act * jax.nn.sigmoid(jnp.dot(left, arrays["gate_out"]))


def program(row: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """Function and abstract arguments of a row; None where it is not expressed."""
    shapes = row["shapes"]
    x = array(shapes["x"])
    if row["what"] == "gated_linear_unit":
        if shapes["precision"] != "BF16_BF16_F32" or shapes["activation"] not in ACTIVATIONS:
            return None
        function = partial(
            gated,
            activation=ACTIVATIONS[shapes["activation"]],
            precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
        )
        return function, (x, array(shapes["weights"]))
    if row["what"] == "triangle_multiplication":
        size, dtype = x.shape[-1], x.dtype
        given = {
            "x": x,
            "mask": like(x.shape[:2], jnp.bool_),
            "projection": like((size, 2, size, 2), dtype),
            "out": like((size, size), dtype),
            "gate_out": like((size, size), dtype),
        }
        given |= {
            name: like((size,), dtype)
            for name in ("scale_in", "offset_in", "scale_out", "offset_out")
        }
        return partial(triangle, outgoing=shapes["triangle"] == "outgoing"), (given,)
    if not shapes["subtract_mean"]:
        return None
    axis = shapes["axis"]
    wide = like((x.shape[axis],), x.dtype)
    if row["what"] == "layer_norm":
        residuals = bool(shapes["return_residuals"]) or row["notes"] == "residuals returned"
        return partial(norm, axis=axis, residuals=residuals), (x, wide, wide)
    edge = list(x.shape)
    edge[axis] = 1
    kept = like(tuple(edge), jnp.float32)
    return partial(norm_backward, axis=axis), (x, x, wide, wide, kept, kept)
