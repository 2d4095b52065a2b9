"""The CPU form of a product with a weight has the usual gradients."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from systolic.models.dense import dense


@pytest.mark.parametrize("rows", [(5,), (2, 5), (2, 3, 5)])
def test_value_and_gradients_are_the_plain_products(rows):
    x = jax.random.normal(jax.random.key(0), (*rows, 4))
    kernel = jax.random.normal(jax.random.key(1), (4, 3))
    pull = jax.random.normal(jax.random.key(2), (*rows, 3))

    def of(platform):
        target = SimpleNamespace(platform=platform)
        return jax.value_and_grad(lambda x, k: (dense(target, x, k) * pull).sum(), (0, 1))(
            x, kernel
        )

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), of("cpu"), of("tpu")
    )
