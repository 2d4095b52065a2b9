"""Programs for the compiler to work on: small, and large in memory alone."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from systolic.chips import slice
from systolic.compiling import FunctionProgram
from systolic.core.errors import LayoutError
from systolic.forecasting.function import Spread, function_program


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.tanh(a @ b)


def mistaken(a: jax.Array, b: jax.Array) -> jax.Array:
    return b @ a @ a


def refused(a: jax.Array, b: jax.Array) -> jax.Array:
    raise LayoutError("3 heads do not divide among 4 devices; choose 4")


def deadly(a: jax.Array, b: jax.Array) -> jax.Array:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)
    return a @ b


def outer(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """An n x n matrix of bf16 and its cumulative sum; ``params`` are updated in place."""
    y = jnp.sin(x @ x.T)
    z = jnp.cumsum(y, axis=0) @ x
    return jax.tree.map(lambda p: p * 2, params), z + y @ x


def program(function: Any, on: str = "v5e-4") -> FunctionProgram:
    a = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    b = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    target = slice(on)
    spread = Spread(in_specs=(PartitionSpec("devices"), PartitionSpec()))
    return function_program(function, (a, b), {}, target, spread)


def large(rows: int, on: str = "v5e-1") -> FunctionProgram:
    """About 14 GiB of arguments, and temporaries of ``2 x rows x rows`` bytes each."""
    params = {"w": jax.ShapeDtypeStruct((14 * 2**19, 1024), jnp.bfloat16)}
    x = jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16)
    return function_program(outer, (params, x), {}, slice(on), Spread(donate_argnums=(0,)))
