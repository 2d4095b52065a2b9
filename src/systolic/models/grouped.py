"""Grouped matmuls: rows that lie by group, each multiplied with the matrix of its group.

``jax.lax.ragged_dot`` everywhere but on TPUs. There XLA has a kernel for it and none for its gradient with
respect to the matrices, which becomes a dense product of all rows for each group; so TPUs run JAX's own
Pallas kernels (megablox), forward and for both gradients. They visit the tiles of rows that belong to a
group, and no others.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from systolic.chips import usual
from systolic.job import Target
from systolic.models.quantized.codes import Quantized

ROWS = (128, 256, 512)
"""Heights of a tile of rows."""
LEAST_ROWS = 8
"""Rows of XLA's own kernel: sublanes of a register."""
ARRAY_ROWS: int = usual("tpu")["rows_per_weights"].value
"""Rows of a tile that take as long as fewer do."""
VMEM_BYTES: int = usual("tpu")["kernel_vmem_bytes"].value
"""Memory of a kernel's windows and sums."""
FLOPS_PER_BYTE: float = usual("tpu")["flops_per_hbm_byte"].value
"""Work that a byte counts which is fetched again."""
STEP_FLOPS: float = usual("tpu")["kernel_step_flops"].value
"""Work that a step of the grid counts beside its own."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Layered:
    """The experts' matrices of a layer, read where they lie."""

    stack: jax.Array | Quantized
    """[layers, experts, depth, columns]."""
    number: jax.Array
    """int32[]: the layer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the layer's matrices."""
        return self.stack.shape[1:]

    def __getitem__(self, key: Any) -> "Layered":
        """The matrices, as a parameter is read: takes ``...`` alone."""
        assert key is Ellipsis
        return self

    def grouped(self, sizes: jax.Array) -> tuple[jax.Array | Quantized, jax.Array]:
        """The matrices of all layers [layers x experts, depth, columns], and the rows of each: those of other layers have none.

        sizes: int32[experts], rows of each of the layer's experts.
        """
        layers, experts = self.stack.shape[:2]
        flat = jax.tree.map(lambda a: a.reshape(layers * experts, *a.shape[2:]), self.stack)
        none = jnp.zeros((layers * experts,), sizes.dtype)
        return flat, jax.lax.dynamic_update_slice(none, sizes, (self.number * experts,))


def grouped_product(
    target: Target,
    x: jax.Array,
    matrices: jax.Array | Quantized | Layered,
    sizes: jax.Array,
    expected: int,
    *,
    turned: bool = False,
) -> jax.Array:
    """Product of each row of ``x`` with the matrix of its group, [rows, columns] in the dtype of ``x``.

    Args:
        target: Where the program will run.
        x: [rows, depth], the rows of group 0 first, then those of group 1, and so on.
        matrices: [groups, depth, columns]; in int8, or a layer's part of a stack, for programs without a gradient.
        sizes: int32[groups]: rows of each group. Rows behind the last group belong to none: their
            results are undefined, in gradients too.
        expected: Rows that belong to a group when routing is balanced; a forecast reads it from the name.
        turned: Whether arrays lie on a TPU as [groups, columns, depth], as a server keeps them; codes do not.
    """
    if isinstance(matrices, Layered):
        # A forecast takes the layer's own number of groups from the name.
        with jax.named_scope(f"of_{matrices.shape[0]}_groups"):
            flat, own = matrices.grouped(sizes)
            return grouped_product(target, x, flat, own, expected, turned=turned)
    if isinstance(matrices, Quantized) and not matrices.scaled_after:
        if target.serves and target.platform == "tpu":
            target.note(
                f"experts in {matrices.dtype.name} with scales of groups are restored to {x.dtype.name} in every step, which takes longer than reading plain ones; int8, fp8 and w8a8 are read as they are"
            )
        return grouped_product(target, x, matrices.restored(x.dtype), sizes, expected)
    if isinstance(matrices, Quantized):
        return _quantized_product(target, x, matrices, sizes, expected)
    if target.platform != "tpu":
        if target.platform == "gpu" and matrices.shape[0] > 1:
            target.note(
                f"XLA multiplies each row with all {matrices.shape[0]} experts that a GPU holds (ragged_dot has no kernel there): HFU counts all of that, MFU what is needed"
            )
        return jax.lax.ragged_dot(x, matrices, sizes)
    with jax.named_scope(f"rows_{expected}_of_{x.shape[0]}"):
        if turned:
            return turned_product(x, jnp.swapaxes(matrices, 1, 2), sizes, expected)
        return pallas_product(x, matrices, sizes, expected)


