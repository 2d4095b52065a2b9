"""Experts of few tokens on a TPU: one kernel that reads the matrices of each chosen expert once and copies none.

A step of decode has so few tokens that its time is that of reading matrices. Rows are not sorted: every token is multiplied
with every expert that any of them chose, weighted with 0 where it is not its own, since a matrix unit takes as long for few
rows as for many. Experts that no token chose are not read. The grid's steps are the chosen experts by tiles of their hidden
units, and a step multiplies gate, up and down of its tile while the next ones are fetched.

Matrices are read with the hidden units as rows: gate and up [experts, d_ff, d_model], so that the part of a device fills whole
registers whatever the tensor axis leaves of d_ff. A server keeps them in this order (:mod:`systolic.steps.paged`).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from systolic.job import Target
from systolic.models.decoder.config import Mlp
from systolic.models.decoder.layers import gated
from systolic.models.grouped import ARRAY_ROWS, VMEM_BYTES
from systolic.models.quantized.codes import NARROW_DTYPES, Quantized

HALVES = 2
"""Sums of the experts that are made apart: on v4 and v5p each of two cores makes one."""
ROW_MULTIPLE = 16
"""Tokens are padded to a multiple of it: the rows of a register in bf16."""
TILE_ROWS = {1: 32, 2: 8, 4: 8}
"""Rows of matrices that a transfer's places are a multiple of, by the bytes of an element."""
LEAST_TILE = 64
"""Hidden units of a tile, at least: of fewer a step of the grid takes longer than its bytes."""
KINDS = (Mlp.swiglu, Mlp.swiglu_clamped, Mlp.geglu)
"""Gated units that a kernel's vector operations can make."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FewSizes:
    """Sizes of the experts of one device."""

    tokens: int
    d_model: int
    d_ff: int
    experts: int
    item_bytes: int
    """Bytes of an element of the matrices."""
    activation_bytes: int
    """Bytes of an element of the tokens."""

    @property
    def rows(self) -> int:
        """Tokens with padding to whole registers."""
        return -(-self.tokens // ROW_MULTIPLE) * ROW_MULTIPLE

    @property
    def tile(self) -> int | None:
        """Hidden units of a tile: the most that fit beside tokens and sums; None where too few do."""
        # One buffer of the tokens, two of the sums in f32.
        held = self.rows * self.d_model * (self.activation_bytes + 2 * 4)
        held += self.rows * max(self.experts, 128) * 4
        wide = TILE_ROWS[self.item_bytes]
        for parts in range(1, self.d_ff + 1):
            size, rest = divmod(self.d_ff, parts)
            if rest or (parts > 1 and size % wide):
                continue
            if size < min(LEAST_TILE, self.d_ff):
                return None
            # Two buffers of three matrices, and the hidden units in f32.
            moving = 2 * 3 * self.d_model * size * self.item_bytes + 3 * self.rows * size * 4
            if held + moving <= VMEM_BYTES:
                return size
        return None


def takes(target: Target, mlp: Mlp, tokens: int, matrices: tuple[Any, ...]) -> bool:
    """Whether the kernel computes these experts: plain matrices or codes with a scale an output, and few enough tokens.

    Args:
        target: Where the program will run; a server's step on a TPU, since the kernel has no gradient.
        mlp: Kind of the experts.
        tokens: Of a device.
        matrices: gate and up [experts, d_model, d_ff], down [experts, d_ff, d_model] of a device.
    """
    if not (target.serves and target.platform == "tpu" and mlp in KINDS) or tokens > ARRAY_ROWS:
        return False
    return all(map(_plain, matrices)) and sizes_of(tokens, target.dtype, matrices).tile is not None


def _plain(matrix: Any) -> bool:
    """Whether it is an array, or codes in 8 bits that are scaled by outputs."""
    if not isinstance(matrix, Quantized):
        return isinstance(matrix, jax.Array)
    once = matrix.scaled_after and matrix.inputs is None and not matrix.apart
    return once and matrix.dtype.name not in NARROW_DTYPES


def sizes_of(tokens: int, dtype: str, matrices: tuple[Any, ...]) -> FewSizes:
    """Sizes of the experts of a device, see :func:`takes`."""
    experts, d_model, d_ff = matrices[0].shape
    return FewSizes(
        tokens=tokens,
        d_model=d_model,
        d_ff=d_ff,
        experts=experts,
        item_bytes=jnp.dtype(matrices[0].dtype).itemsize,
        activation_bytes=jnp.dtype(dtype).itemsize,
    )


def few_product(
    target: Target,
    mlp: Mlp,
    x: jax.Array,
    routing: tuple[jax.Array, jax.Array],
    matrices: tuple[Any, ...],
    biases: tuple[jax.Array, ...] = (),
    *,
    interpret: bool = False,
) -> jax.Array:
    """Contribution of a device's experts to its tokens, [tokens, d_model] in the dtype of ``x``.

    Args:
        target: Where the program will run.
        mlp: Kind of the experts.
        x: [tokens, d_model].
        routing: The chosen experts int32[tokens, k], those outside of 0 to their number being others', and their weights in
            the same shape.
        matrices: See :func:`takes`.
        biases: Of gate and up [experts, d_ff]; none for none.
        interpret: Run the kernel without a TPU.
    """
    sizes = sizes_of(x.shape[0], x.dtype.name, matrices)
    chosen, weights = routing
    hot = chosen[:, :, None] == jnp.arange(sizes.experts)
    shares = jnp.where(hot, weights[:, :, None].astype(jnp.float32), 0).sum(1)
    padding = ((0, sizes.rows - sizes.tokens), (0, 0))
    ways = target.layout.expert
    share = 1 - (1 - chosen.shape[1] / (sizes.experts * ways)) ** sizes.tokens
    expected = max(round(sizes.experts * share), 1)
    with jax.named_scope(f"experts_{expected}_of_{sizes.experts}"):
        sums = _call(mlp, sizes, biases != (), _scaled(matrices), expected, interpret)(
            *visits(hot.any((0, 1))),
            jnp.pad(x, padding),
            jnp.pad(shares, padding),
            *_operands(sizes, matrices, biases),
        )
    return sums.sum(0)[: sizes.tokens].astype(x.dtype)


def visits(active: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Number of experts that are read, int32[1], and which, int32[experts + HALVES], by the places of the grid.

    The last places of a grid may have none: theirs is that of the same half before them, which is there and not fetched again.
    """
    experts = active.shape[0]
    before = jnp.cumsum(active) - 1
    count = active.sum().astype(jnp.int32)
    place = jnp.arange(experts + HALVES)
    place = jnp.where(place < count, place, jnp.maximum(place - HALVES, 0))
    at = active & (before == place[:, None])
    return count[None], jnp.where(at, jnp.arange(experts), 0).sum(1).astype(jnp.int32)


