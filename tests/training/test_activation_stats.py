"""What is seen of the inputs of matrices, against the first layer's computed by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from systolic.job import Batch
from systolic.job.data import MASK
from systolic.quantizing.calibration import largest_inputs, watched
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
    largest = largest_inputs(made, weights, {path: (layers, width)}, iter(batches))
    embedding = np.asarray(weights.params["embedding"], np.float64)
    rows = np.concatenate([embedding[np.asarray(one["tokens"]).ravel()] for one in batches])
    seen = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6)
    assert sums is not None
    np.testing.assert_allclose(sums[path][0], seen.T @ seen, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(largest[path][0], abs(seen).max(0), rtol=1e-4)
    assert (largest[path][1:] > 0).all()
    nothing = largest_inputs(made, weights, {path: (layers, width)}, iter(()))
    assert not nothing[path].any()
    assert watched(made, weights, shapes, iter(()), jnp.add) is None
