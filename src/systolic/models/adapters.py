"""Adapters in a built module: its parameters are frozen, and small matrices beside some of them train."""

import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import GROUP, Adapter, AdapterKind, MatrixFormat, WeightFormat
from systolic.job.precision import CODES, SCALES
from systolic.models.linear import LowRank
from systolic.models.quantized.codes import Quantized, quantized

STACKED = ("layers",)
"""Leading dims that stack copies of a matrix."""
CONVOLVED = "conv_out"
"""Last dim of the kernels of convolutions, which sum over all others."""
TABLE = ("vocab", "embed")
"""Dims of an embedding: as an output matrix it sums over the last, and a row that is looked up has one scale."""
EXPERTS = "experts"
"""Dim of matrices that stay frozen without an adapter: those of a mixture's experts."""


A, B = "lora_a", "lora_b"
"""Last names of the paths of adapters, below the path of their matrix."""
BASE = "base"
"""Last name of a frozen matrix beside an adapter."""
NF4 = MatrixFormat(format=WeightFormat.nf4, group=GROUP)
"""Format of QLoRA's frozen matrices."""


_KEPT: ContextVar[jax.Array | None] = ContextVar("kept", default=None)


@contextmanager
def columns_kept(kept: jax.Array | None) -> Generator[None]:
    """Traces products with the columns of adapters that count for each token, see :class:`~systolic.models.linear.LowRank`."""
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(token)


class Frozen(nnx.Variable):
    """A weight that gets no gradient and has no optimizer state."""


class AdaptedWeight(nnx.Module):
    """A frozen matrix with an adapter, in the place of a parameter.

    Reading it as a parameter is read, ``weight[...]``, gives what :func:`~systolic.models.linear.product` takes.
    """

    def __init__(
        self,
        base: Mapping[str, nnx.Variable],
        a: nnx.Param,
        b: nnx.Param,
        scale: float,
    ) -> None:
        """A matrix under :data:`BASE`, or codes, scales and maybe factors of inputs under their names."""
        for name, part in base.items():
            setattr(self, name, part)
        self.parts = tuple(base)
        self.lora_a, self.lora_b, self.scale = a, b, scale

    def __getitem__(self, key: Any) -> LowRank:
        """The matrix with its adapter; takes ``...`` alone."""
        assert key is Ellipsis
        parts = {name: getattr(self, name)[...] for name in self.parts}
        base = parts[BASE] if BASE in parts else Quantized(**parts)
        return LowRank(base, self.lora_a[...], self.lora_b[...], self.scale, _KEPT.get())


def adapt(
    module: nnx.Module, adapter: Adapter, names: frozenset[str], rngs: nnx.Rngs, dtype: jnp.dtype
) -> None:
    """Freezes a module's parameters and puts adapters beside its matrices of some names.

    Args:
        module: As its model built it; changed.
        adapter: Kind, rank, scale and targets.
        names: Last names of the matrices that its code multiplies with ``product``.
        rngs: For A: uniform within 1 / sqrt(inputs), as in the PEFT library; B is zero.
        dtype: Of frozen weights.
    """
    targets = frozenset(adapter.targets) or names
    for holder, name, parameter in list(_parameters(module)):
        axes = parameter.get_metadata().get("out_sharding")
        value = parameter.get_value().astype(dtype)
        frozen = Frozen(value, out_sharding=axes)
        if name in targets and axes is not None and EXPERTS not in axes:
            setattr(holder, name, _adapted(value, axes, adapter, rngs))
        else:
            setattr(holder, name, frozen)


def _parameters(module: nnx.Module) -> Iterator[tuple[nnx.Module, str, nnx.Param]]:
    """Modules with the names and values of their own parameters."""
    for _, holder in nnx.iter_modules(module):
        for name, value in vars(holder).items():
            if isinstance(value, nnx.Param):
                yield holder, name, value


