"""Grouped matmuls by tokamax's Pallas kernels, with the tiles that its autotuning chose.

Needs ``tokamax`` as :mod:`flash` does, and ``qwix`` (0.1.8 was used) beside it. The library refuses its kernels where no
TPU is; the functions under them do not ask.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from arrays import array, like

_LIBRARY = "tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel"
_DEFAULT = (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT)
TRANSPOSED = "lhs[m,k] x rhs[g,n,k]^T"
CONTRACTED = "ragged contraction (dW)"


def available() -> bool:
    """Whether both libraries are there."""
    return all(importlib.util.find_spec(name) is not None for name in ("tokamax", "qwix"))


def product(
    left: jax.Array, right: jax.Array, sizes: jax.Array, *, config: Mapping[str, Any], mode: str
) -> jax.Array:
    """``[rows, depth] x [groups, depth, columns]``, with the last two swapped, or ``[groups, depth, columns]`` of the
    rows of both."""
    library = importlib.import_module(_LIBRARY)
    fixed = {
        "precision": _DEFAULT,
        "out_dtype": left.dtype,
        "tiling": (config["tile_m"], config["tile_k"], config["tile_n"]),
        "input_buffer_count": config["input_buffer_count"],
    }
    if mode == CONTRACTED:
        scopes = config["combine_scopes"]
        return library.tgmm(left.mT, right, group_sizes=sizes, combine_scopes=scopes, **fixed)
    transposed = mode == TRANSPOSED
    return library.gmm(left, right, group_sizes=sizes, transpose_rhs=transposed, **fixed)


def with_sizes(
    function: Any, shapes: Mapping[str, Any]
) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """``function`` of operands and groups' sizes, with its abstract arguments.

    The sizes are an argument, of which a forecast knows nothing, but where one group has all rows: that the program holds,
    as tokamax's own benchmark holds its sizes.
    """
    operands = (array(shapes["lhs"]), array(shapes["rhs"]))
    groups = shapes["groups"]
    number = groups["num_groups"]
    if groups.get("max", 0) != operands[0].shape[0]:
        return function, (*operands, like((number,), jnp.int32))
    sizes = [operands[0].shape[0], *[0] * (number - 1)]

    def known(left: jax.Array, right: jax.Array) -> jax.Array:
        return function(left, right, jnp.array(sizes, jnp.int32))

    return known, operands


def twice(function: Any) -> Any:
    """``function`` with its result as the residual too, as tokamax returns it: a copy."""

    def both(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = function(*args)
        return made, made

    return both


def _config(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's tiles. Those of v5p's products with swapped weights were tuned when the library named a tile by its place
    in the weights: four of six exceed the dim that they would be of, up to seven times."""
    config = dict(row["config"])
    if row["generation"] == "v5p" and row["shapes"]["mode"] == TRANSPOSED:
        config |= {"tile_k": config["tile_n"], "tile_n": config["tile_k"]}
    return config


def program(row: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """Function and abstract arguments of a grouped matmul's row; None where it is not expressed."""
    shapes = row["shapes"]
    if shapes["precision"] != ["DEFAULT", "DEFAULT"] or not available():
        return None
    function = partial(product, config=_config(row), mode=shapes["mode"])
    return with_sizes(function, shapes)
