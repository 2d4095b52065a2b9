"""Shardings of a call's results: given, constrained in its body, or like an argument."""

import contextlib
import itertools
import math
import os
import re

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
MOST_COMPILED = 3000
"""Operations of a body above which it is not compiled for the shardings of its results alone."""
INLINE = "builtin.module(inline)"
PROPAGATE = "builtin.module(sdy-propagation-pipeline)"
_AXIS = re.compile(r'"([^"]*)"(?::\((\d+)\)(\d+))?')
_ATTRIBUTE = "sdy.sharding"
_OPAQUE = re.compile(r"custom_call|stablehlo\.composite|chlo\.(top_k|ragged_dot|scan)\b")
"""Operations that the pass does not see through."""
_root = []


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


def is_of_jax(source):
    """Whether a place in a file is one of jax itself."""
    import jax

    if not _root:
        _root.append(os.path.dirname(os.path.abspath(jax.__file__)) + os.sep)
    return _root[0] in source


def _inside(jaxpr):
    """Shardings of the slice that the body names."""
    from jax._src import dispatch

    try:
        places = dispatch.get_intermediate_shardings(Inner(jaxpr).jaxpr)
    except Exception:
        return []
    return [place for place, _ in places if bridge.on_slice(place)]


def names_slice(jaxpr):
    """Whether a sharding in the body is one of the slice."""
    return bool(_inside(jaxpr))


def concrete_mesh(jaxpr):
    """A mesh of the slice that the body names; None without one."""
    return next((place.mesh for place in _inside(jaxpr) if hasattr(place, "mesh")), None)


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


def of_results(args, params, mesh, first_device, partitioned):
    """Sharding of each result of a call, and whether it is committed.

    Args:
        args: The call's arguments.
        params: Of jit: the body, the given shardings, the mesh that is set.
        mesh: The mesh that the program has set.
        first_device: Makes the sharding of what nothing places.
        partitioned: What the partitioner and the compiler choose: :class:`Partitions`.
    """
    body = Inner(params["jaxpr"])
    avals = body.outvars_avals()
    mesh = mesh or mesh_of(args) or concrete_mesh(params["jaxpr"]) or _given_mesh(params)
    known = [
        arg.sharding if arrays.is_slice_array(arg) and arg._committed else None for arg in args
    ]
    for index, place in enumerate(params["in_shardings"]):
        if bridge.on_slice(place):
            known[index] = place
    inside = flow(params["jaxpr"], known)
    if mesh is None:
        single = next((place for place in known if place is not None), None)
        return _on_one_device(avals, params, inside, single or first_device(), single is not None)
    answer = [
        _concrete(declared, mesh) or typed(aval, mesh)
        for declared, aval in zip(params["out_shardings"], avals, strict=True)
    ]
    is_open = [where is None and is_large(aval) for where, aval in zip(answer, avals, strict=True)]
    chosen = [None] * len(avals)
    if any(is_open) and mesh.size > 1:
        chosen = partitioned.of_pass(mesh) or chosen
        if all(map(_is_single, chosen)):  # it takes none of its arguments
            return [
                (in_memory(one, aval, flowed), False)
                for one, aval, flowed in zip(chosen, avals, inside, strict=True)
            ]
    likes = alike(args, known)
    likes = [next_alike(likes, aval) for aval in avals]
    for index, aval in enumerate(avals):
        if answer[index] is None:
            where = chosen[index] or inside[index] or (None if is_open[index] else likes[index])
            answer[index] = in_memory(_named_alike(where, known, aval), aval, inside[index])
    left = [n for n, where in enumerate(answer) if where is None and is_open[n]]
    if left and mesh.size > 1:
        chosen = partitioned.of_compiler(left, [avals[n] for n in left], [likes[n] for n in left])
        for n, where in zip(left, chosen, strict=True):
            answer[n] = where
    for n, (where, aval) in enumerate(zip(answer, avals, strict=True)):
        if where is None or not _divides(where, aval):
            answer[n] = in_memory(replicated(mesh), aval, inside[n])
    return [(where, True) for where in answer]


def _is_single(where):
    from jax.sharding import SingleDeviceSharding

    return isinstance(where, SingleDeviceSharding)


