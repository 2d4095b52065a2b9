"""A program's jaxpr: its matmul FLOPs, counted before any compiler, and the part that weights alone decide, computed once."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core
import numpy as np
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


class Products(NamedTuple):
    """FLOPs of matmuls and convolutions, 2 per multiply-add; an outer product adds nothing and is none."""

    forward: float = 0.0
    backward: float = 0.0
    """FLOPs of the gradients of their operands, as far as these depend on weights."""


def count(function: Callable[..., Any], *args: Any) -> float:
    """FLOPs of the matmuls and convolutions of ``function(*args)``, 2 per multiply-add.

    ``args`` may be ShapeDtypeStructs. Loops with a known trip count are multiplied out, a ``while``
    of unknown length counts once, and of the branches of a ``cond`` the largest counts.
    """
    return products(function, None, *args).forward


def products(function: Callable[..., Any], weights: Any, *args: Any) -> Products:
    """FLOPs of ``function(weights, *args)`` and of its gradient by the weights, without rematerialisation.

    Args:
        function: A function of one example or more; without weights it takes ``args`` alone.
        weights: Arrays or ShapeDtypeStructs; the gradient of what does not depend on them is not computed.
        args: The other arguments, as in :func:`count`.
    """
    all_args = args if weights is None else (weights, *args)
    jaxpr = jax.make_jaxpr(function)(*all_args).jaxpr
    num_weights = len(jax.tree.leaves(weights))
    graded = [number < num_weights for number in range(len(jaxpr.invars))]
    return _jaxpr(jaxpr, graded)[0]


def _jaxpr(jaxpr: Jaxpr, graded: Sequence[bool]) -> tuple[Products, list[bool]]:
    """Products of a program, and which of its results have a gradient, given which of its arguments have one."""
    known = dict(zip(jaxpr.invars, graded, strict=True))

    def of(variables: Sequence[Any]) -> list[bool]:
        return [not isinstance(v, Literal) and known.get(v, False) for v in variables]

    total = Products()
    for equation in jaxpr.eqns:
        more, results = _equation(equation, of(equation.invars))
        total = Products(*map(sum, zip(total, more, strict=True)))
        outputs: list[Any] = equation.outvars
        for variable, has_gradient in zip(outputs, results, strict=True):
            known[variable] = has_gradient and jnp.issubdtype(variable.aval.dtype, jnp.inexact)
    return total, of(jaxpr.outvars)


def _equation(equation: Any, graded: list[bool]) -> tuple[Products, list[bool]]:
    primitive, params = equation.primitive.name, equation.params
    results = [any(graded)] * len(equation.outvars)
    if primitive in _FORWARD:
        forward = _FORWARD[primitive](equation)
        outer = _outer_gradients(equation) if primitive == "dot_general" else (False, False)
        gradients = sum(g and not o for g, o in zip(graded[:2], outer, strict=True))
        return Products(forward, forward * gradients), results
    inside = [j.jaxpr if isinstance(j, ClosedJaxpr) else j for j in _nested(params)]
    if primitive == "cond":
        return max(_inside(branch, graded)[0] for branch in inside), results
    if primitive in ("scan", "while"):
        graded = _after_turns(equation, graded)
    nested = [_inside(jaxpr, graded) for jaxpr in inside]
    if len(nested) == 1 and len(nested[0][1]) == len(results):
        results = nested[0][1]
    factor = 1.0
    if primitive == "scan":
        factor = float(params["length"])
    elif primitive == "shard_map":
        factor = float(params["mesh"].size)
    sums = zip(Products(), *(each for each, _ in nested), strict=True)
    return Products(*(factor * sum(each) for each in sums)), results


def _after_turns(equation: Any, graded: Sequence[bool]) -> list[bool]:
    """Whether each argument of a loop has a gradient in any of its turns, since a turn hands results on."""
    params, graded = equation.params, list(graded)
    if equation.primitive.name == "while":
        body, num_carry = params["body_jaxpr"].jaxpr, len(equation.outvars)
        start = len(graded) - num_carry
    else:
        body, num_carry, start = params["jaxpr"].jaxpr, params["num_carry"], params["num_consts"]
    for _ in range(num_carry):
        results = _inside(body, graded)[1][:num_carry]
        before = graded[start : start + num_carry]
        graded[start : start + num_carry] = map(max, results, before)
        if graded[start : start + num_carry] == before:
            break
    return graded


def _inside(jaxpr: Jaxpr, graded: Sequence[bool]) -> tuple[Products, list[bool]]:
    """Products of a nested program, whose arguments are the last ones of its equation."""
    last = list(graded)[len(graded) - len(jaxpr.invars) :]
    return _jaxpr(jaxpr, last if len(last) == len(jaxpr.invars) else [True] * len(jaxpr.invars))


def _nested(params: dict[str, Any]) -> list[Any]:
    jaxprs = []
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (ClosedJaxpr, Jaxpr)):
                jaxprs.append(item)
    return jaxprs


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    terms = math.prod(left[dim] for dim in contracted)
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * terms if terms > 1 else 0.0


def _outer_gradients(equation: Any) -> tuple[bool, bool]:
    """Whether the gradient of each operand of a matmul is an outer product, since the other one is a vector."""
    contracted, batched = equation.params["dimension_numbers"]
    free = [
        math.prod(
            size
            for dim, size in enumerate(variable.aval.shape)
            if dim not in contracted[side] and dim not in batched[side]
        )
        for side, variable in enumerate(equation.invars)
    ]
    return free[1] == 1, free[0] == 1


def _ragged_dot(equation: Any) -> float:
    """FLOPs of a grouped matmul: each row is multiplied with the matrix of its own group."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    left, out = equation.invars[0].aval.shape, math.prod(equation.outvars[0].aval.shape)
    if set(numbers.lhs_ragged_dimensions) <= set(contracted):
        # The gradient of the matrices: [groups, ...], a row is in one of the groups.
        out //= equation.outvars[0].aval.shape[0]
    return 2.0 * out * math.prod(left[dim] for dim in contracted)


