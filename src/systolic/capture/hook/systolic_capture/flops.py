"""FLOPs of the matmuls and convolutions of a program, to tell which of its calls is the large one."""


def of_jaxpr(jaxpr):
    """FLOPs of a body, over all devices; loops of unknown length count once."""
    return sum(_of(eqn) for eqn in jaxpr.eqns)


def in_open_loops(jaxpr):
    """Whether a body has matmuls in loops, or kernels' grids, whose length it does not say: they are counted once."""
    return any(
        (_is_open(eqn) and _of(eqn) > 0) or any(in_open_loops(body) for body in _bodies(eqn.params))
        for eqn in jaxpr.eqns
    )


def _is_open(eqn):
    if eqn.primitive.name == "pallas_call":
        return not all(isinstance(dim, int) for dim in eqn.params["grid_mapping"].grid)
    return eqn.primitive.name == "while"


def _size(dims):
    size = 1
    for dim in dims:
        size *= int(dim)
    return float(size)


def _of(eqn):
    name, params = eqn.primitive.name, eqn.params
    try:
        if name == "dot_general":
            left = eqn.invars[0].aval.shape
            contracted = [left[axis] for axis in params["dimension_numbers"][0][0]]
            return 2 * _size(eqn.outvars[0].aval.shape) * _size(contracted)
        if name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            out = kernel[params["dimension_numbers"].rhs_spec[0]]
            return 2 * _size(eqn.outvars[0].aval.shape) * _size(kernel) / max(out, 1)
        times = params.get("length", 1) if name == "scan" else 1
        if name == "shard_map":
            times = getattr(params["mesh"], "size", 1)
        if name == "pallas_call":
            times = _size(dim for dim in params["grid_mapping"].grid if isinstance(dim, int))
        if name == "cond":
            return max(of_jaxpr(_body(one)) for one in params["branches"])
    except Exception:
        return 0.0
    return times * sum(of_jaxpr(body) for body in _bodies(params))


def _bodies(params):
    for value in params.values():
        for one in value if isinstance(value, (list, tuple)) else (value,):
            body = _body(one)
            if hasattr(body, "eqns"):
                yield body


def _body(value):
    return value.jaxpr if hasattr(value, "jaxpr") else value
