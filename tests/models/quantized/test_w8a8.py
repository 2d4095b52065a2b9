"""Products of int8 activations with int8 matrices: exact sums, factors that carry outliers, and what calibration sees."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.core.errors import OptionError
from systolic.job import MatrixFormat, WeightFormat
from systolic.models.adapters import factored_of
from systolic.models.layers import convolve, convolve_on_cpu
from systolic.models.quantized.activations import (
    LARGEST,
    Watched,
    factors_shape,
    largest_shape,
    w8a8,
    w8a8_product,
    watched_channels,
    watched_input,
)
from systolic.models.quantized.codes import Quantized
from tests.models.drawing import normal

W8A8 = MatrixFormat(format=WeightFormat.w8a8)


def test_a_product_by_hand() -> None:
    weights = Quantized(
        codes=jnp.array([[127, -2], [3, 4]], jnp.int8),
        scales=jnp.array([[0.5, 0.25]]),
        inputs=jnp.array([[2.0], [0.5]]),
    )
    # Over the factors: [127, -254] with a scale of 2, and [3, 2.5] with one of 3 / 127.
    x = jnp.array([[254.0, -127.0], [6.0, 1.25]])
    made = w8a8_product("bd,df->bf", x, weights, jnp.einsum)
    first = np.array([64 * 127 - 127 * 3, -64 * 2 - 127 * 4])  # 127 / 2 is rounded to even
    second = np.array([127 * 127 + 106 * 3, -127 * 2 + 106 * 4])  # 2.5 / (3 / 127) = 105.8
    wanted = np.stack([first * 2, second * 3 / 127]) * [0.5, 0.25]
    np.testing.assert_allclose(made, wanted, rtol=1e-6)


def test_operands_are_int8_and_sums_int32() -> None:
    """Of 4,096 products of the largest codes: more than float32 counts by ones."""
    weights = Quantized(
        codes=jnp.full((4096, 1), 127, jnp.int8).at[0].set(126),
        scales=jnp.ones((1, 1)),
        inputs=jnp.ones((4096, 1)),
    )
    x = jnp.full((1, 4096), 127.0)
    program = jax.make_jaxpr(lambda x: w8a8_product("bd,df->bf", x, weights, jnp.einsum))(x)
    (found,) = [one for one in program.eqns if one.primitive.name == "dot_general"]
    assert [one.aval.dtype.name for one in (*found.invars, *found.outvars)] == [
        "int8",
        "int8",
        "int32",
    ]
    exact = 4095 * 127 * 127 + 126 * 127
    made = w8a8_product("bd,df->bf", x, weights, jnp.einsum)
    assert float(made[0, 0]) == np.float32(exact)


def test_each_token_has_a_scale_and_none_of_zeros_divides() -> None:
    value = normal(0, (16, 8))
    x = normal(1, (3, 16)) * jnp.array([[1e-3], [1.0], [1e4]])
    x = jnp.concatenate([x, jnp.zeros((1, 16))])

    @jax.jit
    def both(x: jax.Array, value: jax.Array) -> Any:
        weights = w8a8(value, jnp.ones(16), (0,), (0,), W8A8)
        return w8a8_product("bd,df->bf", x, weights, jnp.einsum), x @ value

    made, wanted = both(x, value)
    away = np.linalg.norm(made - wanted, axis=1)[:3] / np.linalg.norm(wanted, axis=1)[:3]
    assert away.max() < 0.02
    assert not made[3].any()


def test_factors_carry_what_one_scale_would_lose() -> None:
    """Two inputs a thousand times larger than the others, as in a transformer's stream."""
    outer = jnp.ones(64).at[jnp.array([3, 40])].set(1000.0)
    x = normal(0, (128, 64)) * outer
    value = normal(1, (64, 32)) / outer[:, None]

    @jax.jit
    def away(largest: jax.Array) -> jax.Array:
        made = w8a8(value, largest, (0,), (0,), W8A8)
        return jnp.abs(w8a8_product("bd,df->bf", x, made, jnp.einsum) - x @ value).mean()

    assert away(jnp.abs(x).max(0)) < 0.1 * away(jnp.ones(64))


PRODUCTS: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
    ("bsd,dhe->bshe", (6, 4, 2), (0,)),
    ("bshe,hed->bsd", (4, 2, 6), (0, 1)),
    ("bshr,rhe->bshe", (6, 4, 2), (0,)),  # of latents, a scale for each head
    ("bshe,rhe->bshr", (6, 4, 2), (0,)),  # absorbed: activations stay as they are
]


