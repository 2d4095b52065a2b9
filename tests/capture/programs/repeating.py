"""Loops whose step has other calls at its end, or many of them: the first word says which."""

import queue
import sys
import threading

import jax
import jax.numpy as jnp

how, *numbers = sys.argv[1:]
counts = [int(number) for number in numbers]
WIDTH = 1024


def gradient(weights, batch):
    return jax.grad(lambda w: (jnp.tanh(batch @ w) ** 2).mean())(weights)


@jax.jit
def gather(total, weights, batch):
    return total + gradient(weights, batch)


@jax.jit
def update(weights, total):
    return weights - total @ total @ total, total * 0


@jax.jit
def train(weights, batch):
    return weights - gradient(weights, batch)


@jax.jit
def evaluate(weights, batch):
    return jnp.sort(batch @ weights, axis=0)[-1]


@jax.jit
def critic(own, other, batch):
    return own - gradient(own, batch @ other)


@jax.jit
def generator(own, other, batch):
    return own - gradient(own, batch @ other)


@jax.jit
def embed(tokens, table):
    return table[tokens]


@jax.jit
def layer(hidden, weights):
    product = jax.lax.dot(hidden, weights, preferred_element_type=jnp.int32)
    return (product >> 8).astype(jnp.int8)


@jax.jit
def head(hidden, table):
    product = jax.lax.dot(hidden, table.T, preferred_element_type=jnp.int32)
    return jnp.argmax(product, -1).astype(jnp.int32)


def placed(shape, device=0, dtype=jnp.float32):
    return jax.device_put(jnp.zeros(shape, dtype), jax.devices()[device])


weights, batch = placed((WIDTH, WIDTH)), placed((512, WIDTH))
if how == "microbatches":
    microbatches, steps = counts
    total = placed((WIDTH, WIDTH))
    for _ in range(steps):
        for _ in range(microbatches):
            total = gather(total, weights, batch)
        weights, total = update(weights, total)
elif how == "evaluations":
    every, steps = counts
    for step in range(1, steps + 1):
        weights = train(weights, batch)
        if step % every == 0:
            evaluate(weights, placed((1 << 18, WIDTH)))
elif how == "critics":
    other = placed((WIDTH, WIDTH))
    for _ in range(counts[0]):
        other = generator(other, weights, batch)
        for _ in range(5):
            weights = critic(weights, other, batch)
elif how == "phases":
    for step in range(40):
        weights = train(weights, batch) if step < 20 else gather(weights, weights, batch)
elif how == "integers":
    table = placed((4096, WIDTH), dtype=jnp.int8)
    weights = placed((WIDTH, WIDTH), dtype=jnp.int8)
    tokens = placed((256,), dtype=jnp.int32)
    for _ in range(5):
        hidden = embed(tokens, table)
        for _ in range(4):
            hidden = layer(hidden, weights)
        tokens = head(hidden, table)
elif how == "threads":
    episodes = queue.Queue(2)

    def act():
        policy, state = placed((WIDTH, WIDTH)), placed((512, WIDTH))
        for _ in range(counts[0]):
            state = evaluate(policy, state) + state
            episodes.put(state)

    actor = threading.Thread(target=act)
    actor.start()
    weights = placed((WIDTH, WIDTH), 1)
    for _ in range(counts[0]):
        weights = train(weights, jax.device_put(episodes.get(), jax.devices()[1]))
    actor.join()
