"""Arrays of requests: exported programs, and jobs of a user's own."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from systolic.compiling.program_store import ProgramSpec, ProgramStore
from systolic.core.errors import OptionError
from systolic.data.input_files import InputFiles
from systolic.formats.program.model import ExportedProgram
from systolic.inference.predictor import FixedForm
from systolic.inference.readers import Example, Output
from systolic.inference.rows import Bucket, Row
from systolic.job import Field
from systolic.serving.batch.buckets import InputLimits
from systolic.serving.batch.intake import Inputs, Intake, form_of, input_form, spec_of
from systolic.serving.batch.request import ANY, ArraySpec, ModelKind


def kind_of(dtype: Any) -> str:
    """``f``, ``i``, ``u`` or ``b`` as of NumPy's own dtypes."""
    return "f" if jnp.issubdtype(dtype, jnp.floating) else np.dtype(dtype).kind


def check_range(name: str, array: np.ndarray, dtype: Any) -> None:
    """Refuses numbers that a dtype can't hold; infinities and NaN are no numbers, and pass to floats.

    Raises:
        OptionError: some are too large or too small.
    """
    dtype, kind = np.dtype(dtype), kind_of(dtype)
    if array.dtype == dtype or not array.size or kind not in "fiu":
        return
    numbers = array if kind_of(array.dtype) != "f" else array[np.isfinite(array)]
    if not numbers.size:
        return
    least, most = numbers.min(), numbers.max()
    about: Any = jnp.finfo(dtype) if kind == "f" else jnp.iinfo(dtype)
    if kind == "f":
        with np.errstate(over="ignore"):
            fits = np.isfinite(np.stack([least, most]).astype(dtype)).all()
    else:
        fits = least >= about.min and most <= about.max
    if not fits:
        raise OptionError(
            f"{name} has numbers from {least} to {most}, and {dtype} holds {about.min} to {about.max}"
        )


KINDS = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}
"""Kinds of numbers that become a kind."""


class ArrayIntake(Intake):
    """Arrays by name, one entry for each example.

    A program whose examples depend on each other, which was exported for a number of examples, takes requests
    of that number, each alone.
    """

    kind = ModelKind.tensors
    reads = False

    def __init__(self, form: FixedForm, used: Sequence[str], limits: InputLimits) -> None:
        super().__init__(limits)
        self.form = form
        job = form.steps.job
        self._fields: Mapping[str, Field] = {
            name: field for name, field in job.data.fields().items() if name in used
        }
        self._repeated = job.data.repeated if isinstance(job.data, InputFiles) else ()
        if isinstance(job.model, ExportedProgram) and not job.model.about.independent:
            self.alone = job.model.about.batch
        self.inputs = tuple(self._spec(name, field) for name, field in self._fields.items())

    def _spec(self, name: str, field: Field) -> ArraySpec:
        each = () if name in self._repeated else (self.alone or ANY,)
        return ArraySpec(name=name, dtype=field.dtype, shape=(*each, *field.shape))

    def count(self, inputs: Inputs) -> int:
        """See :class:`Intake`."""
        counts: dict[str, int] = {}
        for spec in self.inputs:
            array, field = inputs[spec.name], self._fields[spec.name]
            each = spec.name not in self._repeated
            shape = array.shape[1:] if each else array.shape
            if shape != tuple(field.shape) or (each and not len(array)):
                raise OptionError(f"{spec.name} is {form_of(array)}; give {input_form(spec)}")
            _check_numbers(array, spec)
            if each:
                counts[spec.name] = len(array)
        if len(set(counts.values())) != 1:
            raise OptionError(
                f"the inputs differ in their first dim ({', '.join(f'{name} {count}' for name, count in counts.items())}); it is the number of examples"
            )
        num_examples = next(iter(counts.values()))
        if self.alone is not None and num_examples != self.alone:
            raise OptionError(
                f"the request has {num_examples} examples, and the program was exported for {self.alone} that depend on each other; give {self.alone}"
            )
        self.bound(num_examples)
        return num_examples

    def parts(self, inputs: Inputs) -> Sequence[Callable[[], Sequence[Example]]]:
        """See :class:`Intake`."""
        arrays = {name: inputs[name].astype(field.dtype) for name, field in self._fields.items()}
        repeated = {name: arrays[name] for name in arrays if name in self._repeated}
        shared = b""
        if repeated:
            digest = hashlib.sha256()
            for array in repeated.values():
                digest.update(np.ascontiguousarray(array).tobytes())
            shared = digest.digest()
        several = {name: array for name, array in arrays.items() if name not in repeated}
        count = len(next(iter(several.values())))
        examples = [
            Example(
                rows=[
                    Row(
                        arrays={**repeated, **{name: array[i] for name, array in several.items()}},
                        shared=shared,
                    )
                ]
            )
            for i in range(count)
        ]
        return [lambda: examples]

    def outputs(self, of: Mapping[str, Any]) -> Sequence[ArraySpec]:
        """See :class:`Intake`."""
        return [spec_of(name, array) for name, array in of.items()]

    def answer(self, example: Example, outputs: Sequence[Output]) -> dict[str, Any]:
        """See :class:`Intake`."""
        del example
        (output,) = outputs
        return dict(output)


def _check_numbers(array: np.ndarray, spec: ArraySpec) -> None:
    """Refuses numbers of another kind, and those that the dtype can't hold."""
    if kind_of(array.dtype) not in KINDS.get(kind_of(spec.dtype), ""):
        raise OptionError(
            f"{spec.name} is {array.dtype}, and the model takes {spec.dtype}; convert it"
        )
    check_range(spec.name, array, spec.dtype)


def used_inputs(
    form: FixedForm, params: Any, model_state: Any, store: ProgramStore | None = None
) -> list[str]:
    """Names of the arrays of an example that the program's outputs depend on: labels are none of them.

    Args:
        form: How rows make a batch.
        params: Weights, or their ShapeDtypeStructs.
        model_state: Other variables likewise.
        store: Where the names are kept; None traces the program.
    """
    model = form.steps.job.model
    together = model.about.together if isinstance(model, ExportedProgram) else 1
    batch = form.abstract(Bucket(rows=math.lcm(form.ways, together)))
    if store is None:
        return _traced(form, params, model_state, batch)
    sizes = {"form": type(form).__name__}
    spec = ProgramSpec(name="inputs", sizes=sizes, arguments=(params, model_state, batch))
    return store.facts(spec, lambda: _traced(form, params, model_state, batch))


def _traced(form: FixedForm, params: Any, model_state: Any, batch: dict[str, Any]) -> list[str]:
    names = sorted(batch)
    closed = jax.make_jaxpr(
        lambda params, model_state, arrays: form.function()(
            params, model_state, dict(zip(names, arrays, strict=True))
        )
    )(params, model_state, [batch[name] for name in names])
    needed = {v for v in closed.jaxpr.outvars if not isinstance(v, jax.extend.core.Literal)}
    for equation in reversed(closed.jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(v for v in equation.invars if not isinstance(v, jax.extend.core.Literal))
    own = closed.jaxpr.invars[-len(names) :]
    return [
        name
        for name, variable in zip(names, own, strict=True)
        if variable in needed and name in form.steps.job.data.fields()
    ]