def _named_alike(where, known, aval):
    """A sharding as an argument names it that has the same: jax tells apart what is written differently."""
    for other in known:
        if where is not None and other is not None:
            with contextlib.suppress(Exception):
                if where.is_equivalent_to(other, len(aval.shape)):
                    return other
    return where


def _on_one_device(avals, params, inside, single, committed):
    """Sharding of each result where no mesh is: as declared, else on the device of the arguments, in the body's memory."""
    answer = []
    for declared, aval, flowed in zip(params["out_shardings"], avals, inside, strict=True):
        if bridge.on_slice(declared):
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


def hoists():
    """Whether jax makes arguments of arrays that a function refers to, as it does where it is told to; else they are constants."""
    from jax._src import config

    flag = getattr(config, "use_simplified_jaxpr_constants", None)
    return flag is not None and bool(flag.value)


def of_loose(args, params, mesh):
    """Sharding to which a call takes each argument that is committed nowhere: the declared one, or all devices of its mesh, or those of the others; None of one that stays."""
    declared = [where if bridge.on_slice(where) else None for where in params["in_shardings"]]
    committed = [arg for arg in args if arrays.is_slice_array(arg) and arg._committed]
    mesh = mesh or mesh_of(committed) or concrete_mesh(params["jaxpr"]) or _given_mesh(params)
    alone = committed[0].sharding if committed else None
    other = alone if mesh is None else replicated(mesh)
    return [
        None if arrays.is_slice_array(arg) and arg._committed else _concrete(where, mesh) or other
        for arg, where in zip(args, declared, strict=True)
    ]


def _divides(sharding, aval):
    """Whether a sharding splits an array evenly, as that of a result of jit does."""
    try:
        sharding.shard_shape(aval.shape)
    except Exception:
        return False
    return True


def is_large(aval):
    """Whether it matters where a value lies."""
    return math.prod(getattr(aval, "shape", ())) > 1 << 16


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

    body = Inner(jaxpr).jaxpr
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
            mesh = (
                next((where.mesh for where in ins if hasattr(where, "mesh")), None)
                or context_mesh()
            )
            return [None if mesh is None else _concrete(constraint, mesh)]
        return [constraint if bridge.on_slice(constraint) else None]
    if name == "device_put":
        return [_put(where, target) for where, target in zip(ins, params["devices"], strict=True)]
    if name in ("pjit", "jit"):
        declared = [where if bridge.on_slice(where) else None for where in params["out_shardings"]]
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

    mesh = params["mesh"] if bridge.is_concrete(params["mesh"]) else context_mesh()
    if mesh is None or not bridge.mesh_on_slice(mesh):
        return None
    if "out_specs" in params:
        return NamedSharding(mesh, params["out_specs"][index])
    named = params["out_names"][index]  # dim to axes, before jax 0.7
    return NamedSharding(
        mesh, PartitionSpec(*(named.get(dim) for dim in range(max(named, default=-1) + 1)))
    )


def context_mesh():
    """The mesh that the program has set, on the slice; None without one."""
    from jax._src import mesh

    current = mesh.get_concrete_mesh() if hasattr(mesh, "get_concrete_mesh") else None
    return current if current is not None and bridge.mesh_on_slice(current) else None


def _same_shape(eqn, ins, var):
    """The sharding that all operands of the result's shape have of which one is known."""
    shape = getattr(var.aval, "shape", None)
    same = [
        where
        for atom, where in zip(eqn.invars, ins, strict=True)
        if where is not None and getattr(atom.aval, "shape", None) == shape
    ]
    return same[0] if same and all(where == same[0] for where in same) else None


# What the partitioner and the compiler choose


