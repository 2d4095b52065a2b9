"""The devices that the program sees: those of the slice, of which this process, the first of the slice's, has its own."""

import contextlib
import functools
import os
import threading
from typing import Any

from systolic_capture import report

_known = {}
_here = threading.local()


@functools.cache
def slice_devices():
    """Devices of the slice as the environment's compiler describes them."""
    from jax.experimental import topologies

    request = report.request()
    name, version, lent = report.compiler()
    report.say(stage=f"loading {name}")
    kwargs = {key: value for key, value in request.topology.items() if value is not None}
    if not request.gpu:
        kwargs["chips_per_host_bounds"] = tuple(kwargs["chips_per_host_bounds"])
    platform = "cuda" if request.gpu else "tpu"
    _known["flags"] = os.environ.get(variable(), "")
    try:
        with _quiet():
            devices = list(topologies.get_topology_desc(platform=platform, **kwargs).devices)
    except Exception as error:
        whose = "lent to an environment without one" if lent else "of this environment"
        reason = " ".join(str(error).split())[:300]
        report.refuse(f"{name} {version} {whose} does not know {request.slice}: {reason}")
    _known["ids"] = frozenset(map(id, devices))
    _answer_memory(type(devices[0]))
    if request.gpu:
        _answer_gpu(type(devices[0]), request.gpu)
    elif not request.topology["num_slices"]:
        _answer(type(devices[0]), "slice_index", lambda _: 0)
    return devices


@contextlib.contextmanager
def _quiet():
    """A context in which JAX's CUDA plugin, as it is loaded, does not say that there is no GPU: no variable makes it silent."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def platform():
    """Platform of the slice's devices: ``tpu`` or ``gpu``."""
    return "gpu" if report.request().gpu else "tpu"


def lowering_platform():
    """The platform that programs are lowered for."""
    return "cuda" if report.request().gpu else "tpu"


def variable():
    """Environment variable with the flags of the slice's compiler."""
    return "XLA_FLAGS" if report.request().gpu else "LIBTPU_INIT_ARGS"


def _is_shown(backend):
    """Whether the name of a backend is that of the slice; None is."""
    return backend in ((None, "gpu", "cuda") if report.request().gpu else (None, "tpu"))


def _answer(kind, name, answer):
    """An attribute of the slice's devices that a description leaves out and a device has."""

    def get(self):
        if not is_slice_device(self):
            raise AttributeError(name)
        return answer(self)

    with contextlib.suppress(AttributeError, TypeError):
        setattr(kind, name, property(get))


