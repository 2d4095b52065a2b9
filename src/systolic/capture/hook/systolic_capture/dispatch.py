"""Operations of the program on arrays: calls of jit are recorded, other operations give the shapes of their results.

Values that are not on the slice are computed, on the CPU, while they are small and jax's own functions make them: keys
of random numbers, counters, small tables. What the program's own jitted functions give has shapes alone.
"""

import contextlib
import functools
import sys
import weakref

from systolic_capture import (
    arrays,
    bodies,
    bridge,
    calls,
    counters,
    memory,
    moves,
    report,
    shardings,
)

MOST_BYTES = 1 << 20
"""Largest result that is computed."""
CALLS = ("pjit", "jit")
_jitted = set()
"""Functions of jax that the program gave to jit, such as a checked one, by their places."""
_lowered = set()
"""Calls of which jax takes the arguments though they lie apart."""
_bodies = weakref.WeakKeyDictionary()


def aval_of(value):
    """Shape and dtype of a value, as jax has them."""
    if hasattr(value, "aval"):
        return value.aval
    from jax._src import core

    return core.typeof(value) if hasattr(core, "typeof") else core.get_aval(value)


def stand_in(aval, sharding, committed=True, sources=None, buffer=None):
    """An array of the slice; one that is not an array, such as a token, as it is. ``buffer``: of the array that it is a view of."""
    if not hasattr(aval, "shape"):
        return aval
    return arrays.array_class()(aval, sharding, committed, sources, buffer)


def first_device():
    """Sharding of what nothing places."""
    import jax

    return jax.sharding.SingleDeviceSharding(bridge.slice_devices()[0])


# core: operations outside of jit


def patch_core(core):
    """Operations outside of jit, on arrays of the slice."""
    real = core.EvalTrace.process_primitive

    def process_primitive(self, primitive, args, params, /):
        if arrays.refs_on_slice(args) or (
            primitive.name in arrays.REF_MAKERS and any(map(arrays.is_slice_array, args))
        ):
            return real(self, primitive, args, params)  # a copy, or a call of jit
        if (
            any(map(arrays.is_slice_array, args))
            or _names_slice(params)
            or (primitive.name not in CALLS and _is_large(primitive, args, params))
        ):
            if primitive.name in (*bodies.FLOWS, *bodies.OPENED):
                return real(
                    self, primitive, args, params
                )  # a call of jit, or the operations inside
            if _is_split(primitive, args, params) or _are_apart(args):
                from jax._src import dispatch

                return dispatch.apply_primitive(primitive, *args, **params)
            return _operation(primitive, args, params)
        with bridge.Cpu():
            return real(self, primitive, args, params)

    core.EvalTrace.process_primitive = process_primitive


def _names_slice(params):
    places = params.get("devices") or (params.get("sharding"),)
    return any(bridge.is_slice_device(where) or bridge.on_slice(where) for where in places)


def _is_large(primitive, args, params):
    """Whether a result is too large to be computed."""
    if "ids" not in bridge._known:
        return False
    try:
        results = _results(primitive, args, params)
    except Exception:
        return False
    return any(bodies.bytes_of(aval) > MOST_BYTES for aval in results)


def _is_split(primitive, args, params):
    """Whether jax compiles an operation by itself, of which the partitioner splits a large result over devices."""
    mesh = shardings.mesh_of(args)
    impl = getattr(primitive.impl, "func", primitive.impl)
    own = getattr(impl, "__name__", "") in ("apply_primitive", "_slice_impl")
    if mesh is None or mesh.size == 1 or not own:
        return False
    try:
        results = _results(primitive, args, params)
    except Exception:
        return False
    return any(map(shardings.is_large, results))


def _results(primitive, args, params):
    results = primitive.abstract_eval(*map(aval_of, args), **params)[0]
    return list(results) if primitive.multiple_results else [results]


def _operation(primitive, args, params):
    if primitive.name in CALLS:
        return jit_call(args, params)
    if primitive.name == "device_put":
        return [put(value, where) for value, where in zip(args, params["devices"], strict=True)]
    if primitive.name in ("debug_callback", "debug_print"):
        return []
    if primitive.name == "sharding_constraint":
        return put(args[0], params["sharding"])
    arrays.check(args)
    mesh = shardings.context_mesh()
    results = _results(primitive, args, params)
    calls.count_operation(primitive.name)
    sources = arrays.sources(args)
    outs = [
        stand_in(aval, *shardings.of_operation(aval, args, mesh, first_device), sources)
        for aval in results
    ]
    if primitive.multiple_results:
        return outs
    counters.tell_operation(primitive.name, args, outs[0])
    return outs[0]