class Partitions:
    """Choices for one program: by the partitioner's own pass, which takes a lowering, and by a compile."""

    def __init__(self, name, jaxpr, lower, compile=None):
        self._name, self._jaxpr, self._lower = name, jaxpr, lower
        self._compile = compile or self._least
        self._number = len(Inner(jaxpr).outvars_avals())

    def of_pass(self, mesh):
        """Sharding of each result, None of one that the pass does not reach; None where there is no such pass."""
        try:
            with _shardy():
                chosen = of_lowered(self._lower(), self._number, mesh)
        except Exception:  # the program's own fault, which its compile says
            return None
        if chosen is not None and not _has_shardy() and not all(map(_is_single, chosen)):
            _note_partitioner()
        return chosen

    def of_compiler(self, places, avals, likes):
        """Sharding of some results, by their places: the compiler's, else those of arguments of the same shape."""
        from systolic_capture import bodies, report

        size = bodies.operations(self._jaxpr)
        reason = f"its {size} operations are too many to compile for that"
        if size <= MOST_COMPILED:
            report.say(stage=f"compiling {self._name} for the shardings of its results")
            try:
                chosen = self._compile()
                return [chosen[place] for place in places]
            except Exception as error:
                reason = f"compiling it failed ({' '.join(str(error).split())[:160]})"
        self._note(avals, likes, reason)
        return likes

    def _note(self, avals, likes, reason):
        from systolic_capture import bodies, calls

        size = sum(map(bodies.bytes_of, avals)) / (1 << 30)
        taken = sum(like is not None for like in likes)
        calls.note(
            f"the shardings of {len(avals)} results of {self._name}, {size:.2f} GiB over all devices, are a guess: {taken} are taken as "
            f"those of arguments of the same shape, {len(avals) - taken} as whole on every device, since {reason}; out_shardings says them"
        )

    def _least(self):
        return list(self._lower().compile(compiler_options=_least_effort())._out_shardings)


def _least_effort():
    """Options of the quickest compile; jax 0.11 took the finer one away."""
    from jax._src import config

    if hasattr(config, "exec_time_optimization_effort"):
        return {"exec_time_optimization_effort": -1.0}
    return {"optimization_level": 1}


def of_lowered(lowering, number, mesh):
    """Sharding of each result of a lowered program; None of what the pass does not reach.

    Args:
        lowering: The program as jax lowered it.
        number: How many results it has.
        mesh: The mesh of the program's arrays, whose name of an axis the answer has where the devices are its own.

    Returns:
        None where this jax has another partitioner, or the pass fails.
    """
    from systolic_capture import calls

    devices = calls.device_assignment(lowering)
    if len(devices) == 1:
        from jax.sharding import SingleDeviceSharding

        return [SingleDeviceSharding(devices[0])] * number
    try:
        module = _propagated(lowering.stablehlo())
        meshes = _meshes(module, devices, mesh)
        results = _results(module)[-number:]
        if not meshes or len(results) != number:
            return None
        text = module.get_asm(large_elements_limit=16)
        opaque = None in results and _OPAQUE.search(text)
        whole = None if opaque else replicated(next(iter(meshes.values())))
        return [whole if one is None else _sharding(one, meshes) for one in results]
    except Exception:
        return None


def _shardy():
    """A context in which jax lowers for the partitioner that has the pass: the one that it takes since 0.7."""
    from jax._src import config

    return contextlib.nullcontext() if _has_shardy() else config.use_shardy_partitioner(True)


def _has_shardy():
    """Whether jax partitions by Shardy: since 0.7, as an option since 0.5."""
    from jax._src import config

    state = getattr(config, "use_shardy_partitioner", None)
    return state is None or state.value


def _note_partitioner():
    """Says that results lie where another partitioner than the program's own puts them."""
    import jax

    from systolic_capture import calls

    calls.note(
        f"results whose sharding jit leaves open lie where Shardy puts them, jax's partitioner since 0.7; GSPMD, which jax {jax.__version__} has, may choose others: out_shardings says them"
    )


def _propagated(module):
    from jax._src.lib.mlir import passmanager

    with module.context:
        copy = module.operation.clone()
        passmanager.PassManager.parse(INLINE).run(copy)
        _inline(copy)
        passmanager.PassManager.parse(PROPAGATE).run(copy)
    return copy


def _inline(module):
    """Puts the bodies of functions in place of their calls, at which the pass stops: jaxlib 0.5's own pass leaves them."""
    functions = {
        str(operation.attributes["sym_name"]).strip('"'): operation
        for operation in _operations(module)
        if operation.name == "func.func"
    }
    main = functions["main"]
    while calls := [one for one in _nested(main) if one.name == "func.call"]:
        for call in calls:
            body = functions[str(call.attributes["callee"]).strip('@"')].regions[0].blocks[0]
            _replace(call, body)


