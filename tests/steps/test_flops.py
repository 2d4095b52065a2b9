"""FLOPs of a program and of its gradient, calculated by hand."""

import jax
import pytest
from jax import numpy as jnp

from systolic.steps.jaxpr import Products, count, products

ROWS, IN, WIDTH = 50, 2, 64
X = jax.ShapeDtypeStruct((ROWS, IN), "float32")
HIDDEN, OUT = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((IN, WIDTH), (WIDTH, 1)))
FIRST = 2 * ROWS * IN * WIDTH
LAST = 2 * ROWS * WIDTH


def perceptron(weights, x):
    hidden, out = weights
    return (jax.nn.relu(x @ hidden) @ out).sum()


def test_no_gradient_of_the_input_and_none_by_an_outer_product():
    """Of the first layer its weights alone; of the last, whose other operand is a vector, too."""
    assert products(perceptron, (HIDDEN, OUT), X) == Products(FIRST + LAST, FIRST + LAST)
    assert count(lambda x: perceptron((jnp.ones((IN, WIDTH)), jnp.ones((WIDTH, 1))), x), X) == (
        FIRST + LAST
    )


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_both_gradients_between_layers(wrap):
    square = jax.ShapeDtypeStruct((8, WIDTH, WIDTH), "float32")
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")

    def deep(weights, x):
        layer = wrap(lambda h, w: jnp.tanh(h @ w))
        return jax.lax.scan(lambda h, w: (layer(h, w), None), x, weights)[0].sum()

    each = 2 * ROWS * WIDTH * WIDTH
    # The first turn's input has none, but a loop's turns are the same program.
    assert products(deep, square, x) == Products(8 * each, 16 * each)


def test_what_depends_on_no_weight_has_no_gradient():
    x = jax.ShapeDtypeStruct((16, 16), "float32")

    def gram(weight, x):
        kernel = x @ x.T
        chosen = jnp.argmax(weight, 1).astype("float32")[None] @ x
        return (weight @ kernel).sum() + chosen.sum()

    one, row = 2 * 16**3, 2 * 16 * 16
    assert products(gram, x, x) == Products(2 * one + row, one)
