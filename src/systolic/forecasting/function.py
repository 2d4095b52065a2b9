"""Forecasts of anyone's function."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from systolic.aot import Compiler, FunctionProgram
from systolic.aot.traced import is_filtered, name_of
from systolic.chips import Slice
from systolic.chips import slice as slice_named
from systolic.core.errors import OptionError
from systolic.forecasting.forecast import Forecast
from systolic.forecasting.run import forecast_program
from systolic.sim.incomplete import Costs, Trips, given


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Layout of a function's arguments on a mesh, and the work of a call."""

    mesh: Mapping[str, int] | None = None
    """Axis name to size; by default one axis ``devices`` over all of them."""
    in_specs: Any = None
    """One entry a positional argument: a PartitionSpec, None (whole on every device) or a tree of
    them like that argument, whose own ``None`` leaves have no spec. One PartitionSpec alone is
    that of every argument."""
    out_specs: Any = None
    """PartitionSpecs of the result; left to the compiler by default. For plain functions."""
    donate_argnums: Sequence[int] = ()
    """Arguments whose memory the result may take. For plain functions; a jitted one says so itself."""


def forecast_function(  # noqa: PLR0913
    function: Callable[..., Any],
    *args: Any,
    on: str | Slice,
    spread: Spread | Mapping[str, int] | None = None,
    model_flops: float | None = None,
    units: tuple[str, float] | None = None,
    flags: str | Sequence[str] = (),
    quick: bool = False,
    trips: Trips = (),
    costs: Costs = (),
    **kwargs: Any,
) -> Forecast:
    """Forecasts ``function(*args, **kwargs)`` on a slice that need not be there.

    Args:
        function: Jitted, made by ``equinox.filter_jit``, or plain; a plain one is jitted. It is
            compiled under the settings of ``jax.config`` that this thread has.
        *args: Arrays or ShapeDtypeStructs. A NamedSharding's spec, or ``Spread.in_specs``, says how
            each is spread over the mesh; what says nothing is whole on every device.
        on: The slice, or its name.
        spread: The mesh (axis name to size), or a :class:`Spread`.
        model_flops: FLOPs that the mathematics needs, for the MFU.
        units: What a call works off, ``("tokens", 1 << 20)``.
        flags: libtpu's, such as ``--xla_tpu_scoped_vmem_limit_kib=65536``: a list, or one text. By
            default none, as your own program has them.
        quick: Stop at the schedule: memory exactly and a rougher time, in seconds. For TPUs;
            elsewhere the compile is no longer than that.
        trips: Trips of loops that depend on data: ``{"while.5": 100}``, by the loop's name in the forecast's notes or
            by ``file.py:line``.
        costs: Time of one call of a kernel, a custom call or a callback: ``{"my_kernel": 1.2e-3}`` in seconds, or ``"1.2ms"``.
        **kwargs: As ``args``.

    Raises:
        OptionError: the mesh does not fit the slice, ``in_specs`` not the arguments or the mesh, a
            flag is none, ``spread`` asks of a jitted function what only jit can say, or the program has nothing of a
            name in ``trips`` or ``costs``.
        RunError: the compiler failed.
    """
    target = slice_named(on) if isinstance(on, str) else on
    how = spread if isinstance(spread, Spread) else Spread(mesh=spread)
    program = function_program(function, args, kwargs, target, how)
    program = replace(
        program,
        model_flops=None if model_flops is None else float(model_flops),
        units=None if units is None else (str(units[0]), float(units[1])),
    )
    compiler = Compiler(flags=_flags(flags))
    return forecast_program(
        program,
        name_of(function),
        target,
        compiler=compiler.quick() if quick else compiler,
        given=given(trips, costs),
    )


def _flags(given: str | Sequence[str]) -> tuple[str, ...]:
    listed = isinstance(given, Sequence) and all(isinstance(flag, str) for flag in given)
    if not listed:
        raise OptionError(
            f"flags is {given!r}; it takes --name=value, a list of them or one text with spaces between"
        )
    flags = tuple(shlex.split(given) if isinstance(given, str) else given)
    for flag in flags:
        if not flag.startswith("--"):
            raise OptionError(
                f"{flag!r} is no flag of the compiler; write --name=value, a list of them or one text with spaces between"
            )
    return flags


def function_program(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    on: Slice,
    spread: Spread,
) -> FunctionProgram:
    """A function with abstract arguments and their partitions; see :func:`forecast_function`."""
    import jax
    from jax.sharding import NamedSharding

    axes = dict(spread.mesh) if spread.mesh else {"devices": on.num_devices}
    if math.prod(axes.values()) != on.num_devices:
        shape = " x ".join(f"{name} {size}" for name, size in axes.items())
        raise OptionError(
            f"the mesh ({shape}) has {math.prod(axes.values())} devices but {on.name} has {on.num_devices}; change an axis"
        )
    jitted = isinstance(function, jax.stages.Wrapped) or is_filtered(function)
    if jitted and (spread.out_specs is not None or spread.donate_argnums):
        raise OptionError(
            f"{name_of(function)} is jitted already, so Spread.out_specs and donate_argnums would be ignored; give them to its jit, or give the plain function"
        )

    def spec_of(leaf: Any) -> Any:
        where = leaf.sharding if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else None
        return where.spec if isinstance(where, NamedSharding) else None

    def abstract(leaf: Any) -> Any:
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return leaf

    specs = [spec_of(leaf) for leaf in jax.tree.leaves((args, dict(kwargs)))]
    if spread.in_specs is not None:
        given = _leaf_specs(spread.in_specs, args, axes)
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


def _leaf_specs(in_specs: Any, args: Sequence[Any], axes: Mapping[str, int]) -> list[Any]:
    """The spec of each leaf of the positional arguments, in their order."""
    import jax
    from jax.sharding import PartitionSpec

    if isinstance(in_specs, PartitionSpec):
        in_specs = (in_specs,) * len(args)
    if len(in_specs) != len(args):
        raise OptionError(
            f"in_specs has {len(in_specs)} entries and the function {len(args)} positional arguments; give one for each, None for an argument that is whole on every device"
        )
    found: list[Any] = []

    def give(spec: Any, part: Any) -> None:
        if spec is not None and not isinstance(spec, PartitionSpec):
            raise OptionError(f"in_specs holds {spec!r}; give a PartitionSpec or None")
        named = [name for entry in spec or () for name in _names(entry)]
        if odd := [name for name in named if name not in axes]:
            raise OptionError(
                f"{spec} names the axis {odd[0]}; the mesh has {', '.join(axes)}: choose one of these, or name the mesh's axes in Spread.mesh"
            )
        found.extend([spec] * len(jax.tree.leaves(part)))

    def is_spec(leaf: Any) -> bool:
        return isinstance(leaf, PartitionSpec) or leaf is None

    for number, (arg, spec) in enumerate(zip(args, in_specs, strict=True)):
        try:
            jax.tree.map(give, spec, arg, is_leaf=is_spec)
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise OptionError(
                f"in_specs[{number}] is not of the form of argument {number} ({reason}); give one PartitionSpec for all of it, or a tree like it"
            ) from error
    return found


def _names(entry: Any) -> tuple[Any, ...]:
    """The mesh axes of one dim's entry in a PartitionSpec."""
    if isinstance(entry, tuple):
        return entry
    return (entry,) if isinstance(entry, str) else ()
