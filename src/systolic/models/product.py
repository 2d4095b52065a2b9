"""Products of activations with weights, in the precision that the target asks for."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from systolic.core.errors import MissingExtraError
from systolic.job import Target


def product(target: Target, spec: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """``einsum(spec, x, weights)``, in the dtype of ``x``.

    With ``int8`` or ``fp8`` operands both sides are rounded per channel of what they contract over,
    in the backward pass the gradient too (Qwix); sums stay wide.

    Raises:
        MissingExtraError: Qwix is not installed.
    """
    if target.operands is None:
        return jnp.einsum(spec, x, weights)
    return jnp.einsum(spec, x, weights, _dot_general=_rounded(target.operands))


@cache
def _rounded(operands: str) -> Any:
    try:
        from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt
    except ImportError as error:
        raise MissingExtraError(f"precision {operands}", "quant") from error
    forward = jnp.int8 if operands == "int8" else jnp.float8_e4m3fn
    backward = jnp.int8 if operands == "int8" else jnp.float8_e5m2
    config = DotGeneralQtConfig(
        lhs_qtype=forward,
        rhs_qtype=forward,
        dlhs_grad_qtype=backward,
        drhs_grad_qtype=backward,
    )

    def dot_general(
        lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, *_: Any, **__: Any
    ) -> jax.Array:
        return dot_general_qt(lhs, rhs, dimension_numbers, config)

    return dot_general