# dispatch: placing values


def put(value, where):
    """``jax.device_put`` of one value, to the slice or from it."""
    import jax
    import numpy as np

    target = getattr(where, "sharding", where)  # of a Format
    aval = aval_of(value)
    if target is None:
        return value
    if isinstance(target, jax.Device):
        target = jax.sharding.SingleDeviceSharding(target)
    if not bridge.is_sharding(target):
        named = getattr(target, "name", None) or getattr(target, "memory_kind", None)
        kind = {"Host": "pinned_host", "Device": "device"}.get(named, named)
        old = value.sharding if arrays.is_slice_array(value) else first_device()
        place = old if kind is None else old.with_memory_kind(kind)
        return stand_in(aval, place, sources=_moved(value, place))
    if not bridge.on_slice(target) and bodies.bytes_of(aval) <= MOST_BYTES:
        return jax.device_put(np.asarray(value), target)
    # Where it lies already, jax gives the array itself under another name.
    buffer = value.buffer if arrays.is_slice_array(value) and value.sharding == target else None
    sources = _moved(value, target)
    array = stand_in(shardings.placed(aval, target), target, sources=sources, buffer=buffer)
    if counters.is_counter(aval):
        array.known = counters.of(value)
    return array


def _moved(value, where):
    """Counts the move of a value; returns what the value there comes from."""
    if arrays.is_slice_array(value):
        value.use()
        return moves.count(value, where)
    if bridge.on_slice(where):
        moves.count_fed(aval_of(value), where)
    return arrays.Origins()


def _donate(value, placed, semantics, index):
    """Frees what ``jax.device_put`` was told to donate, once it is placed."""
    kind = semantics[index] if isinstance(semantics, (list, tuple)) and semantics else None
    if getattr(kind, "name", "") != "DONATE_INPUT" or not arrays.is_slice_array(value):
        return
    value.donated()
    if value.buffer and getattr(placed, "buffer", None) is not value.buffer:
        value.buffer.free()


def patch_put(dispatch):
    """``jax.device_put``."""
    real = dispatch._batched_device_put_impl

    def impl(*values, devices, **kwargs):
        wanted = [
            arrays.is_slice_array(value)
            or _names_slice({"devices": (where,)})
            or bridge.on_slice(getattr(where, "sharding", None))
            for value, where in zip(values, devices, strict=True)
        ]
        if not any(wanted):
            with bridge.Cpu():
                return real(*values, devices=devices, **kwargs)
        outs = []
        for index, (value, where) in enumerate(zip(values, devices, strict=True)):
            if wanted[index]:
                outs.append(put(value, where))
                _donate(value, outs[-1], kwargs.get("copy_semantics", ()), index)
            else:
                options = {
                    name: [option[index]] if isinstance(option, (list, tuple)) else option
                    for name, option in kwargs.items()
                }
                with bridge.Cpu():
                    outs.extend(real(value, devices=[where], **options))
        return outs

    dispatch._batched_device_put_impl = impl


