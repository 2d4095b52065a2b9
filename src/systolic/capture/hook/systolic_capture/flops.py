"""FLOPs of the matmuls and convolutions of a program, to tell which of its calls is the large one."""

import os
import re


def of_jaxpr(jaxpr, mesh=None):
    """FLOPs of a body, over all devices; loops of unknown length count once, and what several devices compute alike does too.

    ``mesh`` is that of the shard_map whose body it is, as :func:`_manual` has it.
    """
    return sum(_of(eqn, mesh) for eqn in jaxpr.eqns)


def needed(call):
    """FLOPs of the part of a call's body that its results come from; 0 where JAX does not tell it."""
    try:
        from jax._src.interpreters import partial_eval

        from systolic_capture import shardings

        body = shardings.Inner(call.params["jaxpr"]).jaxpr
        return of_jaxpr(partial_eval.dce_jaxpr(body, [True] * len(body.outvars))[0])
    except Exception:
        return 0.0


def in_open_loops(jaxpr):
    """Whether a body has matmuls in loops, or kernels' grids, whose length it does not say: they are counted once."""
    return any(
        (_is_open(eqn) and _of(eqn) > 0) or any(in_open_loops(body) for body in _bodies(eqn.params))
        for eqn in jaxpr.eqns
    )


def open_loops(jaxpr, mesh=None):
    """Loops of unknown length that have matmuls, each with those inside of it.

    ``source`` is the line of the loop, empty where its trips are none of a line's: of a kernel's grid and in branches;
    ``times`` how often it runs in one run of what holds it, ``flops`` those of one trip without the ``loops`` inside.
    """
    loops = []
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if _is_open(eqn):
            once = _of(eqn, mesh)
            if once > 0:
                inner = []
                if name == "while":
                    inner = [loop for body in _bodies(params) for loop in open_loops(body, mesh)]
                own = once - sum(map(_once, inner))
                source = _line(eqn) if name == "while" else ""
                loops.append({"source": source, "times": 1.0, "flops": own, "loops": inner})
            continue
        held = _manual(params, mesh) if name == "shard_map" else mesh
        for body in _bodies(params):
            for loop in open_loops(body, held):
                source = "" if name == "cond" else loop["source"]
                loops.append({**loop, "source": source, "times": loop["times"] * _times(eqn)})
    return loops


def _once(loop):
    return loop["times"] * (loop["flops"] + sum(map(_once, loop["loops"])))


def _line(eqn):
    """``file.py:12`` of an equation; empty where this JAX does not say."""
    try:
        from jax._src import source_info_util

        match = re.match(r"(.+?):(\d+)", source_info_util.summarize(eqn.source_info))
    except Exception:
        return ""
    return f"{os.path.basename(match[1])}:{match[2]}" if match else ""


def _is_open(eqn):
    if eqn.primitive.name == "pallas_call":
        return not all(isinstance(dim, int) for dim in eqn.params["grid_mapping"].grid)
    return eqn.primitive.name == "while"


def _size(dims):
    size = 1
    for dim in dims:
        size *= int(dim)
    return float(size)


def _manual(params, mesh):
    """Sizes of the axes that a shard_map, in that of ``mesh``, splits; whether its values say along which they differ."""
    sizes = dict(params["mesh"].shape)
    manual = params.get("newly_manual_axes") or params.get("manual_axes")
    manual = manual or set(sizes) - set(params.get("auto") or ())
    outer, varies = mesh or ({}, True)
    split = {name: sizes[name] for name in manual}
    return {**outer, **split}, varies and bool(params.get("check_vma"))


def _devices(eqn, mesh):
    """Devices of a shard_map that each compute something else; one of those that compute alike counts."""
    if mesh is None:
        return 1.0
    sizes, varies = mesh
    varying = _varying(eqn.outvars[0].aval) if varies else None
    return _size(size for name, size in sizes.items() if varying is None or name in varying)


def _varying(aval):
    """Axes along which a value differs; None where this JAX does not say. JAX 0.7 to 0.9 has it as ``vma``."""
    kind = getattr(aval, "manual_axis_type", None)
    return getattr(aval, "vma", None) if kind is None else kind.varying


def _times(eqn):
    """Runs of what an equation holds."""
    if eqn.primitive.name == "scan":
        return eqn.params.get("length", 1)
    if eqn.primitive.name == "pallas_call":
        return _size(dim for dim in eqn.params["grid_mapping"].grid if isinstance(dim, int))
    return 1


def _of(eqn, mesh=None):
    name, params = eqn.primitive.name, eqn.params
    try:
        if name == "dot_general":
            left = eqn.invars[0].aval.shape
            contracted = [left[axis] for axis in params["dimension_numbers"][0][0]]
            of_one = 2 * _size(eqn.outvars[0].aval.shape) * _size(contracted)
            return of_one * _devices(eqn, mesh)
        if name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            out = kernel[params["dimension_numbers"].rhs_spec[0]]
            of_one = 2 * _size(eqn.outvars[0].aval.shape) * _size(kernel) / max(out, 1)
            return of_one * _devices(eqn, mesh)
        if name == "pallas_call":
            # Values inside of a kernel do not say where they differ; those that come out of it do.
            inner = sum(of_jaxpr(body) for body in _bodies(params))
            return _times(eqn) * inner * _devices(eqn, mesh)
        if name == "cond":
            return max(of_jaxpr(_body(branch), mesh) for branch in params["branches"])
        held = _manual(params, mesh) if name == "shard_map" else mesh
    except Exception:
        return 0.0
    return _times(eqn) * sum(of_jaxpr(body, held) for body in _bodies(params))


def _bodies(params):
    for value in params.values():
        for part in value if isinstance(value, (list, tuple)) else (value,):
            body = _body(part)
            if hasattr(body, "eqns"):
                yield body


def _body(value):
    return value.jaxpr if hasattr(value, "jaxpr") else value
