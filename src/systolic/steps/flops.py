"""Matmul FLOPs of a program, counted from its jaxpr before any compiler."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def count(function: Callable[..., Any], *args: Any) -> float:
    """FLOPs of the matmuls and convolutions of ``function(*args)``, 2 per multiply-add.

    ``args`` may be ShapeDtypeStructs. Loops with a known trip count are multiplied out, a ``while``
    of unknown length counts once, and of the branches of a ``cond`` the largest counts.
    """
    return _jaxpr(jax.make_jaxpr(function)(*args).jaxpr)


def _jaxpr(jaxpr: Jaxpr) -> float:
    return sum(_equation(equation) for equation in jaxpr.eqns)


def _equation(equation: Any) -> float:
    primitive, params = equation.primitive.name, equation.params
    if primitive == "dot_general":
        return _dot(equation)
    if primitive == "ragged_dot_general":
        return _ragged_dot(equation)
    if primitive == "conv_general_dilated":
        return _convolution(equation)
    if primitive == "cond":
        return max(_jaxpr(branch.jaxpr) for branch in params["branches"])
    inner = sum(_jaxpr(j.jaxpr if isinstance(j, ClosedJaxpr) else j) for j in _nested(params))
    if primitive == "scan":
        return inner * params["length"]
    if primitive == "shard_map":
        return inner * params["mesh"].size
    return inner


def _nested(params: dict[str, Any]) -> list[Any]:
    jaxprs = []
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (ClosedJaxpr, Jaxpr)):
                jaxprs.append(item)
    return jaxprs


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return (
        2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
    )


def _ragged_dot(equation: Any) -> float:
    """FLOPs of a grouped matmul: each row is multiplied with the matrix of its own group."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    left, out = equation.invars[0].aval.shape, math.prod(equation.outvars[0].aval.shape)
    if set(numbers.lhs_ragged_dimensions) <= set(contracted):
        # The gradient of the matrices: [groups, ...], a row is in one of the groups.
        out //= equation.outvars[0].aval.shape[0]
    return 2.0 * out * math.prod(left[dim] for dim in contracted)


def _convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    out_features = equation.params["dimension_numbers"].rhs_spec[0]
    per_output = math.prod(size for dim, size in enumerate(kernel) if dim != out_features)
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * per_output
