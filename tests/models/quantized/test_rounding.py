"""Codes of 4 bits of the least error, of weights and of products with known inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.job import MatrixFormat, WeightFormat
from systolic.models.quantized.activations import Watched, watched_input
from systolic.models.quantized.codes import NF4_VALUES, quantized
from systolic.quantizing.rounder import DAMPING, compensated, inverse_factor, least_error
from tests.models.drawing import normal
from tests.tiers import some

INT4 = MatrixFormat(format=WeightFormat.int4, group=4)
NF4 = MatrixFormat(format=WeightFormat.nf4, group=4)


@pytest.mark.parametrize("how", [INT4, NF4], ids=str)
def test_no_group_has_a_larger_error_than_by_its_largest_weight(how: MatrixFormat) -> None:
    drawn = np.array(normal(0, (2, 8, 3)))
    drawn[0, :4, 1] = 0
    value = jnp.asarray(drawn)
    each = jax.jit(lambda value: [make(value, (1,), how) for make in (quantized, least_error)])
    plain, best = each(value)
    assert (best.codes.dtype, best.codes.shape, best.scales.shape) == (
        plain.codes.dtype,
        plain.codes.shape,
        plain.scales.shape,
    )

    def errors(one) -> np.ndarray:
        away = np.asarray(one.restored(jnp.float32) - value).reshape(2, 2, 4, 3)
        return np.sum(away**2, axis=2)

    assert (errors(best) <= errors(plain) * 1.0001 + 1e-12).all()
    assert errors(best).sum() < 0.9 * errors(plain).sum()
    assert not np.asarray(best.restored())[0, :4, 1].any()


def test_a_negative_scale_gives_the_largest_weight_the_code_of_minus_eight() -> None:
    made = least_error(jnp.array([[8.0], [1.0], [-3.0], [5.0]]), (0,), INT4)
    np.testing.assert_array_equal(np.asarray(made.restored()), [[8.0], [1.0], [-3.0], [5.0]])
    np.testing.assert_array_equal(np.asarray(made.codes, np.int8)[:, 0], [-8, -1, 3, -5])


def test_the_second_input_makes_up_for_the_first_by_hand() -> None:
    moments = np.diag([2.0, 3.0, 1.0, 2.0])
    moments[0, 1] = moments[1, 0] = 1.8  # the others are seen apart
    damp = DAMPING * moments.diagonal().mean()
    value = normal(0, (4, 400))
    made = compensated(value, moments, (0,), INT4)
    scales, codes = np.asarray(made.scales, np.float32)[0], np.asarray(made.codes, np.float32)
    plain = np.clip(np.round(value / scales), -8, 7)
    # The change of the second weight that minimises (d0, d1) H (d0, d1)^T for a given d0.
    second = value[1] + (value[0] - plain[0] * scales) * 1.8 / (3.0 + damp)
    expected = np.clip(np.round(second / scales), -8, 7)
    np.testing.assert_array_equal(codes, [plain[0], expected, *plain[2:]])
    assert (plain[1] != expected).sum() > 3


def test_the_factor_is_that_of_the_inverse() -> None:
    wide = np.random.default_rng(0).normal(size=(6, 9))
    wide[2] = 0  # an input that is always zero
    factor, weights = inverse_factor(wide @ wide.T)
    damped = wide @ wide.T + DAMPING * (wide @ wide.T).diagonal().mean() * np.eye(6)
    damped[2, 2] = 1
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(6), atol=2e-4)
    np.testing.assert_allclose(weights, damped.diagonal(), rtol=1e-6)


@pytest.mark.parametrize("how", some([INT4, NF4], [NF4]), ids=str)
def test_products_with_known_inputs_change_less(how: MatrixFormat) -> None:
    """Heads and their width are both summed over, as in attention's last product."""
    mix = normal(1, (8, 8))
    x = normal(2, (64, 8)) @ mix
    value = normal(3, (2, 4, 5))
    plain = jax.jit(lambda value: least_error(value, (0, 1), how))(value)
    made = compensated(value, np.asarray(x.T @ x), (0, 1), how)
    assert made.scales.shape == plain.scales.shape == (2, 1, 5)
    given = x.reshape(64, 2, 4)

    def change(one) -> float:
        away = one.restored(jnp.float32) - value
        return float(jnp.linalg.norm(jnp.einsum("the,hed->td", given, away)))

    assert change(made) < 0.8 * change(plain)
    allowed = np.arange(-8, 8) if how is INT4 else np.asarray(NF4_VALUES)
    restored = np.asarray(made.restored(jnp.float32) / made.scales.astype(jnp.float32))
    assert np.abs(restored[..., None] - allowed).min(-1).max() < 1e-5


@pytest.mark.parametrize(
    ("spec", "shape"), [("bsd,dhe->bshe", (6, 4, 2)), ("bshe,hed->bsd", (4, 2, 6))]
)
def test_the_gradient_of_the_zeros_is_the_moments_of_the_inputs(
    spec: str, shape: tuple[int, ...]
) -> None:
    count = 6 if spec.endswith("bshe") else 8
    x = normal(0, (2, 3, 6) if count == 6 else (2, 3, 4, 2))
    value = normal(1, shape)

    def total(moments: jax.Array) -> jax.Array:
        weights = Watched(value=value, moments=moments)
        return jnp.einsum(spec, watched_input(spec, x, weights), value).sum()

    flat = np.asarray(x).reshape(6, count)
    found = jax.jit(jax.grad(total))(jnp.zeros((count, count)))
    np.testing.assert_allclose(found, flat.T @ flat, rtol=1e-5, atol=1e-5)
