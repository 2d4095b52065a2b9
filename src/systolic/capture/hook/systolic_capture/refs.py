"""Mutable references of ``jax.new_ref`` whose arrays lie on the slice: a call takes the arrays, and gives each that it may change anew."""

import functools
from typing import Any

from systolic_capture import arrays

MAKERS = ("new_ref", "ref", "mutable_array")
"""Operation that makes one, by version of jax."""


@functools.cache
def _kind():
    """The class of references, by version of jax; None where there is none."""
    from jax._src import core

    names = ("Ref", "ArrayRef", "MutableArray")
    return next((getattr(core, name) for name in names if hasattr(core, name)), None)


def is_ref(value):
    """Whether a value is a reference, rather than a traced one."""
    return type(value) is _kind()


def on_slice(values):
    """Whether the array of a reference among some values lies on the slice."""
    return any(arrays.is_slice_array(_holder(value)._buf) for value in values if is_ref(value))


def _holder(ref):
    return getattr(ref, "_refs", ref)


def is_used(jaxpr, args):
    """Whether a call takes a reference or refers to one."""
    return any(map(is_ref, args)) or any(map(is_ref, getattr(jaxpr, "consts", ())))


class DischargedCall:
    """A call with the arrays of its references as arguments that it donates, and as results behind its own."""

    def __init__(self, args, params, first_device):
        from jax._src.interpreters import pxla
        from jax._src.sharding_impls import UNSPECIFIED

        jaxpr, _, mutation = pxla._discharge_refs(params["jaxpr"])
        self._refs = [*args, *mutation.in_mut]
        self._changed = mutation.out_mut
        self.args = [_array(value, first_device) for value in self._refs]
        more = len(mutation.in_mut)
        self.params: dict[str, Any] = {**params, "jaxpr": jaxpr}
        fillers = (("in_shardings", UNSPECIFIED), ("in_layouts", None), ("donated_invars", False))
        for name, filler in fillers:
            if name in params:
                self.params[name] = (*params[name], *[filler] * more)
        donated = self.params["donated_invars"]
        self.params["donated_invars"] = tuple(
            gone or is_ref(value) for gone, value in zip(donated, self._refs, strict=True)
        )
        self._place("out_shardings", lambda array: array.sharding)
        self._place("out_layouts", lambda _: None)

    def _place(self, name, of_array):
        """Gives each changed array a place among those of the results."""
        if name in self.params:
            own = iter(self.params[name])
            self.params[name] = tuple(
                next(own) if index is None else of_array(self.args[index])
                for index in self._changed
            )

    def results(self, outs):
        """The call's own results, once each reference has its array."""
        own = []
        for index, out in zip(self._changed, outs, strict=True):
            if index is None:
                own.append(out)
            else:
                _holder(self._refs[index])._buf = out
        return own


def _array(value, first_device):
    """The array of a reference, committed as jax has it; another value as it is."""
    if not is_ref(value):
        return value
    array = _holder(value)._buf
    if not arrays.is_slice_array(array):
        from systolic_capture import counters

        known = counters.of(array)
        array = arrays.array_class()(array.aval, first_device())
        array.known = known
    array._committed = bool(getattr(value, "_committed", True))
    return array
