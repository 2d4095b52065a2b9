"""Counters on the slice: a whole number that a call makes of others, such as the step of a train state, is computed.

All else on the slice reads as zeros. A program that logs or evaluates each hundredth step by the counter in its state
would do so at each, were that always 0.
"""

import operator

import numpy as np

from systolic_capture import arrays, bridge, shardings

MOST_EQNS = 200
"""Operations behind a counter, above which it is taken for none."""

_makers = {}
IDENTITIES = ("broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape", "squeeze")
PLACED = ("expand_dims", "optimization_barrier", "sharding_constraint", "stop_gradient", "pvary")
NESTED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters that hold the body of a call."""
CALLS = (
    "pjit",
    "jit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "shard_map",
)


def _select(which, *cases):
    return cases[int(which)]


def _clamp(least, value, most):
    return np.minimum(np.maximum(value, least), most)


def _divide(left, right):
    return np.trunc(np.true_divide(left, right)) if right else np.zeros_like(left)


COMPUTED = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "neg", "eq", "ne")},
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge")},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert},
    **{"max": np.maximum, "min": np.minimum, "rem": np.fmod, "sign": np.sign, "div": _divide},
    **{"select_n": _select, "clamp": _clamp},
    **dict.fromkeys((*IDENTITIES, *PLACED), lambda value, *_: value),
}
"""Results of operations on whole numbers."""


def is_counter(aval):
    """Whether an array is one whole number, or one truth value."""
    dtype = getattr(aval, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iub":
        return False
    return all(dim == 1 for dim in aval.shape)


def of(value):
    """The number of a counter, of the slice or of the host; None where it isn't known or is no counter."""
    if arrays.is_slice_array(value):
        return value.known
    if isinstance(value, (bool, int)):
        return np.asarray(value)
    if not is_counter(value) or (hasattr(value, "sharding") and bridge.on_slice(value.sharding)):
        return None
    return np.asarray(value).reshape(())


def tell(jaxpr, args, outs):
    """Gives the results of a call that are counters their numbers, as far as those that they are made of are known."""
    body = shardings.Inner(jaxpr)
    for var, out in zip(body.jaxpr.outvars, outs, strict=True):
        if arrays.is_slice_array(out) and is_counter(var.aval):
            out.known = _Body(body, lambda index: of(args[index]), [MOST_EQNS]).value(var)


def tell_operation(name, args, out):
    """Gives the result of an operation outside of jit its number."""
    if name in COMPUTED and is_counter(out.aval):
        out.known = _applied(name, list(map(of, args)), out.aval)


def _applied(name, values, aval):
    if any(value is None for value in values):
        return None
    try:
        with np.errstate(all="ignore"):
            return np.asarray(COMPUTED[name](*values)).astype(aval.dtype).reshape(())
    except Exception:  # another version's operands: not known
        return None


class _Body:
    """A body whose counters are computed as they are asked for."""

    def __init__(self, body, inputs, left):
        self._body, self._inputs, self._left = body, inputs, left
        self._found = {}
        key = id(body.jaxpr)
        if key not in _makers:
            makers = {var: eqn for eqn in body.jaxpr.eqns for var in eqn.outvars}
            _makers[key] = (body.jaxpr, makers)  # the body is kept, so that its id is not another's
        self._eqns = _makers[key][1]

    def value(self, atom):
        """The number of a variable or literal; None where it isn't known."""
        if hasattr(atom, "val"):
            return of(np.asarray(atom.val))
        if not is_counter(atom.aval):
            return None
        if atom not in self._found:
            self._found[atom] = self._computed(atom)
        return self._found[atom]

    def _computed(self, var):
        jaxpr = self._body.jaxpr
        if (eqn := self._eqns.get(var)) is None:
            if var in jaxpr.invars:
                return self._inputs(jaxpr.invars.index(var))
            consts = dict(zip(jaxpr.constvars, self._body.consts, strict=False))
            return of(consts[var]) if var in consts else None
        self._left[0] -= 1
        name = eqn.primitive.name
        if self._left[0] < 0 or (name not in COMPUTED and name not in CALLS):
            return None
        if name in COMPUTED:
            values = []
            for atom in eqn.invars:  # the first that isn't known ends it
                values.append(self.value(atom))
                if values[-1] is None:
                    return None
            return _applied(name, values, var.aval)
        return self._inside(eqn, list(eqn.outvars).index(var))

    def _inside(self, eqn, place):
        """The number of a call's result."""
        nested = next((eqn.params[key] for key in NESTED if key in eqn.params), None)
        if nested is None:
            return None
        body = shardings.Inner(nested)
        inside = _Body(body, lambda index: self.value(eqn.invars[index]), self._left)
        return inside.value(body.jaxpr.outvars[place])