def _scaled(matrices: tuple[Any, ...]) -> bool:
    return isinstance(matrices[0], Quantized)


def _operands(
    sizes: FewSizes, matrices: tuple[Any, ...], biases: tuple[jax.Array, ...]
) -> list[jax.Array]:
    """Matrices with the hidden units as rows, then scales, then biases: of hidden units [experts, tiles, 1, tile], of down [experts, 1, d_model]."""
    assert sizes.tile is not None
    tiles = (sizes.experts, -1, 1, sizes.tile)
    codes = [matrix.codes if isinstance(matrix, Quantized) else matrix for matrix in matrices]
    operands = [jnp.swapaxes(codes[0], 1, 2), jnp.swapaxes(codes[1], 1, 2), codes[2]]
    if _scaled(matrices):
        # The sums over inputs have one scale each, which may be one of all outputs.
        scales = [matrix.scales.astype(jnp.float32) for matrix in matrices]
        wide = [
            jnp.broadcast_to(scale, (matrix.shape[0], 1, matrix.shape[2]))
            for scale, matrix in zip(scales, matrices, strict=True)
        ]
        operands += [wide[0].reshape(tiles), wide[1].reshape(tiles), wide[2]]
    return operands + [bias.reshape(tiles) for bias in biases]


def _call(
    mlp: Mlp, sizes: FewSizes, biased: bool, scaled: bool, expected: int, interpret: bool
) -> Any:
    """The kernel's call: count, experts, tokens, shares and :func:`_operands` to f32[HALVES, rows, d_model]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    tile, width = sizes.tile, sizes.d_model
    assert tile is not None

    def grid_call(count: jax.Array, experts: jax.Array, *arrays: jax.Array) -> jax.Array:
        # One step at least, which makes the sums 0 where no expert is this device's.
        steps = jnp.maximum((count[0] + HALVES - 1) // HALVES, 1)
        return pl.pallas_call(
            partial(_kernel, mlp, scaled, biased),
            out_shape=jax.ShapeDtypeStruct((HALVES, sizes.rows, width), jnp.float32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(HALVES, steps, sizes.d_ff // tile),
                in_specs=_windows(sizes, biased, scaled),
                out_specs=pl.BlockSpec((None, sizes.rows, width), lambda half, *_: (half, 0, 0)),
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary")
            ),
            cost_estimate=pl.CostEstimate(
                flops=6 * sizes.rows * width * sizes.d_ff * expected,
                bytes_accessed=3 * width * sizes.d_ff * sizes.item_bytes * expected,
                transcendentals=sizes.rows * sizes.d_ff * expected,
            ),
            interpret=interpret,
            name="few_experts",
        )(count, experts, *arrays)

    return grid_call


def _windows(sizes: FewSizes, biased: bool, scaled: bool) -> list[Any]:
    """Windows of tokens, shares and :func:`_operands`, by the places of the grid."""
    from jax.experimental import pallas as pl

    tile, width = sizes.tile, sizes.d_model
    assert tile is not None
    parts = sizes.d_ff // tile

    def place(half: Any, step: Any, part: Any, count: Any, experts: Any) -> tuple[Any, Any]:
        """Expert and tile of a step; past the last expert what was fetched last."""
        at = step * HALVES + half
        return experts[at], jnp.where(at < count[0], part, parts - 1)

    def whole(*_: Any) -> tuple[int, int]:
        return 0, 0

    once = pl.Buffered(1)
    matrix = pl.BlockSpec((None, tile, width), lambda *step: (*place(*step), 0))
    hidden = pl.BlockSpec((None, None, 1, tile), lambda *step: (*place(*step), 0, 0))
    specs = [
        pl.BlockSpec((sizes.rows, width), whole, pipeline_mode=once),
        pl.BlockSpec((sizes.rows, sizes.experts), whole, pipeline_mode=once),
        *[matrix] * 3,
    ]
    if scaled:
        outputs = pl.BlockSpec((None, 1, width), lambda *step: (place(*step)[0], 0, 0))
        specs += [hidden, hidden, outputs]
    return specs + [hidden] * 2 * biased


def _kernel(mlp: Mlp, scaled: bool, biased: bool, count: Any, experts: Any, *refs: Any) -> None:
    """One tile of one expert: its hidden units of all tokens, and their sum into the result, weighted."""
    from jax.experimental import pallas as pl

    x, shares, gate, up, down, *more, out = refs
    step, part = pl.program_id(1), pl.program_id(2)
    at = step * HALVES + pl.program_id(0)

    @pl.when((step == 0) & (part == 0))
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(at < count[0])
    def _() -> None:
        tokens = x[...]

        def product(left: jax.Array, right: Any, inner: int) -> jax.Array:
            return jax.lax.dot_general(
                left,
                right[...].astype(left.dtype),
                (((1,), (inner,)), ((), ())),
                preferred_element_type=jnp.float32,
            )

        projected = [product(tokens, gate, 1), product(tokens, up, 1)]
        if scaled:
            projected = [
                hidden * scales[...] for hidden, scales in zip(projected, more[:2], strict=True)
            ]
        if biased:
            projected = [
                hidden + bias[...].astype(jnp.float32)
                for hidden, bias in zip(projected, more[-2:], strict=True)
            ]
        done = product(gated(mlp, *projected).astype(tokens.dtype), down, 0)
        if scaled:
            done = done * more[2][...]
        own = jax.lax.broadcasted_iota(jnp.int32, shares.shape, 1) == experts[at]
        share = jnp.where(own, shares[...], 0).sum(1, keepdims=True)
        # An overflow in an expert that a token did not choose is not the token's.
        out[...] += jnp.where(share != 0, share * done, 0)
