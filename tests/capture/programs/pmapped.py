"""A trainer of the time of jax.pmap: weights on each device, a batch for each process, gradients averaged by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, EACH = 1024, 32
devices = jax.local_device_count()
print(f"process {jax.process_index()} of {jax.process_count()}, {devices} of {jax.device_count()}")


def loss_of(weights, batch):
    hidden = jnp.tanh(batch @ weights["in"] + weights["bias"]) * weights["scale"]
    return jnp.mean(jnp.square(hidden @ weights["out"]))


@functools.partial(
    jax.pmap, axis_name="batch", donate_argnums=(0,), static_broadcasted_argnums=(2,)
)
def train_step(weights, batch, rate):
    loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
    gradients = jax.lax.pmean(gradients, axis_name="batch")
    weights = jax.tree.map(lambda w, g: w - rate * g, weights, gradients)
    return weights, jax.lax.pmean({"loss": loss}, axis_name="batch")


one = {name: np.zeros((WIDTH, WIDTH), np.float32) for name in ("in", "out")}
one |= {name: np.zeros((WIDTH,), np.float32) for name in ("bias", "scale")}
weights = jax.pmap(lambda _: one)(np.arange(devices))
assert weights["in"].shape == (devices, WIDTH, WIDTH), weights["in"].shape
for step in range(1000):
    batch = np.ones((devices, EACH, WIDTH), np.float32)
    weights, metrics = train_step(weights, batch, 0.1)
    if step % 100 == 0:
        print(step, float(metrics["loss"][0]))
