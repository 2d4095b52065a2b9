"""Trains with its step in the train state, and logs the weights at each hundredth, as EasyDeL's trainer does."""

import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp

WIDTH = 512


class State(NamedTuple):
    weights: jax.Array
    step: jax.Array
    updates: jax.Array


@jax.jit
def initialize(key):
    return State(jax.random.normal(key, (WIDTH, WIDTH)), jnp.zeros((), jnp.int32), jnp.array(7))


@jax.jit
def train_step(state, batch):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state.weights)
    most = jnp.iinfo(jnp.int32).max
    step = jnp.where(state.step < most, state.step + 1, most)
    updates = jax.lax.cond(jnp.isfinite(loss), lambda: state.updates + 1, lambda: state.updates)
    return State(state.weights - 0.01 * grad, step, updates), loss


@jax.jit
def histogram(weights):
    return jnp.sort(weights.reshape(-1))[:: WIDTH * 8]


state = initialize(jax.random.key(0))
batch = jnp.ones((64, WIDTH))
for number in range(30):
    state, loss = train_step(state, batch)
    step = int(state.step)
    print(
        f"step {step} of {number + 1}, twice {int(state.step * 2)}, text {state.step}",
        file=sys.stderr,
    )
    assert int(state.updates) == 0  # behind a branch on a loss: not known
    if step % 100 == 0:
        print(histogram(state.weights), file=sys.stderr)
print(f"ended at {jax.device_get(state.step)}", file=sys.stderr)