def _replace(call, body):
    """Puts a copy of a function's body in place of a call of it."""
    from jax._src.lib.mlir import ir

    values = dict(zip(body.arguments, call.operands, strict=True))
    for operation in body:
        if operation.operation.name == "func.return":
            break
        copy = operation.operation.clone(ip=ir.InsertionPoint(call))
        for inner in (copy, *_nested(copy)):
            for number, operand in enumerate(inner.operands):
                if operand in values:
                    inner.operands[number] = values[operand]
        values.update(zip(operation.operation.results, copy.results, strict=True))
    for result, value in zip(call.results, operation.operation.operands, strict=True):
        result.replace_all_uses_with(values.get(value, value))
    call.erase()


def _nested(operation):
    """The operations within an operation."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _nested(inner.operation)


def _operations(module):
    return [operation.operation for operation in module.regions[0].blocks[0].operations]


def _results(module):
    """The sharding of each result of the main function, as it is written; None of one without."""
    from jax._src.lib.mlir import ir

    for operation in _operations(module):
        if operation.name == "func.func" and str(operation.attributes["sym_name"]) == '"main"':
            break
    else:
        return []
    number = str(operation.attributes["function_type"]).rpartition("->")[2].count("tensor<")
    if "res_attrs" not in operation.attributes:
        return [None] * number
    dictionaries = map(ir.DictAttr, operation.attributes["res_attrs"])
    return [str(one[_ATTRIBUTE]) if _ATTRIBUTE in one else None for one in dictionaries]


def _meshes(module, devices, mesh):
    """Meshes that the module names: of axes and sizes in their order, over the program's devices in theirs."""
    import numpy as np
    from jax.sharding import Mesh

    meshes = {}
    for operation in _operations(module):
        if operation.name != "sdy.mesh":
            continue
        text = str(operation.attributes["mesh"])
        axes = re.findall(r'"([^"]*)"=(\d+)', text)
        ids = re.search(r"device_ids=\[([\d, ]*)\]", text)
        order = [int(one) for one in ids[1].split(",")] if ids else range(len(devices))
        names, sizes = [name for name, _ in axes], [int(size) for _, size in axes]
        if not axes or int(np.prod(sizes)) != len(devices):
            continue
        placed = np.empty(len(devices), object)
        placed[:] = [devices[at] for at in order]
        one = Mesh(placed.reshape(sizes), tuple(names))
        if bridge.is_concrete(mesh) and _is_same(mesh, one):
            one = mesh
        meshes[str(operation.attributes["sym_name"]).strip('"')] = one
    return meshes


def _is_same(mesh, other):
    return tuple(mesh.shape.items()) == tuple(other.shape.items()) and tuple(
        mesh.devices.flat
    ) == tuple(other.devices.flat)


def _sharding(text, meshes):
    """The sharding that ``#sdy.sharding<@mesh, [{"data"}, {}]>`` is, of axes or of parts of them."""
    from jax.sharding import NamedSharding, PartitionSpec

    name, _, dims = text.partition("<@")[2].partition("[")
    mesh = meshes[name.rstrip(", ").strip('"')]
    axes = [_AXIS.findall(dim) for dim in re.findall(r"\{([^}]*)\}", dims.partition("]")[0])]
    mesh = _split(mesh, [axis for dim in axes for axis in dim])
    spec = [tuple(f"{name}:{at}" if at else name for name, at, _ in dim) for dim in axes]
    while spec and not spec[-1]:
        spec.pop()
    return NamedSharding(mesh, PartitionSpec(*(_entry(dim) for dim in spec)))


def _entry(dim):
    if len(dim) < 2:
        return dim[0] if dim else None
    return dim


def _split(mesh, axes):
    """The mesh with each axis of which parts are used as several, named by where they begin."""
    from jax.sharding import Mesh

    ends = {}
    for name, at, size in axes:
        if at:
            ends.setdefault(name, {1}).update((int(at), int(at) * int(size)))
    if not ends:
        return mesh
    names, sizes = [], []
    for name, size in mesh.shape.items():
        if name not in ends:
            names.append(name)
            sizes.append(size)
            continue
        bounds = sorted({*ends[name], size})
        for begin, end in itertools.pairwise(bounds):
            names.append(f"{name}:{begin}")
            sizes.append(end // begin)
    return Mesh(mesh.devices.reshape(sizes), tuple(names))
