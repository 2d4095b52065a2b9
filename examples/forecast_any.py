"""What a TPU slice will do with a function of your own, without a TPU: `python examples/forecast_any.py`.

Needs the TPU compiler: pip install 'systolic[tpu]'. Equinox is optional.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import systolic
from systolic import Spread


def plain(x, w):
    """A plain function: one matmul, the rows of x spread over the slice."""
    return jax.nn.gelu(x @ w)


def show(name, forecast):
    """One line of a forecast."""
    record = forecast.to_json()
    print(
        f"{name}: {record['step_seconds'] * 1e6:.0f} us on {record['slice']}, bound by "
        f"{record['bound_by']}, {record['hbm']['peak_bytes'] / 2**20:.0f} MiB"
    )


def main():
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    rows = Spread(mesh={"data": 4}, in_specs=(P("data"), P()))
    show("plain function", systolic.forecast(plain, x, w, on="v5e-4", spread=rows))

    # A Flax model: its weights are arguments, so that they are not constants of the program.
    graph, weights = nnx.split(nnx.eval_shape(lambda: nnx.Linear(4096, 4096, rngs=nnx.Rngs(0))))

    def loss(weights, x):
        return jnp.sum(nnx.merge(graph, weights)(x) ** 2)

    wide = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
    show(
        "Flax gradient",
        systolic.forecast(jax.grad(loss), weights, wide, on="v6e-4", spread={"data": 4}),
    )

    try:
        import equinox as eqx
    except ImportError:
        print("Equinox model: skipped, pip install equinox")
        return
    model = eqx.filter_eval_shape(eqx.nn.Linear, 4096, 4096, key=jax.random.key(0))
    arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def call(arrays, x):
        return jax.vmap(eqx.combine(arrays, static))(x)

    show("Equinox model", systolic.forecast(call, arrays, wide, on="v5p-8", spread={"data": 4}))


if __name__ == "__main__":
    main()