def patch_array(module):
    """Functions that make an array of parts."""
    import jax

    real_callback = module.make_array_from_callback
    real_local = module.make_array_from_process_local_data
    real_single = module.make_array_from_single_device_arrays

    def make_array_from_callback(shape, sharding, data_callback, *args, dtype=None, **kwargs):
        where = getattr(sharding, "sharding", sharding)
        if not bridge.on_slice(where):
            return real_callback(shape, sharding, data_callback, *args, dtype=dtype, **kwargs)
        shape = tuple(shape)
        index = next(iter(where.devices_indices_map(shape).values()))
        part = data_callback(index)
        if dtype is None:
            dtype = part.dtype if hasattr(part, "dtype") else jax.numpy.asarray(part).dtype
        if arrays.is_slice_array(part):
            return _of_slice_part(part, shape, dtype, where)
        array = array_of(shape, dtype, where)
        moves.count_fed(array.aval, where)
        return array

    def make_array_from_process_local_data(
        sharding, local_data, global_shape=None, *args, **kwargs
    ):
        from jax._src import tree_util

        parts = tree_util.tree_leaves(sharding)
        if not any(map(bridge.on_slice, parts)):
            return real_local(sharding, local_data, global_shape, *args, **kwargs)
        leaves, tree = tree_util.tree_flatten(local_data)
        places = parts * len(leaves) if len(parts) == 1 else parts
        one_shape = global_shape is not None and all(
            isinstance(dim, int) or dim is None for dim in global_shape
        )
        shapes = (
            [global_shape] * len(leaves)
            if global_shape is None or one_shape
            else tree.flatten_up_to(global_shape)
        )
        outs = []
        for leaf, place, shape in zip(leaves, places, shapes, strict=True):
            outs.append(array_of(whole_shape(leaf.shape, place, shape), leaf.dtype, place))
            moves.count_fed(outs[-1].aval, place)
        return tree_util.tree_unflatten(tree, outs)

    def make_array_from_single_device_arrays(shape, sharding, parts, **kwargs):
        if not bridge.on_slice(sharding):
            return real_single(shape, sharding, parts, **kwargs)
        dtype = parts[0].dtype if len(parts) else kwargs["dtype"]
        return array_of(tuple(shape), dtype, sharding, memory.joined(parts), arrays.sources(parts))

    module.make_array_from_callback = make_array_from_callback
    module.make_array_from_process_local_data = make_array_from_process_local_data
    module.make_array_from_single_device_arrays = make_array_from_single_device_arrays


def _of_slice_part(part, shape, dtype, where):
    """An array each of whose parts is a copy of one that lies on the slice, as ``jax.numpy.zeros`` makes them with ``device=``: its
    own device keeps that very part."""
    sources = part.sources
    if hasattr(where, "mesh"):
        sources = moves.count(part, shardings.replicated(where.mesh))
    if part.buffer and part.sharding.device_set <= where.device_set:
        part.buffer.free()
    return array_of(shape, dtype, where, sources=sources)


def whole_shape(own, sharding, shape):
    """Shape of an array of which each process has a part: as given, else as many parts as its sharding has processes."""
    from jax._src import sharding_impls

    own = tuple(own)
    if shape is None:
        if bridge.num_processes() == 1:
            return own
        shape = sharding_impls.local_to_global_shape(sharding, own)
    return tuple(own[axis] if dim is None else dim for axis, dim in enumerate(shape))


def array_of(shape, dtype, sharding, buffer=None, sources=None):
    """An array on the slice; ``buffer``: of the array that it is a view of; ``sources``: of what it is made of."""
    from jax._src import core, dtypes

    if hasattr(dtypes, "canonicalize_dtype"):
        dtype = dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    aval = core.ShapedArray(tuple(shape), dtype)
    return stand_in(shardings.placed(aval, sharding), sharding, sources=sources, buffer=buffer)


# pjit: calls


def patch_jit(pjit):
    """Calls of jitted functions."""
    real = pjit._pjit_call_impl_python

    def call(*args, **params):
        if not _belongs_to_slice(args, params):
            with bridge.Cpu():
                return real(*args, **params)
        return (jit_call(args, params), *_extras(real))

    pjit._pjit_call_impl_python = call


@functools.cache
def _extras(real):
    """Values of ``_pjit_call_impl_python`` beside the results: an executable, a profiler, and constants in some versions."""
    import inspect

    constants = "const_args" in inspect.getsource(real)
    return (None, None, []) if constants else (None, None)


def _belongs_to_slice(args, params):
    from jax._src import config

    jaxpr = params["jaxpr"]
    if any(map(arrays.is_slice_array, args)):
        return True
    if arrays.refs_on_slice(args) or arrays.refs_on_slice(shardings.Inner(jaxpr).consts):
        return True
    if any(map(bridge.on_slice, (*params["in_shardings"], *params["out_shardings"]))):
        return True
    if bridge.mesh_on_slice(params.get("ctx_mesh")):
        return True
    default = config.default_device.value  # None where the program has made none
    if default is not None and not isinstance(default, str):
        return bridge.is_slice_device(default)
    if any(getattr(arg, "_committed", False) for arg in args):
        return False
    if not is_own(jaxpr, params.get("name")):
        return True
    if any(bodies.bytes_of(aval) > MOST_BYTES for aval in shardings.Inner(jaxpr).outvars_avals()):
        bridge.slice_devices()
        return True
    return shardings.names_slice(jaxpr)