def _convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    out_features = equation.params["dimension_numbers"].rhs_spec[0]
    per_output = math.prod(size for dim, size in enumerate(kernel) if dim != out_features)
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * per_output


_FORWARD: dict[str, Callable[[Any], float]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}


class FoldedProgram:
    """A function of weights and a batch as two: weights to constants, and constants with a batch to outputs.

    XLA's CPU backend copies each layer's weights out of a stack before a matmul reads them, and divides by the root of
    each batch norm's variance in every call.

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

    @property
    def largest(self) -> int:
        """Bytes of the largest array that the program computes from a batch."""
        return _largest(self._late)

    @property
    def flops(self) -> float:
        """FLOPs of the program's matmuls and convolutions, as :func:`count`."""
        return _jaxpr(self._late, [False] * len(self._late.invars))[0].forward

    def __call__(self, constants: Sequence[jax.Array], batch: Any) -> Any:
        """The function's outputs."""
        outputs = jax.core.eval_jaxpr(self._late, [], *constants, *jax.tree.leaves(batch))
        return jax.tree.unflatten(self._shape, outputs)

    def in_pieces(self, constants: Sequence[jax.Array], batch: Any, pieces: int) -> Any:
        """The outputs of a batch of so many times as many rows, by one piece after another."""
        parts = jax.tree.map(lambda a: a.reshape(pieces, -1, *a.shape[1:]), batch)
        outputs = jax.lax.map(lambda part: self(constants, part), parts)
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)


def _largest(jaxpr: Jaxpr) -> int:
    sizes = [_bytes(variable) for equation in jaxpr.eqns for variable in equation.outvars]
    for equation in jaxpr.eqns:
        inside = [j.jaxpr if isinstance(j, ClosedJaxpr) else j for j in _nested(equation.params)]
        sizes += map(_largest, inside)
    return max(sizes, default=0)


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