def turned_product(
    x: jax.Array, matrices: jax.Array, sizes: jax.Array, expected: int, *, interpret: bool = False
) -> jax.Array:
    """:func:`pallas_product` of matrices [groups, columns, depth], without gradients."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    rows = x.shape[0]
    padded = jnp.pad(x, ((0, -rows % ROWS[0]), (0, 0)))
    groups, columns, depth = matrices.shape
    like = jax.ShapeDtypeStruct((groups, depth, columns), matrices.dtype)
    tiles = tiles_of(work_of(padded, like, expected))
    turn = {"transpose_rhs": True, "interpret": interpret}
    return gmm(padded, matrices, sizes, x.dtype, tiles, **turn)[:rows]


def _quantized_product(
    target: Target, x: jax.Array, matrices: Quantized, sizes: jax.Array, expected: int
) -> jax.Array:
    """By XLA's own kernel, which on a TPU reads int8 matrices as they are; JAX's takes floats only."""
    read = target.platform == "tpu" and matrices.dtype == jnp.int8
    codes = matrices.codes if read else matrices.codes.astype(x.dtype)
    # Of fewer rows than a tile has XLA makes a dense product with all groups.
    padded = jnp.pad(x, ((0, -x.shape[0] % LEAST_ROWS), (0, 0)))
    with jax.named_scope(f"rows_{expected}_of_{x.shape[0]}"):
        products = jax.lax.ragged_dot(padded, codes, sizes, preferred_element_type=x.dtype)
    products = products[: x.shape[0]]
    ends, groups = jnp.cumsum(sizes), codes.shape[0]
    group = jnp.searchsorted(ends, jnp.arange(x.shape[0]), side="right")
    return products * matrices.scales[:, 0].astype(x.dtype)[jnp.minimum(group, groups - 1)]


def pallas_product(
    x: jax.Array, matrices: jax.Array, sizes: jax.Array, expected: int, *, interpret: bool = False
) -> jax.Array:
    """:func:`grouped_product` by the Pallas kernels; ``interpret`` runs them without a TPU."""
    rows = x.shape[0]
    padded = jnp.pad(x, ((0, -rows % ROWS[0]), (0, 0)))
    return _product(padded, matrices, sizes, expected, interpret)[:rows]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(
    x: jax.Array, matrices: jax.Array, sizes: jax.Array, expected: int, interpret: bool
) -> jax.Array:
    return _forward(x, matrices, sizes, expected, interpret)[0]


def _forward(
    x: jax.Array, matrices: jax.Array, sizes: jax.Array, expected: int, interpret: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    tiles = tiles_of(work_of(x, matrices, expected))
    out = gmm(x, matrices, sizes, x.dtype, tiles, interpret=interpret)
    return out, (x, matrices, sizes)


def _backward(
    expected: int,
    interpret: bool,
    kept: tuple[jax.Array, jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, None]:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    x, matrices, sizes = kept
    work = work_of(x, matrices, expected)
    tiles = tiles_of(replace(work, depth=work.columns, columns=work.depth))
    to_x = gmm(gradient, matrices, sizes, x.dtype, tiles, transpose_rhs=True, interpret=interpret)
    tiles = tiles_of(work, transposed=True)
    to_matrices = tgmm(x.T, gradient, sizes, matrices.dtype, tiles, interpret=interpret)
    return to_x, to_matrices, None


_product.defvjp(_forward, _backward)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedProduct:
    """Sizes of a grouped product: [rows, depth] x [groups, depth, columns]."""

    rows: int
    """A multiple of 128."""
    expected: int
    """Rows that belong to a group."""
    groups: int
    depth: int
    columns: int
    element_bytes: int
    """Bytes per element of operands and result."""


def work_of(
    x: jax.Array, matrices: jax.Array | jax.ShapeDtypeStruct, expected: int
) -> GroupedProduct:
    """Sizes of x [rows, depth] and matrices [groups, depth, columns]."""
    return GroupedProduct(
        rows=x.shape[0],
        expected=expected,
        groups=matrices.shape[0],
        depth=matrices.shape[1],
        columns=matrices.shape[2],
        element_bytes=x.dtype.itemsize,
    )


def tiles_of(work: GroupedProduct, *, transposed: bool = False) -> tuple[int, int, int]:
    """Tiles of rows, depth and columns that are estimated to be fastest.

    ``transposed``: rows are what is summed over, for the gradient of the matrices [groups, depth, columns].
    """
    choices = [
        (tall, deep, wide)
        for tall in ROWS
        if work.rows % tall == 0
        for deep in _tiles(work.depth, 1)
        for wide in _tiles(work.columns, 2)
    ]
    held = [tiles for tiles in choices if _vmem(tiles, work, transposed) <= VMEM_BYTES]
    return min(held or choices[:1], key=lambda tiles: (_cost(tiles, work, transposed), tiles))


def _tiles(size: int, least: int) -> list[int]:
    """Tiles of a dim, narrowest first: the whole of a narrow one, else multiples of 128 that fill it evenly.

    ``least`` of them where it is wide enough: on v4 and v5p the two cores share the tiles of columns.
    """
    if size < 128 * max(least, 2):
        return [size] if size <= 128 or size % 128 == 0 else [128, size]
    parts = range(least, size // 128 + 1)
    return sorted({-(-size // (128 * count)) * 128 for count in parts})


def _vmem(tiles: tuple[int, int, int], work: GroupedProduct, transposed: bool) -> int:
    """Bytes of two buffers of each window, and of the sums in f32."""
    tall, deep, wide = tiles
    windows = tall * deep + deep * wide + tall * wide
    sums = deep * wide if transposed else tall * wide
    return 2 * work.element_bytes * windows + 4 * sums


def _cost(tiles: tuple[int, int, int], work: GroupedProduct, transposed: bool) -> float:
    """Time in FLOPs: of the tiles visited or of the bytes fetched, whichever is longer, and of the grid's steps.

    Every group but the first is taken to begin inside a tile of rows, which is visited once more for it.
    """
    tall, deep, wide = tiles
    visits = math.ceil(work.expected / tall) + work.groups - 1
    along, across = math.ceil(work.depth / deep), math.ceil(work.columns / wide)
    matrices = work.groups * work.depth * work.columns
    left, right = work.expected * work.depth, work.expected * work.columns
    if transposed:
        fetched = left * across + right * along + matrices
    elif along == 1:
        fetched = left * across + matrices + right
    else:  # No window stays from one visit to the next.
        fetched = visits * work.depth * (tall * across + work.columns) + right
    flops = 2.0 * visits * max(tall, ARRAY_ROWS) * along * deep * across * wide
    moved = FLOPS_PER_BYTE * work.element_bytes * fetched
    return max(flops, moved) + visits * along * across * STEP_FLOPS
