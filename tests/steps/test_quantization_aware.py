"""Training with rounded matrices: a step computes what the quantized Bundle of its weights does, and moves the weights by that gradient."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.chips import slice
from systolic.compiling import StepKind
from systolic.compiling.tracing import trace_job
from systolic.core.errors import OptionError
from systolic.formats.comparison import outputs_of
from systolic.formats.matrices import whole
from systolic.job import (
    Adapter,
    AdapterKind,
    Batch,
    MatrixFormat,
    Precision,
    Quantization,
    Sampling,
    WeightFormat,
)
from systolic.models.quantized.codes import quantized
from systolic.models.vision.config import CNN
from systolic.setup import computed_in
from systolic.steps.programs import generation
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget, make_mesh
from tests.steps import tiny
from tests.tiers import some
from tests.training.tiny import Perceptron

JOB = tiny.job(layout=tiny.ONE_DEVICE, model=replace(tiny.MODEL, layers=1), batch=Batch(total=2))
# As many activations as a matrix has rows, and of its shape: nothing is told apart by shapes.
SQUARE = replace(JOB, model=replace(JOB.model, d_ff=32), data=tiny.Tokens(sequence=32))


def target(kind: WeightFormat | None) -> MeshTarget:
    layout = tiny.ONE_DEVICE
    mesh = make_mesh(layout, jax.devices()[:1])
    return MeshTarget(platform="cpu", layout=layout, dtype="float32", mesh=mesh, weight_format=kind)


def weights_of(of: StepFunctions) -> tuple[Any, Any]:
    return jax.jit(of.network.init)(jax.random.key(0))


def gradients(of: StepFunctions, params: Any, rest: Any) -> tuple[Any, Any]:
    """Loss and gradients of a batch."""

    def loss(params: Any) -> jax.Array:
        return of.sums(params, rest, tiny.batch(of, 0), train=True)[0]["loss"].total

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("kind", some([WeightFormat.int8, WeightFormat.int4], [WeightFormat.int8]))
def test_a_step_has_the_loss_of_its_quantized_bundle(kind: WeightFormat) -> None:
    of = StepFunctions(SQUARE, target(kind))
    params, rest = weights_of(of)
    rounded = of.network.rounded
    assert {path.rpartition("/")[2] for path in rounded} == {
        *("query", "key", "value", "out"),
        *("gate", "up", "down", "embedding"),
    }
    formats = {path: how for path, (_, how) in rounded.items()}
    assert Quantization.of(formats) == whole(SQUARE.model, kind)
    as_bundle = replace(SQUARE, quantization=Quantization.of(formats))
    bundle = StepFunctions(as_bundle, target(None))
    held, cast = dict(rest), jax.jit(of.network.cast)(params)
    for path, (inputs, how) in rounded.items():
        made = jax.jit(partial(quantized, inputs=inputs, how=how))(params[path])
        held |= {f"{path}/codes": made.codes, f"{path}/scales": made.scales}
        np.testing.assert_array_equal(cast[path], made.restored("float32"))
        assert np.abs(cast[path] - params[path]).max() > 0
    kept = {path: array for path, array in params.items() if path not in rounded}
    batch = tiny.batch(of, 0)
    found = jax.jit(of.evaluate)(params, rest, batch)["loss"].total
    wanted = jax.jit(bundle.evaluate)(kept, held, batch)["loss"].total
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_gradients_are_those_at_the_rounded_weights() -> None:
    of, plain = (StepFunctions(SQUARE, target(kind)) for kind in (WeightFormat.int4, None))
    params, rest = weights_of(of)
    found = gradients(of, params, rest)
    wanted = gradients(plain, jax.jit(of.network.cast)(params), rest)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_which_precision_rounds_to_what() -> None:
    assert Precision.qat_int4.weight_format is WeightFormat.int4
    assert Precision("qat-int8").dtype == "bfloat16"
    assert Precision.int8.weight_format is None
    assert computed_in(target(WeightFormat.int8)) == "float32, matrices rounded to int8"


def test_what_can_not_be_rounded_is_refused() -> None:
    on = slice("v5e-1")
    with pytest.raises(OptionError, match="precision is qat-int8, and Perceptron has no matrices"):
        replace(JOB, model=Perceptron(), precision=Precision.qat_int8).for_slice(on)
    low_rank = Adapter(kind=AdapterKind.lora)
    with pytest.raises(OptionError, match="precision is qat-int4, and beside an adapter"):
        replace(JOB, adapter=low_rank, precision=Precision.qat_int4).for_slice(on)


def test_a_step_for_a_slice_and_convolutions() -> None:
    job = replace(JOB, precision=Precision.qat_int4)
    facts = trace_job(job, StepKind.train, slice("v5e-1"), jax.devices()[:1]).facts
    assert facts.precision == "qat-int4"
    images = StepFunctions(replace(JOB, model=CNN()), target(WeightFormat.int8))
    wanted = MatrixFormat(format=WeightFormat.int8)
    inputs = (0, 1, 2)
    assert images.network.rounded == {
        f"convs/{number}/kernel": (inputs, wanted) for number in (1, 2, 3)
    }


def test_a_text_is_written_by_the_weights_that_eval_reads() -> None:
    """Rounded once: codes of rounded weights are others, as their scales are."""
    of = StepFunctions(SQUARE, target(WeightFormat.int4))
    params, rest = weights_of(of)
    programs = generation(of, Sampling(temperature=0.0))
    tokens = tiny.batch(of, 0)["tokens"]
    (size, length), module_of = tokens.shape, programs.decode._module
    counts = jnp.full((size,), length)

    @jax.jit
    def written(held: Any) -> jax.Array:
        module = module_of(held, rest)
        return module.logits(module.prefill(tokens, counts, length, jnp.float32)[0])

    found = written(programs.weights(params, rest))
    wanted = outputs_of(of, SimpleNamespace(params=params, model_state=rest), {"tokens": tokens})
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
