"""A model of another framework as arrays by name and a pure function of them; needs jax and numpy only."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from systolic.core.errors import DataError

Named = Mapping[str, Any]
"""Arrays by name."""

_NARROW = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}
"""JAX computes in 32 bits."""

MASK = "mask"
"""That of ``systolic.job.data``, which needs packages that an environment of TensorFlow may lack."""
RENAMED = f"{MASK}_input"
VALUE_ERRORS = (
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""Errors of a trace that needs the values of arrays."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A training step that agrees with the framework's own."""

    notes: tuple[str, ...] = ()
    """Notes on parts that could not be compared."""
    unused: tuple[str, ...] = ()
    """Trained weights that no output depends on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PureFunction:
    """A model as arrays by name and a function of them."""

    framework: str
    """Its framework with the version."""
    trained: Named
    """Weights that an optimizer changes, by the name that the framework gives them."""
    state: Named
    """All other arrays: batch statistics, frozen weights, constants, counters."""
    example: Named
    """Inputs by name, as numpy arrays."""
    call: Callable[[Named, Named, Named, bool, Any], tuple[dict[str, Any], dict[str, Any]]]
    """(trained, state, inputs, train, key) to (outputs, state after it), arrays by name.

    ``train`` selects the behaviour in training, for which ``key`` is a key of jax.random.
    """
    source: Callable[[Named], dict[str, np.ndarray]] | None = None
    """Outputs by name for inputs by name, as the framework itself computes them in evaluation; None without it."""
    random: bool = True
    """Whether training draws random numbers from ``key``."""
    compare: Callable[[Named], "Compared"] | None = None
    """Compares a training step on inputs by name with the framework's own; None where nothing computes it twice.

    Raises OptionError where outputs, gradients or state differ.
    """


def without_mask(function: PureFunction) -> PureFunction:
    """The function with an input named ``mask`` under the name ``mask_input``: batches mark their padding as ``mask``."""
    if MASK not in function.example:
        return function
    source, compare = function.source, function.compare

    def inner(inputs: Named) -> Named:
        return {MASK if name == RENAMED else name: array for name, array in inputs.items()}

    return replace(
        function,
        example={
            RENAMED if name == MASK else name: array for name, array in function.example.items()
        },
        call=lambda trained, state, inputs, train, key: function.call(
            trained, state, inner(inputs), train, key
        ),
        source=None if source is None else lambda inputs: source(inner(inputs)),
        compare=None if compare is None else lambda inputs: compare(inner(inputs)),
    )


def narrowed(array: Any, name: str = "an array") -> np.ndarray:
    """An array with 64-bit numbers in 32 bits.

    Raises:
        DataError: a whole number does not fit.
    """
    values = np.asarray(array)
    kind = _NARROW.get(str(values.dtype))
    if kind is None:
        return values
    if values.dtype.kind in "iu" and values.size:
        limits, worst = np.iinfo(kind), max(int(values.max()), int(values.min()), key=abs)
        if not limits.min <= worst <= limits.max:
            raise DataError(
                f"{name} of the model holds {worst}, and whole numbers have 32 bits here (at most {limits.max}); store it as smaller numbers or as floats"
            )
    return values.astype(kind)


def flattened(
    value: Any, tensor: type | tuple[type, ...], name: str = ""
) -> Iterator[tuple[str, Any]]:
    """Tensors of a result with their names: keys of dicts, numbers of tuples, ``output`` for a single one.

    Raises:
        DataError: something in it is no tensor, dict, list, tuple or None.
    """
    if value is None:
        return
    if isinstance(value, tensor):
        yield name or "output", value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flattened(inner, tensor, f"{name}_{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from flattened(inner, tensor, f"{name or 'output'}_{number}")
    else:
        raise DataError(
            f"the model returns {type(value).__name__}{f' in {name}' if name else ''}, which is no tensor; return tensors, or tuples, lists or dicts of them"
        )


def outputs_of(value: Any, tensor: type | tuple[type, ...]) -> dict[str, Any]:
    """:func:`flattened` as a dict.

    Raises:
        DataError: there is no tensor.
    """
    outputs = dict(flattened(value, tensor))
    if not outputs:
        raise DataError(
            f"the model returns no tensor ({type(value).__name__}); return tensors, or tuples, lists or dicts of them"
        )
    return outputs
