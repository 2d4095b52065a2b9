"""``jax.pmap``: the function under ``shard_map`` over all devices, in one jitted call that is recorded as any other.

A process has the part of its own devices along the mapped axis, as with ``jax.pmap``; in the call all devices stand there.
"""

import functools
import inspect
import os

import numpy as np

from systolic_capture import arrays, bridge, counters, dispatch

UNNAMED = "pmapped"


def patch(jax):
    """``jax.pmap``, and what places the arrays of its functions."""
    from jax._src import source_info_util

    source_info_util.register_exclusion(os.path.dirname(os.path.abspath(__file__)) + os.sep)
    if hasattr(jax, "pmap"):
        jax.pmap = _pmap_of(jax.pmap)
    for name, placing in (
        ("device_put_replicated", _replicated),
        ("device_put_sharded", _sharded),
    ):
        if name in vars(jax) or name in getattr(jax, "_deprecations", {}):
            setattr(jax, name, placing)


def _pmap_of(real):
    @functools.wraps(real)
    def pmap(*args, **kwargs):
        if not args and "fun" not in kwargs:
            return functools.partial(pmap, **kwargs)
        bound = inspect.signature(real).bind(*args, **kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        devices = options.get("devices")
        elsewhere = devices and not any(map(bridge.is_slice_device, devices))
        if elsewhere or options.get("backend") not in (None, "tpu"):
            return real(*args, **kwargs)
        return Pmapped(options)

    return pmap


class Pmapped:
    """A function that ``jax.pmap`` made."""

    def __init__(self, options):
        self._function = options["fun"]
        functools.update_wrapper(self, self._function, updated=())
        name = options.get("axis_name")
        self._name = UNNAMED if name is None else name
        self._in_axes = options.get("in_axes", 0)
        self._out_axes = options.get("out_axes", 0)
        self._static = _numbers(options.get("static_broadcasted_argnums"))
        self._donated = _numbers(options.get("donate_argnums"))
        self._devices = options.get("devices")
        self._made = {}

    def __get__(self, instance, owner=None):
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args, **kwargs):
        """The results in shape alone."""
        from jax import tree_util
        from jax._src.api_util import flatten_axes

        call, leaves = self._prepared(args, kwargs)
        outs, tree = tree_util.tree_flatten(call.jitted(*leaves))
        axes = flatten_axes("pmap out_axes", tree, self._out_axes)
        return tree_util.tree_unflatten(tree, map(call.own, outs, axes))

    def lower(self, *args, **kwargs):
        """The call lowered, over all devices."""
        call, leaves = self._prepared(args, kwargs)
        return call.jitted.lower(*leaves)

    def _prepared(self, args, kwargs):
        """The jitted function for some arguments, and their leaves over all devices."""
        from jax import tree_util
        from jax._src.api_util import flatten_axes

        static = {index: args[index] for index in self._static if index < len(args)}
        dynamic = tuple(arg for index, arg in enumerate(args) if index not in static)
        in_axes = self._in_axes
        if isinstance(in_axes, (tuple, list)):
            in_axes = tuple(axis for index, axis in enumerate(in_axes) if index not in static)
        leaves, tree = tree_util.tree_flatten((dynamic, kwargs))
        axes = tuple(flatten_axes("pmap in_axes", tree, (in_axes, 0)))
        devices = self._taken(leaves, axes)
        key = (tree, axes, len(devices), tuple((k, _hashed(v)) for k, v in static.items()))
        if key not in self._made:
            positions = [index for index in range(len(args)) if index not in static]
            sizes = [tree_util.tree_structure(arg).num_leaves for arg in dynamic]
            owners = np.repeat(positions, sizes) if positions else []
            donated = tuple(n for n, index in enumerate(owners) if int(index) in self._donated)
            self._made[key] = _PmapCall(self, tree, axes, static, donated, devices)
        call = self._made[key]
        return call, list(map(call.whole, leaves, axes))

    def _taken(self, leaves, axes):
        """The devices that the mapped axis takes."""
        devices = list(self._devices or bridge.slice_devices())
        own = sum(map(bridge.is_local, devices))
        sizes = {
            np.shape(leaf)[axis]
            for leaf, axis in zip(leaves, axes, strict=True)
            if axis is not None
        }
        if len(sizes) != 1:
            raise ValueError(
                f"pmap got inconsistent sizes for array axes to be mapped: {sorted(sizes)}"
            )
        (size,) = sizes
        if size > own or (size < own and own < len(devices)):
            raise ValueError(
                f"pmap maps {size} entries of an axis, and this process has {own} devices"
            )
        return devices if own < len(devices) else devices[:size]

    def body(self, tree, axes, static, blocks):
        """The function on one device."""
        import jax
        from jax import tree_util
        from jax._src.api_util import flatten_axes

        ones = [
            block if axis is None else jax.lax.squeeze(block, [axis])
            for block, axis in zip(blocks, axes, strict=True)
        ]
        dynamic, kwargs = tree_util.tree_unflatten(tree, ones)
        args = list(dynamic)
        for index in sorted(static):
            args.insert(index, static[index])
        outs, out_tree = tree_util.tree_flatten(self._function(*args, **kwargs))
        stacked = [
            jax.numpy.asarray(out) if axis is None else jax.numpy.expand_dims(out, axis)
            for out, axis in zip(
                outs, flatten_axes("pmap out_axes", out_tree, self._out_axes), strict=True
            )
        ]
        return tree_util.tree_unflatten(out_tree, stacked)


