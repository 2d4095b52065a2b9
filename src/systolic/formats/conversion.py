"""Parts that exports of programs share: programs without loops, quantized matrices, labels, and the record of an export."""

import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.data.image.images import Images
from systolic.data.text.text_data import Sentences
from systolic.formats.comparison import ExportDifference
from systolic.formats.examples import ExampleInputs
from systolic.formats.hugging_face.preprocessor import (
    PICTURED,
    SIZED,
    OutsidePictures,
    fields_of_job,
)
from systolic.formats.inference import PORTABLE, ExportableModel, Inference
from systolic.job import Job, Quantization, WeightFormat
from systolic.job.precision import CODES, INPUTS, SCALES
from systolic.models.quantized.codes import Quantized
from systolic.models.vision.config import CNN, ConvNet, MobileNetV2
from systolic.steps.tasks import Classification

INLINED = (
    "jit",
    "pjit",
    "closed_call",
    "eval_jaxpr",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
)
"""Primitives that call a function once."""

MOST_TURNS = 128
"""Turns of a loop that are written one after another."""

Replace = Callable[[Any, list[Any]], list[Any] | None]
"""An equation and its inputs to its outputs by other operations; None leaves it as it is."""
HELD = (WeightFormat.int8, WeightFormat.fp8, WeightFormat.w8a8)
"""Formats whose codes files of tensors hold; those of 4 bits are not a dtype of theirs."""
LABELS = "labels.txt"
"""Names of classes, a line each in the order of the outputs."""


def unrolled(call: Callable[..., Any], *args: Any) -> Any:
    """Outputs of a function, computed with its loops of known length written out; for tracing."""
    import jax

    closed, shape = jax.make_jaxpr(call, return_shape=True)(*args)
    outputs = computed(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), outputs)


def loops(jaxpr: Any) -> bool:
    """Whether a program has a loop, its functions' too."""
    return any(
        equation.primitive.name in ("while", "scan") or any(map(loops, _programs(equation.params)))
        for equation in jaxpr.eqns
    )


def largest_bytes(jaxpr: Any) -> int:
    """Bytes of the largest array that a program makes, its functions' too."""
    import jax.core

    sizes = [
        outvar.aval.size * outvar.aval.dtype.itemsize
        for equation in jaxpr.eqns
        for outvar in equation.outvars
        if isinstance(outvar.aval, jax.core.ShapedArray)
    ]
    inner = [
        largest_bytes(program) for equation in jaxpr.eqns for program in _programs(equation.params)
    ]
    return max([0, *sizes, *inner])


def _programs(params: Any) -> list[Any]:
    import jax.extend.core

    programs = [
        program
        for value in params.values()
        for program in (value if isinstance(value, tuple) else [value])
    ]
    programs = [
        program.jaxpr if isinstance(program, jax.extend.core.ClosedJaxpr) else program
        for program in programs
    ]
    return [program for program in programs if isinstance(program, jax.extend.core.Jaxpr)]


def computed(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], replace: Replace = lambda *_: None
) -> list[Any]:
    """Outputs of a jaxpr, its functions inlined and its loops written out."""
    import jax.extend.core

    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax.extend.core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        operands, name = [read(atom) for atom in equation.invars], equation.primitive.name
        if name in INLINED:
            outputs = _called(equation.params, operands, replace)
        elif name == "scan" and equation.params["length"] <= MOST_TURNS:
            outputs = _turns(equation, operands, replace)
        elif (other := replace(equation, operands)) is not None:
            outputs = other
        else:
            params = equation.primitive.get_bind_params(equation.params)
            out = equation.primitive.bind(*operands, **params)
            outputs = out if equation.primitive.multiple_results else [out]
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _called(params: Any, operands: list[Any], replace: Replace) -> list[Any]:
    """Outputs of a function that is called once."""
    import jax.extend.core

    inner = params.get("jaxpr") or params["call_jaxpr"]
    if isinstance(inner, jax.extend.core.ClosedJaxpr):
        return computed(inner.jaxpr, inner.consts, operands, replace)
    return computed(inner, (), operands, replace)