def _answer_gpu(kind, gpu):
    """Facts that JAX tells of a GPU that is there, and cuDNN's version and the GPU's features as its attention asks for them.

    A slice is what NVLink joins: hosts of other machines are slices of their own.
    """
    _answer(kind, "slice_index", lambda device: device.process_index // gpu["hosts_per_domain"])
    _answer(kind, "local_hardware_id", lambda device: device.id % gpu["devices_per_host"])
    _answer(kind, "compute_capability", lambda _: gpu["compute_capability"])
    _answer(kind, "core_count", lambda _: gpu["core_count"])
    try:
        from jax._src.cudnn import fused_attention_stablehlo as attention
    except ImportError:
        return
    own = _numbers(gpu["compute_capability"])
    for name, answer in (
        ("check_cudnn_version", lambda: gpu["cudnn_version"]),
        ("check_compute_capability", lambda least: own >= _numbers(least)),
        ("is_cuda_compute_capability_equal", lambda other: own == _numbers(other)),
    ):
        if name in vars(attention):
            setattr(attention, name, answer)


def _numbers(version):
    return tuple(map(int, str(version).split(".")))


def flags():
    """Flags that the slice's programs are compiled with: the compiler reads its variable when it is loaded, and not what the program sets later."""
    return _known["flags"]


def num_processes():
    """Processes that a program on the slice has, one a host."""
    return report.request().num_hosts


def is_local(device):
    """Whether this process has a device."""
    return device.process_index == 0


def is_of_each_process(devices):
    """Whether each process runs a program of this one's devices on its own: a mesh of what it asked for as its own, or no mesh."""
    if num_processes() == 1 or not all(map(is_local, devices)):
        return False
    return len(devices) == 1 or "asked_local" in _known


def _answer_memory(kind):
    """``device.memory_stats()`` of the slice's devices: nothing is in use."""
    real: Any = kind.memory_stats
    gpu = report.request().gpu

    def memory_stats(self):
        if not is_slice_device(self):
            return real(self)
        return dict.fromkeys(("bytes_in_use", "peak_bytes_in_use", "bytes_limit"), 0) | {
            "bytes_limit": gpu["pool_bytes"] if gpu else report.request().device_bytes
        }

    with contextlib.suppress(AttributeError, TypeError):
        kind.memory_stats = memory_stats


def is_slice_device(device):
    """Whether an object is a device of the slice."""
    return "ids" in _known and id(device) in _known["ids"]


def on_slice(sharding):
    """Whether a sharding's devices are those of the slice."""
    if "ids" not in _known or sharding is None:
        return False
    mesh = getattr(sharding, "mesh", None)
    if mesh is not None:
        return mesh_on_slice(mesh)
    try:
        devices = sharding.device_set
    except Exception:
        return False
    return any(is_slice_device(device) for device in devices)


def is_elsewhere(sharding):
    """Whether a sharding's devices are of this machine, such as its CPU."""
    devices = getattr(sharding, "device_set", None)
    return bool(devices) and any(getattr(device, "platform", "") == "cpu" for device in devices)


def mesh_on_slice(mesh):
    """Whether a mesh is one of devices of the slice."""
    if "ids" not in _known or not is_concrete(mesh):
        return False
    return mesh.devices.size > 0 and is_slice_device(mesh.devices.flat[0])


def is_sharding(value):
    """Whether a value is a sharding, rather than what jax has where none is given."""
    from jax.sharding import Sharding

    return isinstance(value, Sharding)


def is_concrete(mesh):
    """Whether a mesh has devices, rather than axes alone."""
    from jax.sharding import Mesh

    return isinstance(mesh, Mesh)


def patch_bridge(bridge):
    """``jax.devices()`` and its kin answer for the slice."""
    real_devices, real_local = bridge.devices, bridge.local_devices
    if hasattr(bridge, "discover_pjrt_plugins"):
        bridge.discover_pjrt_plugins = _quiet()(bridge.discover_pjrt_plugins)

    def named(backend):
        return (
            backend
            if backend is None or isinstance(backend, str)
            else getattr(backend, "platform", None)
        )

    def devices(backend=None):
        return list(slice_devices()) if _is_shown(named(backend)) else real_devices(backend)

    def local_devices(process_index=None, backend=None, host_id=None):
        if _is_shown(named(backend)):
            if process_index is None:
                _known["asked_local"] = True
            wanted = process_index if process_index is not None else host_id or 0
            return [device for device in slice_devices() if device.process_index == wanted]
        return real_local(backend=backend)

    def count(real, listed):
        def number(backend=None):
            return len(listed()) if _is_shown(named(backend)) else real(backend)

        return number

    def process_count(backend=None):
        return num_processes() if _is_shown(named(backend)) else 1

    bridge.devices = functools.wraps(real_devices)(devices)
    bridge.local_devices = functools.wraps(real_local)(local_devices)
    bridge.device_count = functools.wraps(bridge.device_count)(
        count(bridge.device_count, slice_devices)
    )
    bridge.local_device_count = functools.wraps(bridge.local_device_count)(
        count(bridge.local_device_count, lambda: local_devices())
    )
    bridge.process_index = lambda backend=None: 0
    bridge.process_count = process_count
    bridge.process_indices = lambda backend=None: list(range(process_count(backend)))
    bridge.host_id, bridge.host_count = bridge.process_index, bridge.process_count
    bridge.host_ids = bridge.process_indices
    bridge.default_backend = platform
    _known["local"] = real_local


def patch_plugins(module):
    """Loads parts of JAX's plugins without words."""
    if hasattr(module, "import_from_plugin"):
        module.import_from_plugin = _quiet()(module.import_from_plugin)


def cpu_device():
    """The device on which values are computed that are not on the slice."""
    return _known["local"](backend="cpu")[0]


def patch_default_device(pxla):
    """Default devices: what no sharding places is on the slice, except while values are computed on the CPU."""

    def get_default_device():
        from jax._src import config

        default = config.default_device.value
        if default is not None and not isinstance(default, str):
            return default
        return cpu_device() if getattr(_here, "computes", 0) else slice_devices()[0]

    pxla.get_default_device = get_default_device


class Cpu:
    """A context in which what no sharding places is on the CPU."""

    def __enter__(self):
        _here.computes = getattr(_here, "computes", 0) + 1

    def __exit__(self, *_):
        _here.computes -= 1


def patch_shardings(module):
    """This process's devices of the slice are addressable."""
    for name in ("NamedSharding", "SingleDeviceSharding", "GSPMDSharding", "PositionalSharding"):
        kind = getattr(module, name, None)
        if kind is None:
            continue
        for attribute, answer in (
            ("is_fully_addressable", lambda self: all(map(is_local, self.device_set))),
            ("addressable_devices", lambda self: set(filter(is_local, self.device_set))),
        ):
            real: Any = getattr(kind, attribute)

            def get(self, real=real, answer=answer):
                if on_slice(self):
                    return answer(self)
                return real.fget(self) if isinstance(real, property) else real.__get__(self)

            with contextlib.suppress(AttributeError, TypeError):
                setattr(kind, attribute, property(get))


def patch_mesh(module):
    """Devices of a mesh that this process has."""
    kind: Any = module.Mesh

    def answer(name, of_slice):
        real: Any = vars(kind).get(name)
        get_real: Any = getattr(real, "fget", None) or getattr(real, "func", None)
        if get_real is None:
            return

        def get(self):
            return of_slice(self) if mesh_on_slice(self) else get_real(self)

        setattr(kind, name, property(get))

    def own(self):
        return [device for device in self.devices.flat if is_local(device)]

    answer("local_devices", own)
    answer("_local_devices_set", lambda self: set(own(self)))
    answer("is_multi_process", lambda self: self.devices.size != len(own(self)))
    answer("_process_indices", lambda self: {device.process_index for device in self.devices.flat})