class _PmapCall:
    """A pmapped function for arguments of one structure, over some devices."""

    def __init__(self, of, tree, axes, static, donated, devices):
        import jax
        from jax.sharding import Mesh

        self.mesh = Mesh(np.array(devices), (of._name,))
        self._own_devices = [device for device in devices if bridge.is_local(device)]
        mapped, unchecked = _shard_map(jax)
        out_specs = jax.tree.map(self._spec, of._out_axes, is_leaf=lambda axis: axis is None)
        on_all = mapped(
            lambda *blocks: of.body(tree, axes, static, blocks),
            mesh=self.mesh,
            in_specs=tuple(map(self._spec, axes)),
            out_specs=out_specs,
            **unchecked,
        )

        @functools.wraps(of._function, updated=())
        def call(*leaves):
            return on_all(*leaves)

        # jit checks donated arguments by the signature, which would be the function's own.
        leaves = inspect.Parameter("leaves", inspect.Parameter.VAR_POSITIONAL)
        call.__dict__["__signature__"] = inspect.Signature([leaves])
        if not hasattr(of._function, "__name__"):
            call.__name__ = "pmapped"
        self.jitted = jax.jit(call, donate_argnums=donated)

    def _spec(self, axis):
        from jax.sharding import PartitionSpec

        if axis is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * axis, self.mesh.axis_names[0])

    def whole(self, value, axis):
        """An argument over all devices."""
        from jax.sharding import NamedSharding

        return _over(value, axis, NamedSharding(self.mesh, self._spec(axis)), self.mesh.size)

    def own(self, value, axis):
        """A result as this process has it."""
        from jax.sharding import Mesh, NamedSharding

        if len(self._own_devices) == self.mesh.size:
            return value
        mesh = Mesh(np.array(self._own_devices), self.mesh.axis_names)
        return _over(value, axis, NamedSharding(mesh, self._spec(axis)), mesh.size)


def _over(value, axis, sharding, size):
    """An array with another length of its mapped axis, and elsewhere."""
    from jax._src import core

    if isinstance(value, core.Tracer):
        return value
    aval = dispatch.aval_of(value)
    shape = list(aval.shape)
    if axis is not None:
        shape[axis] = size
    buffer = value.buffer if arrays.is_slice_array(value) else None
    array = dispatch.stand_in(core.ShapedArray(tuple(shape), aval.dtype), sharding, buffer=buffer)
    if arrays.is_slice_array(value):
        array.serial, array.sources = value.serial, value.sources
    if counters.is_counter(array.aval):
        array.known = counters.of(value)
    return array


def _shard_map(jax):
    """``shard_map`` and the argument that leaves replication unchecked, over the versions of jax."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map, {"check_vma": False}
    from jax.experimental.shard_map import shard_map

    return shard_map, {"check_rep": False}


def _numbers(numbers):
    if numbers is None:
        return ()
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _hashed(value):
    try:
        return hash(value)
    except TypeError:
        return id(value)


# Placing arrays


def _placed(shape, dtype, devices):
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(devices), (UNNAMED,))
    where = NamedSharding(mesh, PartitionSpec(UNNAMED))
    return dispatch.array_of((len(devices), *shape), dtype, where)


def _replicated(x, devices):
    """``jax.device_put_replicated``."""
    import jax

    return jax.tree.map(lambda leaf: _placed(np.shape(leaf), _dtype(leaf), devices), x)


def _sharded(shards, devices):
    """``jax.device_put_sharded``."""
    import jax

    return jax.tree.map(lambda *ones: _placed(np.shape(ones[0]), _dtype(ones[0]), devices), *shards)


def _dtype(value):
    return dispatch.aval_of(value).dtype
