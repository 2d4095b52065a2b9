"""Forecasts of anyone's function."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from systolic.aot import Compiler, FunctionProgram
from systolic.aot.program import name_of
from systolic.chips import Slice
from systolic.chips import slice as slice_named
from systolic.core.errors import OptionError
from systolic.forecasting.forecast import Forecast
from systolic.forecasting.run import forecast_program


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How a function's arguments lie on a mesh, and what a call of it does."""

    mesh: Mapping[str, int] | None = None
    """Axis name to size; by default one axis ``devices`` over all of them."""
    in_specs: Sequence[Any] | None = None
    """PartitionSpecs, one an argument, or a tree of them like that argument."""
    out_specs: Any = None
    """PartitionSpecs of the result; left to the compiler by default."""
    donate_argnums: Sequence[int] = ()
    """Arguments whose memory the result may take; for plain functions."""


def forecast_function(
    function: Callable[..., Any],
    *args: Any,
    on: str | Slice,
    spread: Spread | Mapping[str, int] | None = None,
    model_flops: float | None = None,
    units: tuple[str, float] | None = None,
    flags: Sequence[str] = (),
    **kwargs: Any,
) -> Forecast:
    """What ``function(*args, **kwargs)`` will do on a slice that need not be there.

    Args:
        function: Jitted or plain; a plain one is jitted.
        *args: Arrays or ShapeDtypeStructs. A NamedSharding's spec, or ``Spread.in_specs``, says how
            each is spread over the mesh; what says nothing is whole on every device.
        on: The slice, or its name.
        spread: The mesh (axis name to size), or a :class:`Spread`.
        model_flops: FLOPs that the mathematics needs, for the MFU.
        units: What a call works off, ``("tokens", 1 << 20)``.
        flags: libtpu's, such as ``--xla_tpu_scoped_vmem_limit_kib=65536``.
        **kwargs: As ``args``.

    Raises:
        OptionError: the mesh does not fit the slice.
        RunError: the compiler failed.
    """
    target = slice_named(on) if isinstance(on, str) else on
    how = spread if isinstance(spread, Spread) else Spread(mesh=spread)
    program = function_program(function, args, kwargs, target, how)
    program = replace(program, model_flops=model_flops, units=units)
    return forecast_program(
        program, name_of(function), target, compiler=Compiler(flags=tuple(flags))
    )


def function_program(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    on: Slice,
    spread: Spread,
) -> FunctionProgram:
    """A function with abstract arguments and their partitions; see :func:`forecast_function`."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    axes = dict(spread.mesh) if spread.mesh else {"devices": on.num_devices}
    if math.prod(axes.values()) != on.num_devices:
        shape = " x ".join(f"{name} {size}" for name, size in axes.items())
        raise OptionError(
            f"the mesh ({shape}) has {math.prod(axes.values())} devices but {on.name} has {on.num_devices}; change an axis"
        )

    def is_spec(leaf: Any) -> bool:
        return isinstance(leaf, PartitionSpec) or leaf is None

    def spec_of(leaf: Any) -> Any:
        where = leaf.sharding if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else None
        return where.spec if isinstance(where, NamedSharding) else None

    def abstract(leaf: Any) -> Any:
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return leaf

    specs = [spec_of(leaf) for leaf in jax.tree.leaves((args, dict(kwargs)))]
    if spread.in_specs is not None:
        given = [
            part
            for arg, spec in zip(args, spread.in_specs, strict=True)
            for part in jax.tree.leaves(
                jax.tree.broadcast(spec, arg, is_leaf=is_spec), is_leaf=is_spec
            )
        ]
        specs[: len(given)] = given
    args, named = jax.tree.map(abstract, (args, dict(kwargs)))
    return FunctionProgram(
        function=function,
        args=args,
        kwargs=named,
        mesh=axes,
        specs=tuple(specs),
        out_specs=spread.out_specs,
        donate_argnums=tuple(spread.donate_argnums),
    )
