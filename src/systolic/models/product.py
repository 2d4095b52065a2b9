"""Products of activations with weights, in the precision that the target asks for."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from systolic.core.errors import MissingExtraError
from systolic.job import Rounding, Target

PER_CHANNEL = Rounding()


def product(
    target: Target,
    spec: str,
    x: jax.Array,
    weights: jax.Array,
    rounding: Rounding = PER_CHANNEL,
    *,
    heads: bool = False,
) -> jax.Array:
    """``einsum(spec, x, weights)``, in the dtype of ``x``.

    With ``int8`` or ``fp8`` operands both sides are rounded, per channel of what they contract over or as
    ``rounding`` says, in the backward pass the gradient too (Qwix); sums stay wide.

    Args:
        target: Says what operands are rounded to.
        spec: Of the einsum.
        x: Activations.
        weights: In the dtype that the target computes in.
        rounding: Ranges, and which gradients are rounded.
        heads: Whether the product makes queries, keys or values.

    Raises:
        MissingExtraError: Qwix is not installed.
    """
    if target.matmul_format is None:
        return jnp.einsum(spec, x, weights)
    rounded = _rounded(target.matmul_format, rounding.gradients(heads=heads), rounding.largest)
    return jnp.einsum(spec, x, weights, _dot_general=rounded)


@cache
def _rounded(matmul_format: str, gradients: bool, largest: float) -> Any:
    try:
        from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt
    except ImportError as error:
        raise MissingExtraError(f"precision {matmul_format}", "quant") from error
    forward = jnp.int8 if matmul_format == "int8" else jnp.float8_e4m3fn
    backward = jnp.int8 if matmul_format == "int8" else jnp.float8_e5m2
    range_ = f"fixed,{-largest},{largest}" if largest else "absmax"
    config = DotGeneralQtConfig(
        lhs_qtype=forward,
        rhs_qtype=forward,
        lhs_calibration_method=range_,
        rhs_calibration_method=range_,
        lhs_disable_channelwise_axes=largest > 0,
        rhs_disable_channelwise_axes=largest > 0,
        dlhs_grad_qtype=backward if gradients else None,
        drhs_grad_qtype=backward if gradients else None,
        dlhs_grad_disable_channelwise_axes=largest > 0,
        drhs_grad_disable_channelwise_axes=largest > 0,
        use_original_residuals=not gradients,
    )

    def dot_general(
        lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, *_: Any, **__: Any
    ) -> jax.Array:
        return dot_general_qt(lhs, rhs, dimension_numbers, config)

    return dot_general
