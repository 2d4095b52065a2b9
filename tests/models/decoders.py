"""Tiny decoders with random weights: their logits of whole texts and through a cache, each in one program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from systolic.job import Job
from systolic.models.decoder.config import Decoder
from systolic.steps.network import ModelStructure
from tests.steps import tiny

CACHED = 1e-4
"""How far logits through a cache may be from those of the whole text."""


def module(config: Decoder, seed: int = 0) -> Any:
    """With weights of NumPy: none starts at zero, which would hide what is connected to what, and no program draws them."""
    network = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=config)).network
    return network.module(*drawn(network, seed), train=False)


def drawn(network: ModelStructure, seed: int = 0) -> tuple[Any, Any]:
    """Parameters and other variables: scales around one, variances of one, other variables of zero."""
    draw = np.random.default_rng(seed)
    params = {
        name: jnp.asarray(name.endswith("scale") + 0.2 * draw.normal(size=of.shape), of.dtype)
        for name, of in network.params.items()
    }
    rest = {
        name: jnp.asarray(np.full(of.shape, name.endswith("var")), of.dtype)
        for name, of in network.model_state.items()
    }
    return params, rest


def slopes(job: Job) -> tuple[jax.Array, Any]:
    """The loss of a batch and its gradients, in training."""
    steps = tiny.steps(job)
    params, rest = drawn(steps.network)

    def loss(params: Any, batch: Any) -> jax.Array:
        return steps.sums(params, rest, batch, train=True)[0]["loss"].total

    return jax.jit(jax.value_and_grad(loss))(params, tiny.batch(steps, 0))


def check_slopes(found: tuple[jax.Array, Any], wanted: tuple[jax.Array, Any]) -> None:
    """A loss and its gradients are those of another program, and none of them is nothing."""
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for name, value in wanted[1].items():
        largest = float(jnp.abs(value).max())
        assert largest > 0, name
        np.testing.assert_allclose(found[1][name], value, atol=2e-4 * largest, err_msg=name)


def arrays(sequence: int, segments: list[int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, segments and positions of one row."""
    tokens = np.random.default_rng(0).integers(0, 64, (1, sequence)).astype(np.int32)
    owner = np.repeat(np.arange(len(segments), dtype=np.int32) + 1, segments)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in segments])
    return jnp.asarray(tokens), jnp.asarray(owner[None]), jnp.asarray(positions[None])


def program(net: Any, function: Any) -> Any:
    """A function of a module and arrays, jitted, with the module's weights as arguments."""
    graph, state = nnx.split(net)
    jitted = jax.jit(lambda state, *given: function(nnx.merge(graph, state), *given))
    return lambda *given: jitted(state, *given)


def logits(net: Any, *given: jax.Array) -> jax.Array:
    """Of tokens, segments and positions."""
    return nnx.capture(net, nnx.Intermediate)(*given)[0]


def check_cache(net: Any, length: int = 10, prompt: int = 5, capacity: int = 16) -> jax.Array:
    """Logits of a text, which are those of a padded prompt and of one token after another."""

    def both(net: Any, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens, filled = given[0], jnp.pad(given[0][:, :prompt], ((0, 0), (0, 3)))

        def extend(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            made, cache = net.extend(token, cache)
            return cache, made

        hidden, cache = net.prefill(filled, jnp.array([prompt]), capacity, jnp.float32)
        first = net.logits(hidden)[0, :prompt]
        _, others = jax.lax.scan(extend, cache, tokens[:, prompt:].T)
        return logits(net, *given)[0], jnp.concatenate([first, others[:, 0]])

    whole, written = program(net, both)(*arrays(length, [length]))
    np.testing.assert_allclose(written, whole, atol=CACHED)
    return whole
