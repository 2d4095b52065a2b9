"""Products of activations with weights, in the precision that the target asks for."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from systolic.core.errors import extra
from systolic.job import Rounding, Target
from systolic.models.quantized.activations import (
    Watched,
    joined_product,
    w8a8_product,
    watched_input,
)
from systolic.models.quantized.codes import Quantized, quantized_product

PER_CHANNEL = Rounding()
FEW = 512
"""Most rows of activations whose products in a server on a CPU are made of two matrices."""
SPLIT_ROWS = 64
"""Most rows of activations that are split into digits for a product with int8 codes: of more, codes as floats cost little beside the product."""
BASE = 254
"""Base of the digits, which are -127 to 127."""
DIGITS = 127 * BASE + 126
"""Largest number of two digits: its first is not rounded to 128."""
TOGETHER = 4
"""Rows of activations that XLA's CPU kernel of int8 takes at the price of one."""
HALVED = range(200_000, 500_000)
"""Elements of a float32 matrix that XLA's CPU compiler multiplies with one row on one core, and its halves on two."""
GROUPS = 8
"""Most groups of outputs of matrices that are joined with factors of their own."""
SHORT = 768
"""Inputs of a product of int8 below which more rows than :data:`TOGETHER` take 0.8 of the time with the codes as the right operand."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Turned:
    """A matrix with its outputs as rows, as XLA's CPU kernels read it as the left operand without a copy."""

    rows: jax.Array
    """[outputs ..., inputs ...]."""
    inputs: int = field(metadata={"static": True})
    """Dims that products sum over."""
    parts: tuple[tuple[int, ...], ...] = field(default=(), metadata={"static": True})
    """Dims of the outputs of each matrix of which it is the rows, one after the other; empty where it is of one."""

    @classmethod
    def of(cls, matrix: jax.Array, inputs: int) -> "Turned":
        """The matrix [inputs ..., outputs ...]."""
        dims = range(matrix.ndim)
        return cls(rows=matrix.transpose(*dims[inputs:], *dims[:inputs]), inputs=inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix as it was."""
        first = self.rows.ndim - self.inputs
        return (*self.rows.shape[first:], *self.rows.shape[:first])

    @property
    def ndim(self) -> int:
        """Dims of the matrix."""
        return self.rows.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of its elements."""
        return self.rows.dtype

    def astype(self, dtype: Any) -> "Turned":
        """The matrix in a dtype."""
        return replace(self, rows=self.rows.astype(dtype))

    def __getitem__(self, key: Any) -> "Turned":
        """The matrix, as a parameter is read: takes ``...`` alone."""
        assert key is Ellipsis
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """Matrices that multiply the same rows, side by side, so that a GPU runs one product and copies none of them for it."""

    matrix: jax.Array
    """[inputs, outputs of all, ...]."""
    sizes: tuple[int, ...] = field(metadata={"static": True})
    """Outputs of each, along the second dim."""

    @classmethod
    def of(cls, matrices: Sequence[jax.Array]) -> "Joined":
        """The matrices [inputs, outputs, ...]."""
        sizes = tuple(matrix.shape[1] for matrix in matrices)
        return cls(matrix=jnp.concatenate(matrices, axis=1), sizes=sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all as one."""
        return self.matrix.shape

    def __getitem__(self, key: Any) -> "Joined":
        """The matrices, as a parameter is read: takes ``...`` alone."""
        assert key is Ellipsis
        return self


class MatrixParts(NamedTuple):
    """Parts of a matrix of a server."""

    rows: Any
    """Its elements, or its codes."""
    scales: Any = None
    """Scales of codes."""
    inputs: Any = None
    """Factors of its inputs."""


def joined_matrices(matrices: Sequence[MatrixParts]) -> MatrixParts | None:
    """Matrices that read the same activations as one; ``None`` where they are of several kinds, or too small.

    With factors of their own they are groups of as many outputs, at most :data:`GROUPS`: rows [groups, outputs, inputs] and
    factors [groups, inputs].
    """
    turned = [m.rows for m in matrices if isinstance(m.rows, Turned)]
    kinds = {(m.rows.dtype, m.inputs is None) for m in matrices if isinstance(m.rows, Turned)}
    if len(turned) < len(matrices) or len(kinds) > 1:
        return None
    inputs, parts = turned[0].rows.shape[-1], tuple(each.rows.shape[:-1] for each in turned)
    rows = jnp.concatenate([each.rows.reshape(-1, inputs) for each in turned])
    scales = factors = None
    if matrices[0].scales is not None:
        pairs = zip(matrices, parts, strict=True)
        scales = [jnp.broadcast_to(m.scales, (1, *outputs)).reshape(1, -1) for m, outputs in pairs]
        scales = jnp.concatenate(scales, axis=1)
    if matrices[0].inputs is not None:
        counts = [math.prod(outputs) for outputs in parts]
        size = math.gcd(*counts)
        if len(rows) > GROUPS * size:
            return None
        pairs = zip(matrices, counts, strict=True)
        factors = [jnp.tile(m.inputs.reshape(1, -1), (count // size, 1)) for m, count in pairs]
        factors, rows = jnp.concatenate(factors), rows.reshape(-1, size, inputs)
    return MatrixParts(Turned(rows=rows, inputs=1, parts=parts), scales, factors)


class LowRank(NamedTuple):
    """A frozen matrix with a low-rank adapter."""

    base: jax.Array | Quantized
    """[inputs ..., outputs ...]."""
    a: jax.Array
    """A, [inputs ..., rank]."""
    b: jax.Array
    """B, [rank, outputs ...]."""
    scale: float
    """Factor of (x A) B."""
    kept: jax.Array | None = None
    """bool[batch, sequence, rank]: columns of A that count for each token, of several adapters side by side; None: all."""

    def merged(self) -> jax.Array:
        """W + scale A B in float32."""
        base = self.base.restored() if isinstance(self.base, Quantized) else self.base
        wide = partial(jnp.asarray, dtype=jnp.float32)
        change = jnp.tensordot(wide(self.a), wide(self.b), 1)
        return wide(base) + self.scale * change


def product(
    target: Target,
    spec: str,
    x: jax.Array,
    weights: jax.Array | LowRank | Quantized | Turned | Watched,
    rounding: Rounding = PER_CHANNEL,
    *,
    heads: bool = False,
) -> jax.Array:
    """``einsum(spec, x, weights)``, in the dtype of ``x``.

    With ``int8`` or ``fp8`` operands both sides are rounded, per channel of what they contract over or as
    ``rounding`` says, in the backward pass the gradient too (Qwix); sums stay wide. The product with an
    adapter is made of the activations, x A first, so that no gradient of a full matrix exists.

    Args:
        target: Says what operands are rounded to.
        spec: Of the einsum.
        x: Activations.
        weights: In the dtype that the target computes in; an adapter's may be wider. Quantized weights have no gradient.
        rounding: Ranges, and which gradients are rounded.
        heads: Whether the product makes queries, keys or values.

    Raises:
        MissingExtraError: Qwix is not installed.
    """
    if isinstance(weights, Watched):
        x, weights = watched_input(spec, x, weights), weights.value
    if isinstance(weights, LowRank):
        base = _with_frozen(target, spec, x, weights.base, rounding, heads=heads)
        return base + _narrow(spec, x, weights)
    if isinstance(weights, Quantized):
        plain, codes = partial(plain_product, target), partial(codes_product, target)
        if weights.inputs is not None:
            return w8a8_product(spec, x, weights, plain, partial(integer_product, target))
        on_tpu = target.platform == "tpu"
        return quantized_product(spec, x, weights, plain, of_codes=codes, by_group=on_tpu)
    if target.matmul_format is None or isinstance(weights, Turned):
        return plain_product(target, spec, x, weights)
    rounded = _rounded(target.matmul_format, rounding.gradients(heads=heads), rounding.largest)
    return jnp.einsum(spec, x, weights, _dot_general=rounded)


def products(
    target: Target,
    spec: str,
    x: jax.Array,
    matrices: Sequence[Any],
    rounding: Rounding = PER_CHANNEL,
    *,
    heads: bool = False,
) -> Iterator[jax.Array]:
    """:func:`product` with each of some matrices, as a module holds them; where a server on one CPU or GPU has them joined in the place of the first, by one product."""
    first = matrices[0][...]
    if isinstance(first, Joined):
        whole, end = product(target, spec, x, first.matrix, rounding, heads=heads), 0
        for size in first.sizes:
            yield jax.lax.slice_in_dim(whole, end, end := end + size, axis=2)
        return
    codes = first.codes if isinstance(first, Quantized) else first
    if not isinstance(codes, Turned) or not codes.parts:
        for matrix in matrices:
            yield product(target, spec, x, matrix[...], rounding, heads=heads)
        return
    if isinstance(first, Quantized) and first.inputs is not None:
        joined = joined_product(x, first, _group_sums)
    else:
        joined = product(target, "bsd,df->bsf", x, first, rounding, heads=heads)
    ends = accumulate(math.prod(dims) for dims in codes.parts)
    split = jnp.split(joined, list(ends)[:-1], axis=-1)
    for part, dims in zip(split, codes.parts, strict=True):
        yield part.reshape(*x.shape[:-1], *dims)


def alone_on_gpu(target: Target) -> bool:
    """Whether a program is for one GPU, whose kernels take arrays that no mesh splits."""
    return target.platform == "gpu" and target.layout.num_devices == 1


def alone_on_cpu(target: Target) -> bool:
    """Whether a program is for one device, a CPU, for which XLA's compiler is helped in some places."""
    return target.platform == "cpu" and target.layout.num_devices == 1


def served_on_cpu(target: Target, rows: int) -> bool:
    """Whether so many rows of activations are multiplied as a server on one CPU does, see :func:`plain_product`."""
    return target.serves and alone_on_cpu(target) and rows <= FEW


def plain_product(
    target: Target, spec: str, x: jax.Array, weights: jax.Array | Turned
) -> jax.Array:
    """``einsum(spec, x, weights)`` in the dtype of ``x``, operands as they are.

    Few rows of a server on one CPU are multiplied as two matrices, with sums in float32: XLA's CPU kernels of 16-bit operands make
    float32 and take two rows at least, and a product of 16-bit results, or of one row, would convert all weights to
    float32 in each call; a product over several dims would transpose them.
    """
    dtype = x.dtype
    if isinstance(weights, Turned) or target.serves:
        # A server on a CPU holds weights of 16 bits as float32.
        x = x.astype(jnp.promote_types(dtype, weights.dtype))
    matrices = _as_matrices(target, spec, x, weights) if x.dtype == weights.dtype else None
    if matrices is None:
        if (
            alone_on_cpu(target)
            and not target.serves
            and dtype == weights.dtype
            and _is_plain(spec)
        ):
            return _trained_on_cpu(spec, x, weights)
        return jnp.einsum(spec, x, weights).astype(dtype)
    two = matrices.flat.dtype.itemsize == 2
    return matrices.product(matrices.flat, jnp.float32, two).astype(dtype)


def _is_plain(spec: str) -> bool:
    """Whether each dim of the weights is either summed over or the result's alone, as it is not for a mixture's experts."""
    operands, out = spec.split("->")
    operand, matrix = operands.split(",")
    return all((letter in operand) != (letter in out) for letter in matrix)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _trained_on_cpu(spec: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """``einsum(spec, x, weights)`` with the gradient of the weights as XLA's CPU compiler makes it fastest.

    It wants the left side of a product contiguous along what is summed and copies it transposed where it is not, with the
    elementwise work that led to it computed again, such as the softmax of a loss or GELU. The smaller of activations and
    gradient is therefore on the left.
    """
    return jnp.einsum(spec, x, weights)


def _forward(spec: str, x: Any, weights: Any) -> tuple[jax.Array, Any]:
    product = jnp.einsum(spec, x.value, weights.value)
    # Each side is kept for the gradient of the other, if that is wanted.
    return product, (x.value if weights.perturbed else None, weights.value if x.perturbed else None)


def _backward(spec: str, kept: Any, gradient: jax.Array) -> tuple[Any, Any]:
    x, weights = kept
    operands, out = spec.split("->")
    operand, matrix = operands.split(",")
    if weights is not None:
        weights = jnp.einsum(f"{out},{matrix}->{operand}", gradient, weights)
    return weights, None if x is None else _change(x, operand, gradient, out, matrix)


def _change(x: jax.Array, operand: str, gradient: jax.Array, out: str, matrix: str) -> jax.Array:
    """Gradient of the weights, with the dims of ``matrix``."""
    sides = [(x, operand), (gradient, out)]
    (left, lefts), (right, rights) = sides if x.size <= gradient.size else sides[::-1]
    rows = [letter for letter in lefts if letter in rights]
    summed = [lefts.index(row) for row in rows], [rights.index(row) for row in rows]
    change = jax.lax.dot_general(left, right, (summed, ((), ())))
    names = [letter for letter in lefts + rights if letter not in rows]
    # Without the barrier the transpose would become one of the operands, with the other on the left.
    change = jax.lax.optimization_barrier(change)
    return change.transpose([names.index(letter) for letter in matrix])


_trained_on_cpu.defvjp(_forward, _backward, symbolic_zeros=True)


def integer_product(
    target: Target, spec: str, x: jax.Array, codes: jax.Array | Turned
) -> jax.Array:
    """``einsum(spec, x, codes)`` of int8 arrays as int32; on one CPU of two rows at least, since of one XLA widens all codes to int32 in each call."""
    matrices = _as_matrices(target, spec, x, codes)
    if matrices is None:
        return jnp.einsum(spec, x, codes, preferred_element_type=jnp.int32)
    alone = not matrices.turned or _together(1, len(matrices.matrix)) == 1
    return matrices.product(matrices.flat, jnp.int32, alone)


def _group_sums(x: jax.Array, codes: Turned) -> jax.Array:
    """Products int32[rows, groups, outputs] of x int8[groups, rows, inputs] with rows [groups, outputs, inputs], as :func:`integer_product`."""
    (_, rows, inputs), (groups, outputs, _) = x.shape, codes.rows.shape
    joined = _together(rows, outputs)
    if joined == 1 and inputs < SHORT and rows > 1:
        sums = jnp.einsum("grk,gnk->grn", x, codes.rows, preferred_element_type=jnp.int32)
        return sums.swapaxes(0, 1)
    if joined == rows == 1:
        x = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
    matrix = codes.rows.reshape(groups, -1, joined * inputs)
    sums = jnp.einsum("gnk,grk->gnr", matrix, _beside(x, joined), preferred_element_type=jnp.int32)
    sums = jax.lax.optimization_barrier(sums).reshape(groups, outputs, -1)
    return sums[:, :, :rows].transpose(2, 0, 1)


def codes_product(target: Target, spec: str, x: jax.Array, codes: jax.Array | Turned) -> jax.Array:
    """``einsum(spec, x, codes)`` of floats and int8 or float8 codes, in the dtype of ``x``.

    Few rows of a server on one CPU are split into two digits of 8 bits, whose products with int8 codes are of int8 with sums in
    int32: they read the codes alone, where a product of floats would write all of them to memory as floats first, in each step.
    Their 16 bits span the largest input of a row, :data:`DIGITS` steps to each side, so that the error is below that of bfloat16
    for inputs down to a hundredth of it.
    """
    matrices = _as_matrices(target, spec, x, codes) if codes.dtype == jnp.int8 else None
    if matrices is None or len(matrices.flat) > SPLIT_ROWS:
        return plain_product(target, spec, x, codes.astype(x.dtype))
    rows, wide = len(matrices.flat), matrices.flat.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    # A row with what is no number has no number in its results either.
    scales = jnp.where(largest == 0, DIGITS, largest) * (1 / DIGITS)
    whole = jnp.round(wide / scales)
    high = jnp.round(whole * (1 / BASE))
    digits = jnp.concatenate([high, whole - high * BASE]).astype(jnp.int8)
    sums = matrices.sums(digits, jnp.int32).astype(jnp.float32)
    outputs = (sums[:rows] * BASE + sums[rows:]) * scales
    return outputs.astype(x.dtype).reshape(matrices.shape)


class _Matrices(NamedTuple):
    """An einsum as a product of two matrices."""

    flat: jax.Array
    """Activations [rows, inputs]."""
    matrix: jax.Array
    """[inputs, outputs], or the other way round."""
    turned: bool
    """Whether it is the other way round."""
    shape: tuple[int, ...]
    """Shape of the result."""

    def sums(self, flat: jax.Array, dtype: Any) -> jax.Array:
        """[rows, outputs] of activations ``flat`` [rows, inputs].

        XLA's CPU kernels copy the right operand in each call, so that weights whose rows are outputs are the left one. The
        barrier is where the compiler would exchange them again, to save the transpose of the result.

        Of int8 a row of the left operand costs as much as 1,200 more inputs, and few rows of activations fill a part of the
        kernel: some outputs, one after the other, are then read as one row, and each has activations that are zeros
        where the others' inputs are.
        """
        if not self.turned:
            return jnp.einsum("rk,kn->rn", flat, self.matrix, preferred_element_type=dtype)
        (rows, inputs), outputs = flat.shape, len(self.matrix)
        joined = _together(rows, outputs) if dtype == jnp.int32 else 1
        if joined == 1 and dtype == jnp.int32 and inputs < SHORT:
            return jnp.einsum("rk,nk->rn", flat, self.matrix, preferred_element_type=dtype)
        flat = _beside(flat, joined)
        matrix = self.matrix.reshape(-1, joined * inputs)
        if rows == 1 and matrix.dtype == jnp.float32 and matrix.size in HALVED and not outputs % 2:
            halves, both = matrix.reshape(2, -1, inputs), jnp.stack([flat, flat])
            sums = jnp.einsum("hnk,hrk->hnr", halves, both, preferred_element_type=dtype)
        else:
            sums = jnp.einsum("nk,rk->nr", matrix, flat, preferred_element_type=dtype)
        return jax.lax.optimization_barrier(sums).reshape(outputs, rows).T

    def product(self, flat: jax.Array, dtype: Any, two: bool) -> jax.Array:
        """The result, of activations of ``two`` rows at least."""
        sums = self.sums(_two_rows(flat) if two else flat, dtype)
        return sums[: len(flat)].reshape(self.shape)


def _together(rows: int, outputs: int) -> int:
    """Outputs that are read as one row of int8."""
    return next(n for n in range(max(TOGETHER // rows, 1), 0, -1) if outputs % n == 0)


def _beside(flat: jax.Array, joined: int) -> jax.Array:
    """Activations [..., rows, inputs] of outputs that are read together, as [..., joined x rows, joined x inputs].

    Written to zeros one after the other: XLA's CPU compiler concatenates them element by element.
    """
    *outer, rows, inputs = flat.shape
    if joined == 1:
        return flat
    beside = jnp.zeros((*outer, joined * rows, joined * inputs), flat.dtype)
    for n in range(joined):
        place = (*[0] * len(outer), n * rows, n * inputs)
        beside = jax.lax.dynamic_update_slice(beside, flat, place)
    return beside


def _as_matrices(
    target: Target, spec: str, x: jax.Array, weights: jax.Array | Turned
) -> _Matrices | None:
    """The product as one of two matrices; ``None`` where it is none, or no server on one CPU makes it of few rows."""
    operands, out = spec.split("->")
    operand, matrix = operands.split(",")
    if isinstance(weights, Turned):
        inputs = weights.inputs
        assert operand.endswith(matrix[:inputs])
        array, first = weights.rows, False
        outputs = array.shape[: array.ndim - inputs]
    else:
        inputs, array = sum(letter in operand for letter in matrix), weights
        first = operand.endswith(matrix[:inputs])
        summed = not any(letter in out for letter in matrix if letter in operand)
        rows = x.size // math.prod(x.shape[-inputs:])
        last = operand.endswith(matrix[-inputs:])
        if not served_on_cpu(target, rows) or not summed or not (first or last):
            return None
        outputs = array.shape[inputs:] if first else array.shape[:-inputs]
    flat = x.reshape(-1, math.prod(x.shape[-inputs:]))
    sizes = (flat.shape[1], -1) if first else (-1, flat.shape[1])
    return _Matrices(flat, array.reshape(sizes), not first, (*x.shape[:-inputs], *outputs))


def _two_rows(flat: jax.Array) -> jax.Array:
    return jnp.pad(flat, ((0, 1), (0, 0))) if len(flat) == 1 else flat


def _with_frozen(
    target: Target,
    spec: str,
    x: jax.Array,
    base: jax.Array | Quantized,
    rounding: Rounding,
    *,
    heads: bool,
) -> jax.Array:
    """Product with a frozen matrix, which has no gradient."""
    if target.serves or not isinstance(base, Quantized) or base.inputs is not None:
        return product(target, spec, x, base, rounding, heads=heads)

    def restored(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
        weights = Quantized(codes=codes, scales=scales).restored(x.dtype)
        return product(target, spec, x, weights, rounding, heads=heads)

    # The backward pass restores the matrix again: kept for it, those of all layers would be in memory at once.
    # The layers are a scan, whose two passes no compiler joins.
    policy = jax.checkpoint_policies.nothing_saveable
    again = jax.checkpoint(restored, policy=policy, prevent_cse=False)
    return again(x, base.codes, base.scales)


def _narrow(spec: str, x: jax.Array, weights: LowRank) -> jax.Array:
    """scale (x A) B, in the dtype of ``x``; where ``spec`` sums over the outputs of the matrix, B comes first."""
    operands, out = spec.split("->")
    operand, matrix = operands.split(",")
    rank = next(letter for letter in "zyxwvut" if letter not in spec)
    inputs = weights.a.ndim - 1
    parts = [
        (matrix[:inputs] + rank, weights.a.astype(x.dtype)),
        (rank + matrix[inputs:], weights.b.astype(x.dtype)),
    ]
    if any(letter in out for letter in matrix[:inputs]):
        parts.reverse()
    (first, factor), (second, other) = parts
    kept = [letter for letter in operand if letter in out or letter in second]
    between = "".join(kept) + rank
    narrow = jnp.einsum(f"{operand},{first}->{between}", x, factor)
    if weights.kept is not None:
        dims = range(2, narrow.ndim - 1)
        narrow = jnp.where(jnp.expand_dims(weights.kept, tuple(dims)), narrow, 0)
    return jnp.einsum(f"{between},{second}->{out}", narrow * weights.scale, other)


@cache
def _rounded(matmul_format: str, gradients: bool, largest: float) -> Any:
    with extra(f"precision {matmul_format}", "quant"):
        from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt
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
