"""One train step that two compilers and one flag schedule differently: ``python tests/recorded/hlo/versions.py FILE [FLAG=VALUE]``.

Runs under any JAX from 0.6 on, without Systolic; the recorded texts are ``clean`` of :mod:`tests.recorded.hlo.record`.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LAYERS, WIDTH, HIDDEN, HEADS, LENGTH, BATCH, VOCABULARY = 2, 1024, 4096, 8, 1024, 32, 32768


def normed(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def attended(x: Any, weights: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, weights[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("bthk,bshk->bhts", q, k).astype(jnp.float32) * (WIDTH // HEADS) ** -0.5
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(x.dtype)
    mixed = jnp.einsum("bhts,bshk->bthk", shares, v)
    return jnp.einsum("bthk,hkd->btd", mixed, weights["out"])


def fed(x: Any, weights: Any) -> Any:
    hidden = jax.nn.gelu(x @ weights["up"]) * (x @ weights["gate"])
    return hidden @ weights["down"]


def loss_of(params: Any, tokens: Any) -> Any:
    params = jax.tree.map(lambda one: one.astype(jnp.bfloat16), params)
    x = params["embed"][tokens]
    for layer in params["layers"]:
        with jax.named_scope("attention"):
            x = x + attended(normed(x, layer["before"]), layer)
        with jax.named_scope("mlp"):
            x = x + fed(normed(x, layer["after"]), layer)
    with jax.named_scope("head"):
        logits = (x @ params["embed"].T).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()


def step(params: Any, momentum: Any, tokens: Any) -> tuple[Any, Any, Any]:
    loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
    with jax.named_scope("optimizer"):
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        params = jax.tree.map(lambda p, m: p - 1e-3 * m, params, momentum)
    return params, momentum, loss


def shapes() -> dict[str, Any]:
    head = WIDTH // HEADS
    layer = {
        **dict.fromkeys(("query", "key", "value"), (WIDTH, HEADS, head)),
        "out": (HEADS, head, WIDTH),
        **dict.fromkeys(("up", "gate"), (WIDTH, HIDDEN)),
        "down": (HIDDEN, WIDTH),
        **dict.fromkeys(("before", "after"), (WIDTH,)),
    }
    return {"embed": (VOCABULARY, WIDTH), "layers": [layer] * LAYERS}


def compiled(options: dict[str, Any]) -> str:
    """The schedule for v6e-4: parameters and batch split over four chips."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
    mesh = Mesh(np.array(devices), ("fsdp",))

    def of(shape: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
        where = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    params = jax.tree.map(
        lambda shape: of(shape, jnp.float32, "fsdp"),
        shapes(),
        is_leaf=lambda one: isinstance(one, tuple),
    )
    tokens = of((BATCH, LENGTH), jnp.int32, "fsdp")
    jitted = jax.jit(step, donate_argnums=(0, 1))
    lowered = jitted.trace(params, params, tokens).lower(lowering_platforms=("tpu",))
    return lowered.compile(compiler_options=options).as_text()


if __name__ == "__main__":
    flags = dict(word.split("=", 1) for word in sys.argv[2:])
    Path(sys.argv[1]).write_text(compiled(flags))
