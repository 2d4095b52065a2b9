"""A program divided into what weights decide and the rest computes the same, and less in every call."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from systolic.steps.jaxpr import FoldedProgram

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


def scaled(params: dict, state: dict, batch: dict) -> dict:
    """A program whose constants have one shape and their values by the length of a row."""
    length = batch["x"].shape[1]
    by_length = np.array([length, 2 * length], np.float32)

    @jax.jit
    def inner(weights: jax.Array) -> jax.Array:
        return weights * by_length

    total = batch["x"].sum(1)
    return {
        "outer": total[:, None] / np.array([length, 1.0], np.float32),
        "inner": total * inner(params["v"]).sum(),
    }


def test_programs_of_other_constants_do_not_share_them() -> None:
    weights = ({"v": np.ones(2, np.float32)}, {})
    batches = [{"x": np.ones((2, length), np.float32)} for length in (4, 16)]
    folded = [FoldedProgram(scaled, weights, batch) for batch in batches]
    # As a predictor shares them: by key.
    constants = {one.key: one.constants(weights) for one in reversed(folded)}
    for one, batch in zip(folded, batches, strict=True):
        made, whole = one(constants[one.key], batch), scaled(*weights, batch)
        for name, array in whole.items():
            np.testing.assert_array_equal(made[name], array)
    again = FoldedProgram(scaled, weights, batches[0])
    assert again.key == folded[0].key


def test_a_constant_within_a_function_of_its_own_counts() -> None:
    """An exported program keeps its constants in the functions that it calls."""
    x, table = jax.ShapeDtypeStruct((2,), "float32"), np.array([1.0, 2.0], np.float32)

    def key(values: np.ndarray) -> str:
        closed = jax.make_jaxpr(lambda w: w * values)(x)

        def call(params: dict, state: dict, batch: dict) -> dict:
            (made,) = jax.extend.core.jaxpr_as_fun(closed)(params["w"])
            whole = jax.lax.cond(params["on"], lambda w: w * values, lambda w: w, params["w"])
            return {"y": batch["x"] * made + whole}

        weights = ({"w": x, "on": jax.ShapeDtypeStruct((), "bool")}, {})
        return FoldedProgram(call, weights, {"x": x}).key

    assert key(table) == key(table.copy())
    assert key(table) != key(2 * table)
