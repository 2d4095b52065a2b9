"""What is seen of the inputs of matrices, against the first layer's computed by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from systolic.job import Batch
from systolic.job.data import MASK
from systolic.quantizing.calibration import watched
from systolic.runs.weights import Weights
from tests.steps import tiny


def test_inputs_of_the_first_layer_are_normalised_embeddings() -> None:
    model = replace(tiny.MODEL, layers=2)
    made = tiny.steps(tiny.job(model=model, layout=tiny.ONE_DEVICE, batch=Batch(total=2)))
    params, model_state = jax.jit(made.network.init)(jax.random.key(0))
    weights = Weights(params=params, model_state=model_state, step=0, skipped=0)
    batches = [tiny.batch(made, seed) for seed in range(2)]
    assert {one[MASK].min() for one in map(jax.device_get, batches)} == {1}
    path, layers, width = "blocks/query", model.layers, model.d_model
    shapes = {path: (layers, width, width)}
    sums = watched(made, weights, shapes, iter(batches), jnp.add)
    largest = watched(made, weights, {path: (layers, width)}, iter(batches), jnp.maximum)
    embedding = np.asarray(weights.params["embedding"], np.float64)
    rows = np.concatenate([embedding[np.asarray(one["tokens"]).ravel()] for one in batches])
    seen = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(sums[path][0], seen.T @ seen, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(largest[path][0], abs(seen).max(0), rtol=1e-4)
    assert (largest[path][1:] > 0).all()
    nothing = watched(made, weights, {path: (layers, width)}, iter(()), jnp.maximum)
    assert not nothing[path].any()


def test_padding_does_not_count() -> None:
    """Of RMSNorm, an input x of d features has x x^T of trace d: the sum counts the positions that are no padding."""
    model = replace(tiny.MODEL, layers=2)
    steps = tiny.steps(tiny.job(model=model, layout=tiny.ONE_DEVICE, batch=Batch(total=4)))
    params, model_state = jax.jit(steps.network.init)(jax.random.key(0))
    weights = Weights(params=params, model_state=model_state, step=0, skipped=0)
    batch = dict(tiny.batch(steps, 0))
    segments = np.ones_like(np.asarray(batch["segments"]))
    segments[0, 5:] = segments[1] = 0
    batch |= {"segments": jnp.asarray(segments), MASK: jnp.asarray([1.0, 1.0, 1.0, 0.0])}
    counted, width = 5 + segments.shape[1], model.d_model
    shapes = dict.fromkeys(("blocks/query", "blocks/mlp/up"), (model.layers, width, width))
    for sums in watched(steps, weights, shapes, [batch], jnp.add).values():
        traces = np.trace(sums, axis1=1, axis2=2) / width
        np.testing.assert_allclose(traces, counted, rtol=1e-3)
    # The largest of a batch with outliers in the padding alone is that of the batch without them.
    shapes = {"blocks/query": (model.layers, width)}
    tokens = np.asarray(batch["tokens"])
    assert 63 not in tokens[segments > 0]
    batch["tokens"] = jnp.asarray(np.where(segments == 0, 63, tokens))
    plain = watched(steps, weights, shapes, [batch], jnp.maximum)["blocks/query"]
    params["embedding"] = params["embedding"].at[63, 0].set(1e3)
    np.testing.assert_array_equal(
        watched(steps, weights, shapes, [batch], jnp.maximum)["blocks/query"], plain
    )
