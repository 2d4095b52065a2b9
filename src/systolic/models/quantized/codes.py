"""Matrices in fewer bits: codes with scales, in the place of a parameter's array.

Memory holds, and each step reads, the codes. Where an output channel has one scale the product is made of the codes,
which the compiler widens on their way to the matrix unit, and its result is scaled; so are the sums of each group where groups have
their own scales and there are few rows of activations. Other matrices are restored one at a time, on a TPU on their way to the matrix unit too. Codes are made by Qwix; reading them needs no other package.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from systolic.core.errors import extra
from systolic.job import MatrixFormat, WeightFormat

SCALES_DTYPE = "bfloat16"
"""Dtype of scales: codes are computed with the rounded scale, so that it costs no accuracy beside its 2 bytes."""
NARROW_DTYPES = "int4", "uint4"
"""Dtypes whose elements lie two to a byte."""
FEW_ROWS = 128
"""Rows of activations up to which sums by group are taken. By the compiler's cycles for 4,096 x 14,336 in groups of 64 they cost 0.08 of restoring
the matrix on v6e at 16 rows and as much at about 370, on v5e at about 230: sums of 64 inputs fill a part of the matrix unit only."""
QUANTILES = "uint4", "uint8"
"""Dtypes of the codes of nf4; those of all other formats are numbers."""

Make = Callable[[str, jax.Array, jax.Array], jax.Array]
"""Function that computes an einsum of activations and a matrix."""

NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Numbers that the codes of nf4 stand for (Dettmers et al. 2023, appendix E): who reads a quantized model needs no Qwix."""


