"""Operations that LiteRT has as one, marked in a program that JAX spells out: lookups in a table, and GELU."""

from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

LOOKUP, GELU = "odml.embedding_lookup", "aten.gelu.default"
"""Names that the converter knows."""
ROOT_HALF = float(np.sqrt(0.5))


class Composites:
    """What :func:`~systolic.formats.unrolling.computed` puts in place of the equations of one flat program."""

    def __init__(self, program: jax.extend.core.ClosedJaxpr) -> None:
        jaxpr = program.jaxpr
        self._made = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
        self._tables = set(jaxpr.constvars)
        found = [(equation, self._halved(equation)) for equation in jaxpr.eqns]
        self._gelus = {id(last): id(half) for last, half in found if half is not None}
        self._halves: dict[int, Any] = dict.fromkeys(self._gelus.values())

    def __call__(self, equation: Any, given: list[Any]) -> list[Any] | None:
        """Outputs of an equation by an operation of LiteRT; None leaves it as it is."""
        if id(equation) in self._halves:
            self._halves[id(equation)] = next(one for one in given if np.ndim(one))
            return None
        if id(equation) in self._gelus:
            return [_gelu(self._halves[self._gelus[id(equation)]])]
        if equation.primitive.name == "gather" and self._looks_up(equation):
            return [_looked_up(*given)]
        return None

    def _looks_up(self, equation: Any) -> bool:
        """Whether an equation picks whole rows of a table of weights."""
        table, indices = equation.invars
        about, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        rank = len(indices.aval.shape) - 1
        return (
            table in self._tables
            and len(table.aval.shape) == 2
            and table.aval.dtype == np.float32
            and tuple(sizes) == (1, table.aval.shape[1])
            and tuple(about.start_index_map) == tuple(about.collapsed_slice_dims) == (0,)
            and tuple(about.offset_dims) == (rank,)
            and not about.operand_batching_dims
            and indices.aval.dtype == np.int32
        )

    def _halved(self, equation: Any) -> Any:
        """Of the last product of x / 2 and erfc(-x / root of 2): the equation of x / 2; None of others."""
        if equation.primitive.name != "mul":
            return None
        makers = [self._maker(atom) for atom in equation.invars]
        for half, tail in (makers, makers[::-1]):
            if tail is None or tail.primitive.name != "erfc" or half is None:
                continue
            scaled = self._maker(tail.invars[0])
            turned = None if scaled is None else self._maker(_factor(scaled, ROOT_HALF))
            if turned is None or turned.primitive.name != "neg":
                continue
            if _factor(half, 0.5) is turned.invars[0]:
                return half
        return None

    def _maker(self, atom: Any) -> Any:
        """The equation that a value comes from."""
        if atom is None or isinstance(atom, jax.extend.core.Literal):
            return None
        return self._made.get(atom)


def _factor(equation: Any, number: float) -> Any:
    """What an equation multiplies by a number; None where it does something else."""
    if equation.primitive.name != "mul":
        return None
    for one, other in (equation.invars, equation.invars[::-1]):
        literal = isinstance(one, jax.extend.core.Literal) and np.ndim(one.val) == 0
        if literal and np.isclose(float(one.val), number, rtol=1e-6):
            return other
    return None


def _gelu(x: jax.Array) -> Any:
    def decomposed(x: jax.Array, *, approximate: str) -> jax.Array:
        del approximate
        return jax.nn.gelu(x, approximate=False)

    return jax.lax.composite(decomposed, GELU)(x, approximate="none")


def _looked_up(table: Any, indices: Any) -> Any:
    def decomposed(indices: jax.Array, table: jax.Array) -> jax.Array:
        return table.at[indices].get(mode="promise_in_bounds")

    flat = indices.reshape(-1)
    rows = jax.lax.composite(decomposed, LOOKUP)(flat, jnp.asarray(table))
    return rows.reshape(*indices.shape[:-1], table.shape[1])
