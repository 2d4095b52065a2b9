"""int8 and fp8 operands: the program rounds what it says, and still learns."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.chips import slice
from systolic.compiling import StepKind
from systolic.compiling.tracing import trace_job
from systolic.core.errors import OptionError
from systolic.job import Precision, RoundedBackward, Rounding
from systolic.models.decoder.config import Decoder
from systolic.models.linear import product
from systolic.models.vision.config import CNN
from systolic.setup import computed_in
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget, make_mesh
from tests.steps import tiny


def target(operands: str | None) -> MeshTarget:
    layout = tiny.ONE_DEVICE
    mesh = make_mesh(layout, jax.devices()[:1])
    return MeshTarget(
        platform="cpu", layout=layout, dtype="float32", mesh=mesh, matmul_format=operands
    )


def steps(operands: str | None) -> StepFunctions:
    job = tiny.job(layout=tiny.ONE_DEVICE)
    return StepFunctions(job, target(operands))


@pytest.mark.parametrize(
    ("spec", "shape", "left"),
    [
        ("bsd,df->bsf", (6, 4), "(tensor<2x5x4xf32>, tensor<2x5x6xf32>)"),
        ("bsd,vd->bsv", (8, 6), "(tensor<2x5x6xf32>, tensor<2x5x8xf32>)"),
        ("bsd,dhe->bshe", (6, 2, 3), "(tensor<2x5x6xf32>, tensor<2x5x2x3xf32>)"),
    ],
)
def test_a_product_on_a_cpu_has_the_gradients_of_xla_with_the_smaller_side_on_the_left(
    spec: str, shape: tuple[int, ...], left: str
) -> None:
    draw = np.random.default_rng(0)
    x, weights = draw.normal(size=(2, 5, 6)), draw.normal(size=shape)
    x, weights = x.astype(np.float32), weights.astype(np.float32)

    on_cpu = replace(target(None), platform="cpu")

    def gradients(platform: str):
        on = replace(on_cpu, platform=platform)
        return jax.grad(lambda x, w: jnp.sin(product(on, spec, x, w)).sum(), argnums=(0, 1))

    for own, known in zip(gradients("cpu")(x, weights), gradients("tpu")(x, weights), strict=True):
        np.testing.assert_allclose(own, known, rtol=1e-5, atol=1e-5)
    # A TPU's program is the einsum alone, and a frozen matrix has no gradient.
    assert "custom_vjp" not in str(jax.make_jaxpr(gradients("tpu"))(x, weights))
    frozen = jax.grad(lambda x: jnp.sin(product(on_cpu, spec, x, weights)).sum())
    assert str(jax.make_jaxpr(frozen)(x)).count("dot_general") == 2
    text = jax.jit(gradients("cpu")).lower(x, weights).as_text()
    assert left in text.split("optimization_barrier")[0].splitlines()[-2]


@pytest.mark.parametrize(("operands", "error"), [("int8", 0.02), ("fp8", 0.06)])
def test_products_are_near_the_exact_ones_but_rounded(operands: str, error: float) -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (2, 8, 64))
    weights = jax.random.normal(keys[1], (64, 4, 16))
    spec = "bsd,dhe->bshe"
    exact = product(target(None), spec, x, weights)
    rounded = product(target(operands), spec, x, weights)
    off = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 1e-4 < off < error


@pytest.mark.parametrize("operands", ["int8", "fp8"])
def test_gradients_point_the_same_way(operands: str) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 8, 64))
    weights = jax.random.normal(jax.random.key(1), (64, 32))

    def loss(weights: jax.Array, of: str | None) -> jax.Array:
        return jnp.sum(jnp.sin(product(target(of), "bsd,df->bsf", x, weights)))

    slope = jax.jit(jax.grad(loss), static_argnums=1)
    exact, rounded = slope(weights, None).ravel(), slope(weights, operands).ravel()
    cosine = exact @ rounded / (jnp.linalg.norm(exact) * jnp.linalg.norm(rounded))
    assert 0.9 < float(cosine) < 0.999999


@pytest.mark.slow
@pytest.mark.parametrize("operands", ["int8", "fp8"])
def test_training_learns_as_it_does_without(operands: str) -> None:
    exact, _ = tiny.run(steps(None), 8)
    rounded, _ = tiny.run(steps(operands), 8)
    assert rounded[-1] < rounded[0]
    np.testing.assert_allclose(rounded, exact, rtol=0.05)
    assert not np.allclose(rounded, exact, rtol=1e-7)


def test_precisions_say_their_operands() -> None:
    assert Precision.int8.resolve("cpu").matmul_format == "int8"
    assert Precision.fp8.dtype == "bfloat16"
    assert replace(tiny.job(), precision=Precision.bf16).precision.matmul_format is None


def test_what_is_computed_in_is_said_and_what_no_matmul_follows_is_refused() -> None:
    assert computed_in(target("fp8")) == "float32, fp8 operands (emulated on a CPU)"
    assert computed_in(target(None)) == target(None).dtype
    Decoder().check_precision(Precision.fp8)
    with pytest.raises(OptionError, match="precision is fp8, which CNN has no matmuls for"):
        CNN().check_precision(Precision.fp8)


def test_a_forecast_says_where_a_chip_has_no_hardware_for_the_operands() -> None:
    def notes(precision: Precision, on: str) -> list[str]:
        job = replace(tiny.job(layout=tiny.ONE_DEVICE), precision=precision)
        facts = trace_job(job, StepKind.eval, slice(on), jax.devices()[:1]).facts
        return [note for note in facts.notes if "hardware" in note]

    (said,) = notes(Precision.fp8, "v5e-1")
    assert said == (
        "v5e has no fp8 matmul hardware in the catalogue (native: bf16, int8, int4), so expect no gain over bf16"
    )
    assert notes(Precision.int8, "v5e-1") == notes(Precision.fp8, "v6e-1") == []
    with pytest.raises(OptionError, match="precision is fp8, which CNN has no matmuls for"):
        replace(tiny.job(), model=CNN(), precision=Precision.fp8).for_slice(slice("v5e-1"))


def test_a_field_without_effect_is_refused() -> None:
    narrow = replace(Decoder(), rounding=Rounding(largest=224.0))
    narrow.check_effects(Precision.fp8)
    with pytest.raises(OptionError, match=r"model\.rounding is set but precision is bf16"):
        replace(tiny.job(), model=narrow, precision=Precision.bf16).check_effects()
    windows = Decoder(layers=4, window=8, global_every=4)
    windows.check_effects(Precision.auto)
    with pytest.raises(OptionError, match=r"global-every is 5 and model\.layers 4, so that it has"):
        replace(windows, global_every=5).check_effects(Precision.auto)


def test_gradients_of_matmuls_that_do_not_round_them_are_exact_beside_rounded_operands() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 8, 64))
    weights = jax.random.normal(jax.random.key(1), (64, 32))

    def loss(weights: jax.Array, rounding: Rounding, heads: bool) -> jax.Array:
        given = product(target("int8"), "bsd,df->bsf", x, weights, rounding, heads=heads)
        return jnp.sum(given)

    some = Rounding(backward=RoundedBackward.heads)
    exact = jnp.broadcast_to(x.sum((0, 1))[:, None], weights.shape)
    of = {heads: jax.grad(loss)(weights, some, heads) for heads in (False, True)}
    np.testing.assert_allclose(of[False], exact, rtol=1e-4, atol=1e-4)
    assert not np.allclose(of[True], exact, rtol=1e-4, atol=1e-4)
    assert not Rounding(backward=RoundedBackward.none).gradients(heads=True)


def test_a_fixed_range_cuts_off_what_is_larger_and_measures_nothing() -> None:
    rounding = Rounding(largest=2.0)
    x = jnp.asarray([[[1.0, 4.0]]])
    made = product(target("fp8"), "bsd,df->bsf", x, jnp.eye(2), rounding)
    np.testing.assert_allclose(made, [[[1.0, 2.0]]], rtol=1e-6)
    text = jax.jit(partial(product, target("fp8"), "bsd,df->bsf", rounding=rounding)).lower(
        x, jnp.eye(2)
    )
    assert "stablehlo.abs" not in text.as_text()
    with pytest.raises(OptionError, match="largest"):
        Rounding(largest=-1.0)


def test_the_model_says_which_matmuls_round_their_gradients() -> None:
    def narrow(backward: RoundedBackward, operands: str | None = "int8") -> int:
        job = tiny.job(layout=tiny.ONE_DEVICE)
        model = replace(job.model, layers=1, rounding=Rounding(backward=backward))
        of = StepFunctions(replace(job, model=model), target(operands))
        text = jax.jit(of.train).lower(of.abstract_state, of.abstract_batch()).as_text()
        assert ("xi8>" in text) is (operands is not None)
        return len(re.findall(r"dot_general.*xi8>.*xi8>", text))

    # Seven matmuls a layer, three of them of heads; two more of each in the backward pass.
    assert narrow(RoundedBackward.none) == 7
    assert narrow(RoundedBackward.heads) == 7 + 2 * 3
    assert narrow(RoundedBackward.all) == 7 * 3
    assert narrow(RoundedBackward.all, None) == 0
