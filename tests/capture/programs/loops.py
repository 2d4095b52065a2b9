"""Loops, branches and a rematerialized function that the program calls outside of jit, and a checked one."""

import jax
import jax.numpy as jnp
from jax.experimental import checkify

WIDTH = 512


@jax.jit
def train_step(w, x):
    """One step: two matmuls of the batch."""
    return w - 0.1 * (x.T @ (x @ w))


@jax.jit
def average(mean, w):
    """Averages the weights: no matmul."""
    return 0.9 * mean + 0.1 * w


@jax.jit
def part(w):
    """One matmul."""
    return w @ w


def body(w, x):
    """One matmul of the weights a trip."""
    return w @ x, None


def larger(w):
    """One matmul."""
    return w @ w


def check_one(w):
    """One matmul, and a check."""
    checkify.check(w[0, 0] >= 0, "negative")
    return w @ w


checked = jax.jit(checkify.checkify(check_one))
w = mean = jnp.zeros((WIDTH, WIDTH))
x, xs = jnp.ones((256, WIDTH)), jnp.ones((3, WIDTH, WIDTH))
for _ in range(6):
    w = jax.lax.fori_loop(0, 100, lambda _, w: train_step(w, x), w)
    w = jax.lax.scan(body, w, xs)[0]
    w = jax.lax.cond(w[0, 0] > 0, lambda w: w, larger, w)
    w = jax.checkpoint(part)(w)
    error, w = checked(w)
    mean = average(mean, w)
