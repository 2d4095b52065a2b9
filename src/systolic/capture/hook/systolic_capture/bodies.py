"""Bodies of jitted functions, told apart: two traces of the same operations have the same fingerprint.

A function is traced again for another static argument, another value that it closes over, another precision. What
differs then is an operation, a parameter of one, a shape within, or a number that is written into the body.
"""

import hashlib
import os
import re

import numpy as np

from systolic_capture import flops, shardings

LAMBDA = "<lambda>"

MOST_NUMBERS = 8
"""Bodies that differ in numbers alone, above which further ones count as one: a rate that is new in each step."""
MOST_VALUES = 16
"""Values of an array that are a part of a body; of larger ones its shape and dtype are."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}|(?:id|serial)=\d+")

_SHAPES = frozenset(("broadcast_in_dim", "convert_element_type", "pvary", "reshape", "squeeze"))
"""Operations around the one that a call of one operation is named by."""

FLOWS = ("scan", "while", "cond", "pallas_call")
"""Operations with bodies that jax compiles as one program where the program calls them outside of jit."""
OPENED = ("checkpoint", "remat", "remat2", "custom_linear_solve", "custom_vjp_call_jaxpr")
"""Operations whose bodies it runs operation by operation there."""

_made = {}
_numbers = {}
traces = {}
"""Traces of each fingerprint: above one, the function was traced again."""


def fingerprint(jaxpr):
    """Digest of a body; computed once for each trace."""
    body = shardings.Inner(jaxpr)
    known = _made.get(id(body.jaxpr))
    if known is None:
        digest = _digests(body)
        # The body is kept, so that its id is not another's.
        known = _made[id(body.jaxpr)] = (body.jaxpr, digest)
        traces[digest] = traces.get(digest, 0) + 1
    return known[1]


def flow_in(jaxpr, name):
    """The body of the loop or branch that a call of that name is, called outside of jit; None of another call."""
    body = shardings.Inner(jaxpr).jaxpr
    if name not in FLOWS or len(body.eqns) != 1 or body.eqns[0].primitive.name != name:
        return None
    params = body.eqns[0].params
    if name == "cond":
        return max(params["branches"], key=lambda branch: flops.of_jaxpr(_opened(branch)))
    return params.get("body_jaxpr") or params.get("jaxpr")


def _opened(jaxpr):
    return shardings.Inner(jaxpr).jaxpr


def name_of(jaxpr, name):
    """Name of a call: of a loop or an operation that jax calls by itself outside of jit, the body's or the operation's; of a lambda its line."""
    flow = flow_in(jaxpr, name)
    if flow is not None:
        own = shardings.Inner(flow).source.partition(" at ")
        jitted = [eqn.params["name"] for eqn in _opened(flow).eqns if _is_jitted(eqn)]
        if len(jitted) == 1 and own[0] in ("", LAMBDA):
            return jitted[0]
        return name if not own[1] or shardings.is_of_jax(own[2]) else own[0]
    if LAMBDA in name:
        line = os.path.basename(shardings.Inner(jaxpr).source.rpartition(" at ")[2])
        return f"lambda at {line}" if line else name
    if name != "<unnamed function>":
        return name
    body = shardings.Inner(jaxpr).jaxpr
    while body.eqns:
        eqn = next(
            (inner for inner in body.eqns if inner.primitive.name not in _SHAPES), body.eqns[0]
        )
        name = eqn.primitive.name
        if "jaxpr" not in eqn.params:
            break
        body = shardings.Inner(eqn.params["jaxpr"]).jaxpr
    return name


def _is_jitted(eqn):
    return eqn.primitive.name in ("pjit", "jit") and "name" in eqn.params


def _digests(body):
    shape, numbers = hashlib.sha256(), hashlib.sha256()
    _BodyWriter(shape, numbers).body(body.jaxpr, body.consts)
    loose, strict = shape.hexdigest(), numbers.hexdigest()
    variants = _numbers.setdefault(loose, set())
    if strict in variants or len(variants) < MOST_NUMBERS:
        variants.add(strict)
        return loose, strict
    return loose, ""


class _BodyWriter:
    """Writes a body into two digests: operations with their parameters, and numbers within."""

    def __init__(self, shape, numbers):
        self._shape, self._numbers = shape, numbers
        self._names = {}

    def _write(self, *texts):
        self._shape.update("\0".join(texts).encode() + b"\n")

    def body(self, jaxpr, consts=()):
        """A body, with the values that it closes over."""
        for var in (*jaxpr.constvars, *jaxpr.invars):
            self._var(var)
        for value in consts:
            self._value(value)
        for eqn in jaxpr.eqns:
            self._write(eqn.primitive.name, *map(self._atom, eqn.invars))
            for key in sorted(eqn.params):
                self._param(key, eqn.params[key])
            for var in eqn.outvars:
                self._var(var)
        self._write("out", *map(self._atom, jaxpr.outvars))

    def _var(self, var):
        self._names[var] = str(len(self._names))
        self._write(str(getattr(var, "aval", "")))

    def _atom(self, atom):
        if not hasattr(atom, "val"):
            return self._names.get(atom, "?")
        self._value(atom.val)
        return f"literal {getattr(atom, 'aval', '')}"

    def _value(self, value):
        if not hasattr(value, "shape"):
            self._numbers.update(repr(value).encode() + b"\n")
            return
        self._write(str(value.shape), str(getattr(value, "dtype", "")))
        if isinstance(value, (np.ndarray, np.generic)) and value.size <= MOST_VALUES:
            self._numbers.update(np.asarray(value).tobytes() + b"\n")

    def _param(self, key, value):
        if isinstance(value, (list, tuple)):
            self._write(key, str(len(value)))
            for part in value:
                self._param(key, part)
            return
        inside = getattr(value, "jaxpr", value)
        if hasattr(inside, "eqns"):
            self._write(key, "body")
            self.body(inside, list(getattr(value, "consts", ()) or ()))
        elif callable(value) and not isinstance(value, type) and hasattr(value, "__name__"):
            self._write(key, str(getattr(value, "__qualname__", value.__name__)))
        elif not _says_itself(key):
            self._write(key, _ADDRESS.sub("", repr(value)))


def _says_itself(key):
    """Whether a parameter says nothing of the work: rules of derivatives, and where it comes from."""
    return key in (
        "debug",
        "debug_info",
        "name",
        "jvp_jaxpr_fun",
        "jvp_jaxpr_thunk",
        "fwd_jaxpr_thunk",
        "bwd",
        "ctx_mesh",
        "source",
    )


def kept(params):
    """Whether the compiled program has each argument of a call: jit drops those that no result needs."""
    body = shardings.Inner(params["jaxpr"]).jaxpr
    if params.get("keep_unused"):
        return [True] * len(body.invars)
    from jax._src.interpreters import partial_eval

    return list(partial_eval.dce_jaxpr(body, [True] * len(body.outvars))[1])


def live_bytes(jaxpr):
    """The most bytes of values that are alive at once while a body runs operation by operation, over all devices.

    A compiler that joins operations needs less, and none needs less than the arguments and results.
    """
    body = shardings.Inner(jaxpr).jaxpr
    last = {}
    for number, eqn in enumerate(body.eqns):
        last.update(dict.fromkeys(_vars(eqn.invars), number))
    last.update(dict.fromkeys(_vars(body.outvars), len(body.eqns)))
    alive = {var: _bytes(var) for var in (*body.constvars, *body.invars)}
    total = most = sum(alive.values())
    for number, eqn in enumerate(body.eqns):
        inside = max((live_bytes(part) for part in _inner(eqn)), default=0)
        taken = sum(alive.get(var, 0) for var in set(_vars(eqn.invars)))
        for var in eqn.outvars:
            alive[var] = _bytes(var)
            total += alive[var]
        most = max(most, total, total + inside - taken - sum(map(_bytes, eqn.outvars)))
        for var in {*_vars(eqn.invars), *eqn.outvars}:
            if last.get(var, -1) <= number:
                total -= alive.pop(var, 0)
    return most


def operations(jaxpr):
    """Operations of a body with those inside of it."""
    eqns = shardings.Inner(jaxpr).jaxpr.eqns
    return len(eqns) + sum(operations(part) for eqn in eqns for part in _inner(eqn))


def _vars(atoms):
    return [atom for atom in atoms if not hasattr(atom, "val")]


def _bytes(var):
    return bytes_of(var.aval)


def bytes_of(aval):
    """Bytes of a value over all devices, each part once."""
    size = getattr(getattr(aval, "dtype", None), "itemsize", 4)
    for dim in getattr(aval, "shape", ()):
        size *= dim if isinstance(dim, int) else 1
    return size


def _inner(eqn):
    for value in eqn.params.values():
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if (
                hasattr(getattr(part, "jaxpr", part), "eqns")
                and eqn.primitive.name != "pallas_call"
            ):
                yield part
