"""A trainer in plain JAX that knows nothing of Systolic: a small decoder on random bytes, data parallel.

systolic forecast --on v5e-8 -- python examples/plain_trainer.py --layers 4 --width 512
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HEAD, BYTES = 64, 256
parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--tokens", type=int, default=512)
parser.add_argument("--steps", type=int, default=1000)
options = parser.parse_args()

mesh = Mesh(np.array(jax.devices()), ("data",))
everywhere = NamedSharding(mesh, PartitionSpec())
by_example = NamedSharding(mesh, PartitionSpec("data"))


@functools.partial(jax.jit, out_shardings=everywhere)
def init(key):
    width, keys = options.width, iter(jax.random.split(key, 6))
    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    layers = {
        name: jax.random.normal(next(keys), (options.layers, *shape)) * shape[0] ** -0.5
        for name, shape in shapes.items()
    }
    return {"embed": jax.random.normal(next(keys), (BYTES, width)), "layers": layers}


def logits(weights, tokens):
    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def layer(x, own):
        own = jax.tree.map(lambda matrix: matrix.astype(jnp.bfloat16), own)
        parts = (norm(x) @ own["qkv"]).reshape(*x.shape[:2], 3, -1, HEAD)
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(parts, 2, 0), is_causal=True)
        x = x + mixed.reshape(x.shape) @ own["out"]
        return x + jax.nn.gelu(norm(x) @ own["up"]) @ own["down"], None

    x = weights["embed"].astype(jnp.bfloat16)[tokens]
    x, _ = jax.lax.scan(layer, x, weights["layers"])
    return (norm(x) @ weights["embed"].T.astype(jnp.bfloat16)).astype(jnp.float32)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(weights, batch):
    def loss_of(weights):
        likely = jax.nn.log_softmax(logits(weights, batch[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(likely, batch[:, 1:, None], -1))

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients), loss


rng = np.random.default_rng(0)
weights = init(jax.random.key(0))
for step in range(options.steps):
    text = rng.integers(0, BYTES, (options.batch, options.tokens + 1), dtype=np.int32)
    weights, loss = train_step(weights, jax.device_put(text, by_example))
    if step % 100 == 0:
        print(f"step {step}: loss {float(loss):.3f}")
