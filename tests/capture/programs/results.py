"""Writes where the results of some functions lie; its step gives back an array that it takes, as a copy."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SIZE = 1024
mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))


def placed(*axes):
    return jax.device_put(jnp.zeros((SIZE, SIZE)), NamedSharding(mesh, PartitionSpec(*axes)))


@jax.jit
def positive(x):
    return jnp.where(x > 0, x, 0)


def scanned(x, w):
    return jax.lax.scan(lambda x, _: (x @ w, x.sum(0)), x, None, length=3)[0]


def update(w, x):
    return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


def spread():
    """The sharding of each function's results, by its name."""
    rows, columns = placed("data"), placed(None, "model")
    both, whole = placed("data", "model"), placed()
    functions = {
        "matmul": (lambda x, w: x @ w, rows, columns),
        "transposed": (lambda x: x.T, rows),
        "sum": (lambda x, w: x + w, rows, columns),
        "sum in another order": (lambda x, w: w + x, rows, columns),
        "swapped": (lambda x, w: (jnp.sin(w), jnp.cos(x)), rows, columns),
        "zeros": (lambda x: (x * 2, jnp.zeros_like(x)), rows),
        "of no argument": (lambda x: jax.random.normal(jax.random.key(0), x.shape), columns),
        "noise": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), columns),
        "rows of another": (lambda x, w: x[w[0].astype(int)], rows, columns),
        "in another shape": (lambda x: x.reshape(2 * SIZE, -1), rows),
        "split finer": (lambda x: x.reshape(2, SIZE // 2, SIZE), rows),
        "whole and activation": (lambda a, x, w: a + x @ w, whole, rows, columns),
        "within": (lambda x, w: positive(positive(x) @ w), rows, columns),
        "scan": (scanned, rows, both),
        "update": (update, both, rows),
        "update of whole weights": (update, whole, rows),
        "largest": (lambda x: jax.lax.top_k(x, 512)[0], rows),
    }
    deep = jnp.stack([rows, rows, rows])
    outside = {"stacked": [deep], "a row": [deep[1]], "columns": [both[:, 1:], rows.T]}
    inside = {
        name: [place_of(one) for one in jax.tree.leaves(jax.jit(function)(*args))]
        for name, (function, *args) in functions.items()
    }
    return inside | {name: list(map(place_of, arrays)) for name, arrays in outside.items()}


def place_of(array):
    kind = type(array.sharding).__name__
    index = array.sharding.devices_indices_map(array.shape)
    parts = [
        [part.indices(dim)[:2] for part, dim in zip(one, array.shape, strict=True)]
        for one in index.values()
    ]
    return [kind, array.committed, parts]


with open(sys.argv[1], "w") as file:
    json.dump(spread(), file)


@jax.jit
def step(state):
    w, table = state
    return w + w @ w, table


state = jax.device_put(
    (jnp.zeros((256, 256)), jnp.zeros((SIZE, SIZE))), NamedSharding(mesh, PartitionSpec())
)
first = state
for _ in range(10):
    state = step(state)
