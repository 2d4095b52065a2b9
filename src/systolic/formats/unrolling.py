"""Programs without loops over layers and without calls, for converters, which know few of them; imports nothing of this package."""

from collections.abc import Callable, Sequence
from typing import Any

INLINED = (
    "jit",
    "pjit",
    "closed_call",
    "eval_jaxpr",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
)
"""Primitives that call a function once."""
MOST_TURNS = 128
"""Turns of a loop that are written one after another."""
Replace = Callable[[Any, list[Any]], list[Any] | None]
"""An equation and its inputs to its outputs by other operations; None leaves it as it is."""


def unrolled(call: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, computed with its loops of known length written out; for tracing."""
    import jax

    closed, shape = jax.make_jaxpr(call, return_shape=True)(*args)
    made = computed(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), made)


def loops(jaxpr: Any) -> bool:
    """Whether a program has a loop, its functions' too."""
    return any(
        equation.primitive.name in ("while", "scan") or any(map(loops, _programs(equation.params)))
        for equation in jaxpr.eqns
    )


def largest_bytes(jaxpr: Any) -> int:
    """Bytes of the largest array that a program makes, its functions' too."""
    import jax.core

    sizes = [
        one.aval.size * one.aval.dtype.itemsize
        for equation in jaxpr.eqns
        for one in equation.outvars
        if isinstance(one.aval, jax.core.ShapedArray)
    ]
    inner = [largest_bytes(one) for equation in jaxpr.eqns for one in _programs(equation.params)]
    return max([0, *sizes, *inner])


def _programs(params: Any) -> list[Any]:
    import jax.extend.core

    found = [
        one for value in params.values() for one in (value if isinstance(value, tuple) else [value])
    ]
    found = [one.jaxpr if isinstance(one, jax.extend.core.ClosedJaxpr) else one for one in found]
    return [one for one in found if isinstance(one, jax.extend.core.Jaxpr)]


def computed(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], replace: Replace = lambda *_: None
) -> list[Any]:
    """Outputs of a jaxpr, its functions inlined and its loops written out."""
    import jax.extend.core

    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax.extend.core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        given, name = [read(atom) for atom in equation.invars], equation.primitive.name
        if name in INLINED:
            made = _called(equation.params, given, replace)
        elif name == "scan" and equation.params["length"] <= MOST_TURNS:
            made = _turns(equation, given, replace)
        elif (other := replace(equation, given)) is not None:
            made = other
        else:
            params = equation.primitive.get_bind_params(equation.params)
            out = equation.primitive.bind(*given, **params)
            made = out if equation.primitive.multiple_results else [out]
        known.update(zip(equation.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _called(params: Any, given: list[Any], replace: Replace) -> list[Any]:
    """Outputs of a function that is called once."""
    import jax.extend.core

    inner = params.get("jaxpr") or params["call_jaxpr"]
    if isinstance(inner, jax.extend.core.ClosedJaxpr):
        return computed(inner.jaxpr, inner.consts, given, replace)
    return computed(inner, (), given, replace)


def _turns(equation: Any, given: list[Any], replace: Replace) -> list[Any]:
    """Outputs of a loop over layers, one turn after another."""
    import jax.numpy as jnp

    params = equation.params
    body, turns = params["jaxpr"], range(params["length"])
    inner, constants = getattr(body, "jaxpr", body), getattr(body, "consts", ())
    carried = _passed_whole(equation.outvars, inner.outvars)
    whole = _passed_whole(equation.invars, inner.invars)
    consts, carry, rows = given[: whole - carried], given[whole - carried : whole], given[whole:]
    made: list[list[Any]] = []
    for turn in reversed(turns) if params["reverse"] else turns:
        own = [*consts, *carry, *(row[turn] for row in rows)]
        outputs = computed(inner, constants, own, replace)
        carry = outputs[:carried]
        made.append(outputs[carried:])
    made = made[::-1] if params["reverse"] else made
    return [*carry, *(jnp.stack(parts) for parts in zip(*made, strict=True))]


def _passed_whole(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Variables of a loop's equation that its body has as they are; those cut into rows have one axis more outside."""
    pairs = zip(outside, inside, strict=True)
    return sum(len(one.aval.shape) == len(other.aval.shape) for one, other in pairs)
