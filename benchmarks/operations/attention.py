"""Attention in plain operations, with tokamax's semantics.

Queries, keys and values are ``[batch, sequence, heads, head dim]``. Both matmuls run as bf16 with f32
accumulation whatever the dtype given (tokamax's default precision on TPU for bf16 and f16); scores, mask,
bias and softmax are f32; scores are scaled by ``1 / sqrt(head dim)``; masked ones are the lowest f32.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import flash
import jax
import jax.numpy as jnp
from arrays import array, like

PRECISION = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
CHUNKS = (512, 1024)
"""Queries and keys of a chunk, where the autotuning ran ``xla_chunked``."""
LOWEST = float(jnp.finfo(jnp.float32).min)


def product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(
        equation, left, right, precision=PRECISION, preferred_element_type=jnp.float32
    )


def repeated(keys: jax.Array, heads: int) -> jax.Array:
    """Keys or values with as many heads as queries have."""
    own = keys.shape[-2]
    return keys if own in (1, heads) else jnp.repeat(keys, heads // own, axis=-2)


def scores(
    q: jax.Array,
    k: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
) -> jax.Array:
    made = product("...qhd,...khd->...hqk", q, k) * (1 / math.sqrt(q.shape[-1]))
    if bias is not None:
        made = made + bias.astype(jnp.float32)
    return made if mask is None else jnp.where(mask, made, LOWEST)


def masked(mask: jax.Array | None, causal: bool, queries: int, keys: int) -> jax.Array | None:
    if not causal:
        return mask
    lower = (jnp.arange(queries)[:, None] >= jnp.arange(keys)[None, :])[None]
    return lower if mask is None else mask & lower


def plain(
    arrays: Mapping[str, jax.Array], *, causal: bool, residuals: bool
) -> jax.Array | tuple[jax.Array, ...]:
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    k, v = repeated(k, q.shape[-2]), repeated(v, q.shape[-2])
    mask = masked(arrays.get("mask"), causal, q.shape[-3], k.shape[-3])
    weights, top, total = softmax(scores(q, k, arrays.get("bias"), mask))
    out = product("...hqk,...khd->...qhd", weights, v).astype(q.dtype)
    return (out, jnp.squeeze(top, -1), jnp.squeeze(total, -1)) if residuals else out


@jax.custom_jvp
def softmax(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights, maximum and sum of each row."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / total, top, total


@softmax.defjvp
def _(logits: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[Any, Any]:
    weights, *statistics = softmax(*logits)
    (tangent,) = tangents
    moved = weights * (tangent - (weights * tangent).sum(axis=-1, keepdims=True))
    return (weights, *statistics), (moved, *map(jnp.zeros_like, statistics))


def backward(arrays: Mapping[str, jax.Array], *, causal: bool) -> tuple[jax.Array, ...]:
    """Gradients from the output's.

    tokamax's takes the softmax's maximum and sum as residuals and doesn't use them: it squeezes both before it returns
    them, and its gradient reads what was not squeezed, which is computed again.
    """
    names = [name for name in ("q", "k", "v", "bias") if name in arrays]

    def attend(*values: jax.Array) -> Any:
        some = dict(arrays) | dict(zip(names, values, strict=True))
        return plain(some, causal=causal, residuals=False)

    _, pull = jax.vjp(attend, *(arrays[name] for name in names))
    return pull(arrays["dout"])


def chunked(arrays: Mapping[str, jax.Array], *, causal: bool) -> jax.Array:
    """A loop over chunks of queries, and within it one over chunks of keys."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    k, v = repeated(k, q.shape[-2]), repeated(v, q.shape[-2])
    mask = masked(arrays.get("mask"), causal, q.shape[-3], k.shape[-3])
    queries, size = q.shape[-3], CHUNKS[0]
    whole = queries // size
    parts = []
    if whole:
        step = partial(_rows, arrays | {"k": k, "v": v}, mask, size)
        _, out = jax.lax.scan(lambda at, _: (at + size, step(at)), 0, length=whole)
        out = jnp.moveaxis(out, 0, -4)
        parts.append(out.reshape(*q.shape[:-3], whole * size, *out.shape[-2:]))
    if rest := queries % size:
        parts.append(_rows(arrays | {"k": k, "v": v}, mask, rest, whole * size))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-3)