def test_it_is_near_the_product_of_the_restored_matrix() -> None:
    draw, given = np.random.default_rng(0), []
    for spec, shape, _ in PRODUCTS:
        first, second = spec.split("->")[0].split(",")
        sizes = dict(zip(second, shape, strict=True)) | {"b": 2, "s": 3}
        x = draw.normal(size=[sizes[letter] for letter in first]).astype(np.float32)
        given.append((x, draw.normal(size=shape).astype(np.float32)))

    def each(given: list[Any]) -> list[Any]:
        made = []
        for (spec, shape, inputs), (x, value) in zip(PRODUCTS, given, strict=True):
            count = int(np.prod([shape[dim] for dim in inputs]))
            weights = w8a8(value, jnp.linspace(0.5, 4, count), inputs, inputs, W8A8)
            assert weights.inputs is not None
            assert weights.inputs.shape == factors_shape(shape, inputs, stacked=False)
            restored = weights.restored(jnp.float32)
            product = w8a8_product(spec, x, weights, jnp.einsum)
            made.append((product, jnp.einsum(spec, x, restored), restored))
        return made

    for (spec, *_), (_, value), (made, wanted, restored) in zip(
        PRODUCTS, given, jax.jit(each)(given), strict=True
    ):
        away = 0.02 * np.abs(wanted).max()
        np.testing.assert_allclose(made, wanted, atol=away, err_msg=spec)
        np.testing.assert_allclose(restored, value, atol=0.05, err_msg=spec)


@pytest.mark.parametrize("depthwise", [True, False])
def test_a_convolution_by_hand(depthwise: bool) -> None:
    """Codes of whole numbers, so that nothing is rounded; zeros around the picture stay zeros."""
    random = np.random.default_rng(0)
    channels, groups = 4, 4 if depthwise else 1
    inputs = np.array([1.0, 2.0, 4.0, 0.5], np.float32)
    picture = random.integers(-127, 128, (2, 5, 5, channels)) * inputs
    codes = random.integers(-127, 128, (3, 3, channels // groups, 4)).astype(np.int8)
    scales = np.array([1.0, 0.5, 2.0, 0.25], np.float32)
    shape = (1, 1, 1, 4) if depthwise else (1, 1, 4, 1)
    kernel = Quantized(
        codes=jnp.asarray(codes),
        scales=jnp.asarray(scales).reshape(1, 1, 1, 4),
        inputs=jnp.asarray(inputs).reshape(shape),
    )
    x, how = jnp.asarray(picture, jnp.float32), (1, (1, 1), (1, 1), groups)
    wanted = convolve(x, kernel.restored(jnp.float32), *how)
    for convolution in (convolve, convolve_on_cpu):
        made = convolution(x, kernel, *how)
        np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-2)
    # Beyond what calibration saw it is the largest code.
    beyond = convolve(1000 * jnp.ones_like(x), kernel, *how)
    edge = convolve(LARGEST * jnp.broadcast_to(inputs, x.shape), kernel, *how)
    np.testing.assert_allclose(beyond, edge)


def test_factors_of_a_convolution_are_scales_of_its_channels() -> None:
    value = normal(0, (1, 1, 3, 4))
    seen = jnp.array([1.0, 10.0, 0.0])
    dense = jax.jit(lambda value: w8a8(value, seen, (0, 1, 2), (2,), W8A8).inputs)(value)
    assert dense is not None
    codes = np.asarray(seen / dense.reshape(-1))
    assert codes.max() == pytest.approx(LARGEST, rel=0.01)
    apart = value.reshape(1, 1, 1, 12)
    each = jax.jit(lambda value: w8a8(value, jnp.ones(12), (0, 1, 2), (3,), W8A8).inputs)(apart)
    assert each is not None
    np.testing.assert_allclose(each.reshape(-1), 1 / LARGEST, rtol=0.01)


def test_dims_with_factors() -> None:
    assert factored_of(("layers", "embed", "heads", "head_dim")) == (1,)
    assert factored_of(("heads", "head_dim", "embed")) == (0, 1)
    assert factored_of(("layers", "experts", "expert_embed", "mlp")) == ()
    assert factored_of(("vocab", "embed")) == factored_of(("embed", "vocab")) == ()
    assert factored_of((None, None, "conv_in", "conv_out")) == (2,)
    assert factored_of((None, None, None, "conv_out")) == (3,)
    assert factors_shape((2, 6, 4, 3), (1,), stacked=True) == (2, 6, 1, 1)
    assert largest_shape((2, 6, 4, 3), (1, 2), stacked=True) == (2, 24)


def test_the_gradient_of_the_zeros_is_the_largest_of_the_inputs() -> None:
    x = normal(0, (2, 3, 4, 2))
    value = normal(1, (4, 2, 6))

    def total(largest: jax.Array) -> jax.Array:
        weights = Watched(value=value, moments=largest)
        seen = watched_input("bshe,hed->bsd", x, weights)
        # Also where nothing of the product reaches the result.
        return 0 * jnp.einsum("bshe,hed->bsd", seen, value).sum()

    found = jax.grad(total)(jnp.zeros(8))
    np.testing.assert_allclose(found, np.abs(np.asarray(x).reshape(6, 8)).max(0))

    def channels(largest: jax.Array) -> jax.Array:
        return watched_channels(x, Watched(value=value, moments=largest)).sum()

    np.testing.assert_allclose(jax.grad(channels)(jnp.zeros(2)), jnp.abs(x).max((0, 1, 2)))


def test_sums_have_one_scale_for_each_channel() -> None:
    with pytest.raises(OptionError, match="group is 32, and sums of int8 products"):
        replace(W8A8, group=32)