def _turns(equation: Any, operands: list[Any], replace: Replace) -> list[Any]:
    """Outputs of a loop over layers, one turn after another."""
    import jax.numpy as jnp

    params = equation.params
    body, turns = params["jaxpr"], range(params["length"])
    inner, constants = getattr(body, "jaxpr", body), getattr(body, "consts", ())
    carried = _passed_whole(equation.outvars, inner.outvars)
    whole = _passed_whole(equation.invars, inner.invars)
    consts, carry, rows = (
        operands[: whole - carried],
        operands[whole - carried : whole],
        operands[whole:],
    )
    outputs_by_turn: list[list[Any]] = []
    for turn in reversed(turns) if params["reverse"] else turns:
        own = [*consts, *carry, *(row[turn] for row in rows)]
        outputs = computed(inner, constants, own, replace)
        carry = outputs[:carried]
        outputs_by_turn.append(outputs[carried:])
    outputs_by_turn = outputs_by_turn[::-1] if params["reverse"] else outputs_by_turn
    return [*carry, *(jnp.stack(parts) for parts in zip(*outputs_by_turn, strict=True))]


def _passed_whole(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Variables of a loop's equation that its body has as they are; those cut into rows have one axis more outside."""
    pairs = zip(outside, inside, strict=True)
    return sum(len(outer.aval.shape) == len(inner.aval.shape) for outer, inner in pairs)


def plain_platform(model: ExportableModel) -> str:
    """The platform whose program a converter takes best.

    That of a CPU has the layers one after another in place of a loop. Convolutional networks have no loop, and on a
    CPU some of their convolutions are sums of shifted pictures or matmuls of patches.
    """
    return PORTABLE if isinstance(model.job.model, CNN | ConvNet) else "cpu"


def each_platform(model: ExportableModel, function: Inference) -> Inference:
    """A function with what is fast on a CPU beside what is fast elsewhere, where these differ much; XLA compiles one of them.

    MobileNetV2 takes an eighth of the time so on a CPU (20 ms in place of 165 for a picture on two cores).
    """
    if not isinstance(model.job.model, MobileNetV2):
        return function
    own = model.functions_on("cpu")[function.name].call

    def call(params: Mapping[str, Any], inputs: dict[str, Any]) -> dict[str, jax.Array]:
        return jax.lax.platform_dependent(dict(params), inputs, cpu=own, default=function.call)

    return replace(function, call=call)


def with_codes(model: ExportableModel, *, kept: bool) -> tuple[ExportableModel, tuple[str, ...]]:
    """A model as a format holds it, and what became of its quantized matrices, in words.

    Args:
        model: The model.
        kept: Whether the format holds codes of 8 bits.
    """
    formats = model.job.quantization.by_path()
    stay = {path: how for path, how in formats.items() if kept and how.format in HELD}
    floats = [path for path in formats if path not in stay]
    params: dict[str, Any] = dict(model.params)
    for path in floats:
        codes, scales = (jnp.asarray(params.pop(f"{path}/{part}")) for part in (CODES, SCALES))
        inputs = params.pop(f"{path}/{INPUTS}", None)
        if inputs is not None:
            inputs = jnp.asarray(inputs)
        wide = Quantized(codes=codes, scales=scales, inputs=inputs).restored(jnp.float32)
        params[path] = np.asarray(wide)
    notes = []
    whole = [path for path, how in stay.items() if how.format.activations]
    if len(stay) > len(whole):
        notes.append(
            f"quantized matrices that stay in codes, which the program widens: {len(stay) - len(whole)}"
        )
    if whole:
        notes.append(
            f"quantized matrices that are multiplied with activations in int8: {len(whole)}"
        )
    if floats:
        notes.append(
            f"quantized matrices that are written as the floats that their codes stand for: {len(floats)}"
        )
    job = replace(model.job, quantization=Quantization.of(stay))
    return replace(model, job=job, params=params), tuple(notes)


def class_names(job: Job) -> tuple[str, ...]:
    """Names of an image classifier's classes, in the order of its outputs; () where they have none."""
    return job.data.labels() if isinstance(job.task, Classification) else ()


def label_lines(job: Job) -> bytes:
    """Content of :data:`LABELS`; empty where classes have no names."""
    return "".join(f"{name}\n" for name in class_names(job)).encode()


def described(job: Job) -> dict[str, Any]:
    """Names of classes (``labels``), what is done to a picture's size (``pictures``, fields of transformers' processors), and of a model of embeddings what is written before a text (``before``) and whether it is in lower case (``lower``)."""
    properties: dict[str, Any] = {"labels": list(class_names(job))}
    if isinstance(job.data, Images | OutsidePictures) and isinstance(job.model, PICTURED):
        fields = fields_of_job(job)
        properties["pictures"] = {name: fields[name] for name in SIZED}
    if isinstance(job.data, Sentences):
        properties |= {"before": job.data.before, "lower": job.data.lower}
    return {name: property_ for name, property_ in properties.items() if property_}


def metadata(job: Job) -> dict[str, str]:
    """The same as texts: JSON but for what is written before a text."""
    return {
        name: text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        for name, text in described(job).items()
    }


def with_labels(content: bytes, job: Job) -> bytes:
    """A .tflite file with :data:`LABELS` at its end, as an archive that ``unzip`` opens; unchanged where classes have no names."""
    lines = label_lines(job)
    if not lines:
        return content
    file = io.BytesIO(content)
    with zipfile.ZipFile(file, "a") as archive:
        # A date of its own, so that the same model gives the same file.
        archive.writestr(zipfile.ZipInfo(LABELS, (1980, 1, 1, 0, 0, 0)), lines)
    return file.getvalue()


def input_notes(job: Job) -> list[str]:
    """A line for what a program's user does to a picture, or to a text before it is tokens."""
    properties = described(job)
    notes = []
    if "before" in properties:
        notes.append(
            f"{properties['before']!r} is written before each text here, which no program does: put it there before making tokens"
        )
    if "pictures" in properties:
        notes.append(
            f"pictures are resized and cut here, which no program does: do it before as the program's `pictures` say, {json.dumps(properties['pictures'])}"
        )
    if "lower" in properties:
        notes.append(
            "texts are read in lower case here, which no program does: change them before making tokens"
        )
    return notes


@dataclass(frozen=True, kw_only=True)
class ModelExport:
    """An exported model on disk."""

    path: Path
    kind: str
    """Format."""
    parameters: int
    """Elements of all parameters."""
    bytes: int
    """Size of all files."""
    differences: Mapping[str, ExportDifference]
    """Differences by function."""
    compared_on: str
    """Origin of the inputs of the comparison."""
    notes: tuple[str, ...] = ()
    """Form of quantized matrices, order of classes."""
    seconds: float = 0.0
    """Time that the export took."""

    @classmethod
    def of(
        cls,
        model: ExportableModel,
        path: Path,
        kind: str,
        differences: Mapping[str, ExportDifference],
        examples: ExampleInputs,
    ) -> "ModelExport":
        """The export at a path, a folder or a file."""
        files = [path] if path.is_file() else [part for part in path.rglob("*") if part.is_file()]
        return cls(
            path=path,
            kind=kind,
            parameters=sum(int(np.size(array)) for array in model.params.values()),
            bytes=sum(file.stat().st_size for file in files),
            differences=differences,
            compared_on=examples.origin,
        )

    def lines(self) -> list[str]:
        """The comparison, a line for each function, and notes."""
        measured = [
            f"{name}: {difference} ({self.compared_on})"
            for name, difference in self.differences.items()
        ]
        return [*measured, *self.notes]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": str(self.path),
            "format": self.kind,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "compared_on": self.compared_on,
            "functions": {
                name: difference.to_json() for name, difference in self.differences.items()
            },
            "notes": list(self.notes),
            "seconds": self.seconds,
        }
