"""Convolutions written for a CPU are those of XLA."""

from typing import Any

import jax
import numpy as np
import pytest

from systolic.models.layers import convolve, convolve_on_cpu


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("taps", "inner", "outer", "groups"),
    [(3, 1, 6, 6), (1, 6, 4, 1), (3, 6, 4, 1), (5, 1, 6, 6), (3, 3, 4, 2)],
)
@pytest.mark.parametrize("pads", [((1, 1), (1, 1)), ((0, 1), (0, 2)), ((0, 0), (2, 1))])
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

    wanted, made = (run(function, x, kernel) for function in (convolve, convolve_on_cpu))
    assert made.shape == wanted.shape
    np.testing.assert_allclose(made, wanted, atol=2e-5)
    towards = draw.normal(size=wanted.shape).astype(np.float32)
    for argument in (0, 1):
        slopes = [
            jax.grad(lambda x, k, f=f: (run(f, x, k) * towards).sum(), argument)(x, kernel)
            for f in (convolve, convolve_on_cpu)
        ]
        np.testing.assert_allclose(slopes[1], slopes[0], atol=1e-4)
