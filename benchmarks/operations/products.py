"""Matmuls, dense and ragged, copies and collectives in plain operations."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import grouped
import jax
import jax.numpy as jnp
from arrays import array, like
from jax.sharding import PartitionSpec

Spread = tuple[Mapping[str, int], Any]
"""A mesh and the partitions of the arguments."""


KINDS = ("matmul", "grouped_matmul", "HBM copy", "all-gather", "all-reduce", "collective-permute")
"""What a row's ``what`` begins with, where its program is here."""


_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "s8": jnp.int8}
"""Of dense products."""


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Product that keeps the operands' dtype; of int8 the sums are int32."""
    integers = jnp.issubdtype(a.dtype, jnp.integer)
    return jnp.matmul(a, b, preferred_element_type=jnp.int32 if integers else a.dtype)


def matmul_relu(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.relu(a @ b)


def copy(x: jax.Array) -> jax.Array:
    return jnp.copy(x)


def ragged(
    left: jax.Array, right: jax.Array, sizes: jax.Array, *, dims: Any, dtype: Any
) -> jax.Array:
    made = jax.lax.ragged_dot_general(
        left,
        right,
        group_sizes=sizes,
        ragged_dot_dimension_numbers=dims,
        precision=(jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT),
        preferred_element_type=jnp.float32,
    )
    return made.astype(dtype)


def _ragged(row: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    shapes = row["shapes"]
    if shapes["precision"] != ["DEFAULT", "DEFAULT"]:
        return None
    contracted, groups = {
        "lhs[m,k] x rhs[g,k,n]": (([1], [1]), [0]),
        grouped.TRANSPOSED: (([1], [2]), [0]),
        grouped.CONTRACTED: (([0], [0]), []),
    }[shapes["mode"]]
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=groups,
    )
    dtype = array(shapes["lhs"]).dtype
    return grouped.with_sizes(partial(ragged, dims=dims, dtype=dtype), shapes)


def gathered(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, "devices", tiled=True)


def summed(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "devices")


def shifted(x: jax.Array, *, size: int) -> jax.Array:
    return jax.lax.ppermute(x, "devices", [(i, (i + 1) % size) for i in range(size)])


def mapped(function: Any, *, spec: Any, out: Any) -> Any:
    """``function`` of each device's part, on the mesh that is set."""

    def call(x: jax.Array) -> jax.Array:
        return jax.shard_map(function, in_specs=spec, out_specs=out, check_vma=False)(x)

    return call


def program(row: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """Function and abstract arguments of a row; None where it is not expressed."""
    what, shapes = row["what"], row["shapes"]
    if what == "grouped_matmul":
        made = grouped.program(row) if row["implementation"] == "pallas" else _ragged(row)
        if made is None or row["notes"] != "residuals returned":
            return made
        return grouped.twice(made[0]), made[1]
    if what.startswith("matmul"):
        if "pallas" in str(shapes.get("implementation", "")):
            return None
        dtype = next((d for d in _DTYPES if str(shapes.get("dtype")).startswith(d)), None)
        if dtype is None:
            raise ValueError(f"dtype {shapes.get('dtype')!r} is none of {', '.join(_DTYPES)}")
        a = like((shapes["m"], shapes["k"]), _DTYPES[dtype])
        b = like((shapes["k"], shapes["n"]), _DTYPES[dtype])
        return matmul_relu if "relu" in what else matmul, (a, b)
    if what.startswith("HBM copy"):
        # The benchmark's bytes are of the array; rows of 1,024 lanes lie without padding.
        return copy, (like((shapes["bytes"] // 2048, 1024), jnp.bfloat16),)
    return None


def spread(row: Mapping[str, Any], size: int) -> tuple[Any, tuple[Any, ...], Spread] | None:
    """A collective over all devices of a slice; None where it is not expressed."""
    what, shapes = row["what"], row["shapes"]
    whole, split = PartitionSpec(), PartitionSpec("devices")
    mesh = {"devices": size}
    if what == "all-gather" and shapes.get("participants") == size:
        x = array(shapes["in_shape"])
        given = like((x.shape[0] * size, *x.shape[1:]), x.dtype)
        return mapped(gathered, spec=split, out=whole), (given,), (mesh, (split,))
    if what == "all-reduce" and str(shapes.get("replica_groups")) == f"one group of {size}":
        return mapped(summed, spec=whole, out=whole), (array(shapes["shape"]),), (mesh, (whole,))
    if what.startswith("collective-permute"):
        count = shapes["bytes_per_device"] // 2
        given = like((size, max(count // 128, 1), 128), jnp.bfloat16)
        function = partial(shifted, size=size)
        return mapped(function, spec=split, out=split), (given,), (mesh, (split,))
    return None
