"""Traces of a job's steps and of a server's, for present or described devices."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format

from systolic.chips import Slice
from systolic.compiling.traced import PagedCall, ProgramFacts, ServingCall, StepKind, Traced
from systolic.core.errors import OptionError
from systolic.job import Batch, Job, Residual, Sampling
from systolic.models.quantized.codes import stored_bytes
from systolic.steps.decode import Decode
from systolic.steps.paged import PagedSteps, StepInput, StepShape
from systolic.steps.programs import (
    jit_decode,
    jit_evaluate,
    jit_paged,
    jit_prefill,
    jit_train,
)
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget


def trace_job(job: Job, verb: StepKind, on: Slice, devices: Sequence[Any]) -> Traced:
    """The step of ``job`` that ``verb`` names, on a mesh of ``devices``."""
    job = job.for_slice(on)
    target = MeshTarget.of(job, on.platform, devices)
    if target.matmul_format is not None and target.matmul_format not in on.chip.native:
        target.note(
            f"{on.chip.name} has no {target.matmul_format} matmul hardware in the catalogue (native: {', '.join(on.chip.native) or 'none'}), so expect no gain over bf16"
        )
    steps = StepFunctions(job, target)
    fields = job.data.fields()
    unit = "tokens" if "tokens" in fields else "examples"
    per_example = fields["tokens"].shape[0] if unit == "tokens" else 1
    state = steps.abstract_state
    match verb:
        case StepKind.train:
            traced = jit_train(steps).trace(state, steps.abstract_batch())
            flops, units = steps.step_flops, steps.batch_size * per_example
        case StepKind.eval:
            size = steps.batch_size // job.layout.accumulate
            traced = jit_evaluate(steps).trace(
                state.evaluated, state.model_state, steps.abstract_batch(size)
            )
            flops, units = steps.forward_flops * size, size * per_example
        case StepKind.prefill | StepKind.decode:
            if unit != "tokens":
                raise OptionError(f"{job.name} does not write text; forecast its eval step instead")
            traced, flops, units = _generation(steps, verb, per_example)
    return Traced(
        traced=traced,
        mesh=target.mesh,
        facts=ProgramFacts(
            name=job.name,
            verb=verb.value,
            model_flops=float(flops),
            unit=unit,
            units=int(units),
            **described(job, steps),
            notes=list(target.notes),
        ),
    )


def described(job: Job, steps: StepFunctions, rows: int | None = None) -> dict[str, Any]:
    """Sizes, precision and layout of a definite job, as text; of a step with ``rows`` in place of the job's batch."""
    micro = job.layout.num_microbatches(steps.batch_size // job.layout.accumulate)
    return {
        "batch_size": steps.batch_size if rows is None else rows,
        "parameters": steps.network.num_parameters,
        "precision": job.precision.value,
        "layout": job.layout.to_json() | ({"microbatches": micro} if micro else {}),
    }


def _generation(steps: StepFunctions, verb: StepKind, sequence: int) -> tuple[Any, float, int]:
    """Prefill of full rows, or decoding one token for each row with a full cache."""
    decode = Decode(steps, Sampling(temperature=0.0))
    size = decode.steps.batch_size
    tokens = 1 if verb is StepKind.decode else sequence
    return trace_generation(decode, size, tokens, sequence), *generated(
        decode, size, tokens, sequence
    )


def generated(decode: Decode, size: int, tokens: int, context: int) -> tuple[float, int]:
    """Matmul FLOPs and tokens of :func:`trace_generation`'s program."""
    if tokens == 1:
        return decode.decode_flops(context) * size, size
    return decode.prefill_flops(tokens) * size, size * tokens


def trace_generation(decode: Decode, size: int, tokens: int, context: int) -> Any:
    """The next token of ``size`` texts over a cache of ``context`` positions, or with more ``tokens`` the start of each text."""
    steps, placement = decode.steps, decode.placement
    params = jax.tree.map(
        lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
        jax.eval_shape(decode.weights, steps.abstract_state.params),
        placement,
    )
    model_state, begun = steps.abstract_state.model_state, decode.abstract_state(size, context)
    if tokens == 1:
        return jit_decode(decode, size).trace(params, model_state, begun, count=1)
    where = steps.target.sharding(steps.target.fit((size, tokens), ("batch", None)))
    prompt = jax.ShapeDtypeStruct((size, tokens), jnp.int32, sharding=where)
    return jit_prefill(decode, size).trace(
        params, model_state, prompt, begun.token, begun.key, capacity=context
    )


def trace_serving(program: ServingCall, on: Slice, devices: Sequence[Any]) -> Traced:
    """The step of a server on a mesh of ``devices``."""
    job = program.job.for_slice(on)
    target = MeshTarget.of(job, on.platform, devices)
    decode = Decode(StepFunctions(job, target), Sampling(temperature=0.0), program.served)
    sizes = (program.rows, program.tokens, program.context)
    traced = trace_generation(decode, *sizes)
    flops, units = generated(decode, *sizes)
    return Traced(
        traced=traced,
        mesh=target.mesh,
        facts=ProgramFacts(
            name=job.name,
            verb="decode" if program.tokens == 1 else "prefill",
            model_flops=float(flops),
            unit="tokens",
            units=units,
            **described(job, decode.steps, program.rows),
            **_bytes(decode, program),
            notes=list(target.notes),
        ),
    )


def trace_paged(program: PagedCall, on: Slice, devices: Sequence[Any]) -> Traced:
    """The step of an engine on a mesh of ``devices``: logits of the token after the last of each text."""
    job = _served(program.job, on)
    target = MeshTarget.of(job, on.platform, devices[: job.layout.num_devices])
    steps = StepFunctions(job, target, trains=False)
    paged = PagedSteps(steps, program.page_size, program.cache, adapters=program.adapters)
    shape = StepShape(program.rows, int(program.chunk > 0), program.chunk, program.pages)
    if program.drafts:
        shape = StepShape(0, program.rows, program.drafts + 1, program.pages)

    def ints(size: int) -> Any:
        whole = target.sharding(target.spec())
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=whole)

    weights, pages = paged.placed_weights, paged.placed_pages(program.num_pages)
    packed = sum(math.prod(size) for size in StepInput.sizes(shape, paged.history, paged.adapters))
    jitted = jit_paged(paged, shape, drafts=program.drafts > 0)
    traced = jitted.trace(weights, pages, ints(program.rows + 1), ints(packed))
    decode = Decode(paged.steps, Sampling(temperature=0.0))
    flops = program.rows * (program.drafts + 1) * decode.decode_flops(program.context)
    if program.chunk:
        flops += decode.prefill_flops(program.chunk)
    page = sum(_one(array, array.sharding) for array in jax.tree.leaves(paged.placed_pages(1)))
    read = paged.read_weights(shape.tokens)
    replicas = target.mesh.shape["data"]
    return Traced(
        traced=traced,
        mesh=target.mesh,
        facts=ProgramFacts(
            name=job.name,
            verb="decode" if not program.chunk else "prefill" if not program.rows else "step",
            model_flops=float(flops) * replicas,
            unit="tokens",
            units=shape.tokens * replicas,
            **described(job, paged.steps, shape.texts * replicas),
            attention=paged.kernel,
            weight_bytes=sum(_one(a, a.sharding) * share for a, share in read),
            stored_bytes=float(sum(_one(a, a.sharding) for a in jax.tree.leaves(weights))),
            adapters_bytes=float(sum(_one(a, a.sharding) for a in paged.placed_adapters)),
            cache_bytes=page * program.pages * shape.texts * _read_share(job.model, program),
            page_bytes=page,
            int8_products=any(how.format.activations for _, how in job.quantization.matrices),
            replicas=replicas,
            notes=list(target.notes),
        ),
    )


