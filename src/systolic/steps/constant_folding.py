"""A program divided by what it depends on: what weights alone decide is computed once, not in every call.

XLA's CPU backend copies each layer's weights out of a stack before a matmul reads them, and divides by the root of
each batch norm's variance in every call.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core
import numpy as np


class FoldedProgram:
    """A function of weights and a batch as two: weights to constants, and constants with a batch to outputs.

    Args:
        function: (params, model_state, batch) to a dict of arrays.
        weights: (params, model_state), arrays or their shapes.
        batch: A batch's arrays or their shapes.

    Attributes:
        key: Text that two programs share whose constants are the same.
    """

    def __init__(self, function: Callable[..., Any], weights: Any, batch: Any) -> None:
        flat, structure = jax.tree.flatten(weights)

        def whole(leaves: Sequence[Any], batch: Any) -> Any:
            return function(*jax.tree.unflatten(structure, leaves), batch)

        closed, shape = jax.make_jaxpr(whole, return_shape=True)(flat, batch)
        self._shape = jax.tree.structure(shape)
        jaxpr = closed.jaxpr
        self._given = list(jaxpr.invars[: len(flat)])
        known = {*self._given, *jaxpr.constvars}
        early: list[Any] = []
        late: list[Any] = []
        for equation in jaxpr.eqns:
            if _of_weights(equation, known):
                early.append(equation)
                known.update(equation.outvars)
            else:
                late.append(equation)
        used = [v for equation in late for v in _variables(equation.invars)]
        used += _variables(jaxpr.outvars)
        self._constants = list(dict.fromkeys(v for v in used if v in known))
        # Names of arguments don't fit any more.
        plain = jaxpr.replace(debug_info=jaxpr.debug_info.with_unknown_names())
        self._early = plain.replace(
            constvars=[],
            invars=[*jaxpr.constvars, *self._given],
            outvars=self._constants,
            eqns=early,
        )
        self._late = plain.replace(
            constvars=[], invars=[*self._constants, *jaxpr.invars[len(flat) :]], eqns=late
        )
        self._consts = closed.consts
        values = [*closed.consts, *_values(self._early)]
        self.key = "\n".join([str(self._early), *map(_digest, values)])

    def constants(self, weights: Any) -> list[jax.Array]:
        """Weights that the program needs, in the order that :meth:`__call__` takes."""
        return jax.jit(self.fold)(jax.tree.leaves(weights))

    def fold(self, leaves: Sequence[Any]) -> list[Any]:
        """The constants of flat weights, to be jitted."""
        return jax.core.eval_jaxpr(self._early, [], *self._consts, *leaves)

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the constants."""
        return [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
            for v in self._constants
        ]

    def __call__(self, constants: Sequence[jax.Array], batch: Any) -> Any:
        """The function's outputs."""
        outputs = jax.core.eval_jaxpr(self._late, [], *constants, *jax.tree.leaves(batch))
        return jax.tree.unflatten(self._shape, outputs)


def _of_weights(equation: Any, known: set[Any]) -> bool:
    """Whether an equation is decided by weights, and its results are not larger: broadcasts belong to their users."""
    inputs = _variables(equation.invars)
    if not inputs or equation.effects or not known.issuperset(inputs):
        return False
    largest = max(map(_bytes, inputs))
    return sum(map(_bytes, equation.outvars)) <= largest


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, jax.extend.core.Literal)]


def _values(jaxpr: Any) -> Iterator[Any]:
    """Arrays that a program holds, its functions' too; its text has their shapes alone."""
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if isinstance(atom, jax.extend.core.Literal) and np.ndim(atom.val):
                yield atom.val
        for value in jax.tree.leaves(equation.params, is_leaf=_is_program):
            if isinstance(value, jax.extend.core.ClosedJaxpr):
                yield from value.consts
                yield from _values(value.jaxpr)
            elif isinstance(value, jax.extend.core.Jaxpr):
                yield from _values(value)
            elif isinstance(value, np.ndarray | jax.Array):
                yield value


def _is_program(value: Any) -> bool:
    return isinstance(value, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr)


def _digest(value: Any) -> str:
    array = np.asarray(value)
    content = hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).data)
    return f"{array.dtype}{list(array.shape)} {content.hexdigest()}"


def _bytes(variable: Any) -> int:
    return int(np.prod(variable.aval.shape)) * variable.aval.dtype.itemsize
