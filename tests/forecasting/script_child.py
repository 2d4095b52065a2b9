"""A script as users write it: classes, transformed functions and a mesh of this machine at its top level.

Prints one JSON object of two forecasts, with this machine's mesh and with the slice's.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import systolic

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    up: Any
    down: Any


@jax.tree_util.register_pytree_node_class
class Rows:
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.rows,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Rows":
        return cls(*children)


@struct.dataclass
class Scales:
    loss: Any
    power: int = struct.field(pytree_node=False, default=2)


class State(TrainState):
    scales: Scales = struct.field(default=None)


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x


def _forward(x: jax.Array) -> tuple[jax.Array, None]:
    return clipped(x), None


def _backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jnp.clip(gradient, -1, 1),)


clipped.defvjp(_forward, _backward)


@jax.checkpoint
def layer(weights: Weights, rows: Rows) -> jax.Array:
    hidden = jnp.tanh(rows.rows @ weights.up)
    hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, P("data", "model")))
    return clipped(hidden @ weights.down)


def step(state: State, rows: Rows) -> State:
    def loss(params: dict[str, Weights]) -> jax.Array:
        return (layer(params["mlp"], rows) ** state.scales.power).mean() * state.scales.loss

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def begin() -> State:
    weights = Weights(up=jnp.zeros((256, 512)), down=jnp.zeros((512, 256)))
    return State.create(
        apply_fn=layer,
        params={"mlp": weights},
        tx=optax.adam(1e-3),
        scales=Scales(loss=jnp.ones(())),
    )


def main() -> None:
    state, rows = jax.eval_shape(begin), Rows(jax.ShapeDtypeStruct((128, 256), jnp.float32))
    found = [
        systolic.forecast(jax.jit(step, donate_argnums=0), state, rows, on="v5e-4", quick=True)
    ]
    global mesh
    auto = (jax.sharding.AxisType.Auto,) * 2  # newer versions of JAX have Explicit by default
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"), axis_types=auto)
    spread = {"data": 2, "model": 2}
    found.append(
        systolic.forecast(
            jax.jit(step, donate_argnums=0), state, rows, on="v5e-4", quick=True, spread=spread
        )
    )
    print(json.dumps([[made.layout, made.step_seconds, made.to_json()["hbm"]] for made in found]))


if __name__ == "__main__":
    main()
