"""Linear layer and softmax cross entropy in plain operations, with tokamax's semantics.

Activations ``x`` are ``[tokens, hidden]``, weights ``w`` ``[hidden, vocabulary]``, labels ``[tokens]``. The matmul
has JAX's default precision, and its result and the softmax the dtype that ``x @ w`` has: bf16 for bf16 both,
f32 where one is f32. The sum of the loss is f32.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from arrays import array, like


def forward(
    x: jax.Array, labels: jax.Array, w: jax.Array, *, mean: bool, residuals: bool
) -> jax.Array | tuple[jax.Array, ...]:
    logits = x @ w
    hot = jax.nn.one_hot(labels, num_classes=w.shape[1], dtype=x.dtype)
    loss = jnp.sum(-hot * jax.nn.log_softmax(logits, axis=-1), dtype=jnp.float32)
    loss = loss / x.shape[0] if mean else loss
    return (loss, jax.nn.logsumexp(logits, axis=-1)) if residuals else loss


def backward(
    dout: jax.Array,
    lse: jax.Array,
    x: jax.Array,
    labels: jax.Array,
    w: jax.Array,
    *,
    mean: bool,
) -> tuple[jax.Array, jax.Array]:
    hot = jax.nn.one_hot(labels, num_classes=w.shape[1], dtype=x.dtype)
    slope = jnp.exp(x @ w - lse[:, None]) - hot
    scale = dout / x.shape[0] if mean else dout
    return scale * (slope @ w.T), scale * (x.T @ slope)


def chunked(
    x: jax.Array,
    labels: jax.Array,
    w: jax.Array,
    *,
    mean: bool,
    blocks: tuple[int, int],
    residuals: bool,
) -> jax.Array | tuple[jax.Array, ...]:
    """A loop over blocks of tokens, and within it one over blocks of the vocabulary, padded to whole blocks."""
    tokens, rows, columns = x.shape[0], *blocks
    x = jnp.pad(x, ((0, -tokens % rows), (0, 0)))
    labels = jnp.pad(labels, (0, -tokens % rows))
    w = jnp.pad(w, ((0, 0), (0, -w.shape[1] % columns)))
    dtype = x.dtype

    def of_rows(i: Any, carry: Any) -> Any:
        every, total = carry
        begin = i * rows

        def of_columns(j: Any, carry: Any) -> Any:
            lse, picked = carry
            mine = jax.lax.dynamic_slice(labels, (begin,), (rows,))
            left = jax.lax.dynamic_slice(x, (begin, 0), (rows, x.shape[1]))
            right = jax.lax.dynamic_slice(w, (0, j * columns), (w.shape[0], columns))
            logits = jnp.dot(left, right).astype(dtype)
            hot = jax.nn.one_hot(mine - j * columns, columns, dtype=dtype)
            lse = jnp.logaddexp(lse, jax.nn.logsumexp(logits, axis=-1))
            return lse, picked - jnp.sum(logits * hot, axis=-1)

        start = (jnp.full((rows,), -jnp.inf, dtype), jnp.zeros((rows,), dtype))
        lse, picked = jax.lax.fori_loop(0, w.shape[1] // columns, of_columns, start)
        inside = ((begin + jnp.arange(rows)) < tokens).astype(dtype)
        every = jax.lax.dynamic_update_slice(every, lse, (begin,))
        return every, total + jnp.sum(picked * inside) + jnp.sum(lse * inside)

    start = (jnp.zeros(x.shape[0], dtype), jnp.array(0.0, dtype))
    every, total = jax.lax.fori_loop(0, x.shape[0] // rows, of_rows, start)
    loss = (total / tokens if mean else total).astype(jnp.float32)
    return (loss, every[:tokens]) if residuals else loss


def program(row: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """Function and abstract arguments of a loss row; None where it is not expressed."""
    shapes = row["shapes"]
    x, w = array(shapes["x"]), array(shapes["w"])
    labels = like((x.shape[0],), jnp.int32)
    mean, residuals = shapes["reduction"] == "mean", row["notes"] == "residuals returned"
    if row["what"].endswith("_vjp"):
        if row["implementation"] != "xla":
            return None
        lse = like((x.shape[0],), jnp.result_type(x.dtype, w.dtype))
        return partial(backward, mean=mean), (like((), jnp.float32), lse, x, labels, w)
    if row["implementation"] == "xla_chunked":
        blocks = (row["config"]["b_block_size"], row["config"]["v_block_size"])
        function = partial(chunked, mean=mean, blocks=blocks, residuals=residuals)
        return function, (x, labels, w)
    return partial(forward, mean=mean, residuals=residuals), (x, labels, w)
