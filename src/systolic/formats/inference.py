"""Inference of a model as pure functions of its weights and of named inputs, which every exported program computes; a job's follow from its task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx

from systolic.core.errors import OptionError, nearest
from systolic.core.units import si
from systolic.data.audio import Recordings
from systolic.formats.comparison import EXACT, NARROW
from systolic.formats.program.model import ExportedProgram
from systolic.job import Adapter, Job, Layout, Model, Precision, Remat, Task
from systolic.job.data import MASK
from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder
from systolic.models.whisper.config import Whisper
from systolic.steps.decode import Transcribe
from systolic.steps.lengths import longest_text
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget, make_mesh
from systolic.steps.tasks import (
    ArrayClassification,
    ArrayOutputs,
    ArrayRegression,
    Classification,
    Embedding,
    LanguageModel,
    MaskedTokens,
    Transcription,
)

Arrays = dict[str, jax.Array]

BATCH, SEQUENCE = "batch", "sequence"
"""Names of free dims: examples of a call, and tokens of a text."""

PORTABLE = "any"
"""Platform of a program that lowers everywhere: no kernel of one kind of chip is chosen."""
Read = Callable[[Any, dict[str, Any]], Mapping[str, jax.Array]]
"""A module with its weights and inputs by name to outputs by name."""
ALONE = Layout(data=1, fsdp=1, remat=Remat.none)
IMAGE, TOKENS, FEATURES, ENCODED, LOGITS = "image", "tokens", "features", "encoded", "logits"
SEGMENTS = "segments"
"""Array of an example that says where a text's tokens are; ``mask`` of a function."""


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
    sources: Mapping[str, str] = field(default_factory=dict)
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
                d for input_ in self.inputs.values() for d in input_.shape if isinstance(d, str)
            )
        )

    @property
    def batch(self) -> int | None:
        """Examples of a call; None where they are free."""
        first = next(
            input_.shape[0] for name, input_ in self.inputs.items() if name not in self.whole
        )
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
            name: replace(input_, shape=tuple(sizes.get(str(dim), dim) for dim in input_.shape))
            for name, input_ in self.inputs.items()
        }
        return replace(self, inputs=inputs)

    def abstract(self, sizes: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """The inputs for sizes of the free dims, for tracing."""
        return {
            name: jax.ShapeDtypeStruct(input_.sized(sizes), jnp.dtype(input_.dtype))
            for name, input_ in self.inputs.items()
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
        traced = jax.eval_shape(self.call, shapes, self.abstract(self.symbolic()))
        return {
            name: InferenceArray(
                shape=tuple(dim if isinstance(dim, int) else str(dim) for dim in array.shape),
                dtype=str(array.dtype),
            )
            for name, array in traced.items()
        }


Make = Callable[[Job, str, str], tuple[Inference, ...]]
"""A job, a platform and a compute dtype to its inference functions."""


@dataclass(frozen=True, kw_only=True)
class ExportableModel:
    """A model with its weights, which can leave as one or several functions."""

    job: Job
    """The job that it was trained or imported under; one device, no adapter."""
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
            functions = self.make(self.job, platform, self.dtype)
            self._made[platform] = {
                function.name: function.fixed(self.sizes) for function in functions
            }
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
        from systolic.formats.conversion import largest_bytes  # which imports this module

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
        outputs = jax.jit(call)(dict(params), dict(inputs))
    return {name: np.asarray(array) for name, array in outputs.items()}


def reference_device() -> Any:
    """A CPU device, where JAX has one beside its default backend; else the default device."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


TEXT = InferenceArray(shape=(BATCH, SEQUENCE), dtype="int32")


def exportable(
    job: Job,
    weights: Mapping[str, Any],
    precision: Precision = Precision.f32,
    sizes: Mapping[str, int] | None = None,
) -> ExportableModel:
    """A model that can leave.

    Args:
        job: As it was trained or imported, on any layout.
        weights: Parameters and other variables of its plain model by path, adapters merged
            (``TrainedModel.plain_weights``).
        precision: Of the exported computation.
        sizes: Of dims that are not to be free, by their names (``batch``, ``sequence``).

    Raises:
        OptionError: its task has no outputs to export, or a text of that size is longer than the model takes.
    """
    most = longest_text(job)
    if most is not None and (sizes or {}).get(SEQUENCE, 0) > most:
        raise OptionError(
            f"--sequence is {(sizes or {})[SEQUENCE]}, and {job.name} takes texts of {most} tokens; give {most} or fewer"
        )
    plain = replace(job, layout=ALONE, adapter=Adapter(), precision=precision)
    _maker(plain.task)
    return ExportableModel(
        job=plain, params=weights, make=functions_of, dtype=precision.dtype, sizes=sizes or {}
    )


def functions_of(job: Job, platform: str, dtype: str) -> tuple[Inference, ...]:
    """The functions of a job with a layout of one device, traced for a platform.

    Raises:
        OptionError: its task has no outputs to export.
    """
    mesh = make_mesh(job.layout, [reference_device()])
    target = MeshTarget(platform=platform, layout=job.layout, dtype=dtype, mesh=mesh)
    return _maker(job.task)(StepFunctions(job, target, trains=False))


def _maker(task: Task) -> Callable[[StepFunctions], tuple[Inference, ...]]:
    for kind, maker in MAKERS.items():
        if isinstance(task, kind):
            return maker
    if type(task).outputs is Task.outputs:
        raise OptionError(
            f"{type(task).__name__} names no outputs of the model, only terms of its loss; give it a method outputs(model, batch)"
        )
    return _others


def _inference(
    steps: StepFunctions, name: str, inputs: Mapping[str, InferenceArray], read: Read, **more: Any
) -> Inference:
    """A function that reads a module with its weights."""
    network = steps.network

    def call(params: Mapping[str, Any], batch: dict[str, Any]) -> Arrays:
        # Arrays that no module has, such as the moments of a run, are no part of the program.
        own = {path: jnp.asarray(params[path]) for path in network.params}
        rest = {path: jnp.asarray(params[path]) for path in network.model_state}
        module = network.module(network.cast(own), rest, train=False)
        return {key: _plain(array) for key, array in read(module, batch).items()}

    return Inference(name=name, inputs=inputs, call=call, **more)


def _plain(array: jax.Array) -> jax.Array:
    """Floating numbers in float32, which every format has."""
    return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _images(steps: StepFunctions) -> tuple[Inference, ...]:
    """``image`` f32[batch, height, width, channels], numbers 0 to 255, to ``logits`` f32[batch, classes]."""
    field = steps.job.data.fields()[IMAGE]
    image = InferenceArray(shape=(BATCH, *field.shape), dtype="float32")
    return (
        _inference(
            steps, LOGITS, {IMAGE: image}, lambda module, batch: {LOGITS: module(batch[IMAGE])}
        ),
    )


def _limit(model: Model) -> dict[str, int]:
    """The most tokens of a text, where the model has one."""
    match model:
        case Decoder() if model.learned_positions:
            return {SEQUENCE: model.learned_positions}
        case Encoder() | Whisper():
            return {SEQUENCE: model.positions}
    return {}


def _places(tokens: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def _language(steps: StepFunctions) -> tuple[Inference, ...]:
    """``tokens`` i32[batch, sequence] to ``logits`` f32[batch, sequence, vocab] of the tokens after each; padding goes to the end."""

    def read(module: Any, batch: dict[str, Any]) -> Mapping[str, jax.Array]:
        tokens = batch[TOKENS]
        # A mixture sows the losses of its routing, which a reader has no use for.
        logits, _ = nnx.capture(module, nnx.Intermediate)(
            tokens, jnp.ones_like(tokens), _places(tokens)
        )
        return {LOGITS: logits}

    return (_inference(steps, LOGITS, {TOKENS: TEXT}, read, limits=_limit(steps.job.model)),)


def _texts(steps: StepFunctions, name: str, read: Read) -> tuple[Inference, ...]:
    inputs = {TOKENS: TEXT, MASK: TEXT}
    return (
        _inference(
            steps, name, inputs, read, limits=_limit(steps.job.model), sources={MASK: SEGMENTS}
        ),
    )


def _embedding(steps: StepFunctions) -> tuple[Inference, ...]:
    """``tokens`` and ``mask`` i32[batch, sequence], 1 for a token and 0 for padding, to ``embedding`` f32[batch, width]."""

    def read(module: Any, inputs: dict[str, Any]) -> Mapping[str, jax.Array]:
        tokens = inputs[TOKENS]
        batch = {TOKENS: tokens, SEGMENTS: inputs[MASK], "positions": _places(tokens)}
        return steps.job.task.outputs(module, batch)

    return _texts(steps, "embedding", read)


def _masked(steps: StepFunctions) -> tuple[Inference, ...]:
    """``tokens`` and ``mask`` i32[batch, sequence] to ``logits`` f32[batch, sequence, vocab] of every place."""

    def read(module: Any, batch: dict[str, Any]) -> Mapping[str, jax.Array]:
        places = _places(batch[TOKENS])
        hidden = module(batch[TOKENS], batch[MASK], places)
        return {LOGITS: module.logits(hidden, places)}

    return _texts(steps, LOGITS, read)


def _speech(steps: StepFunctions) -> tuple[Inference, ...]:
    """Three functions.

    ``transcribe``: ``features`` f32[batch, frames, mels] to ``tokens`` i32[batch, positions], the end's token after each text.
    ``encode``: ``features`` to ``encoded`` f32[batch, frames / 2, width].
    ``decode``: ``encoded`` and ``tokens`` i32[batch, sequence] to ``logits`` f32[batch, sequence, vocab].
    """
    model, data = steps.job.model, steps.job.data
    assert isinstance(model, Whisper)
    assert isinstance(data, Recordings)
    field = data.fields()[FEATURES]
    features = {FEATURES: InferenceArray(shape=(BATCH, *field.shape), dtype="float32")}
    encoded = InferenceArray(shape=(BATCH, model.frames, model.d_model), dtype="float32")
    encode = _inference(
        steps, "encode", features, lambda module, batch: {ENCODED: module.encode(batch[FEATURES])}
    )

    def decoded(module: Any, batch: dict[str, Any]) -> Mapping[str, jax.Array]:
        heard = batch[ENCODED].astype(steps.target.dtype)
        return {LOGITS: module.logits(module.decode(batch[TOKENS], heard))}

    decode = _inference(
        steps,
        "decode",
        {ENCODED: encoded, TOKENS: TEXT},
        decoded,
        limits=_limit(model),
    )
    if not data.writing.prompt:
        return encode, decode
    writes = Transcribe(steps, data.writing, model.positions)

    def transcribe(params: Mapping[str, Any], batch: dict[str, Any]) -> Arrays:
        own = {path: params[path] for path in steps.network.params}
        rest = {path: params[path] for path in steps.network.model_state}
        sound = batch[FEATURES]
        rows = sound.shape[0]
        start = jnp.asarray(data.writing.prompt, jnp.int32)
        prompt = jnp.broadcast_to(start, (rows, len(data.writing.prompt)))
        return {TOKENS: writes(own, rest, sound, prompt, jnp.ones(rows, bool))}

    return Inference(name="transcribe", inputs=features, call=transcribe), encode, decode


def _arrays(steps: StepFunctions) -> tuple[Inference, ...]:
    """The model's own inputs and outputs by name, [batch, ...]."""
    task, model = steps.job.task, steps.job.model
    label = task.label if isinstance(task, ArrayClassification) else None
    label = task.target if isinstance(task, ArrayRegression) else label
    fields = {name: array for name, array in steps.job.data.fields().items() if name != label}
    whole = set()
    if isinstance(model, ExportedProgram):
        whole = {name for name, input_ in model.about.inputs.items() if not input_.batched}
    inputs = {
        name: InferenceArray(
            shape=array.shape if name in whole else (BATCH, *array.shape), dtype=array.dtype
        )
        for name, array in fields.items()
    }

    def read(module: Any, arrays: dict[str, Any]) -> Mapping[str, jax.Array]:
        size = next(array.shape[0] for name, array in arrays.items() if name not in whole)
        # What is the same for all examples has an entry for each in a batch.
        batch = {
            name: jnp.broadcast_to(array, (size, *array.shape)) if name in whole else array
            for name, array in arrays.items()
        }
        outputs = module(**batch)
        if isinstance(task, ArrayClassification | ArrayRegression):
            return {task.output: outputs[task.output]}
        return {
            name: array for name, array in outputs.items() if array.ndim and array.shape[0] == size
        }

    return (_inference(steps, "outputs", inputs, read, whole=frozenset(whole)),)


def _others(steps: StepFunctions) -> tuple[Inference, ...]:
    """The task's outputs, of those arrays of an example that they depend on."""
    job = steps.job

    def read(module: Any, arrays: dict[str, Any]) -> Mapping[str, jax.Array]:
        size = next(iter(arrays.values())).shape[0]
        rest = {
            name: jnp.zeros((size, *array.shape), array.dtype)
            for name, array in job.data.fields().items()
            if name not in arrays
        }
        return job.task.outputs(module, {**arrays, **rest, MASK: jnp.ones(size)})

    fields = {
        name: InferenceArray(shape=(BATCH, *array.shape), dtype=array.dtype)
        for name, array in job.data.fields().items()
    }
    every = _inference(steps, "outputs", fields, read)
    used = _used(every, {**steps.network.params, **steps.network.model_state})
    if not used:
        raise OptionError(
            f"the outputs of {type(job.task).__name__} depend on no array of an example; there is nothing to export"
        )
    return (_inference(steps, "outputs", {name: fields[name] for name in used}, read),)


def _used(inference: Inference, shapes: Mapping[str, Any]) -> list[str]:
    """Names of the inputs that outputs depend on."""
    inputs = inference.abstract({BATCH: 2})
    jaxpr: Any = jax.make_jaxpr(inference.call)(dict(shapes), inputs).jaxpr
    needed = {id(outvar) for outvar in jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        if any(id(outvar) in needed for outvar in equation.outvars):
            needed |= {id(invar) for invar in equation.invars}
    leaves = jax.tree.leaves_with_path((dict(shapes), inputs))
    return [
        path[1].key
        for (path, _), variable in zip(leaves, jaxpr.invars, strict=True)
        if path[0].idx == 1 and id(variable) in needed
    ]


MAKERS: Mapping[type[Task], Callable[[StepFunctions], tuple[Inference, ...]]] = {
    Classification: _images,
    LanguageModel: _language,
    Embedding: _embedding,
    MaskedTokens: _masked,
    Transcription: _speech,
    ArrayOutputs: _arrays,
    ArrayClassification: _arrays,
    ArrayRegression: _arrays,
}
"""Class of a task to what makes the functions of its models."""