def _read_share(model: Any, program: PagedCall) -> float:
    """Share of the texts' positions that the layers have to read: of those with a window no more than it."""
    positions, windows = program.pages * program.page_size, model.windows
    tokens = max(program.chunk, 1)
    each = [min(positions, window + tokens - 1) if window else positions for window in windows]
    layers = [each[layer % len(each)] for layer in range(model.layers)]
    return sum(layers) / (positions * model.layers)


def _served(job: Job, on: Slice) -> Job:
    """The job under a definite layout of engines: one on each of the data axis, which the model's sizes need not divide.

    Raises:
        LayoutError: the layout does not divide the slice.
    """
    layout = job.layout
    # Engines may leave devices idle.
    if not layout.definite or layout.num_devices >= on.num_devices or on.num_slices > 1:
        layout = layout.on(on.num_devices, on.num_slices)
    layout.check_slices(on.num_slices)
    precision = job.precision.resolve(on.platform)
    job.model.check_precision(precision)
    return replace(
        job,
        layout=replace(layout, residual=Residual.whole),
        precision=precision,
        batch=Batch(total=layout.num_devices),
    )


def _bytes(decode: Decode, program: ServingCall) -> dict[str, float]:
    """Bytes of one device that a step can't do without: the floor of its time, by the rate of the memory.

    ``cache_bytes`` are of all positions of its rows, ``weight_bytes`` of what it reads of the weights: no rows
    of an embedding that isn't the output matrix, and of a mixture the experts that its tokens choose, each evenly
    and by chance. ``stored_bytes`` are of all weights.
    """
    steps = decode.steps
    weights = jax.eval_shape(decode.weights, steps.abstract_state.params)
    placed = {
        path: sum(jax.tree.leaves(jax.tree.map(_one, weights[path], where)))
        for path, where in decode.placement.items()
    }
    axes = steps.network.axes
    config: Any = steps.job.model
    tokens = program.rows * program.tokens
    read = 0.0
    for path, size in placed.items():
        names = axes[path] or ()
        if path == "embedding" and "unembedding" in placed:
            continue
        share = 1.0
        if "experts" in names:
            share = 1 - (1 - config.experts_per_token / config.experts) ** tokens
        read += size * share
    state = decode.abstract_state(program.rows, program.context)
    cache = sum(_one(array, array.sharding) for array in jax.tree.leaves(state.cache))
    ways = steps.target.axes("batch")
    replicas = math.prod(steps.target.mesh.shape[axis] for axis in ways)
    return {
        "weight_bytes": read,
        "stored_bytes": float(sum(placed.values())),
        "cache_bytes": float(cache),
        "replicas": replicas,
    }


def _one(array: Any, where: Any) -> int:
    """Bytes of an array on one device, by its sharding or its format."""
    sharding = where.sharding if isinstance(where, Format) else where
    return stored_bytes(sharding.shard_shape(array.shape), array.dtype)
