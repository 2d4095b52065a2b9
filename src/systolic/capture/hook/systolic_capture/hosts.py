"""Messages between the processes of several hosts: this is the first of them, and the others say what it says."""

import os
import threading

from systolic_capture import arrays, bridge, dispatch

LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE")
"""Variables in which launchers write the number of a program's processes."""


def patch_distributed(module):
    """``jax.distributed.initialize``: nothing to connect, and a client that answers by itself."""
    state = module.global_state

    def initialize(coordinator_address=None, num_processes=None, *args, **kwargs):
        _warn_of_others("jax.distributed.initialize(num_processes=…)", num_processes)
        bridge.cpu_device()  # its backend would join the others through the client
        state.process_id, state.num_processes = 0, bridge.num_processes()
        state.client = Client()

    def shutdown(*args, **kwargs):
        state.client = None

    module.initialize, module.shutdown = initialize, shutdown


def _warn_of_others(where, number):
    """A caution where a program or its launcher has another number of processes than it is shown, by which it may split its rows."""
    own = bridge.num_processes()
    if number and int(number) != own:
        from systolic_capture import calls

        calls.caution(
            f"{where} says {number} processes, and the program ran as the first of {own}, one a host: rows that it splits by that number are {own / int(number):g} times those of the slice; start it with one process a host"
        )


def warn_of_launchers():
    """A caution where a launcher's environment has another number of processes; one is that of a shell."""
    for name in LAUNCHERS:
        if os.environ.get(name, "").isdigit() and int(os.environ[name]) > 1:
            _warn_of_others(name, os.environ[name])


class Client:
    """Client of the coordination service: what is set is there, and nobody is waited for."""

    def __init__(self):
        self._kept, self._lock = {}, threading.Lock()

    def key_value_set(self, key, value, allow_overwrite=False):
        """Keeps a value."""
        with self._lock:
            self._kept[key] = value

    key_value_set_bytes = key_value_set

    def key_value_try_get(self, key):
        """A value; the last one that was set for a key that another process would have set."""
        with self._lock:
            return self._kept.get(key, next(reversed(self._kept.values()), ""))

    def key_value_try_get_bytes(self, key):
        """A value in bytes."""
        text = self.key_value_try_get(key)
        return text if isinstance(text, bytes) else text.encode()

    def blocking_key_value_get(self, key, timeout_in_ms=0):
        """A value, at once."""
        return self.key_value_try_get(key)

    def blocking_key_value_get_bytes(self, key, timeout_in_ms=0):
        """A value in bytes, at once."""
        return self.key_value_try_get_bytes(key)

    def key_value_dir_get(self, key):
        """Values below a key."""
        with self._lock:
            return [(name, value) for name, value in self._kept.items() if name.startswith(key)]

    key_value_dir_get_bytes = key_value_dir_get

    def key_value_delete(self, key):
        """Forgets a value, and those below it."""
        with self._lock:
            for name in [name for name in self._kept if name == key or name.startswith(f"{key}/")]:
                del self._kept[name]

    def key_value_increment(self, key, increment=1):
        """A counter, raised."""
        with self._lock:
            self._kept[key] = str(int(self._kept.get(key, 0)) + increment)
            return int(self._kept[key])

    def wait_at_barrier(self, *args, **kwargs):
        """Waits for nobody."""

    def get_live_nodes(self, process_ids):
        """All processes, each of its first start."""
        return dict.fromkeys(process_ids, 0)

    def connect(self):
        """Connected."""

    def shutdown(self):
        """Nothing to end."""


def patch_utils(module):
    """``jax.experimental.multihost_utils``."""
    real_to_global = module.host_local_array_to_global_array
    real_to_local = module.global_array_to_host_local_array

    def host_local_array_to_global_array(local_inputs, global_mesh, pspecs):
        if not bridge.mesh_on_slice(global_mesh):
            return real_to_global(local_inputs, global_mesh, pspecs)
        return _over(local_inputs, global_mesh, pspecs, _to_global)

    def global_array_to_host_local_array(global_inputs, global_mesh, pspecs):
        if not bridge.mesh_on_slice(global_mesh):
            return real_to_local(global_inputs, global_mesh, pspecs)
        return _over(global_inputs, global_mesh, pspecs, _to_local)

    module.sync_global_devices = lambda name: None
    module.broadcast_one_to_all = lambda in_tree, is_source=None: in_tree
    module.assert_equal = lambda in_tree, fail_message="": None
    module.reached_preemption_sync_point = lambda step_id: False
    module.process_allgather = _process_allgather
    module.host_local_array_to_global_array = host_local_array_to_global_array
    module.global_array_to_host_local_array = global_array_to_host_local_array


def _process_allgather(in_tree, tiled=False):
    """Each process's values, which are those of this one."""
    import jax
    import numpy as np

    def gathered(leaf):
        if arrays.is_slice_array(leaf) and not leaf.is_fully_addressable:
            return np.asarray(leaf)
        value = np.asarray(leaf)
        copies = [value] * bridge.num_processes()
        if len(copies) == 1 and tiled:
            return value
        return np.concatenate(copies) if tiled and value.ndim else np.stack(copies)

    return jax.tree.map(gathered, in_tree)


def _over(tree, mesh, pspecs, convert):
    """A tree of arrays with a conversion of each under its sharding on a mesh."""
    import jax
    from jax._src.api_util import flatten_axes
    from jax.sharding import NamedSharding, PartitionSpec

    leaves, form = jax.tree.flatten(tree)
    specs = flatten_axes("input pspecs", form, pspecs, tupled_args=False)
    wheres = [NamedSharding(mesh, PartitionSpec() if spec is None else spec) for spec in specs]
    return jax.tree.unflatten(form, map(convert, leaves, wheres))


def _to_global(leaf, where):
    """The array over all processes of which this one has a part."""
    import numpy as np

    if arrays.is_slice_array(leaf) and not leaf.is_fully_addressable:
        return leaf
    where.mesh.local_mesh  # noqa: B018  refuses a mesh in which a process's devices are no block, as jax does
    shape = dispatch.whole_shape(np.shape(leaf), where, None)
    return dispatch.array_of(
        shape, dispatch.aval_of(leaf).dtype, where, sources=arrays.sources([leaf])
    )


def _to_local(leaf, where):
    """This process's part of an array over all processes."""
    from jax.sharding import NamedSharding

    if not arrays.is_slice_array(leaf) or leaf.is_fully_addressable:
        return leaf
    shape = [
        dim // _processes_along(where, axis, leaf.shape) for axis, dim in enumerate(leaf.shape)
    ]
    own = NamedSharding(where.mesh.local_mesh, where.spec)
    return dispatch.array_of(shape, leaf.dtype, own, sources=leaf.sources)


def _processes_along(sharding, axis, shape):
    """Parts of a dim that different processes have."""
    from jax._src import sharding_impls

    own = sharding_impls.num_addressable_indices(sharding, axis, shape)
    return max(1, shape[axis] // own)
