"""Programs of a job, traced for present or described devices."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from systolic.chips import Slice
from systolic.compiling.traced import StepKind, Traced
from systolic.core.errors import OptionError
from systolic.job import Job, LayerArrays, Sampling
from systolic.steps.decode import Decode
from systolic.steps.programs import jit_apart, jit_decode, jit_evaluate, jit_prefill, jit_train
from systolic.steps.static_decode import ApartDecode
from systolic.steps.steps import StepFunctions
from systolic.steps.target import MeshTarget


def trace_job(job: Job, verb: StepKind, on: Slice, devices: Sequence[Any]) -> Traced:
    """The step of ``job`` that ``verb`` names, on a mesh of ``devices``."""
    job = job.settle(on)
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
        facts={
            "name": job.name,
            "verb": verb.value,
            "model_flops": float(flops),
            "unit": unit,
            "units": int(units),
            **described(job, steps),
            "notes": list(target.notes),
        },
    )


def described(job: Job, steps: StepFunctions) -> dict[str, Any]:
    """Sizes, precision and layout of a definite job, as text."""
    micro = job.layout.num_microbatches(steps.batch_size // job.layout.accumulate)
    return {
        "batch_size": steps.batch_size,
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
    if tokens == 1 and decode.served.layers is LayerArrays.apart:
        apart = ApartDecode(decode)
        weights, begun = apart.placed_weights(), apart.placed_state(size, context)
        return jit_apart(apart, size, context).trace(weights, begun)
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