def is_own(jaxpr, name=""):
    """Whether jax itself calls its function or operation, rather than the program one that it jitted, or a loop."""
    source = shardings.Inner(jaxpr).source
    if not shardings.is_of_jax(source) or source in _jitted:
        return False
    return bodies.flow_in(jaxpr, name) is None


def patch_public_jit(jax):
    """``jax.jit``: a function that jax made of one of the program, as checkify does, is the program's own."""
    real = jax.jit

    def note(function):
        from jax._src import api_util

        with contextlib.suppress(Exception):
            source = api_util.fun_sourceinfo(function)
            if source is not None and shardings.is_of_jax(source):
                _jitted.add(source)

    @functools.wraps(real)
    def jit(*args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__") or ""
        if args and caller.partition(".")[0] != "jax":
            note(args[0])
        made = real(*args, **kwargs)
        return made if args else functools.partial(jit, **kwargs)

    jax.jit = jit


def jit_call(args, params):
    """A call on the slice: recorded, and its results in shape alone."""
    if arrays.uses_refs(params["jaxpr"], args):
        discharged = arrays.DischargedCall(args, params, first_device)
        return discharged.results(jit_call(discharged.args, discharged.params))
    arrays.check(args)
    call = calls.Call(args, params, is_own(params["jaxpr"], params.get("name")))
    _refuse_apart(call)
    with contextlib.nullcontext() if call.own else memory.inside_call():
        outs = call.results()
        counters.tell(params["jaxpr"], args, outs)
        sources = calls.record(call)
        call.donate()
    sources = arrays.sources(args) if sources is None else sources
    for out in filter(arrays.is_slice_array, outs):
        out.sources = sources
        memory.made_by(out.buffer, out.born)
    return outs


def _are_apart(args):
    """Whether arguments that are committed lie on other devices, or on the same in another order."""
    placed = (arg for arg in args if arrays.is_slice_array(arg) and arg._committed)
    return len({arg.sharding._device_assignment for arg in placed}) > 1


def _refuse_apart(call):
    """Raises the error by which jax names arguments on incompatible devices."""
    if not _are_apart(call.args) or call.key in _lowered:
        return
    try:
        call.lower()
    except Exception as error:  # others are its compile's to say
        if type(error).__name__ == "DeviceAssignmentMismatchError":
            raise
    _lowered.add(call.key)


# stages: programs that the program compiles itself


def body_of(lowering):
    """The body that was lowered and the shardings that its arguments were given; None where jax does not say."""
    return _bodies.get(lowering)


def patch_stages(stages):
    """``jitted.lower(...).compile()``."""
    real_lower, real_compile = stages.Traced.lower, stages.Lowered.compile

    @functools.wraps(real_lower)
    def lower(self, *args, **kwargs):
        if kwargs.get("lowering_platforms") is None:
            kwargs["lowering_platforms"] = (bridge.lowering_platform(),)
        lowered = real_lower(self, *args, **kwargs)
        with contextlib.suppress(AttributeError, TypeError):
            params = getattr(self, "_params", {})
            places = {name: params.get(name, ()) for name in ("in_shardings", "out_shardings")}
            _bodies[lowered._lowering] = {"jaxpr": self.jaxpr, **places}
        return lowered

    @functools.wraps(real_compile)
    def compile(self, *args, **kwargs):
        devices = calls.device_assignment(self._lowering)
        if not devices or not bridge.is_slice_device(devices[0]):
            return real_compile(self, *args, **kwargs)
        from systolic_capture import compiled

        options = args[0] if args else kwargs.get("compiler_options")
        return compiled.CapturedCompiled(self, options, lambda: real_compile(self, *args, **kwargs))

    stages.Traced.lower, stages.Lowered.compile = lower, compile


def patch_jax(jax):
    """The last of jax has been imported."""
    from systolic_capture import hosts, pmap, show_platforms

    show_platforms()
    hosts.warn_of_launchers()
    arrays.register()
    pmap.patch(jax)
    patch_public_jit(jax)
    report.say(stage="running until the first call", jax=jax.__version__)
    calls.start()
