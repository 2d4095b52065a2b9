"""Shardings of a call's results: given, constrained in its body, or like an argument."""

import contextlib
import os

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


_root = []


def is_of_jax(source):
    """Whether a place in a file is one of jax itself."""
    import jax

    if not _root:
        _root.append(os.path.dirname(os.path.abspath(jax.__file__)) + os.sep)
    return _root[0] in source


def names_slice(jaxpr):
    """Whether a sharding in the body is one of the slice."""
    from jax._src import dispatch

    body = inner(jaxpr).jaxpr
    try:
        places = dispatch.get_intermediate_shardings(body)
    except Exception:
        return False
    return any(bridge.on_slice(place[0]) for place in places)


def concrete_mesh(jaxpr):
    """A mesh of the slice that the body names; None without one."""
    from jax._src import dispatch

    try:
        places = dispatch.get_intermediate_shardings(inner(jaxpr).jaxpr)
    except Exception:
        return None
    for sharding, _ in places:
        if bridge.on_slice(sharding) and hasattr(sharding, "mesh"):
            return sharding.mesh
    return None


def placed(aval, sharding):
    """The aval of an array that is placed: its type says its memory, and its sharding where the mesh's axes are explicit."""
    from jax._src import core

    if (update := getattr(core, "update_aval_with_sharding", None)) is None:
        return aval
    with contextlib.suppress(Exception):
        aval = update(aval, sharding)
        if hasattr(aval, "memory_space"):
            space = core.mem_kind_to_space(getattr(sharding, "memory_kind", None))
            aval = aval.update(memory_space=space)
    return aval


def typed(aval, mesh):
    """The sharding that an aval has as its type on a mesh; None without one."""
    from jax.sharding import NamedSharding

    declared = getattr(aval, "sharding", None)
    inside = getattr(declared, "mesh", None)
    if mesh is None or declared is None or inside is None or getattr(inside, "empty", True):
        return None
    if not getattr(inside, "_any_axis_explicit", False):
        return None
    return NamedSharding(mesh, declared.spec)


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
    taken = [arg for arg in args if arrays.is_slice_array(arg)]
    mesh = mesh_of(taken) or mesh
    declared = typed(aval, mesh)
    if declared is not None:
        return declared, True
    committed = any(arg._committed for arg in taken)
    for arg in sorted(taken, key=lambda arg: not arg._committed):
        if arg.shape == aval.shape:
            return arg.sharding, arg._committed
    if mesh is not None:
        return replicated(mesh), committed
    return (taken[0].sharding if taken else first_device()), committed


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
        arg.sharding if arrays.is_slice_array(arg) and arg._committed else None for arg in args
    ]
    for index, place in enumerate(params["in_shardings"]):
        if bridge.is_sharding(place) and bridge.on_slice(place):
            known[index] = place
    inside = flow(params["jaxpr"], known)
    if mesh is None:
        single = next((place for place in known if place is not None), None)
        return _on_one_device(avals, params, inside, single or first_device(), single is not None)
    places = alike(args, known)
    answer = []
    for index, aval in enumerate(avals):
        declared = params["out_shardings"][index]
        like = next_alike(places, aval)
        where = _concrete(declared, mesh) or typed(aval, mesh)
        if where is None:
            where = in_memory(inside[index] or like, aval, inside[index])
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


def _on_one_device(avals, params, inside, single, committed):
    """Sharding of each result where no mesh is: as declared, else on the device of the arguments, in the body's memory."""
    answer = []
    for declared, aval, flowed in zip(params["out_shardings"], avals, inside, strict=True):
        if bridge.is_sharding(declared) and bridge.on_slice(declared):
            answer.append((declared, True))
        else:
            answer.append((in_memory(single, aval, flowed), committed))
    return answer


def in_memory(where, aval, flowed):
    """A sharding in the kind of memory that the body has a result in: as it is typed, or before jax 0.7 where it flowed to."""
    if where is None:
        return None
    space = getattr(getattr(aval, "memory_space", None), "name", None)
    if space is None:
        kind = getattr(flowed, "memory_kind", None) or "device"
    else:
        kind = {"Host": "pinned_host"}.get(space, "device")
    has = where.memory_kind or "device"
    return where if has == kind else where.with_memory_kind(kind)


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
    for where in (*params["out_shardings"], *params["in_shardings"]):
        if bridge.on_slice(where) and hasattr(where, "mesh"):
            return where.mesh
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
    places = {}
    for arg, where in zip(args, known, strict=True):
        if where is not None:
            places.setdefault((tuple(arg.shape), str(arg.dtype)), []).append(where)
    return {key: [list(all_), 0] for key, all_ in places.items()}


def next_alike(places, aval):
    """The sharding of the next argument of that shape: a train step gives back its state in order."""
    entry = places.get((tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", ""))))
    if entry is None:
        return None
    wheres, used = entry
    entry[1] += 1
    return wheres[min(used, len(wheres) - 1)]


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
        constraint = params["sharding"]
        inside = getattr(constraint, "mesh", None)
        if inside is not None and not bridge.is_concrete(inside):
            mesh = next((where.mesh for where in ins if hasattr(where, "mesh")), None) or _context()
            return [None if mesh is None else _concrete(constraint, mesh)]
        return [constraint if bridge.on_slice(constraint) else None]
    if name == "device_put":
        return [_put(where, target) for where, target in zip(ins, params["devices"], strict=True)]
    if name in ("pjit", "jit"):
        declared = [
            where if bridge.is_sharding(where) and bridge.on_slice(where) else None
            for where in params["out_shardings"]
        ]
        flowed = flow(params["jaxpr"], ins)
        return [where or other for where, other in zip(declared, flowed, strict=False)]
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


def _put(where, target):
    """Place that ``device_put`` within a body gives an array: what it names, or in another memory of the same devices."""
    target = getattr(target, "sharding", target)  # of a Format
    if bridge.is_sharding(target):
        return target if bridge.on_slice(target) else None
    named = getattr(target, "name", None) or getattr(target, "memory_kind", None)
    kind = {"Host": "pinned_host", "Device": "device"}.get(named, named)
    return where if where is None or not isinstance(kind, str) else where.with_memory_kind(kind)


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

    current = mesh.get_concrete_mesh() if hasattr(mesh, "get_concrete_mesh") else None
    return current if current is not None and bridge.mesh_on_slice(current) else None


def _same_shape(eqn, ins, var):
    shape = getattr(var.aval, "shape", None)
    for atom, where in zip(eqn.invars, ins, strict=True):
        if where is not None and getattr(atom.aval, "shape", None) == shape:
            return where
    return None
