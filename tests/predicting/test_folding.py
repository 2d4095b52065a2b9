"""A program divided into what weights decide and the rest computes the same, and less in every call."""

import jax
import jax.numpy as jnp
import numpy as np

from systolic.predicting.folding import FoldedProgram

STACK = np.random.default_rng(0).normal(size=(3, 4, 4)).astype(np.float32)
VARIANCE = np.array([1.0, 4.0, 9.0, 16.0], np.float32)
TABLE = np.arange(7, dtype=np.int32)
"""A constant of the program."""


def network(params: dict, state: dict, batch: dict) -> dict:
    x = batch["x"]
    for index in range(3):
        x = jnp.tanh(x @ jax.lax.index_in_dim(params["stack"], index, keepdims=False))
    scale = jax.lax.rsqrt(state["variance"] + 1e-5)
    return {
        "wide": x * scale + jnp.broadcast_to(state["variance"], x.shape),
        "scale": scale,
        "table": jnp.asarray(TABLE)[batch["at"]],
    }


def test_what_weights_decide_is_computed_once() -> None:
    weights = ({"stack": STACK}, {"variance": VARIANCE})
    batch = {"x": np.ones((1000, 4), np.float32), "at": np.array([2, 5])}
    folded = FoldedProgram(network, weights, batch)
    constants = folded.constants(weights)
    made = jax.jit(folded)(constants, batch)
    whole = jax.jit(network)(*weights, batch)
    for name, array in whole.items():
        np.testing.assert_array_equal(made[name], array, strict=True)
    # One matrix of each layer and the scale; no slice and no root is left in the program.
    left = {e.primitive.name for e in jax.make_jaxpr(folded)(constants, batch).jaxpr.eqns}
    assert not left & {"slice", "dynamic_slice", "rsqrt"}
    assert sum(one.shape == (4, 4) for one in constants) == 3
    # Nothing of the weights is kept in the size of a batch.
    assert max(one.size for one in constants) == 16


def test_programs_of_other_batches_share_their_constants() -> None:
    weights = ({"stack": STACK}, {"variance": VARIANCE})
    each = [
        FoldedProgram(
            network, weights, {"x": np.ones((rows, 4), np.float32), "at": np.zeros(rows, int)}
        )
        for rows in (2, 5)
    ]
    assert each[0].key == each[1].key
