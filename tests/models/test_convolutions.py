"""Convolutions written for a CPU are those of XLA."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.models.layers import convolve, convolve_on_cpu
from tests.tiers import some


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("taps", "inner", "outer", "groups"),
    [
        (3, 1, 6, 6),
        (1, 6, 4, 1),
        (3, 6, 4, 1),
        (5, 1, 6, 6),
        (3, 3, 4, 2),
        (3, 3, 4, 1),
        (7, 2, 5, 1),
    ],
)
@pytest.mark.parametrize(
    "pads", some([((1, 1), (1, 1)), ((0, 1), (0, 2)), ((0, 0), (2, 1))], [((0, 1), (0, 2))])
)
def test_numbers_and_gradients(
    stride: int, taps: int, inner: int, outer: int, groups: int, pads: tuple[tuple[int, int], ...]
) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(2, 9, 8, inner * groups)).astype(np.float32)
    kernel = draw.normal(size=(taps, taps, inner, outer)).astype(np.float32)
    if taps == 1:
        pads = ((0, 0), (0, 0))

    def run(function: Any, x: Any, kernel: Any) -> jax.Array:
        return function(x, kernel, stride, *pads, groups=groups)

    towards = draw.normal(size=jax.eval_shape(partial(run, convolve), x, kernel).shape)

    def both(x: Any, kernel: Any, towards: Any) -> list[Any]:
        made = []
        for function in (convolve, convolve_on_cpu):
            out, back = jax.vjp(partial(run, function), x, kernel)
            made.append((out, *back(towards)))
        return made

    (wanted, *slopes), (made, *own) = jax.jit(both)(x, kernel, towards.astype(np.float32))
    assert made.shape == wanted.shape
    np.testing.assert_allclose(made, wanted, atol=2e-5)
    for found, known in zip(own, slopes, strict=True):
        np.testing.assert_allclose(found, known, atol=1e-4)


def test_the_gradient_of_a_depthwise_kernel_in_bfloat16_is_summed_in_float32() -> None:
    """It is a sum over 25,088 numbers: in bfloat16 it stayed at a third of its length."""
    draw = np.random.default_rng(0)
    x = jnp.asarray(np.maximum(draw.normal(size=(32, 28, 28, 4)), 0), jnp.bfloat16)
    kernel = draw.normal(size=(3, 3, 1, 4)).astype(np.float32) / 3
    towards = jnp.asarray(draw.normal(size=x.shape) + 0.5, jnp.bfloat16)

    def slope(function: Any, dtype: Any) -> jax.Array:
        def out(kernel: jax.Array) -> jax.Array:
            return function(x.astype(dtype), kernel.astype(dtype), 1, (1, 1), (1, 1), groups=4)

        return jax.vjp(out, kernel)[1](towards.astype(dtype))[0]

    known = jax.jit(partial(slope, convolve, jnp.float32))()
    found = jax.jit(partial(slope, convolve_on_cpu, jnp.bfloat16))()
    assert np.linalg.norm(known - found) < 0.01 * np.linalg.norm(known)