def _part(x: jax.Array | None, at: Any, size: int, axis: int) -> jax.Array | None:
    if x is None or x.shape[axis] == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, at, size, axis)


def _rows(arrays: Mapping[str, jax.Array], mask: jax.Array | None, size: int, at: Any) -> jax.Array:
    q = _part(arrays["q"], at, size, -3)
    k, v = arrays["k"], arrays["v"]
    bias, mask = _part(arrays.get("bias"), at, size, -2), _part(mask, at, size, -2)
    edge = (*q.shape[:-3], q.shape[-2], size)
    state = (
        jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32),
        jnp.full(edge, -jnp.inf),
        jnp.zeros(edge, jnp.float32),
    )

    def turn(begin: Any, width: int, state: Any) -> Any:
        made, top, total = state
        logits = scores(
            q,
            _part(k, begin, width, -3),
            _part(bias, begin, width, -1),
            _part(mask, begin, width, -1),
        )
        above = jnp.maximum(top, jnp.max(logits, axis=-1))
        weights, shrunk = jnp.exp(logits - above[..., None]), jnp.exp(top - above)
        made = made * jnp.swapaxes(shrunk, -1, -2)[..., None]
        made = made + product("...hqk,...khd->...qhd", weights, _part(v, begin, width, -3))
        return made, above, total * shrunk + weights.sum(axis=-1)

    keys, width = k.shape[-3], CHUNKS[1]
    whole = keys // width
    if whole:
        state = jax.lax.fori_loop(0, whole, lambda i, s: turn(i * width, width, s), state)
    if rest := keys % width:
        state = turn(whole * width, rest, state)
    made, _, total = state
    return (made / jnp.swapaxes(total, -1, -2)[..., None]).astype(q.dtype)


def check(q: jax.ShapeDtypeStruct, k: jax.ShapeDtypeStruct, v: jax.ShapeDtypeStruct) -> None:
    """Whether queries, keys and values are of one attention.

    Raises:
        ValueError: they are not.
    """
    if not 3 <= q.ndim == k.ndim == v.ndim:
        raise ValueError("q, k and v are not [batch, sequence, heads, head dim]")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"head dim {q.shape[-1]} of q is not {k.shape[-1]} of k")
    if k.shape[-3] != v.shape[-3]:
        raise ValueError(f"k is {k.shape[-3]} long and v {v.shape[-3]}")
    for name, given in (("k", k), ("v", v)):
        if not given.shape[-2] or q.shape[-2] % given.shape[-2]:
            raise ValueError(
                f"{q.shape[-2]} heads of q are no multiple of {given.shape[-2]} of {name}"
            )


def program(row: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """Function and abstract arguments of an attention row; None where it is not expressed."""
    shapes = row["shapes"]
    check(*(array(shapes[name]) for name in ("q", "k", "v")))
    if row["implementation"] == "pallas":
        return flash.program(row)
    if shapes.get("soft_cap"):
        return None
    residuals, causal = row["notes"] == "residuals returned", bool(shapes["causal"])
    given = {name: array(shapes[name]) for name in ("q", "k", "v")}
    for name, key in (("bias", "bias"), ("mask", "bool_mask")):
        if shapes.get(key):
            given[name] = array(shapes[key])
    if row["what"] == "attention_vjp":
        q, v = given["q"], given["v"]
        if given["k"].shape[-2] != q.shape[-2]:
            return None
        given["dout"] = like((*q.shape[:-1], v.shape[-1]), q.dtype)
        return partial(backward, causal=causal), (given,)
    if row["implementation"] == "xla_chunked":
        return partial(chunked, causal=causal), (given,)
    return partial(plain, causal=causal, residuals=residuals), (given,)
