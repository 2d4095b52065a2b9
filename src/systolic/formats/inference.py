"""Inference of a model as pure functions of its weights and of named inputs: what every exported program computes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import psutil

from systolic.core.errors import OptionError, nearest
from systolic.core.units import si
from systolic.formats.difference import EXACT, NARROW
from systolic.formats.unrolling import largest_bytes
from systolic.job import Job, Precision

Arrays = dict[str, jax.Array]
BATCH, SEQUENCE = "batch", "sequence"
"""Names of free dims: examples of a call, and tokens of a text."""
PORTABLE = "any"
"""Platform of a program that lowers everywhere: no kernel of one kind of chip is chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceArray:
    """An input or output of an inference function."""

    shape: tuple[int | str, ...]
    """Sizes; a free dim has a name, such as :data:`BATCH`."""
    dtype: str

    def sized(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """The shape with sizes for its free dims; raises KeyError where one lacks its own."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True)
class Inference:
    """One pure function: (params, inputs by name) to outputs by name.

    Parameters and other variables are one flat dict, path to array, the same for all functions of a model.
    Jit it, export it, or call it.
    """

    name: str
    """``logits``, ``embedding``, ``encode`` …"""
    inputs: Mapping[str, InferenceArray]
    call: Callable[[Mapping[str, Any], dict[str, Any]], dict[str, jax.Array]] = field(repr=False)
    limits: Mapping[str, int] = field(default_factory=dict)
    """Largest size of a free dim, where the model has one."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Input to the array of an example that it is made of, where their names differ."""
    whole: frozenset[str] = frozenset()
    """Inputs that are one for all examples of a call, without a batch dim."""

    def __call__(
        self, params: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        """The outputs; each has the free dims of the inputs that it belongs to."""
        return self.call(params, dict(inputs))

    @property
    def free(self) -> tuple[str, ...]:
        """Names of the free dims, in the order in which they occur."""
        return tuple(
            dict.fromkeys(
                d for one in self.inputs.values() for d in one.shape if isinstance(d, str)
            )
        )

    @property
    def batch(self) -> int | None:
        """Examples of a call; None where they are free."""
        first = next(one.shape[0] for name, one in self.inputs.items() if name not in self.whole)
        return None if isinstance(first, str) else first

    def fixed(self, sizes: Mapping[str, int]) -> "Inference":
        """The function with sizes for some free dims; names that it lacks are left out.

        Raises:
            OptionError: a size is beyond the model's limit.
        """
        for dim, most in self.limits.items():
            if sizes.get(dim, 0) > most:
                raise OptionError(
                    f"--{dim} is {sizes[dim]}, and the model takes {most}; give {most} or fewer"
                )
        inputs = {
            name: replace(one, shape=tuple(sizes.get(str(dim), dim) for dim in one.shape))
            for name, one in self.inputs.items()
        }
        return replace(self, inputs=inputs)

    def abstract(self, sizes: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """The inputs for sizes of the free dims, for tracing."""
        return {
            name: jax.ShapeDtypeStruct(one.sized(sizes), jnp.dtype(one.dtype))
            for name, one in self.inputs.items()
        }

    def symbolic(self) -> dict[str, int | Any]:
        """Sizes of the free dims as symbols of JAX, below the limits."""
        if not self.free:
            return {}
        limits = [f"{dim} <= {most}" for dim, most in self.limits.items() if dim in self.free]
        dims = jax.export.symbolic_shape(", ".join(self.free), constraints=limits)
        return dict(zip(self.free, dims, strict=True))

    def outputs(self, params: Mapping[str, Any]) -> dict[str, InferenceArray]:
        """The outputs by name, with their free dims; traces the function."""
        shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in params.items()}
        made = jax.eval_shape(self.call, shapes, self.abstract(self.symbolic()))
        return {
            name: InferenceArray(
                shape=tuple(dim if isinstance(dim, int) else str(dim) for dim in array.shape),
                dtype=str(array.dtype),
            )
            for name, array in made.items()
        }


Make = Callable[[Job, str, str], tuple[Inference, ...]]
"""A job, a platform and a compute dtype to its inference functions."""


@dataclass(frozen=True, kw_only=True)
class ExportableModel:
    """A model with its weights, which can leave as one or several functions."""

    job: Job
    """What it was trained or imported as; one device, no adapter."""
    params: Mapping[str, Any] = field(repr=False)
    """Parameters and other variables by path, adapters merged."""
    make: Make = field(repr=False)
    dtype: str = "float32"
    """Numpy name of the dtype that it computes in."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of dims that are not left free."""
    _made: dict[str, dict[str, Inference]] = field(default_factory=dict, repr=False, init=False)
    _outputs: dict[str, dict[str, InferenceArray]] = field(
        default_factory=dict, repr=False, init=False
    )
    _source: list["ExportableModel"] = field(default_factory=list, repr=False, init=False)

    @property
    def functions(self) -> Mapping[str, Inference]:
        """The functions to export, by name, for any platform; the first is the one that is used alone."""
        return self.functions_on(PORTABLE)

    def functions_on(self, platform: str) -> Mapping[str, Inference]:
        """The functions traced for a platform (``tpu``, ``gpu``, ``cpu``), with what is fast there."""
        if platform not in self._made:
            made = self.make(self.job, platform, self.dtype)
            self._made[platform] = {one.name: one.fixed(self.sizes) for one in made}
        return self._made[platform]

    def outputs(self, name: str) -> Mapping[str, InferenceArray]:
        """The outputs of a function by name, with their free dims."""
        if name not in self._outputs:
            self._outputs[name] = self.functions[name].outputs(self.params)
        return self._outputs[name]

    def function(self, name: str | None = None) -> Inference:
        """A function by name, the first one without.

        Raises:
            OptionError: there is no such function.
        """
        if name is None:
            return next(iter(self.functions.values()))
        if name not in self.functions:
            raise OptionError(
                f"{self.job.name} has no function {name!r}{nearest(name, self.functions)}; it has {', '.join(self.functions)}"
            )
        return self.functions[name]

    def check_memory(self, name: str, inputs: Mapping[str, np.ndarray]) -> None:
        """Refuses inputs for which the source program makes an array that this machine has no memory for, twice.

        Raises:
            OptionError: so.
        """
        call = self._wide().functions_on("cpu")[name].call
        shapes = {path: jax.ShapeDtypeStruct(a.shape, a.dtype) for path, a in self.params.items()}
        wanted = 2 * largest_bytes(jax.make_jaxpr(call)(shapes, dict(inputs)).jaxpr)
        free = psutil.virtual_memory().available
        if wanted > free:
            sizes = " ".join(f"--{dim} {size}" for dim, size in self.sizes.items())
            raise OptionError(
                f"{sizes}: the comparison of {name} takes {si(wanted, 'B')} of memory, and {si(free, 'B')} are free; give less, or fewer --examples"
            )

    def source_outputs(self, name: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs of a function's source program in float32 on this machine's CPU, to compare an artifact with."""
        return run(self._wide().functions_on("cpu")[name].call, self.params, inputs)

    @property
    def tolerance(self) -> float:
        """Largest difference from the source, over the largest output, of a program that is no mistake."""
        return EXACT if self.dtype == "float32" else NARROW

    def _wide(self) -> "ExportableModel":
        """The same computed in float32."""
        if self.dtype == "float32":
            return self
        if not self._source:
            wide = replace(self.job, precision=Precision.f32)
            self._source.append(replace(self, job=wide, dtype="float32"))
        return self._source[0]


def run(
    call: Callable[..., Any], params: Mapping[str, Any], inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Outputs of a function of params and inputs on this machine's CPU, with matmuls as exact as the device has."""
    # A TPU's default for float32 is one pass in bfloat16.
    with jax.default_device(reference_device()), jax.default_matmul_precision("highest"):
        made = jax.jit(call)(dict(params), dict(inputs))
    return {name: np.asarray(array) for name, array in made.items()}


def reference_device() -> Any:
    """A CPU device, where JAX has one beside its default backend; else the default device."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]
