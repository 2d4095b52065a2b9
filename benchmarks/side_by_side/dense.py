"""Matrix products with weights, in the form that the target platform differentiates fastest."""

import jax

from systolic.job import Target


def dense(target: Target, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x @ kernel``: x [..., given], kernel [given, made] of the same dtype, to [..., made].

    XLA's CPU compiler wants the left side of a product contiguous along what is summed, and
    copies it transposed where it is not, computing again whatever elementwise work led to it. The
    usual gradient of a weight has the gradient of the output on the left, so a language model's
    loss would be computed a second time, column by column. On a CPU it is put on the right.
    """
    return _cpu(x, kernel) if target.platform == "cpu" else x @ kernel


@jax.custom_vjp
def _cpu(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x @ kernel, (x, kernel)


def _backward(
    saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    rows = tuple(range(x.ndim - 1))
    return gradient @ kernel.T, jax.lax.dot_general(x, gradient, ((rows, rows), ((), ())))


_cpu.defvjp(_forward, _backward)