def _quantiles(codes: jax.Array, dtype: Any) -> jax.Array:
    """Values of nf4's codes, of the same shape, in ``dtype``.

    Chosen bit by bit: 15 selects, which fuse with the product. An index into the table is a gather, which TPUs compute one
    element at a time on the scalar unit where the table comes into a loop.
    """
    bits = codes.astype(jnp.int32)
    values = [jnp.full((), value, dtype) for value in NF4_VALUES]
    for bit in range(4):
        is_set = (bits >> bit) & 1 == 1
        values = [
            jnp.where(is_set, odd, even)
            for even, odd in zip(values[::2], values[1::2], strict=True)
        ]
    return values[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """A matrix in fewer bits, or a stack of them, in the place of a parameter's array."""

    codes: jax.Array
    """int8, int4, float8 (e4m3) or uint4 (nf4), of the matrix's shape; on a CPU int8 and uint8 in place of 4 bits.

    The members of a group can have a dim of their own, see :func:`members_apart`.
    """
    scales: jax.Array
    """Array of the matrix's rank; dims that share a scale have size 1, or are shorter where groups of neighbours share one."""
    inputs: jax.Array | None = None
    """Factors that the codes were multiplied with, of the same rank, where activations are divided by them and rounded too (:mod:`systolic.models.quantized.activations`)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return _joined_shape(self.codes.shape, self.scales.shape)

    @property
    def apart(self) -> bool:
        """Whether the members of a group have a dim of their own in ``codes``."""
        return self.codes.ndim > self.scales.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the codes."""
        return self.codes.dtype

    def joined(self) -> "Quantized":
        """The same with codes of the matrix's shape."""
        return Quantized(codes=self.codes.reshape(self.shape), scales=self.scales)

    @property
    def grouped(self) -> bool:
        """Whether a dim has several scales and fewer than elements."""
        pairs = zip(self.shape, self.scales.shape, strict=True)
        return any(1 < scales < size for size, scales in pairs)

    @property
    def scaled_after(self) -> bool:
        """Whether a product of the codes can be scaled: codes are numbers, and no dim has groups."""
        return self.codes.dtype.name not in QUANTILES and not self.grouped

    def __getitem__(self, key: Any) -> "Quantized":
        """The matrix, as a parameter is read: takes ``...`` alone."""
        assert key is Ellipsis
        return self

    def restored(self, dtype: Any = None) -> jax.Array:
        """The matrix in a dtype, by default that of its scales."""
        dtype = jnp.dtype(self.scales.dtype if dtype is None else dtype)
        if self.codes.dtype.name in QUANTILES:
            values = _quantiles(self.codes, dtype)
        else:
            values = self.codes.astype(dtype)
        scales = self.scales.astype(dtype)
        if not self.grouped:
            factors = 1 if self.inputs is None else self.inputs.astype(dtype)
            return values * scales / factors
        split: list[int] = []
        spread: list[int] = []
        for size, count in zip(self.shape, scales.shape, strict=True):
            split += [count, size // count]
            spread += [count, 1]
        return (values.reshape(split) * scales.reshape(spread)).reshape(self.shape)


def members_apart(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Codes of a stack of matrices [layers, ...] with a dim for the groups and one for their members, where one dim has groups.

    Of a layer of such a stack the compiler restores a matrix and multiplies it in one operation. One that is divided after it was
    read from the stack is written to memory first, with a matrix of scales of four times its bytes.
    """
    own, scaled = codes.shape[1:], scales.shape[1:]
    split = [dim for dim, pair in enumerate(zip(own, scaled, strict=True)) if 1 < pair[1] < pair[0]]
    if len(split) != 1:
        return codes
    divided = _divided(codes, split[0] + 1, scaled[split[0]])
    return divided if _apart_dim(divided.shape[1:], scaled) == split[0] else codes


def _apart_dim(codes: tuple[int, ...], scales: tuple[int, ...]) -> int:
    """The first dim of a matrix that codes of one rank more can have divided: the others' scales are one, or one each."""
    for dim, count in enumerate(scales):
        others = zip(
            (*codes[:dim], *codes[dim + 2 :]), (*scales[:dim], *scales[dim + 1 :]), strict=True
        )
        if codes[dim] == count and all(scale_count in (1, size) for size, scale_count in others):
            return dim
    raise ValueError(f"codes {codes} do not belong to scales {scales}")


def _joined_shape(codes: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a matrix by those of its codes and scales."""
    if len(codes) == len(scales):
        return codes
    dim = _apart_dim(codes, scales)
    return (*codes[:dim], codes[dim] * codes[dim + 1], *codes[dim + 2 :])


def held_dtype(how: MatrixFormat, platform: str) -> str:
    """Dtype of codes in memory: of 4 bits a byte on a CPU, where XLA has no packed ones.

    There JAX 0.10 refuses arrays of int4 as arguments of programs that were compiled ahead of time, as those of servers are.
    """
    wide = {"int4": "int8", "uint4": "uint8"} if platform == "cpu" else {}
    return wide.get(how.format.dtype, how.format.dtype)


def stored_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array in memory; codes of 4 bits lie two to a byte."""
    wide = jnp.dtype(dtype)
    bits = 4 if wide.name in NARROW_DTYPES else 8 * wide.itemsize
    return -(-math.prod(shape) * bits // 8)


def scales_shape(
    shape: tuple[int, ...], inputs: tuple[int, ...], how: MatrixFormat
) -> tuple[int, ...]:
    """Shape of the scales of a matrix whose products sum over the dims ``inputs``."""
    sizes = [1 if dim in inputs else size for dim, size in enumerate(shape)]
    if how.group:
        last = inputs[-1]
        sizes[last] = shape[last] // math.gcd(shape[last], how.group)
        # Other inputs have scales of their own, since a group is of neighbours.
        for dim in inputs[:-1]:
            sizes[dim] = shape[dim]
    return tuple(sizes)


def quantized(
    value: jax.Array,
    inputs: tuple[int, ...],
    how: MatrixFormat,
    scales_dtype: Any = SCALES_DTYPE,
) -> Quantized:
    """A matrix of floats in fewer bits, scaled by the largest of each channel or group.

    Args:
        value: The matrix, or a stack of them.
        inputs: Dims that products sum over.
        how: Format and group.
        scales_dtype: Dtype of the scales.

    Raises:
        MissingExtraError: Qwix is not installed.
    """
    qarray = _qwix()
    shape = scales_shape(value.shape, inputs, how)
    pairs = list(enumerate(zip(value.shape, shape, strict=True)))
    way = qarray.HowToQuantize(
        qtype="nf4" if how.format is WeightFormat.nf4 else how.format.dtype,
        channelwise_axes=tuple(dim for dim, (size, count) in pairs if size == count),
        tiled_axes={dim: size // count for dim, (size, count) in pairs if 1 < count < size},
    )
    wide = value.astype(jnp.float32)
    scales, _ = qarray.compute_scale_zero_point(qarray.calibrate(wide, way), way.qtype)
    scales = scales.astype(scales_dtype)
    array = qarray.quantize_with_scale_zero_point(wide, way.qtype, scales, None)
    return Quantized(codes=array.qvalue, scales=scales)


def fake_quantized(
    value: jax.Array, inputs: tuple[int, ...], how: MatrixFormat, dtype: Any
) -> jax.Array:
    """Array that the codes of a matrix stand for, in a dtype; its gradient is the matrix's (Bengio et al. 2013, straight-through).

    Args: as :func:`quantized`.
    """

    @jax.custom_vjp
    def rounded(value: jax.Array) -> jax.Array:
        return quantized(value, inputs, how).restored(dtype)

    rounded.defvjp(
        lambda value: (rounded(value), None),
        lambda _, gradient: (gradient.astype(value.dtype),),
    )
    return rounded(value)


def quantized_product(
    spec: str,
    x: jax.Array,
    weights: Quantized,
    make: Make = jnp.einsum,
    *,
    of_codes: Make | None = None,
    by_group: bool = False,
) -> jax.Array:
    """``einsum(spec, x, weights)`` in the dtype of ``x``; the scales of channels are applied to the result, or to ``x`` where it has their dims.

    Args:
        spec: Of the einsum.
        x: Activations.
        weights: The matrix.
        make: What multiplies two arrays of a dtype.
        of_codes: What multiplies activations with codes; by default ``make`` with the codes in their dtype.
        by_group: Whether groups are summed one by one, and the sums scaled, where ``x`` has at most :data:`FEW_ROWS` rows.
    """
    operands, out = spec.split("->")
    operand, matrix = operands.split(",")
    scaled = {letter for letter, size in zip(matrix, weights.scales.shape, strict=True) if size > 1}
    if of_codes is None:
        of_codes = lambda spec, x, codes: make(spec, x, codes.astype(x.dtype))  # noqa: E731
    if weights.scaled_after and scaled <= set(out):
        outputs = of_codes(spec, x, weights.codes)
        return outputs * spread(weights.scales, matrix, out).astype(x.dtype)
    if weights.scaled_after and scaled <= set(operand):
        x = x * spread(weights.scales, matrix, operand).astype(x.dtype)
        return of_codes(spec, x, weights.codes)
    if by_group and _by_group(spec, weights):
        pairs = zip(operand, x.shape, strict=True)
        rows = math.prod(size for letter, size in pairs if letter not in matrix)
        if rows <= FEW_ROWS and weights.codes.dtype.name not in QUANTILES:
            return _group_product(spec, x, weights)
        if weights.grouped:
            return _divided_product(spec, x, weights)
    return make(spec, x, weights.restored(x.dtype))


def _by_group(spec: str, weights: Quantized) -> bool:
    """Whether scales belong to inputs that are summed over, at most one of which has groups."""
    operands, out = spec.split("->")
    split = _split(operands.partition(",")[2], weights)
    return len(split) <= 1 and set(split).isdisjoint(out)


def _divided_product(spec: str, x: jax.Array, weights: Quantized) -> jax.Array:
    """The product with a restored matrix whose groups' members have a dim of their own: its scales are not written to memory."""
    operands, out = spec.split("->")
    operand, matrix = operands.split(",")
    (letter,) = _split(matrix, weights)
    dim, inside = matrix.index(letter), _unused(spec)
    groups = weights.scales.shape[dim]
    codes = weights.codes if weights.apart else _divided(weights.codes, dim, groups)
    # Otherwise the compiler joins the dims again, and then writes the scales.
    codes = jax.lax.optimization_barrier(codes)
    members = Quantized(codes=codes, scales=jnp.expand_dims(weights.scales, dim + 1))
    x = _divided(x, operand.index(letter), groups)
    operand, matrix = (text.replace(letter, letter + inside) for text in (operand, matrix))
    return jnp.einsum(f"{operand},{matrix}->{out}", x, members.restored(x.dtype))


def _unused(spec: str) -> str:
    """A letter for one more dim of an einsum."""
    return next(letter for letter in "zyxwvut" if letter not in spec)


def _split(matrix: str, weights: Quantized) -> list[str]:
    """Letters of the dims with groups."""
    sizes = zip(matrix, weights.shape, weights.scales.shape, strict=True)
    return [letter for letter, size, count in sizes if 1 < count < size]


def _group_product(spec: str, x: jax.Array, weights: Quantized) -> jax.Array:
    """The product as sums over the inputs that share a scale, float32, which are scaled and then added up.

    The compiler makes one operation of it, which reads codes and scales. To restore the matrix before the product it would
    write a matrix of scales to memory, of four times the bytes of the codes.
    """
    operands, out = spec.split("->")
    operand, matrix = operands.split(",")
    codes, scales = weights.codes, weights.scales
    scaled = [letter for letter, count in zip(matrix, scales.shape, strict=True) if count > 1]
    later = [letter for letter in scaled if letter not in out]
    sums = "".join([*(letter for letter in out if letter in operand), *later])
    sums += "".join(letter for letter in out if letter not in operand)
    factors = spread(scales, matrix, sums).astype(jnp.float32)
    for letter in _split(matrix, weights):
        inside, groups = _unused(spec), scales.shape[matrix.index(letter)]
        codes = codes if weights.apart else _divided(codes, matrix.index(letter), groups)
        x = _divided(x, operand.index(letter), groups)
        operand, matrix = (text.replace(letter, letter + inside) for text in (operand, matrix))
    wide = jnp.float32
    form = f"{operand},{matrix}->{sums}"
    partial_sums = jnp.einsum(form, x, codes.astype(x.dtype), preferred_element_type=wide) * factors
    total = partial_sums.sum([sums.index(letter) for letter in later])
    left = [letter for letter in sums if letter not in later]
    return total.transpose([left.index(letter) for letter in out]).astype(x.dtype)


def _divided(array: jax.Array, dim: int, groups: int) -> jax.Array:
    """The array with a dim as two: groups, and what each has."""
    return array.reshape(*array.shape[:dim], groups, -1, *array.shape[dim + 1 :])


def spread(scales: jax.Array, letters: str, into: str) -> jax.Array:
    """Scales with the dims ``letters`` as they broadcast over an array with the dims ``into``."""
    kept = [letter for letter, size in zip(letters, scales.shape, strict=True) if size > 1]
    order = sorted(kept, key=into.index)
    values = scales.reshape([size for size in scales.shape if size > 1])
    values = values.transpose([kept.index(letter) for letter in order])
    sizes = dict(zip(order, values.shape, strict=True))
    return values.reshape([sizes.get(letter, 1) for letter in into])


def _qwix():
    with extra("quantized weights", "quant"):
        from qwix._src.core import qarray
    return qarray
