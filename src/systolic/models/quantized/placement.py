"""Quantized matrices in a built module, in the places of its parameters."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.core.errors import OptionError
from systolic.job import MatrixFormat, Model, WeightFormat
from systolic.job.precision import CODES, INPUTS, SCALES
from systolic.models.adapters import (
    BASE,
    STACKED,
    AdaptedWeight,
    Frozen,
    factored_of,
    inputs_of,
)
from systolic.models.grouped import Layered
from systolic.models.quantized.activations import factors_shape
from systolic.models.quantized.codes import (
    SCALES_DTYPE,
    Quantized,
    held_dtype,
    members_apart,
    scales_shape,
)

INT8 = MatrixFormat(format=WeightFormat.int8)
LEAST_GROUP = 16
"""Inputs that share a scale at least in 4 bits: with fewer, scales take a bit and more of each weight."""


class QuantizedWeight(nnx.Module):
    """A matrix in codes, scales and, for rounded activations, factors of its inputs, in the place of a parameter.

    Reading it as a parameter is read, ``weight[...]``, gives what :func:`~systolic.models.linear.product` takes.
    """

    def __init__(self, codes: Frozen, scales: Frozen, inputs: Frozen | None = None) -> None:
        self.codes, self.scales, self.inputs = codes, scales, inputs

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return Quantized(codes=self.codes[...], scales=self.scales[...]).shape

    def __getitem__(self, key: Any) -> Quantized | Layered:
        """The matrix; takes ``...`` alone."""
        assert key is Ellipsis
        codes, scales = self.codes.get_value(), self.scales.get_value()
        if isinstance(codes, Layered):
            stack = Quantized(codes=codes.stack, scales=scales.stack)
            return Layered(stack=stack, number=codes.number)
        inputs = None if self.inputs is None else self.inputs.get_value()
        return Quantized(codes=codes, scales=scales, inputs=inputs)


def with_members_apart(stacked: Any) -> Any:
    """Arrays of layers [layers, ...] whose codes have a dim for the members of a group, see :func:`~systolic.models.quantized.codes.members_apart`."""
    codes, scales = jax.tree_util.DictKey(CODES), jax.tree_util.DictKey(SCALES)
    leaves, form = jax.tree_util.tree_flatten_with_path(stacked)
    arrays = dict(leaves)

    def apart(path: tuple[Any, ...], value: Any) -> Any:
        own = arrays.get(tuple(scales if key == codes else key for key in path))
        return value if codes not in path or own is None else members_apart(value, own)

    return form.unflatten([apart(path, value) for path, value in leaves])


def place_quantized(module: nnx.Module, formats: Mapping[str, MatrixFormat], platform: str) -> None:
    """Puts quantized matrices of zeros in the places of weights; their codes and scales are read from files.

    Args:
        module: As its model built it, or with adapters; changed.
        formats: By path of the parameter.
        platform: Of the devices that hold them.

    Raises:
        OptionError: the module has no such parameter.
    """
    places = {
        "/".join(map(str, (*path, name))): (holder, name, value)
        for path, holder in nnx.iter_modules(module)
        for name, value in vars(holder).items()
        if isinstance(value, nnx.Param | Frozen | AdaptedWeight)
    }
    for path, how in formats.items():
        if path not in places:
            raise OptionError(f"the model has no parameter {path} to quantize; quantize it again")
        holder, name, weight = places[path]
        plain = getattr(weight, BASE) if isinstance(weight, AdaptedWeight) else weight
        axes = plain.get_metadata().get("out_sharding")
        shape = plain.get_value().shape
        scales = scales_shape(shape, inputs_of(axes), how)
        arrays = {
            CODES: jnp.zeros(shape, jnp.dtype(held_dtype(how, platform))),
            SCALES: jnp.zeros(scales, SCALES_DTYPE),
        }
        if how.format.activations:
            factors = factors_shape(shape, factored_of(axes), axes[0] in STACKED)
            arrays[INPUTS] = jnp.ones(factors, SCALES_DTYPE)
        parts = {part: Frozen(array, out_sharding=axes) for part, array in arrays.items()}
        if isinstance(weight, AdaptedWeight):
            quantized = AdaptedWeight(parts, weight.lora_a, weight.lora_b, weight.scale)
        else:
            quantized = QuantizedWeight(**parts)
        setattr(holder, name, quantized)


def formats_of_all(
    model: Model,
    shapes: Mapping[str, tuple[int, ...]],
    axes: Mapping[str, tuple[str | None, ...] | None],
    kind: WeightFormat,
) -> dict[str, tuple[tuple[int, ...], MatrixFormat]]:
    """The matrices of a model by path: dims that products sum over, and the format with its usual groups.

    Args:
        model: The model.
        shapes: Of its parameters, by path.
        axes: Logical names of their dims.
        kind: Of the codes.
    """
    formats = {}
    for path, names in axes.items():
        if names is None or not model.quantizable(path):
            continue
        inputs, shape = inputs_of(names), shapes[path]
        if len(shape) - (names[0] in STACKED) < 2:
            continue
        matrix_format = MatrixFormat(format=kind, group=kind.group)
        formats[path] = (inputs, fitting(matrix_format, shape[inputs[-1]], model.fewest_bits(path)))
    return formats


def fitting(
    matrix_format: MatrixFormat, size: int, fewest_bits: int, *, factored: bool = True
) -> MatrixFormat:
    """The format of a matrix: with a group that divides its last input dim of ``size``; int8 where 4 bits are too few, groups would be under :data:`LEAST_GROUP`, or its inputs stay as they are since they are not ``factored``."""
    if matrix_format.format.activations and not factored:
        return INT8
    if not matrix_format.group:
        return matrix_format
    group = math.gcd(size, matrix_format.group)
    narrow = group < min(LEAST_GROUP, matrix_format.group)
    if matrix_format.format.bits == 4 and (narrow or fewest_bits > 4):
        return INT8
    return replace(matrix_format, group=group)


def plain_path(path: str) -> str:
    """Path of the parameter that an array belongs to: of codes, scales and factors the matrix's."""
    home, _, last = path.rpartition("/")
    return home if last in (CODES, SCALES, INPUTS) else path
