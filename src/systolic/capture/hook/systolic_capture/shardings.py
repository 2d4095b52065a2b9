"""Shardings of a call's results: given, constrained in its body, or like an argument."""

from systolic_capture import arrays, bridge

ELEMENTWISE = frozenset(
    (
        *("abs", "add", "add_any", "and", "asin", "atan2", "cbrt", "ceil", "clamp", "copy", "cos"),
        *("convert_element_type", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt"),
        *("integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul"),
        *("ne", "neg", "nextafter", "not", "or", "pow", "real", "reduce_precision", "rem", "round"),
        *("rsqrt", "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan"),
        *("tanh", "xor", "pvary", "mesh_cast", "optimization_barrier"),
    )
)
"""Operations whose result is spread like their operands."""


class Inner:
    """The body of a jaxpr, closed or not, over the versions of jax."""

    def __init__(self, jaxpr):
        self.jaxpr = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
        self.consts = list(getattr(jaxpr, "consts", ()) or ())
        debug = getattr(self.jaxpr, "debug_info", None) or getattr(self.jaxpr, "_debug_info", None)
        self.source = str(getattr(debug, "func_src_info", "") or "")

    def outvars_avals(self):
        """Shapes of the results."""
        return [var.aval for var in self.jaxpr.outvars]


def inner(jaxpr):
    """The body of a jaxpr."""
    return Inner(jaxpr)


def names_slice(jaxpr):
    """Whether a sharding in the body is one of the slice."""
    from jax._src import dispatch

    body = inner(jaxpr).jaxpr
    try:
        found = dispatch.get_intermediate_shardings(body)
    except Exception:
        return False
    return any(bridge.on_slice(one[0]) for one in found)


def concrete_mesh(jaxpr):
    """A mesh of the slice that the body names; None without one."""
    from jax._src import dispatch

    try:
        found = dispatch.get_intermediate_shardings(inner(jaxpr).jaxpr)
    except Exception:
        return None
    for one, _ in found:
        if bridge.on_slice(one) and hasattr(one, "mesh"):
            return one.mesh
    return None


def placed(aval, sharding):
    """The aval of an array that is placed: with its sharding as its type where the mesh's axes are explicit."""
    from jax._src import core

    update = getattr(core, "update_aval_with_sharding", None)
    if update is None:
        return aval
    try:
        return update(aval, sharding)
    except Exception:
        return aval


def typed(aval, mesh):
    """The sharding that an aval has as its type on a mesh; None without one."""
    from jax.sharding import NamedSharding

    found = getattr(aval, "sharding", None)
    inside = getattr(found, "mesh", None)
    if mesh is None or found is None or inside is None or getattr(inside, "empty", True):
        return None
    if not getattr(inside, "_any_axis_explicit", False):
        return None
    return NamedSharding(mesh, found.spec)


def mesh_of(values):
    """The mesh that arrays on the slice are spread over; None without one."""
    for value in values:
        if arrays.is_slice_array(value) and hasattr(value.sharding, "mesh"):
            return value.sharding.mesh
    return None


def replicated(mesh):
    """Whole on every device of a mesh."""
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(mesh, PartitionSpec())


def of_operation(aval, args, mesh, first_device):
    """Sharding of the result of an operation outside of jit, and whether it is committed."""
    given = [one for one in args if arrays.is_slice_array(one)]
    mesh = mesh_of(given) or mesh
    found = typed(aval, mesh)
    if found is not None:
        return found, True
    committed = any(one._committed for one in given)
    for one in sorted(given, key=lambda one: not one._committed):
        if one.shape == aval.shape:
            return one.sharding, one._committed
    if mesh is not None:
        return replicated(mesh), committed
    return (given[0].sharding if given else first_device()), committed


def of_results(args, params, mesh, first_device, compiled):
    """Sharding of each result of a call.

    Args:
        args: The call's arguments.
        params: Of jit: the body, the given shardings, the mesh that is set.
        mesh: The mesh that the program has set.
        first_device: Makes the sharding of what nothing places.
        compiled: Compiles the call and gives the shardings that the compiler chose; None where it failed.
    """
    body = inner(params["jaxpr"])
    avals = body.outvars_avals()
    mesh = mesh or mesh_of(args) or concrete_mesh(params["jaxpr"]) or _given_mesh(params)
    known = [
        one.sharding if arrays.is_slice_array(one) and one._committed else None for one in args
    ]
    for index, one in enumerate(params["in_shardings"]):
        if bridge.is_sharding(one) and bridge.on_slice(one):
            known[index] = one
    inside = flow(params["jaxpr"], known)
    if mesh is None and not any(one is not None for one in known):
        return [(first_device(), False) for _ in avals]
    if mesh is None:
        single = next(one for one in known if one is not None)
        return [(single, True) for _ in avals]
    places = alike(args, known)
    answer = []
    for index, aval in enumerate(avals):
        given = params["out_shardings"][index]
        like = next_alike(places, aval)
        where = _concrete(given, mesh) or typed(aval, mesh) or inside[index] or like
        if where is None and not getattr(aval, "shape", ()):
            where = replicated(mesh)
        answer.append(where)
    if any(where is None and _is_large(aval) for where, aval in zip(answer, avals, strict=True)):
        chosen = compiled() or [None] * len(avals)
        answer = [where or other for where, other in zip(answer, chosen, strict=True)]
    return [
        (where if where is not None and _divides(where, aval) else replicated(mesh), True)
        for where, aval in zip(answer, avals, strict=True)
    ]


def _divides(sharding, aval):
    """Whether a sharding splits an array evenly, as that of a result of jit does."""
    try:
        sharding.shard_shape(aval.shape)
    except Exception:
        return False
    return True


def _is_large(aval):
    size = 1
    for dim in getattr(aval, "shape", ()):
        size *= dim
    return size > 1 << 16


def _given_mesh(params):
    for one in (*params["out_shardings"], *params["in_shardings"]):
        if bridge.on_slice(one) and hasattr(one, "mesh"):
            return one.mesh
    return None


def _concrete(sharding, mesh):
    from jax.sharding import NamedSharding

    if not bridge.is_sharding(sharding):
        return None
    inside = getattr(sharding, "mesh", None)
    if inside is not None and not bridge.is_concrete(inside):
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


def alike(args, known):
    """Shardings of arguments by shape and dtype, in their order."""
    found = {}
    for one, where in zip(args, known, strict=True):
        if where is not None:
            found.setdefault((tuple(one.shape), str(one.dtype)), []).append(where)
    return {key: [list(all_), 0] for key, all_ in found.items()}


def next_alike(places, aval):
    """The sharding of the next argument of that shape: a train step gives back its state in order."""
    entry = places.get((tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", ""))))
    if entry is None:
        return None
    found, used = entry
    entry[1] += 1
    return found[min(used, len(found) - 1)]


def flow(jaxpr, known):
    """Shardings of a body's results as far as constraints and operations on whole elements say; None elsewhere."""
    from jax._src import core

    body = inner(jaxpr).jaxpr
    env = {}

    def read(atom):
        return None if isinstance(atom, core.Literal) else env.get(atom)

    for var, where in zip(body.invars, known, strict=False):
        env[var] = where
    for eqn in body.eqns:
        ins = [read(atom) for atom in eqn.invars]
        try:
            outs = _through(eqn, ins)
        except Exception:  # another version's parameters: nothing is known of its results
            outs = []
        for var, where in zip(eqn.outvars, outs, strict=False):
            if where is not None:
                env[var] = where
    return [read(atom) for atom in body.outvars]


def _through(eqn, ins):
    name, params = eqn.primitive.name, eqn.params
    if name == "sharding_constraint":
        found = params["sharding"]
        inside = getattr(found, "mesh", None)
        if inside is not None and not bridge.is_concrete(inside):
            mesh = next((one.mesh for one in ins if hasattr(one, "mesh")), None) or _context()
            return [None if mesh is None else _concrete(found, mesh)]
        return [found if bridge.on_slice(found) else None]
    if name in ("pjit", "jit"):
        given = [
            one if bridge.is_sharding(one) and bridge.on_slice(one) else None
            for one in params["out_shardings"]
        ]
        made = flow(params["jaxpr"], ins)
        return [one or other for one, other in zip(given, made, strict=False)]
    if name == "scan":
        if "ft_in" in params:  # since jax 0.12
            consts, carry, _ = params["ft_in"].unpack()
            return ins[len(consts) : len(consts) + len(carry)]
        first = params["num_consts"]
        return ins[first : first + params["num_carry"]]
    if name == "while":
        return ins[params["cond_nconsts"] + params["body_nconsts"] :]
    if name == "cond":
        return flow(params["branches"][0], ins[1:])
    if name == "shard_map":
        return [_of_shards(params, index) for index in range(len(eqn.outvars))]
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params and hasattr(params[key], "eqns" if key == "jaxpr" else "jaxpr"):
            return flow(params[key], ins)
    if name in ELEMENTWISE:
        return [_same_shape(eqn, ins, var) for var in eqn.outvars]
    return [None] * len(eqn.outvars)


def _of_shards(params, index):
    """The sharding of a result of ``shard_map``; None where its mesh is not of the slice."""
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = params["mesh"] if bridge.is_concrete(params["mesh"]) else _context()
    if mesh is None or not bridge.mesh_on_slice(mesh):
        return None
    if "out_specs" in params:
        return NamedSharding(mesh, params["out_specs"][index])
    named = params["out_names"][index]  # dim to axes, before jax 0.7
    return NamedSharding(
        mesh, PartitionSpec(*(named.get(dim) for dim in range(max(named, default=-1) + 1)))
    )


def _context():
    from jax._src import mesh

    found = mesh.get_concrete_mesh() if hasattr(mesh, "get_concrete_mesh") else None
    return found if found is not None and bridge.mesh_on_slice(found) else None


def _same_shape(eqn, ins, var):
    shape = getattr(var.aval, "shape", None)
    for atom, where in zip(eqn.invars, ins, strict=True):
        if where is not None and getattr(atom.aval, "shape", None) == shape:
            return where
    return None