def _adapted(
    value: jax.Array, axes: tuple[str | None, ...], adapter: Adapter, rngs: nnx.Rngs
) -> AdaptedWeight:
    outer = len([name for name in axes if name in STACKED])
    inputs = outer + num_inputs(axes[outer:])
    stack, in_dims, out_dims = value.shape[:outer], value.shape[outer:inputs], value.shape[inputs:]
    reach = math.prod(in_dims) ** -0.5
    down = jax.random.uniform(
        rngs.params(), (*stack, *in_dims, adapter.rank), jnp.float32, -reach, reach
    )
    up = jnp.zeros((*stack, adapter.rank, *out_dims), jnp.float32)
    base = {BASE: value}
    if adapter.kind is AdapterKind.qlora:
        compact = compact_base(value, axes)
        base = {CODES: compact.codes, SCALES: compact.scales}
    return AdaptedWeight(
        {name: Frozen(part, out_sharding=axes) for name, part in base.items()},
        nnx.Param(down, out_sharding=(*axes[:inputs], None)),
        nnx.Param(up, out_sharding=(*axes[:outer], None, *axes[inputs:])),
        adapter.scale,
    )


def compact_base(value: jax.Array, axes: tuple[str | None, ...]) -> Quantized:
    """A frozen matrix, or a stack of them, in 4 bits; neighbours in its last input dim share scales.

    Scales stay in the compute dtype: they are not quantized a second time.
    """
    return quantized(value, inputs_of(axes), NF4, value.dtype)


def inputs_of(axes: tuple[str | None, ...]) -> tuple[int, ...]:
    """Dims of a matrix, or a stack of them, that its products sum over, by the logical names of its dims."""
    if EXPERTS in axes:
        return (len(axes) - 2,)
    if axes[-1] == CONVOLVED:
        return tuple(range(len(axes) - 1))
    if axes == TABLE:
        return (1,)
    outer = len([name for name in axes if name in STACKED])
    return tuple(range(outer, outer + num_inputs(axes[outer:])))


def factored_of(axes: tuple[str | None, ...]) -> tuple[int, ...]:
    """Dims of a matrix whose inputs have factors where activations are rounded too; () where they stay: those of experts and the vocabulary.

    Of convolutions these are channels, for one of each channel by itself the last dim.
    """
    if EXPERTS in axes or "vocab" in axes:
        return ()
    if axes[-1] == CONVOLVED:
        return (len(axes) - (1 if axes[-2] is None else 2),)
    return inputs_of(axes)


def num_inputs(axes: tuple[str | None, ...]) -> int:
    """Leading dims of a matrix that a product sums over: one where it reads the residual stream or a latent, else all but the last.

    axes: logical names of its dims, without those that stack matrices.
    """
    return len(axes) - 1 if axes[-1] == "embed" else 1


def merged(
    params: Mapping[str, jax.Array], frozen: Mapping[str, jax.Array], adapter: Adapter
) -> dict[str, jax.Array]:
    """Weights of the plain model: W + scale A B in the dtype of W (of its scales, in 4 bits), the others as they are.

    Args:
        params: Adapters by path.
        frozen: Frozen weights and other variables by path.
        adapter: Its scale.
    """
    plain: dict[str, jax.Array] = {}
    for path, value in frozen.items():
        home, _, last = path.rpartition("/")
        if f"{home}/{A}" not in params:
            plain[path] = value
        elif last != SCALES:
            base: jax.Array | Quantized = value
            if last == CODES:
                base = Quantized(codes=value, scales=frozen[f"{home}/{SCALES}"])
            plain[home] = _joined(base, params[f"{home}/{A}"], params[f"{home}/{B}"], adapter.scale)
    return plain


def _joined(base: jax.Array | Quantized, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """W + scale A B, each with the same leading dims of a stack, one matrix at a time."""
    dtype = base.scales.dtype if isinstance(base, Quantized) else base.dtype

    def whole(base: jax.Array | Quantized, a: jax.Array, b: jax.Array) -> jax.Array:
        return LowRank(base, a, b, scale).merged().astype(dtype)

    stacked = a.ndim + b.ndim - 2 - len(base.shape)
    return (
        whole(base, a, b) if not stacked else jax.lax.map(lambda each: whole(*each), (base, a, b))
    )
