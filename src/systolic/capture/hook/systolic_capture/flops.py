"""FLOPs of the matmuls and convolutions of a program, to tell which of its calls is the large one."""


def of_jaxpr(jaxpr):
    """FLOPs of a body, over all devices; loops of unknown length count once."""
    return sum(_of(eqn) for eqn in jaxpr.eqns)


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
